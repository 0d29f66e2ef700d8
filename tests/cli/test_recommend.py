import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvplan.core.workloads import Search
from kvplan.store.profiles import save_profile


def test_it_picks_and_ends_with_0(run: Any, workload: Path, profile: Path) -> None:
    answer = run("recommend", workload, "-p", profile)
    assert answer.status == 0
    assert answer.err == ""
    assert "quantize to 8 bits, not further" in answer.out


def test_json_is_all_there_is_on_stdout(run: Any, workload: Path, profile: Path) -> None:
    body = json.loads(run("recommend", workload, "-p", profile, "--json").out)
    assert (body["schema"], body["pick"]["format"]) == (1, "int8")


@pytest.mark.parametrize(
    ("old", "new", "status", "says"),
    [
        ("150MiB", "1GiB", 0, "Keep 16 bits"),
        ("150MiB", "100MiB", 1, "Would fit: "),
        ("p95: 50", "p95: 5", 1, "Nothing fits"),
        ("{max_perplexity_increase: 1%}", "{max_retrieval_drop: 5%}", 3, "Undecided"),
    ],
)
def test_each_outcome_has_its_status(
    run: Any, workload: Path, profile: Path, old: str, new: str, status: int, says: str
) -> None:
    workload.write_text(workload.read_text().replace(old, new))
    answer = run("recommend", workload, "-p", profile)
    assert answer.status == status
    assert says in answer.out


def test_several_profiles_add_up(run: Any, workload: Path, tmp_path: Path, make: Any) -> None:
    whole = make.profile()
    paths = [tmp_path / "times.json", tmp_path / "quality.json"]
    save_profile(replace(whole, quality=()), paths[0])
    save_profile(replace(whole, cells=()), paths[1])
    assert run("recommend", workload, "-p", paths[0]).status == 3
    assert run("recommend", workload, "-p", paths[0], "-p", paths[1]).status == 0


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("schema: 1", "schema: 1\nparallel: {tensor: 2}", "one device"),
        ("schema: 1", "schema: 1\ndevice: NVIDIA L4", "asks for NVIDIA L4"),
        ("model: made-up", "model: demo", "asks for demo"),
    ],
)
def test_what_it_cannot_answer_ends_with_3_and_one_line(
    run: Any, workload: Path, profile: Path, old: str, new: str, says: str
) -> None:
    workload.write_text(workload.read_text().replace(old, new))
    answer = run("recommend", workload, "-p", profile)
    assert answer.status == 3
    assert answer.out == ""
    assert answer.err.count("\n") == 1
    assert says in answer.err


def test_without_a_profile_memory_is_exact_and_the_rest_undecided(run: Any, workload: Path) -> None:
    workload.write_text(workload.read_text().replace("model: made-up", "model: demo"))
    answer = run("recommend", workload)
    assert answer.status == 3
    assert "time not measured" in answer.out
    assert "kvplan profile demo -w" in answer.out


def test_a_device_without_a_bundled_profile_is_planned_without_measurements(run: Any, workload: Path) -> None:
    text = workload.read_text().replace("model: made-up", "model: demo\ndevice: No Such Device")
    workload.write_text(text)
    assert run("recommend", workload).status == 3


def test_profiles_of_two_devices_are_not_mixed(
    run: Any, workload: Path, profile: Path, tmp_path: Path, make: Any
) -> None:
    other = tmp_path / "other.json"
    save_profile(make.profile(device=make.device(uuid="cpu-2")), other)
    answer = run("recommend", workload, "-p", profile, "-p", other)
    assert answer.status == 3
    assert "another device" in answer.err


@pytest.mark.parametrize("change", [{"kernel": "cpu/other"}, {"kvplan_version": "9.9"}, {"threads": 7}])
def test_profiles_of_two_kernels_or_versions_are_not_mixed(
    run: Any, workload: Path, profile: Path, tmp_path: Path, make: Any, change: dict[str, Any]
) -> None:
    made, other = make.profile(), tmp_path / "other.json"
    cells = tuple(replace(cell, key=replace(cell.key, **change)) for cell in made.cells)
    save_profile(replace(made, cells=cells), other)
    answer = run("recommend", workload, "-p", profile, "-p", other)
    assert answer.status == 3
    assert "give profiles of one kernel, version and number of threads" in answer.err


def test_times_of_the_reference_are_named(run: Any, workload: Path, tmp_path: Path, make: Any) -> None:
    made, path = make.profile(), tmp_path / "reference.json"
    cells = tuple(replace(cell, key=replace(cell.key, kernel="reference")) for cell in made.cells)
    save_profile(replace(made, cells=cells), path)
    assert "Times are of the reference operations" in " ".join(run("recommend", workload, "-p", path).out.split())


def test_bad_input_is_one_line_and_2(run: Any, workload: Path, profile: Path) -> None:
    profile.write_bytes(profile.read_bytes()[:1000])
    answer = run("recommend", workload, "-p", profile)
    assert answer.status == 2
    assert answer.out == ""
    assert answer.err.startswith("error: ")
    assert answer.err.count("\n") == 1


def test_a_bucket_longer_than_the_model_takes_is_bad_input(run: Any, workload: Path, profile: Path) -> None:
    workload.write_text(workload.read_text().replace("prompt: ", "prompt: 99"))
    answer = run("recommend", workload, "-p", profile)
    assert answer.status == 2
    assert "takes" in answer.err


def test_neither_torch_nor_numpy_is_loaded(workload: Path, profile: Path) -> None:
    program = (
        "import sys; from kvplan.cli import main; "
        f"status = main(['recommend', {str(workload)!r}, '-p', {str(profile)!r}, '--json']); "
        "sys.exit(status or len({'torch', 'transformers', 'numpy', 'rich.table'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, check=False).returncode == 0


def test_an_engine_is_planned_for_with_its_own_flags(run: Any, workload: Path, profile: Path) -> None:
    workload.write_text(workload.read_text().replace("schema: 1", "schema: 1\nengine: vllm"))
    answer = run("recommend", workload, "-p", profile)
    assert answer.status in (0, 1, 3)
    assert "vLLM" in answer.out
    body = json.loads(run("recommend", workload, "-p", profile, "--json").out)
    assert body["engine"] == "vllm"
    assert {option["format"] for option in body["options"]} >= {"bf16", "int8_per_token_head"}
    if body["pick"]:
        assert body["launch"]["command"].startswith("vllm serve")
        assert body["launch"]["file_name"] == "vllm.yaml"


@pytest.mark.parametrize(
    ("engine", "title", "command", "file_name"),
    [
        ("sglang", "SGLang", "sglang serve --model-path", "sglang.yaml"),
        ("trtllm", "TensorRT-LLM", "trtllm-serve", "trtllm.yaml"),
    ],
)
def test_other_engines_are_planned_for_with_theirs(
    run: Any, workload: Path, profile: Path, engine: str, title: str, command: str, file_name: str
) -> None:
    text = workload.read_text().replace("schema: 1", f"schema: 1\nengine: {engine}")
    workload.write_text(text.replace("concurrency: 32", "concurrency: 16").replace("150MiB", "1GiB"))
    assert title in run("recommend", workload, "-p", profile).out
    body = json.loads(run("recommend", workload, "-p", profile, "--json").out)
    assert body["engine"] == engine
    assert body["pick"]
    assert body["launch"]["command"].startswith(command)
    assert body["launch"]["file_name"] == file_name


def rewrite(workload: Path, search: str, **keys: str) -> None:
    """Give *workload* a search and further keys of its own."""
    kept = [line for line in workload.read_text().splitlines() if line.split(":")[0] not in ("search", *keys)]
    workload.write_text("\n".join([*kept, f"search: {search}", *(f"{key}: {text}" for key, text in keys.items()), ""]))


def test_a_format_that_no_engine_has_is_one_line_of_the_file(run: Any, workload: Path) -> None:
    rewrite(workload, "{formats: [nvfp3]}", engine="vllm")
    answer = run("recommend", workload)
    assert (answer.status, answer.out, answer.err.count("\n")) == (2, "", 1)
    assert answer.err.startswith(f"error: {workload}:")
    assert "'nvfp3'" in answer.err


@pytest.mark.parametrize(
    ("engine", "name", "kept", "having"),
    [
        ("vllm", "q8_0", "bf16", "llama.cpp has it"),
        ("llama.cpp", "nvfp4", "bf16", "vLLM, SGLang, TensorRT-LLM, kvplan's runtime have it"),
    ],
)
def test_a_format_of_another_engine_is_refused_with_those_that_have_it_and_the_rest_is_planned(
    run: Any, workload: Path, profile: Path, engine: str, name: str, kept: str, having: str
) -> None:
    rewrite(workload, f"{{formats: [{kept}, {name}]}}", engine=engine, memory="1GiB")
    body = json.loads(run("recommend", workload, "-p", profile, "--json").out)
    assert kept in {option["format"] for option in body["options"]}
    assert having in json.dumps(body["refused"])


def test_a_format_of_another_engine_alone_is_not_kvplans_and_ends_with_3(run: Any, workload: Path) -> None:
    rewrite(workload, "{formats: [bf16, q8_0]}")
    answer = run("recommend", workload)
    assert (answer.status, answer.out, answer.err.count("\n")) == (3, "", 1)
    assert "kvplan's runtime has no cache format 'q8_0'; llama.cpp has it" in answer.err


@pytest.mark.parametrize(
    ("engine", "keys", "says"),
    [
        ("vllm", {"parallel": "{tensor: 7}"}, "parallel.tensor: 7 ranks do not divide"),
        ("vllm", {"parallel": "{pipeline: 99}"}, "parallel.pipeline: 99 stages"),
        ("llama.cpp", {"prefix_caching": "false"}, "search.block_size: llama.cpp keeps cells"),
    ],
)
def test_what_an_engine_does_not_take_is_said_of_the_files_key(
    run: Any, workload: Path, profile: Path, engine: str, keys: dict[str, str], says: str
) -> None:
    rewrite(workload, "{block_size: [48]}" if "block_size" in says else "{formats: [bf16]}", engine=engine, **keys)
    answer = run("recommend", workload, "-p", profile)
    assert (answer.status, answer.out, answer.err.count("\n")) == (2, "", 1)
    assert answer.err.startswith(f"error: {workload}: {says}")


def test_an_engine_that_keeps_no_prefixes_is_planned_without_and_says_so(
    run: Any, workload: Path, profile: Path
) -> None:
    rewrite(workload, "{formats: [bf16]}", engine="transformers", memory="1GiB")
    body = json.loads(run("recommend", workload, "-p", profile, "--json").out)
    assert any("transformers keeps no prefixes: every session" in remark for remark in body["remarks"])


def test_a_cpu_lacks_what_needs_a_gpus_capability(run: Any, workload: Path, profile: Path) -> None:
    rewrite(workload, "{formats: [bf16, nvfp4]}", engine="vllm", device="cpu")
    body = json.loads(run("recommend", workload, "-p", profile, "--json").out)
    assert "nvfp4" not in {option["format"] for option in body["options"]}
    assert "needs a GPU of compute capability 10.0" in json.dumps(body["refused"])


def test_a_format_by_layer_is_planned_with_and_started_by_its_name(
    run: Any, workload: Path, tmp_path: Path, make: Any
) -> None:
    rewrite(
        workload, "{formats: [bf16, int4@0=bf16@1=int8], block_size: [64]}", quality="{max_perplexity_increase: 2%}"
    )
    search = Search(formats=("bf16", "int4@0=bf16@1=int8"), block_tokens=(64,))
    path = tmp_path / "mixed.json"
    save_profile(make.profile(make.workload(search=search)), path)
    answer = run("recommend", workload, "-p", path)
    assert answer.status == 0
    assert "quantize to 8 bits on average" in answer.out
    assert 'Runtime(loaded, parse_formats("int4@0=bf16@1=int8"), block_tokens=64' in answer.out
