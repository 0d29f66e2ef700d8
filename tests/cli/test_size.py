import json
from pathlib import Path
from typing import Any

import pytest

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256,
    "max_position_embeddings": 8192, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return path


def test_bytes_are_those_of_arithmetic(run: Any, config: Path) -> None:
    answer = run("size", config, "-f", "bf16", "-f", "int4", "--context", 1000, "--kv-memory", "1GiB", "--json")
    bf16, int4 = json.loads(answer.out)["results"]
    per_token = 16 * 2 * 8 * 128 * 2
    assert answer.status == 0
    assert bf16["logical"]["bytes_per_sequence"] == per_token * 1000
    assert bf16["allocated"]["bytes_per_sequence"] == per_token * 1024
    assert bf16["capacity"]["blocks"] == (1 << 30) // (per_token * 64)
    assert int4["logical"]["growth_bytes_per_token"] == 16 * 2 * 8 * (64 + 4)


def test_the_model_sets_what_is_not_said(run: Any, config: Path) -> None:
    (result,) = json.loads(run("size", config, "--json").out)["results"]
    assert (result["context"], result["format"], "capacity" in result) == (8192, "bf16", False)


def test_names_of_other_engines_options_are_taken(run: Any, config: Path) -> None:
    options = ["--max-model-len", 2048, "--block-size", 32, "--tensor-parallel-size", 1, "--pipeline-parallel-size", 1]
    (result,) = json.loads(run("size", config, *options, "--json").out)["results"]
    assert result["context"] == 2048
    assert result["allocated"]["groups"][0]["block_tokens"] == 32


def test_device_memory_leaves_out_weights(run: Any) -> None:
    pool = json.loads(run("size", "demo", "--kv-memory", "512MiB", "--json").out)["results"][0]["capacity"]
    whole = json.loads(run("size", "demo", "--memory", "512MiB", "--json").out)["results"][0]["capacity"]
    assert 0 < whole["max_concurrency"] < pool["max_concurrency"]


@pytest.mark.parametrize(
    ("options", "status", "says"),
    [
        (["--engine", "vllm9"], 2, "engine 'vllm9'"),
        (["--engine", "vllm", "-f", "int8"], 3, "vllm has no cache format 'int8'"),
        (["--engine", "vllm", "--tp", "3"], 2, "3 ranks do not divide 32 query and 8 KV heads"),
        (["--engine", "vllm", "--pp", "17"], 2, "17 stages for 16 layers"),
        (["--engine", "vllm", "--draft-tokens", "1"], 2, "has no draft layers"),
        (["--engine-version", "new"], 2, "no version"),
        (["--engine", "vllm", "--engine-version", "0.0.1"], 2, "0.6 to 0.29 are known"),
        (["--engine", "trtllm", "--engine-option", "no-such"], 2, "is no option of TensorRT-LLM"),
        (["--engine", "vllm", "--block-size", "3"], 2, "use 16"),
        (["--context", "8193"], 2, "beyond the 8192"),
        (["--tp", "2"], 3, "one device"),
        (["-f", "int7"], 3, "int7"),
        (["-f", "kivi-k4v4-g64", "--block-size", "32"], 3, "use block size 64"),
        (["-f", "int8@0=kivi-k4v4-g64", "--block-size", "32"], 3, "use block size 64"),
        (["-f", "int4@16=bf16"], 3, "no layer 16 among the 16 that cache keys and values"),
        (["-f", "int4@0=bf16@0-1=int8"], 3, "two formats for layer 0"),
        (["-f", "int4@0=bf16", "--engine", "vllm"], 3, "vllm has no cache format 'int4@0=bf16'; kvplan's runtime has"),
        (["--memory", "8GiB"], 2, "weights 8.46 GiB + activations"),
        (["--memory", "8GiB", "--kv-memory", "8GiB"], 2, "give one"),
        (["--kv-memory", "8 parsecs"], 2, "no size"),
        (["--kv-memory", "8"], 2, "has no unit"),
        (["--memory-utilization", "banana"], 2, "no share"),
        (["--memory", "8GiB", "--gpu-memory-utilization", "3"], 2, "--memory-utilization"),
    ],
)
def test_what_it_cannot_count_is_one_line(run: Any, config: Path, options: list[str], status: int, says: str) -> None:
    answer = run("size", config, *options)
    assert answer.status == status
    assert answer.out == ""
    assert answer.err.count("\n") == 1
    assert says in answer.err


def test_weights_that_a_config_describes_leave_a_pool_and_others_are_named(run: Any, config: Path) -> None:
    pool = json.loads(run("size", config, "--memory", "16GiB", "--json").out)["results"][0]["capacity"]
    assert pool["tokens"] > 0
    config.write_text(json.dumps({**CONFIG, "intermediate_size": None}))
    answer = run("size", config, "--memory", "16GiB")
    assert answer.status == 2
    assert "has no intermediate_size" in answer.err
    assert "--kv-memory" in answer.err


def test_the_screen_has_a_row_an_answer(run: Any, config: Path) -> None:
    answer = run("size", config, "-f", "int8", "-f", "int4", "--kv-memory", "4GiB")
    assert sum("int" in line for line in answer.out.splitlines()) == 2
    assert "exact" in answer.out


LATENT = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "num_hidden_layers": 61,
    "num_attention_heads": 128, "num_key_value_heads": 128, "hidden_size": 7168, "vocab_size": 129280,
    "max_position_embeddings": 163840, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
    "v_head_dim": 128, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture
def latent(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LATENT))
    return path


def test_a_model_that_the_runtime_does_not_hold_has_its_logical_bytes_counted(run: Any, latent: Path) -> None:
    answer = run("size", latent, "--context", 1000, "--memory", "80GiB", "--json")
    (result,) = json.loads(answer.out)["results"]
    assert answer.status == 0
    assert result["logical"] == {
        "bytes_per_sequence": 70_272_000, "growth_bytes_per_token": 70_272, "fixed_bytes_per_sequence": 0,
    }  # fmt: skip
    assert "allocated" not in result
    assert "capacity" not in result
    assert "attention is latent" in result["reason"]


def test_the_screen_says_that_such_bytes_are_logical(run: Any, latent: Path) -> None:
    answer = run("size", latent, "-f", "fp8_e4m3")
    assert answer.status == 0
    assert "34.31 KiB" in answer.out
    assert "exact (logical)" in " ".join(answer.out.split())
    assert "kvplan's runtime does not hold it, because attention is latent" in " ".join(answer.out.split())


def test_a_format_that_says_nothing_of_such_a_cache_is_refused(run: Any, latent: Path) -> None:
    answer = run("size", latent, "-f", "int4")
    assert (answer.status, answer.out, answer.err.count("\n")) == (3, "", 1)
    assert "a layer caches one vector a token" in answer.err


def test_formats_of_engines_are_sized_for_it(run: Any, latent: Path) -> None:
    entries = {entry["name"]: entry for entry in json.loads(run("formats", latent, "--json").out)["formats"]}
    assert "unsupported" in entries["int8"]
    assert entries["vllm:fp8_ds_mla"]["bytes_per_token"] == 61 * 656


@pytest.mark.parametrize("command", [("profile", "-o", "p.json")])
def test_what_runs_a_model_refuses_it(run: Any, latent: Path, command: tuple[str, ...]) -> None:
    answer = run(command[0], latent, *command[1:])
    assert (answer.status, answer.out) == (3, "")
    assert "does not hold this cache: attention is latent" in answer.err


LOG = """INFO LLM engine (v0.11.0) with config: model='m', max_seq_len=4096, tensor_parallel_size=1, kv_cache_dtype=fp8
INFO the current vLLM instance can use total_gpu_memory (24.00GiB) x gpu_memory_utilization (0.90) = 21.60GiB
INFO model weights take 8.00GiB; non_torch_memory takes 0.10GiB; PyTorch activation peak memory takes 1.50GiB; the rest
"""

SGLANG_LOG = """server_args=ServerArgs(model_path='x', kv_cache_dtype='auto', mem_fraction_static=0.82, \
page_size=1, tp_size=1, chunked_prefill_size=2048)
Load weight begin. avail mem=78.68 GB
Load weight end. elapsed=605.50 s, type=LlamaForCausalLM, dtype=torch.bfloat16, avail mem=63.38 GB, mem usage=15.00 GB.
"""


def test_a_log_tells_what_only_a_run_can(run: Any, config: Path, tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    log.write_text(LOG)
    answer = run("size", config, "--measured", log, "--json")
    (result,) = json.loads(answer.out)["results"]
    assert (result["engine"], result["format"], result["context"]) == ("vllm", "fp8", 4096)
    memory = {term["name"]: (round(term["bytes"] / 2**30, 2), term["evidence"]) for term in result["memory"]}
    assert memory == {
        "usable": (21.6, "measured"), "weights": (8.0, "measured"), "activations": (1.5, "measured"),
        "beside tensors": (0.1, "measured"), "pool": (12.0, "measured"),
    }  # fmt: skip
    assert result["capacity"]["blocks"] == 12 * 2**30 // (16 * 2 * 8 * 128 * 16)
    assert result["capacity"]["evidence"] == "measured"
    assert "beside tensors" in run("size", config, "--measured", log).out


def test_what_is_said_beside_a_log_wins_be_it_the_default(run: Any, config: Path, tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    log.write_text(LOG.replace("tensor_parallel_size=1", "tensor_parallel_size=2, max_num_seqs=64"))
    results = [
        json.loads(run("size", config, "--measured", log, *more, "--json").out)["results"][0]
        for more in ([], ["--tp", 1], ["--kv-memory", "1GiB"])
    ]
    assert [result["tp"] for result in results] == [2, 1, 2]
    weights = [[term["bytes"] for term in result.get("memory", []) if term["name"] == "weights"] for result in results]
    assert weights == [[8 * 2**30], [16 * 2**30], []]
    assert results[2]["capacity"] == {
        **results[2]["capacity"], "blocks": 2**30 // (16 * 2 * 4 * 128 * 16), "evidence": "exact",
    }  # fmt: skip


def test_a_log_that_prints_its_pool_needs_no_memory_for_the_setting_of_its_run(
    run: Any, config: Path, tmp_path: Path
) -> None:
    log = tmp_path / "vllm.log"
    log.write_text("INFO vLLM API server version 0.11.0 tensor_parallel_size=1\nAvailable KV cache memory: 8.00 GiB\n")
    (result,) = json.loads(run("size", config, "--measured", log, "--context", 4096, "--json").out)["results"]
    assert [(term["name"], term["bytes"], term["evidence"]) for term in result["memory"]] == [
        ("pool", 8 * 2**30, "measured")
    ]
    answer = run("size", config, "--measured", log, "--tp", 2)
    assert (answer.status, answer.out, answer.err.count("\n")) == (3, "", 1)


def test_a_log_without_memory_is_no_measurement(run: Any, config: Path, tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    log.write_text("INFO GPU KV cache size: 2,440,192 tokens\n")
    answer = run("size", config, "--measured", log)
    assert (answer.status, answer.out, answer.err.count("\n")) == (3, "", 1)
    assert "says nothing of what the run took" in answer.err
    assert "only its setting counts" in run("size", config, "--measured", log, "--kv-memory", "1GiB").out


def test_sglangs_activations_take_nothing_of_its_pool(run: Any, config: Path, tmp_path: Path) -> None:
    log = tmp_path / "sglang.log"
    log.write_text(SGLANG_LOG)
    (result,) = json.loads(run("size", config, "--measured", log, "--max-batched-tokens", 16384, "--json").out)[
        "results"
    ]
    memory = {term["name"]: (round(term["bytes"] / 2**30, 2), term["evidence"]) for term in result["memory"]}
    assert memory["activations"] == (0.0, "exact")
    assert memory["pool"] == (49.52, "measured")


def test_what_fits_by_prediction_says_so(run: Any, config: Path) -> None:
    answer = run("size", config, "--memory", "80GiB", "--json")
    (result,) = json.loads(answer.out)["results"]
    assert (result["evidence"], result["capacity"]["evidence"]) == ("exact", "predicted")
    assert "vLLM's rule" in run("size", config, "--memory", "80GiB", "--engine", "sglang").out
    assert "vLLM's rule" not in run("size", config, "--memory", "80GiB", "--engine", "vllm").out


def test_a_model_without_room_is_a_row_among_others(run: Any, config: Path, tmp_path: Path) -> None:
    larger = tmp_path / "larger.json"
    larger.write_text(json.dumps(CONFIG | {"num_hidden_layers": 160}))
    asked = ["--engine", "vllm", "--memory", "24GiB", "--context", 2048]
    alone = run("size", larger, *asked)
    assert (alone.status, alone.out, alone.err.count("\n")) == (2, "", 1)
    assert "leave nothing" in alone.err
    assert "16 bits" in alone.err
    both = run("size", config, larger, *asked)
    results = json.loads(run("size", config, larger, *asked, "--json").out)["results"]
    assert both.status == 0
    assert [("capacity" in result, "allocated" in result) for result in results] == [(True, True), (False, True)]
    assert "note: larger.json: no pool: weights" in " ".join(both.out.split())


def test_every_pool_is_shown_with_whose_it_is(run: Any, config: Path) -> None:
    shown = run("size", config, "--engine", "vllm", "--engine", "llama.cpp", "--memory", "24GiB").out
    lines = " ".join(shown.split())
    assert " vllm: usable 21.60 GiB - weights" in lines
    assert " llama.cpp: usable 21.60 GiB - weights" in lines
    assert "note: llama.cpp: the pool of llama.cpp is counted by vLLM's rule" in lines


def test_a_log_of_another_engine_is_refused(run: Any, config: Path, tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    log.write_text(LOG)
    answer = run("size", config, "--measured", log, "--engine", "kvplan")
    assert (answer.status, answer.out, answer.err.count("\n")) == (2, "", 1)
    assert "the log is of vllm" in answer.err


def test_engines_stand_side_by_side_and_a_refusal_is_an_answer(run: Any, latent: Path) -> None:
    answer = run("size", latent, "--engine", "vllm", "--engine", "lmdeploy", "--context", 1000, "--json")
    assert answer.status == 0
    results = {result["engine"]: result for result in json.loads(answer.out)["results"]}
    assert results["vllm"]["allocated"]["growth_bytes_per_token"] == 70_272
    assert "allocated" not in results["lmdeploy"]
    assert "TurboMind" in results["lmdeploy"]["reason"]
    shown = run("size", latent, "--engine", "vllm", "--engine", "lmdeploy")
    assert "not counted" in shown.out


def test_alone_or_all_refused_it_ends_with_3(run: Any, latent: Path) -> None:
    for engines in (["lmdeploy"], ["lmdeploy", "llama.cpp"]):
        options = [word for name in engines for word in ("--engine", name)]
        answer = run("size", latent, *options, "-f", "nvfp4")
        assert (answer.status, answer.out, answer.err.count("\n")) == (3, "", 1)


def test_what_the_user_knows_of_the_memory_is_taken_off(run: Any, config: Path) -> None:
    options = [
        "--memory",
        "24GiB",
        "--activation-memory",
        "2GiB",
        "--graph-memory",
        "1GiB",
        "--process-memory",
        "512MiB",
    ]
    (result,) = json.loads(run("size", config, *options, "--json").out)["results"]
    memory = {term["name"]: term for term in result["memory"]}
    assert {name: memory[name]["evidence"] for name in ("activations", "graphs", "beside tensors")} == {
        "activations": "reported", "graphs": "reported", "beside tensors": "reported",
    }  # fmt: skip
    taken = sum(term["bytes"] for name, term in memory.items() if name not in ("usable", "pool"))
    assert memory["pool"]["bytes"] == pytest.approx(memory["usable"]["bytes"] - taken, abs=1)
    alone = run("size", config, "--graph-memory", "1GiB")
    assert (alone.status, alone.err.count("\n")) == (2, 1)


def test_a_release_that_is_not_known_is_not_said_to_be_counted(run: Any, config: Path) -> None:
    shown = run("size", config, "--engine", "vllm", "--engine-version", "99999").out
    assert "as vLLM 0.29 allocates" in shown
    assert "99999 is counted by the rules of 0.29" in " ".join(shown.split())


def test_a_setting_that_one_engine_does_not_take_is_an_answer_beside_others(run: Any, config: Path) -> None:
    answer = run("size", config, "--tp", 2, "--engine", "vllm", "--engine", "llama.cpp", "--json")
    vllm, llama = json.loads(answer.out)["results"]
    assert answer.status == 0
    assert vllm["allocated"]["bytes_per_sequence"] == 8192 * 16 * 2 * 4 * 128 * 2
    assert "whole layers" in llama["reason"]


def test_a_release_is_of_one_engine(run: Any, config: Path) -> None:
    answer = run("size", config, "--engine", "vllm", "--engine", "sglang", "--engine-version", "0.20")
    assert (answer.status, answer.out, answer.err.count("\n")) == (2, "", 1)
    assert "--engine-version" in answer.err


def test_where_all_are_refused_the_status_is_that_of_one(run: Any, config: Path) -> None:
    for options, status in ((["--tp", "3"], 2), (["-f", "q8_0"], 3)):
        alone = run("size", config, "--engine", "sglang", *options)
        both = run("size", config, "--engine", "trtllm", "--engine", "sglang", *options)
        assert (alone.status, both.status, alone.err) == (status, status, both.err)


def test_bytes_by_layer_are_those_of_the_formats_of_the_layers(run: Any, config: Path) -> None:
    names = ("int4", "bf16", "k4v4@0,1,-2,-1=bf16")
    found = json.loads(run("size", config, *(f"-f{name}" for name in names), "--json").out)["results"]
    four, sixteen, mixed = (result["allocated"] for result in found)
    assert found[2]["format"] == "int4@0,1,-2,-1=bf16"
    assert [group["layers"] for group in mixed["groups"]] == [4, 12]
    for figure in ("bytes_per_sequence", "growth_bytes_per_token"):
        assert mixed[figure] == pytest.approx((12 * four[figure] + 4 * sixteen[figure]) / 16)


def test_pages_that_a_layer_leaves_empty_are_a_term_of_their_own(run: Any, config: Path) -> None:
    answer = run("size", config, "-f", "int8-r1000@0=int8", "--context", "2048", "--terms")
    assert "pages left empty" in answer.out
    assert "pages left empty" not in run("size", config, "-f", "int8-r1000", "--context", "2048", "--terms").out
