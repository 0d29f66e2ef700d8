# `make demo` and `make test` set up .venv themselves; `make help` lists the rest.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
NATIVE := $(wildcard kernels/kvplan_kernels/native/*.cpp kernels/kvplan_kernels/native/*.h)
DEMO := .demo
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export HF_HUB_OFFLINE := 1

.PHONY: help install demo test lint types imports unit docs docs-check wheel test-slow test-gpu budget mutants bench clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/:[^#]*## /\t/' | expand -t 14

install: $(STAMP) ## set up .venv with kvplan, what measuring needs, and the development tools

$(STAMP): pyproject.toml setup.py constraints.txt $(NATIVE)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -c constraints.txt pip setuptools
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[profile]' --group dev
	touch $@

demo: install ## profile the embedded model and recommend a setting for it
	mkdir -p $(DEMO)
	$(BIN)/kvplan profile demo -w profiles/kvplan_profiles/workloads/demo.yaml --quick --force -o $(DEMO)/profile.json
	$(BIN)/kvplan recommend profiles/kvplan_profiles/workloads/demo.yaml -p $(DEMO)/profile.json

test: install lint types imports unit docs-check wheel ## every check

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

imports: install
	$(BIN)/lint-imports

unit: export KVPLAN_REQUIRE_NATIVE := 1
unit: install
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -n 2 -m "not slow and not alone"
	$(BIN)/pytest -q -m "alone and not slow"
	$(BIN)/pytest -q --doctest-modules kvplan kernels/kvplan_kernels

test-slow: install ## the tests that `make test` leaves out
	$(BIN)/pytest -q -m slow

test-gpu: install ## run the GPU kernels' tests on a GPU, every case; without one it is an error
	KVPLAN_TEST_GPU=1 $(BIN)/pytest -q -s tests/kernels/test_triton.py tests/kernels/test_e4m3.py tests/gpu

budget: install ## write what tests hold the compiled GPU kernels to
	$(BIN)/python tests/kernels/write_budget.py

mutants: install ## break the kernels on purpose and see the tests fail
	$(BIN)/python tests/kernels/check_mutants.py

docs: install ## write the generated reference pages
	$(BIN)/python docs/generate.py

docs-check: install
	$(BIN)/python docs/generate.py --check

wheel: install ## build the wheel and start it where nothing else is installed
	rm -rf build dist .wheel-env
	KVPLAN_VARIANTS=portable $(BIN)/python -m build -q --wheel --outdir dist
	$(PYTHON) -m venv .wheel-env
	.wheel-env/bin/python -m pip install -q -c constraints.txt dist/*.whl
	.wheel-env/bin/python -P tests/packaging/start_wheel.py
	rm -rf .wheel-env

bench: install ## time the decode kernels beside torch's attention
	$(BIN)/kvplan kernels bench decode

clean: ## remove what was built
	rm -rf build dist .wheel-env .demo *.egg-info
