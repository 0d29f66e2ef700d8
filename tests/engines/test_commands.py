"""Commands and files that start engines say what was meant, whatever a model's folder is called."""

import json
import shlex
from dataclasses import replace
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kvplan.engines import ENGINES
from kvplan.engines.commands import ini_text, shell_line, yaml_text
from kvplan.engines.engine import Launch

OTHERS = sorted(set(ENGINES) - {"kvplan", "transformers"})


def launched(engine: str, model: str) -> Any:
    form = {"llama.cpp": "f16", "trtllm": "fp8"}.get(engine, "bf16")
    return ENGINES[engine].launch(
        Launch(model=model, format=form, block_tokens=64, context_tokens=512, sequences=2, prefix_caching=False)
    )


@pytest.mark.parametrize("engine", OTHERS)
@given(model=st.sampled_from(["/m/my model; rm -r x", "a'b", "$(id)", "~/m m"]) | st.text().map("/m/".__add__))
def test_a_models_name_is_one_word_of_the_command(engine: str, model: str) -> None:
    words = shlex.split(launched(engine, model).command)
    assert words.count(model) >= 1
    assert [word for word in words if word != model] == [
        w for w in shlex.split(launched(engine, "m").command) if w != "m"
    ]


@pytest.mark.parametrize(("engine", "key"), [("vllm", "model"), ("sglang", "model-path")])
@pytest.mark.parametrize("model", ["/m/my model: #1", "yes", "1e3", "a\nb: c", "- x"])
def test_a_models_name_is_one_value_of_the_file(engine: str, key: str, model: str) -> None:
    assert yaml.safe_load(launched(engine, model).file_text)[key] == model


def test_a_name_that_llama_cpps_presets_cannot_say_is_in_the_command_alone() -> None:
    """A value ends at ; and # and there are no quotes (ggml-org/llama.cpp common/preset.cpp)."""
    text = launched("llama.cpp", "my model; rm.gguf")
    assert (text.file_name, text.file_text) == ("", "")
    assert launched("llama.cpp", "my model.gguf").file_text.startswith("[my model.gguf]\nmodel = my model.gguf\n")
    assert ini_text("a]b", {}) == ""


def test_python_files_hold_what_the_engine_reads() -> None:
    text = launched("transformers", "m")
    assert json.loads(text.file_text)
    assert compile(launched("lmdeploy", "a'b").file_text, "config", "exec")


def test_the_runtime_is_started_with_what_its_format_has_learned() -> None:
    setting = Launch(model="m", format="unbias-int4", block_tokens=64, context_tokens=512, sequences=2, blocks=9)
    assert ENGINES["kvplan"].launch(setting).command.endswith("slots=2, calibration=calibration)")
    assert "calibration" not in ENGINES["kvplan"].launch(replace(setting, format="int4")).command


NAMES = st.text("abc", min_size=1).map("x".__add__)
TEXTS = st.text() | st.sampled_from(["yes", "No", "null", "1e3", "~", ".5", "0x1", "a: b", "a #b", "\x85", "1:20"])


@given(st.dictionaries(NAMES, TEXTS | st.integers() | st.booleans(), min_size=1, max_size=4))
def test_what_is_written_is_what_is_read(values: dict[str, Any]) -> None:
    assert yaml.safe_load(yaml_text(values)) == values
    assert yaml.safe_load(yaml_text({"outer": values, "last": 1})) == {"outer": values, "last": 1}
    named = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    assert shlex.split(shell_line([], values)) == named
