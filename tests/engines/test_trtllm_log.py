"""Logs of TensorRT-LLM, cut to the lines that matter, and what is said of each figure."""

from typing import Any

import pytest

from kvplan.engines import explain_log, read_log
from kvplan.engines.logs import Finding, Verdict

LLAMA_8B = {"layers": 32, "heads": 32, "kv": 8, "hidden": 4096}
LLAMA_2_7B = {"layers": 32, "heads": 32, "kv": 32, "hidden": 4096}
SMOLLM2 = {"layers": 30, "heads": 9, "kv": 3, "hidden": 576}
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
KIMI = {"layers": 61, "heads": 64, "kv": 64, "hidden": 7168, "model_type": "kimi_k2", **LATENT}
GPT_OSS_120B = {"layers": 36, "heads": 64, "kv": 8, "hidden": 2880, "head_dim": 64, "model_type": "gpt_oss",
                "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 18}  # fmt: skip
QWEN3_NEXT = {"layers": 48, "heads": 16, "kv": 2, "hidden": 2048, "head_dim": 256, "model_type": "qwen3_next",
              "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
              "linear_num_key_heads": 16, "linear_num_value_heads": 32, "mamba_ssm_dtype": "float32",
              "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 12}  # fmt: skip

PROFILED = """
[12/20/2025-04:21:10] [TRT-LLM] [W] Attention window size 131072 exceeds upper bound 8224 for available blocks. \
Reducing to 8224.
[TensorRT-LLM][INFO] Number of tokens per block: 32.
[TensorRT-LLM][INFO] [MemUsageChange] Allocated 0.56 GiB for max tokens in paged KV cache (8224).
[12/20/2025-04:21:51] [TRT-LLM] [I] Peak memory during memory usage profiling (torch + non-torch): 113.65 GiB, \
available KV cache memory when calculating max tokens: 5.95 GiB, fraction is set 0.8999999761581421, kv size is 73728. \
device total memory 119.70 GiB, , tmp kv_mem 0.56 GiB
[12/20/2025-04:21:51] [TRT-LLM] [I] Estimated max memory in KV cache : 5.95 GiB
[12/20/2025-04:21:51] [TRT-LLM] [W] Both free_gpu_memory_fraction and max_tokens are set (to 0.8999999761581421 and \
86711, respectively). The smaller value will be used.
[TensorRT-LLM][INFO] Number of tokens per block: 32.
[TensorRT-LLM][INFO] [MemUsageChange] Allocated 5.95 GiB for max tokens in paged KV cache (86720).
[12/20/2025-04:21:52] [TRT-LLM] [I] max_seq_len=86720, max_num_requests=64, max_num_tokens=8192, max_batch_size=64
"""
"""A public log of 2025-12-20, gpt-oss-120b on a GB10."""

BUILT = """
[TensorRT-LLM][INFO] Memory usage when calculating max tokens in paged kv cache: total: 31.84 GiB, available: 17.83 GiB
[TensorRT-LLM][INFO] Number of blocks in KV cache primary pool: 8219
[TensorRT-LLM][INFO] Number of blocks in KV cache secondary pool: 0, onboard blocks to primary memory before reuse: true
[TensorRT-LLM][INFO] Number of tokens per block: 32.
[TensorRT-LLM][INFO] [MemUsageChange] Allocated 16.05 GiB for max tokens in paged KV cache (263008)
"""
"""A public log of 2025, Llama-3.1-8B with a cache in FP8 on a device of 32 GB."""


def explained(spec: Any, log: str, config: dict[str, Any] | None) -> dict[tuple[str, int], Finding]:
    facts = read_log(log)
    assert facts is not None
    assert facts.engine == "trtllm"
    return {(finding.what, finding.line): finding for finding in explain_log(facts, spec(**config) if config else None)}


def test_the_pass_that_measures_is_not_the_pool_that_serves(spec: Any) -> None:
    found = explained(spec, PROFILED, GPT_OSS_120B)
    assert found["tokens", 4].verdict is Verdict.MISLEADS
    assert found["tokens", 4].recomputed == "86,720"
    assert found["tokens", 9].verdict is Verdict.AGREES
    assert [found["allocated", line].recomputed for line in (4, 9)] == ["0.56 GiB", "5.95 GiB"]
    assert found["bytes of a token", 5].recomputed == "73,728 bytes"
    assert (found["memory for the cache", 5].verdict, found["memory for the cache", 5].recomputed) == (
        Verdict.AGREES, "5.95 GiB",
    )  # fmt: skip
    assert found["max_tokens", 7].verdict is Verdict.AGREES
    assert Verdict.UNEXPLAINED not in {finding.verdict for finding in found.values()}


def test_the_context_that_was_asked_for_is_cut(spec: Any) -> None:
    found = explained(spec, PROFILED, GPT_OSS_120B)["longest sequence", 10]
    assert (found.verdict, found.printed, found.recomputed) == (Verdict.MISLEADS, "86720 tokens", "131,072")
    assert "131,072 tokens were asked for" in found.reason
    facts = read_log(PROFILED)
    assert facts is not None
    assert facts.setup.context_tokens == 86720


@pytest.mark.parametrize("factor", [0.5, 0.9, 1.1, 2])
@pytest.mark.parametrize("figure", ["5.95 GiB for max tokens", "kv size is 73728"])
def test_a_departure_that_leaves_a_figure_unchecked_explains_nothing(spec: Any, figure: str, factor: float) -> None:
    number = next(word for word in figure.split() if word[0].isdigit())
    digits = 2 if "." in number else 0
    altered = PROFILED.replace(figure, figure.replace(number, f"{float(number) * factor:.{digits}f}"))
    found = explained(spec, altered, GPT_OSS_120B)
    what = ("bytes of a token", 5) if "kv size" in figure else ("allocated", 9)
    assert found[what].verdict is Verdict.UNEXPLAINED


def test_a_placeholder_is_no_pool(spec: Any) -> None:
    """A public log of 2025-12-20, AutoDeploy: 0.00 GiB for 3,958,272 tokens."""
    log = """
[12/20/2025-03:40:47] [TRT-LLM AUTO-DEPLOY] [RANK 0] [I] Using fake cache manager with head_dim=0 and num pages: 61848
[TensorRT-LLM][INFO] Max KV cache blocks per sequence: 256 [window size=16384], tokens per block=64, primary \
blocks=61848, secondary blocks=0, max sequence length=16384
[TensorRT-LLM][INFO] [MemUsageChange] Allocated 0.00 GiB for max tokens in paged KV cache (3958272).
"""
    for config in (LLAMA_8B, None):
        found = explained(spec, log, config)
        assert {finding.verdict for finding in found.values()} == {Verdict.NOT_CHECKED}
        assert all("placeholder" in finding.reason for finding in found.values())


def test_an_engine_that_tensorrt_built(spec: Any) -> None:
    found = explained(spec, BUILT, LLAMA_8B)
    assert found["blocks", 3].verdict is Verdict.AGREES
    assert found["allocated", 6].reason == "2 tensor parallel ranks or the cache is in 8 bits"
    assert found["tokens", 6].verdict is Verdict.EXPLAINED
    facts = read_log(BUILT)
    assert facts is not None
    run = facts.measured
    assert run.usable is not None
    assert run.taken is not None
    assert (run.usable.value - run.taken.value) / 2**30 == pytest.approx(17.83 * 0.9)


@pytest.mark.parametrize(
    ("config", "log", "figures"),
    [
        # https://github.com/NVIDIA/TensorRT-LLM/issues/1400, 0.8, an engine of Llama-2-7B's geometry
        (
            LLAMA_2_7B,
            """[TensorRT-LLM][INFO] Allocate 69524783104 bytes for k/v cache.
[TensorRT-LLM][INFO] Using 132608 tokens in paged KV cache.""",
            ["bytes of the cache"],
        ),
        # a public log of 2026, SmolLM2-135M with trtllm-serve --max_seq_len 2048
        (
            SMOLLM2,
            """[TRT-LLM] [I] Estimated max memory in KV cache : 9.06 GiB
[TensorRT-LLM][INFO] Max KV cache blocks per sequence: 65 [window size=2049], tokens per block=32, primary \
blocks=13189, max sequence length=2049
[TensorRT-LLM][INFO] [MemUsageChange] Allocated 9.06 GiB for max tokens in paged KV cache (422048).""",
            ["allocated"],
        ),
        # ai-dynamo/dynamo, components/backends/trtllm, February 2025, DeepSeek-R1-Distill-Llama-8B
        (
            LLAMA_8B,
            """[TensorRT-LLM][INFO] Max KV cache pages per sequence: 2048
[TensorRT-LLM][INFO] Number of tokens per block: 64.
[TensorRT-LLM][INFO] [MemUsageChange] Allocated 26.91 GiB for max tokens in paged KV cache (220480).
[02/14/2025-09:38:53] [TRT-LLM] [I] max_seq_len=131072, max_num_requests=2048, max_num_tokens=8192""",
            ["allocated"],
        ),
    ],
)
def test_pools_of_every_era_agree(spec: Any, config: dict[str, Any], log: str, figures: list[str]) -> None:
    found = explained(spec, log, config)
    assert [what for what, _ in found if what in figures] == figures
    assert {finding.verdict for finding in found.values()} == {Verdict.AGREES}


def test_what_the_log_does_not_say_is_tried(spec: Any) -> None:
    """A public log of 2026, Kimi K2.5: 35,136 bytes a token, which are 576 of 8 bits in 61 layers."""
    log = "[TensorRT-LLM][INFO] [MemUsageChange] Allocated 166.02 GiB for max tokens in paged KV cache (5073376)."
    found = explained(spec, log, KIMI)["allocated", 1]
    assert (found.verdict, found.reason) == (Verdict.EXPLAINED, "the cache is in 8 bits")
    assert explained(spec, log, LLAMA_8B)["allocated", 1].verdict is Verdict.UNEXPLAINED


def test_blocks_of_an_engine_follow_from_what_was_free(spec: Any) -> None:
    """https://github.com/NVIDIA/TensorRT-LLM/issues/2268, 0.13, Qwen1.5-7B."""
    log = """
Engine version 0.13.0.dev2024082000
[TensorRT-LLM][INFO] Memory usage when calculating max tokens in paged kv cache: total: 39.39 GiB, available: 21.89 GiB
[TensorRT-LLM][INFO] Number of blocks in KV cache primary pool: 631
"""
    found = explained(spec, log, {**LLAMA_2_7B, "model_type": "qwen2"})["blocks", 4]
    assert (found.verdict, found.reason) == (Verdict.EXPLAINED, "blocks of 64 tokens")


def test_a_longest_sequence_that_an_engine_cut(spec: Any) -> None:
    """A public log of 2024, 1.42 GiB free: 82 blocks, and sequences of 5,185 tokens."""
    log = """
[TensorRT-LLM][INFO] Memory usage when calculating max tokens in paged kv cache: total: 22.18 GiB, available: 1.42 GiB
[TensorRT-LLM][INFO] Number of blocks in KV cache primary pool: 82
[TensorRT-LLM][WARNING] maxAttentionWindow and maxSequenceLen are too large for at least one sequence to fit in \
kvCache. they are reduced to 5185
[TensorRT-LLM][INFO] Number of tokens per block: 64.
[TensorRT-LLM][INFO] [MemUsageChange] Allocated 1.28 GiB for max tokens in paged KV cache (5248).
"""
    found = explained(spec, log, None)
    assert found["longest sequence", 4].verdict is Verdict.MISLEADS
    assert found["blocks", 3].verdict is Verdict.AGREES
    assert found["allocated", 6].verdict is Verdict.NOT_CHECKED


def test_pools_of_several_windows(spec: Any) -> None:
    """Wordings of kvCacheManager.cpp: 500 blocks of each window, 36,864 bytes a token in either."""
    log = """
[TensorRT-LLM][INFO] Max KV cache blocks per sequence: 5 [window size=128], tokens per block=32, primary blocks=500, \
secondary blocks=0, max sequence length=8192
[TensorRT-LLM][INFO] Max KV cache blocks per sequence: 256 [window size=8192], tokens per block=32, primary blocks=500,\
 secondary blocks=0, max sequence length=8192
[TensorRT-LLM][INFO] Number of tokens per block: 32.
[TensorRT-LLM][INFO] [MemUsageChange] Allocated 1.10 GiB for max tokens in paged KV cache (32000).
"""
    found = explained(spec, log, GPT_OSS_120B)["allocated", 5]
    assert (found.verdict, found.recomputed) == (Verdict.AGREES, "1.10 GiB")


def test_states_of_a_batch(spec: Any) -> None:
    """Wordings of mamba_cache_manager.py: states of 64 sequences beside the blocks of attention."""
    log = """
[TRT-LLM] [I] Mamba Cache is allocated. max_mamba_cache_size: 64, conv_state size: 0.11GB, ssm_state size: 4.50GB
[TensorRT-LLM][INFO] [MemUsageChange] Allocated 3.00 GiB for max tokens in paged KV cache (131072).
"""
    found = explained(spec, log, QWEN3_NEXT)
    assert found["recurrent states", 2].recomputed == "4.50 GiB"
    assert found["allocated", 3].recomputed == "3.00 GiB"
    assert {finding.verdict for finding in found.values()} == {Verdict.AGREES}


def test_memory_is_split_as_it_was_printed() -> None:
    """Wordings of `_util.py`: what is in torch, and what is not."""
    log = (
        PROFILED
        + """
[TRT-LLM] [I] Memory used after loading model weights (inside torch) in memory usage profiling: 100.00 GiB
[TRT-LLM] [I] Memory dynamically allocated during inference (inside torch) in memory usage profiling: 8.00 GiB
"""
    )
    facts = read_log(log)
    assert facts is not None
    run = facts.measured
    assert run.usable is not None
    assert run.context is not None
    assert run.context.value / 2**30 == pytest.approx(113.65 - 0.56 - 108)
    pool = run.usable.value - 108 * 2**30 - run.context.value
    assert pool / 2**30 == pytest.approx(5.95, abs=0.005)


def test_the_setting_is_read_from_the_arguments() -> None:
    log = """
[TensorRT-LLM] TensorRT LLM version: 1.2.0rc4
[TRT-LLM] [I] LLM Args: model='org/m' tensor_parallel_size=8 pipeline_parallel_size=2 max_seq_len=40960 \
max_num_tokens=8192 enable_attention_dp=True kv_cache_config=KvCacheConfig(enable_block_reuse=False, \
free_gpu_memory_fraction=0.85, dtype='fp8')
"""
    facts = read_log(log)
    assert facts is not None
    setup = facts.setup
    assert (facts.engine, facts.version, facts.model, facts.format) == ("trtllm", "1.2.0rc4", "org/m", "fp8")
    assert (setup.tensor_parallel, setup.pipeline_parallel, setup.context_tokens) == (8, 2, 40960)
    assert (setup.max_batched_tokens, setup.prefix_caching, setup.version) == (8192, False, (1, 2, 0))
    assert {"enable-attention-dp", "free-gpu-memory-fraction=0.85"} <= setup.options
    assert not facts.figures
    assert "TLLM_LOG_LEVEL" in facts.hint


@pytest.mark.parametrize("log", [PROFILED, BUILT])
@pytest.mark.parametrize("tail", [False, True])
@pytest.mark.parametrize("lines", range(1, 11))
def test_a_log_that_breaks_off_is_read_as_far_as_it_goes(spec: Any, log: str, lines: int, tail: bool) -> None:
    facts = read_log("\n".join(log.splitlines()[lines:] if tail else log.splitlines()[:lines]))
    if facts is not None:
        config = GPT_OSS_120B if log is PROFILED else LLAMA_8B
        assert Verdict.UNEXPLAINED not in {finding.verdict for finding in explain_log(facts, spec(**config))}


def test_no_other_figure_agrees(spec: Any, agreeing: Any) -> None:
    """Half the tokens of a cache in 8 bits are those of one in 16; the line of blocks belies them."""
    assert agreeing(PROFILED, spec(**GPT_OSS_120B)) == []
    assert agreeing(BUILT, spec(**LLAMA_8B)) == [(6, "tokens", "131504 tokens")]
    found = explained(spec, BUILT.replace("263008", "131504"), LLAMA_8B)
    assert found["blocks", 3].verdict is Verdict.UNEXPLAINED
