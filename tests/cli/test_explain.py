import json
from pathlib import Path
from typing import Any

import pytest

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256,
    "max_position_embeddings": 131072, "torch_dtype": "bfloat16",
}  # fmt: skip
LOG = """INFO LLM engine (v0.9.1) with config: model='org/llama', max_seq_len=20000, kv_cache_dtype=auto
INFO Available KV cache memory: 3.81 GiB
INFO GPU KV cache size: 31,232 tokens
INFO Maximum concurrency for 20,000 tokens per request: 1.56x
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return path


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "vllm.log"
    path.write_text(LOG)
    return path


def test_a_log_that_follows_ends_with_0(run: Any, log: Path, config: Path) -> None:
    answer = run("explain", log, "--model", config)
    assert answer.status == 0
    assert "3 figures agree." in answer.out
    assert "31,232 tokens" in answer.out


def test_a_figure_that_does_not_follow_ends_with_4(run: Any, log: Path, config: Path) -> None:
    log.write_text(LOG.replace("31,232", "41,232"))
    answer = run("explain", log, "--model", config, "--json")
    assert answer.status == 4
    verdicts = {finding["what"]: finding["verdict"] for finding in json.loads(answer.out)["findings"]}
    assert verdicts["GPU KV cache size"] == "unexplained"
    assert verdicts["maximum concurrency"] == "agrees"


def test_what_misleads_is_in_the_first_line(run: Any, log: Path, config: Path) -> None:
    log.write_text(
        "[TP0] KV Cache is allocated. #tokens: 20480, K size: 1.25 GB, V size: 1.25 GB\n"
        "max_total_num_tokens=20480, max_running_requests=48, context_len=131072\n"
    )
    answer = run("explain", log, "--model", config)
    assert answer.status == 0
    assert "3 figures are right and mislead: K size, V size, context_len." in answer.out.split("\n\n")[0].replace(
        "\n", " "
    )


def test_sums_of_the_log_s_own_figures_say_nothing_of_the_model(run: Any, log: Path, config: Path) -> None:
    """Eight ranks do not divide twelve heads: only what needs no model is left."""
    log.write_text(
        "server_args=ServerArgs(tp_size=8, page_size=1)\n"
        "[TP0] KV Cache is allocated. #tokens: 20480, KV size: 1.34 GB\nmax_total_num_tokens=20480, context_len=8192\n"
    )
    config.write_text(json.dumps(CONFIG | {"num_attention_heads": 12, "num_key_value_heads": 12, "hidden_size": 768}))
    answer = run("explain", log, "--model", config)
    assert answer.status == 3
    said = " ".join(answer.out.split())
    assert said.startswith("No figure of the log could be held against the model: 8 ranks do not divide 12 query")
    assert "1 figure agrees. 1 figure was not checked: KV size." in said


def test_k_and_v_are_a_sum_of_the_log(run: Any, log: Path, config: Path) -> None:
    log.write_text(
        "llama_context: n_ctx = 8192\n"
        "llama_kv_cache: size = 68.00 MiB (8192 cells, 8 layers, 1/1 seqs), K (q8_0): 34.00 MiB, V (q8_0): 34.00 MiB\n"
    )
    config.write_text(json.dumps(CONFIG | {"head_dim": 80}))
    answer = run("explain", log, "--model", config)
    assert answer.status == 3
    assert "could be held against the model: llama.cpp q8_0 takes head sizes" in " ".join(answer.out.split())


def test_a_placeholder_is_no_answer(run: Any, log: Path, config: Path) -> None:
    log.write_text(
        "[TRT-LLM] [I] Using fake cache manager with head_dim=0 and num pages: 61848\n"
        "[TensorRT-LLM][INFO] [MemUsageChange] Allocated 0.00 GiB for max tokens in paged KV cache (3958272).\n"
    )
    answer = run("explain", log, "--model", config)
    assert answer.status == 3
    assert "a placeholder of AutoDeploy" in " ".join(answer.out.split())


def test_a_model_that_is_not_here_leaves_it_undecided(run: Any, log: Path) -> None:
    answer = run("explain", log)
    assert answer.status == 3
    assert "name it with --model" in " ".join(answer.out.split())


@pytest.mark.parametrize(
    ("text", "options", "status", "says"),
    [
        ("nothing of note\n", [], 2, "has no figures about a KV cache"),
        ("", [], 2, "has no figures about a KV cache"),
        (LOG, ["--engine", "kvplan"], 2, "prints no start-up log"),
        (LOG, ["--engine", "vllm2"], 2, "engine 'vllm2' is not known"),
        (LOG, ["--model", "no-such.json"], 2, "no such file"),
    ],
)
def test_what_it_cannot_read_is_one_line(
    run: Any, log: Path, text: str, options: list[str], status: int, says: str
) -> None:
    log.write_text(text)
    answer = run("explain", log, *options)
    assert (answer.status, answer.out, answer.err.count("\n")) == (status, "", 1)
    assert says in answer.err


def test_bytes_that_are_no_text_are_read_around(run: Any, log: Path, config: Path) -> None:
    log.write_bytes(b"\xff\xfe\x01\n" + LOG.encode())
    assert run("explain", log, "--model", config).status == 0


def test_no_such_log(run: Any, tmp_path: Path) -> None:
    answer = run("explain", tmp_path / "none.log")
    assert (answer.status, answer.out) == (2, "")
    assert "no such file" in answer.err
