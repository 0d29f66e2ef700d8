"""Logs of SGLang, cut to the lines that matter, and what is said of each figure."""

from typing import Any

import pytest

from kvplan.engines import explain_log, read_log
from kvplan.engines.logs import Finding, Verdict

QWEN_7B = {"layers": 28, "heads": 28, "kv": 4, "hidden": 3584, "model_type": "qwen2"}
LLAMA_8B = {"layers": 32, "heads": 32, "kv": 8, "hidden": 4096}
GPT2 = {"layers": 12, "heads": 12, "kv": None, "hidden": 768, "model_type": "gpt2"}
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
KIMI = {"layers": 61, "heads": 64, "kv": 64, "hidden": 7168, "model_type": "kimi_k2", **LATENT}
DEEPSEEK = {"layers": 61, "heads": 128, "kv": 128, "hidden": 7168, "model_type": "deepseek_v3", **LATENT,
            "num_nextn_predict_layers": 1}  # fmt: skip
DEEPSEEK_32 = DEEPSEEK | {"model_type": "deepseek_v32", "index_head_dim": 128, "index_topk": 2048, "index_n_heads": 64}
MIXTRAL = {"layers": 32, "heads": 32, "kv": 8, "hidden": 4096, "model_type": "mixtral"}
QWEN3_235B = {"layers": 94, "heads": 64, "kv": 4, "hidden": 4096, "head_dim": 128, "model_type": "qwen3_moe"}
GLM_52 = {"layers": 78, "heads": 64, "kv": 64, "hidden": 6144, "model_type": "glm_moe_dsa", **LATENT,
          "index_head_dim": 128, "index_topk": 2048, "index_n_heads": 32, "index_topk_freq": 4,
          "index_skip_topk_offset": 3}  # fmt: skip
GRANITE_MICRO = {"layers": 40, "heads": 32, "kv": 8, "hidden": 2048, "model_type": "granitemoehybrid",
                 "mamba_n_heads": 64, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1,
                 "mamba_d_conv": 4, "mamba_expand": 2,
                 "layer_types": (["mamba"] * 9 + ["attention"]) * 4}  # fmt: skip
QWEN36_27B = {"layers": 64, "heads": 24, "kv": 4, "hidden": 5120, "head_dim": 256, "model_type": "qwen3_5_text",
              "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
              "linear_num_key_heads": 16, "mamba_ssm_dtype": "float32", "linear_num_value_heads": 48,
              "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 16}  # fmt: skip
MIMO_FLASH = {"layers": 48, "heads": 64, "kv": 4, "hidden": 4096, "model_type": "mimo_v2_flash", "head_dim": 192,
              "v_head_dim": 128, "swa_num_key_value_heads": 8, "swa_head_dim": 192, "swa_v_head_dim": 128,
              "sliding_window": 128, "hybrid_layer_pattern": [0, 1, 1, 1, 1] + [0, 1, 1, 1, 1, 1] * 7 + [0],
              "max_position_embeddings": 262144}  # fmt: skip
GEMMA_4_26B = {"layers": 30, "heads": 16, "kv": 8, "hidden": 2816, "model_type": "gemma4_text", "head_dim": 256,
               "global_head_dim": 512, "sliding_window": 1024, "attention_k_eq_v": True,
               "num_global_key_value_heads": 2, "max_position_embeddings": 262144,
               "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5}  # fmt: skip

EARLY = """
2025-02-04 21:21:33 [2025-02-04 05:21:33] server_args=ServerArgs(model_path='/models/DeepSeek-R1-Distill-Qwen-7B', \
dtype='auto', kv_cache_dtype='auto', context_length=None, mem_fraction_static=0.88, max_running_requests=None, \
max_total_tokens=None, chunked_prefill_size=2048, tp_size=1, dp_size=1, speculative_algorithm=None, \
speculative_num_draft_tokens=64, disable_radix_cache=False, enable_dp_attention=False)
2025-02-04 21:21:40 [2025-02-04 05:21:40 TP0] Load weight begin. avail mem=22.76 GB
Loading safetensors checkpoint shards:  50% Completed | 1/2 [04:38<04:38, 278.99s/it]
2025-02-04 21:29:17 [2025-02-04 05:29:17 TP0] Load weight end. type=Qwen2ForCausalLM, dtype=torch.bfloat16, \
avail mem=8.37 GB
2025-02-04 21:29:17 [2025-02-04 05:29:17 TP0] KV Cache is allocated. K size: 2.82 GB, V size: 2.82 GB.
2025-02-04 21:29:17 [2025-02-04 05:29:17 TP0] Memory pool end. avail mem=1.68 GB
2025-02-04 21:29:20 [2025-02-04 05:29:20 TP0] max_total_num_tokens=105531, chunked_prefill_size=2048, \
max_prefill_tokens=16384, max_running_requests=2049, context_len=131072
"""
"""A public log of February 2025, DeepSeek-R1-Distill-Qwen-7B on an RTX 3090."""

RANKS = """
[2026-02-26 16:30:34] server_args=ServerArgs(model_path='moonshotai/Kimi-K2.5', kv_cache_dtype='auto', \
mem_fraction_static=0.8260405859375, max_total_tokens=None, page_size=1, tp_size=8, pp_size=1, dp_size=1)
[2026-02-26 16:31:00 TP7] Load weight begin. avail mem=283.68 GB
[2026-02-26 16:31:00 TP3] Load weight begin. avail mem=283.53 GB
[2026-02-26 16:41:05 TP1] Load weight end. elapsed=605.50 s, type=KimiK25ForConditionalGeneration, \
dtype=torch.bfloat16, avail mem=210.38 GB, mem usage=73.58 GB.
[2026-02-26 16:41:06 TP2] Load weight end. elapsed=606.47 s, type=KimiK25ForConditionalGeneration, \
dtype=torch.bfloat16, avail mem=209.96 GB, mem usage=73.58 GB.
[2026-02-26 16:41:18 TP6] KV Cache is allocated. #tokens: 2454421, KV size: 160.63 GB
[2026-02-26 16:41:18 TP2] KV Cache is allocated. #tokens: 2454421, KV size: 160.63 GB
[2026-02-26 16:41:18 TP2] Memory pool end. avail mem=45.24 GB
max_total_num_tokens=2454421, chunked_prefill_size=16384, context_len=262144, available_gpu_mem=40.00 GB
"""
"""A public log of 2026-02-26, Kimi K2.5 on eight MI355X, SGLang 0.5.8."""

STATES = """
[2026-02-01 00:05:02 TP0] Load weight begin. avail mem=15.24 GB
[2026-02-01 00:05:03 TP0] Load weight end. elapsed=1.25 s, type=GraniteMoeHybridForCausalLM, \
dtype=torch.bfloat16, avail mem=9.26 GB, mem usage=5.98 GB.
[2026-02-01 00:05:03 TP0] Using KV cache dtype: torch.bfloat16
[2026-02-01 00:05:03 TP0] Mamba Cache is allocated. max_mamba_cache_size: 38, conv_state size: 0.03GB, \
ssm_state size: 2.74GB
[2026-02-01 00:05:03 TP0] KV Cache is allocated. #tokens: 399740, K size: 1.52 GB, V size: 1.52 GB
[2026-02-01 00:05:04 TP0] Capture cuda graph end. Time elapsed: 1.24 s. mem usage=0.09 GB. avail mem=2.89 GB.
max_total_num_tokens=399740
"""
"""A public log of 2026-02-01, granite-4.0-h-micro, of sgl-project/sglang's pull request that adds it."""

WINDOWS = """
sglang.launch_server --model-path XiaomiMiMo/MiMo-V2-Flash --tp-size 4 --mem-fraction-static 0.7 --page-size 64
[2026-01-31 13:50:39 TP2] Use sliding window memory pool. full_layer_tokens=375360, swa_layer_tokens=300288
[2026-01-31 13:50:39 TP1] Use sliding window memory pool. full_layer_tokens=375360, swa_layer_tokens=300288
[2026-01-31 13:50:39 TP1] KV Cache is allocated. #tokens: 300288, K size: 8.38 GB, V size: 5.59 GB
[2026-01-31 13:50:39 TP2] KV Cache is allocated. #tokens: 300288, K size: 8.38 GB, V size: 5.59 GB
max_total_num_tokens=375360, chunked_prefill_size=8192, max_running_requests=2048, context_len=262144
"""
"""https://github.com/sgl-project/sglang/pull/18039, MiMo-V2-Flash on four ranks."""


def explained(spec: Any, log: str, config: dict[str, Any] | None) -> dict[str, Finding]:
    facts = read_log(log)
    assert facts is not None
    assert facts.engine == "sglang"
    return {finding.what: finding for finding in explain_log(facts, spec(**config) if config else None)}


def test_gigabytes_are_gibibytes_and_the_context_is_cut(spec: Any) -> None:
    facts = read_log(EARLY)
    assert facts is not None
    assert (facts.model, facts.format) == ("/models/DeepSeek-R1-Distill-Qwen-7B", "")
    assert facts.setup.context_tokens == 131072
    found = explained(spec, EARLY, QWEN_7B)
    assert (found["K size"].verdict, found["K size"].recomputed) == (Verdict.MISLEADS, "2.82 GiB")
    assert found["K size"].reason == "GB are GiB: it is 3.03 GB"
    assert found["context_len"].verdict is Verdict.MISLEADS
    assert found["context_len"].recomputed == "105,531"


def test_memory_after_loading_makes_the_tokens(spec: Any) -> None:
    found = explained(spec, EARLY, QWEN_7B)["tokens that memory makes"]
    assert found.verdict is Verdict.AGREES
    low, high = (int(text.replace(",", "")) for text in found.recomputed.split(" to "))
    assert low <= 105531 <= high < low * 1.01


def test_the_least_of_the_ranks_binds(spec: Any) -> None:
    found = explained(spec, RANKS, KIMI)
    assert found["tokens that memory makes"].verdict is Verdict.AGREES
    assert found["KV size"].verdict is Verdict.MISLEADS
    assert found["KV size"].recomputed == "160.63 GiB"
    assert found["max_total_num_tokens"].verdict is Verdict.AGREES
    facts = read_log(RANKS)
    assert facts is not None
    assert facts.measured.usable is not None
    assert facts.measured.usable.value == pytest.approx(283.53 * 0.8260405859375 * 2**30)
    assert facts.measured.weights is not None
    assert facts.measured.weights.text == "73.58 GB"


def test_states_have_one_slot_more_than_is_printed(spec: Any) -> None:
    found = explained(spec, STATES, GRANITE_MICRO)
    assert found["recurrent states"].recomputed == "2.74 GiB"
    assert found["convolution inputs"].verdict is Verdict.AGREES
    assert found["K size"].recomputed == "1.52 GiB"
    assert Verdict.UNEXPLAINED not in {finding.verdict for finding in found.values()}


def test_pools_of_windows(spec: Any) -> None:
    found = explained(spec, WINDOWS, MIMO_FLASH)
    assert (found["K size"].recomputed, found["V size"].recomputed) == ("8.38 GiB", "5.59 GiB")
    assert found["max_total_num_tokens"].verdict is Verdict.MISLEADS
    assert "those of windows have 300288 tokens" in found["max_total_num_tokens"].reason
    assert (found["tokens of windows"].verdict, found["tokens of windows"].recomputed) == (Verdict.AGREES, "300,288")


def test_addresses_are_no_memory(spec: Any) -> None:
    """kvcached's guide, 2025: 7.99 GB of addresses, 4.27 GB of memory."""
    log = """
[kvcached][INFO] VirtualKV Cache is allocated. #tokens: 248479, K size: 7.99 GB, V size: 7.99 GB
[kvcached][INFO] Physical KV Cache limits by --mem-fraction-static: #tokens: 248479, K size: 4.27 GB, V size: 4.27 GB
"""
    found = explained(spec, log, GPT2)
    assert found["tokens reserved"].verdict is Verdict.MISLEADS
    assert found["K size"].recomputed == "4.27 GiB"


def test_pools_that_are_backed_after_graphs_were_captured(spec: Any) -> None:
    """Wordings of 0.5.23 (memory_pool.py and kv_pool_runtime.py); 40,000 tokens of 131,072 bytes, pages of 1."""
    log = """
[2026-11-01 10:00:00 TP0] KV Cache VA upper bound. dtype: torch.bfloat16, #tokens: 90000, K size: 5.49 GB, \
V size: 5.49 GB
[2026-11-01 10:00:09 TP0] Capture decode CUDA graph end. elapsed=9.10 s, mem usage=0.80 GB, avail mem=9.35 GB.
[2026-11-01 10:00:09 TP0] Post-capture KV sizing: full_layer_tokens=40000, swa_layer_tokens=0
[2026-11-01 10:00:09 TP0] Post-capture KV sizing: KV cache allocated. dtype: torch.bfloat16, #tokens: 40000, \
KV size: 4.94 GB, avail mem=4.40 GB
[2026-11-01 10:00:09 TP0] max_total_num_tokens=40000, chunked_prefill_size=8192, context_len=8192
"""
    found = explained(spec, log, LLAMA_8B)
    assert found["tokens reserved"].printed == "90000 tokens"
    assert found["KV size after graphs"].verdict is Verdict.MISLEADS
    assert found["max_total_num_tokens"].verdict is Verdict.AGREES
    facts = read_log(log)
    assert facts is not None
    assert facts.measured.graphs_within


def test_layers_that_draft_have_a_pool_of_their_own(spec: Any) -> None:
    """As https://github.com/sgl-project/sglang/issues/6027, DeepSeek-V3: 274,934 tokens, and one layer that drafts."""
    log = """
[2025-05-06 10:00:00 DP1 TP1] KV Cache is allocated. #tokens: 274934, KV size: 17.99 GB
[2025-05-06 10:00:00 DP1 TP1] KV Cache is allocated. #tokens: 274934, KV size: 0.29 GB
server_args=ServerArgs(tp_size=16, dp_size=16, enable_dp_attention=True, page_size=1, kv_cache_dtype='auto')
max_total_num_tokens=274934, chunked_prefill_size=8192
"""
    found = explained(spec, log, DEEPSEEK)
    assert found["KV size"].recomputed == "17.99 GiB"
    assert found["KV size of what drafts"].recomputed == "0.29 GiB"
    assert found["max_total_num_tokens"].verdict is Verdict.MISLEADS
    assert "16 replicas" in found["max_total_num_tokens"].reason


def test_another_model_that_drafts_is_not_known(spec: Any) -> None:
    """A public log of September 2026, Qwen3.8-27B with a drafter: 499,968 tokens in 8 bits."""
    log = """
[2026-09-03 TP0] KV Cache is allocated. dtype: torch.float8_e4m3fn, #tokens: 499968, K size: 7.63 GB, V size: 7.63 GB
[2026-09-03 TP0] KV Cache is allocated. dtype: torch.float8_e4m3fn, #tokens: 499968, K size: 2.38 GB, V size: 2.38 GB
"""
    found = explained(spec, log, QWEN36_27B)
    assert found["K size"].recomputed == "7.63 GiB"
    assert found["K size of what drafts"].verdict is Verdict.NOT_CHECKED


def test_states_of_requests_that_draft(spec: Any) -> None:
    """As `MambaPool` of 0.5.23 has them: a state for each token of a step, of each request and of padding."""
    log = """
server_args=ServerArgs(model_path='m', speculative_algorithm='NEXTN', speculative_num_draft_tokens=4, tp_size=1)
[2026-09-03 TP0] Mamba Cache is allocated. max_mamba_cache_size: 40, conv_state size: 0.11GB, \
ssm_state size: 5.77GB intermediate_ssm_state_cache size: 5.06GB intermediate_conv_window_cache size: 0.10GB
[2026-09-03 TP0] KV Cache is allocated. dtype: torch.bfloat16, #tokens: 65536, K size: 2.00 GB, V size: 2.00 GB
[2026-09-03 TP0] max_total_num_tokens=65536, max_running_requests=8, context_len=65536
"""
    found = explained(spec, log, QWEN36_27B)
    assert found["recurrent states"].recomputed == "5.77 GiB"
    assert found["states of what drafts"].recomputed == "5.06 GiB"
    assert found["requests at once"].reason == "40 slots of states, 5 for a request"


@pytest.mark.parametrize(
    ("config", "log", "what", "reason"),
    [
        # public logs of July 2026, GLM-5.2
        (GLM_52, "KV Cache is allocated. dtype: torch.float8_e4m3fn, #tokens: 131072, KV size: 7.51 GB", "KV size",
         "before 0.5.18"),
        # sgl-project/sglang's LoRA notebook, May 2026, Llama-3.1-8B on one device; and as four ranks and 8 bits have it
        (LLAMA_8B, "KV Cache is allocated. #tokens: 20480, K size: 1.25 GB, V size: 1.25 GB", "K size", "GB are GiB"),
        (LLAMA_8B, "KV Cache is allocated. #tokens: 204800, K size: 3.13 GB, V size: 3.13 GB", "K size",
         "4 tensor parallel ranks;"),
        (LLAMA_8B, "KV Cache is allocated. #tokens: 204800, K size: 6.25 GB, V size: 6.25 GB", "K size",
         "2 tensor parallel ranks or the cache is in 8 bits;"),
    ],
)  # fmt: skip
def test_what_the_log_does_not_say_is_tried(
    spec: Any, config: dict[str, Any], log: str, what: str, reason: str
) -> None:
    found = explained(spec, log, config)[what]
    assert found.verdict is Verdict.MISLEADS
    assert reason in found.reason


@pytest.mark.parametrize(
    ("config", "line", "reason"),
    [
        # https://github.com/sgl-project/sglang/pull/11309, October 2025, DeepSeek-V3.2 on B200: after it, and before
        (DEEPSEEK_32, "#tokens: 975424, KV size: 43.67 GB", "the cache is in 8 bits; GB"),
        (DEEPSEEK_32, "#tokens: 1462784, KV size: 54.52 GB", "not in the printed size"),
        # a public log of June 2026, Kimi K2.6 on NPUs, whose pages are of 128
        (KIMI, "dtype: torch.bfloat16, #tokens: 76416, KV size: 5.01 GB", "pages of 128 tokens; GB"),
        # https://github.com/vllm-project/vllm/issues/21348, Qwen3-235B-A22B with --tp 4
        (QWEN3_235B, "#tokens: 367404, K size: 8.23 GB, V size: 8.23 GB", "4 tensor parallel ranks"),
        # a public log of November 2025, DeepSeek V3 with data parallel attention
        (DEEPSEEK, "#tokens: 524288, KV size: 17.16 GB", "the cache is in 8 bits"),
        # a public log of Mixtral 8x7B, 2025
        (MIXTRAL, "#tokens: 356458, K size: 21.76 GB, V size: 21.76 GB", "GB are GiB: it is 23.36 GB"),
        # https://github.com/sgl-project/sglang/pull/14071, December 2025, two layers of DeepSeek
        (
            {**DEEPSEEK, "layers": 2},
            "#tokens: 60000, KV size: 0.13 GB, layout=(60001, 1, 576), page_size=1",
            "it is 0.14 GB",
        ),
    ],
)  # fmt: skip
def test_lines_of_many_runs(spec: Any, config: dict[str, Any], line: str, reason: str) -> None:
    found = explained(spec, f"[2026-01-01 00:00:00 DP0 TP0 EP0] KV Cache is allocated. {line}", config)
    size = found["KV size" if "KV size" in line else "K size"]
    assert size.verdict is Verdict.MISLEADS
    assert reason in size.reason


def test_a_pool_that_is_not_printed_is_not_checked(spec: Any) -> None:
    """https://github.com/sgl-project/sglang/issues/29575, June 2026."""
    log = """[2026-06-28 15:16:45] max_total_num_tokens=2086558, chunked_prefill_size=8192, max_prefill_tokens=16384, \
max_running_requests=33, context_len=256000, available_gpu_mem=17.22 GB"""
    found = explained(spec, log, LLAMA_8B)
    assert {finding.verdict for finding in found.values()} == {Verdict.NOT_CHECKED}


def test_what_follows_from_nothing_is_a_contradiction(spec: Any) -> None:
    assert explained(spec, EARLY, LLAMA_8B)["K size"].verdict is Verdict.UNEXPLAINED
    found = explained(spec, RANKS.replace("num_tokens=2454421", "num_tokens=2554421"), KIMI)
    assert found["max_total_num_tokens"].verdict is Verdict.UNEXPLAINED


def test_a_pool_that_has_no_memory(spec: Any) -> None:
    """A public log of June 2026, Gemma 4 26B: the pools come out negative, and the server does not start."""
    log = "Use sliding window memory pool. full_layer_tokens=-40934, swa_layer_tokens=-32747\nRuntimeError: Not enough"
    assert explained(spec, log, GEMMA_4_26B)["tokens of windows"].verdict is Verdict.AGREES


def test_the_last_start_counts(spec: Any) -> None:
    twice = EARLY.replace("2.82", "2.14").replace("105531", "80001") + EARLY
    found = explained(spec, twice, QWEN_7B)
    assert found["K size"].recomputed == "2.82 GiB"
    begun = EARLY + "\n".join(EARLY.splitlines()[:3])
    assert explained(spec, begun, QWEN_7B)["K size"].recomputed == "2.82 GiB"


def test_without_a_model_nothing_is_claimed(spec: Any) -> None:
    found = explained(spec, RANKS, None)
    assert found["KV size"].verdict is Verdict.NOT_CHECKED
    assert found["max_total_num_tokens"].verdict is Verdict.AGREES


def test_a_log_without_figures_says_where_they_are() -> None:
    facts = read_log("python3 -m sglang.launch_server --model-path org/m --log-level warning")
    assert facts is not None
    assert (facts.engine, facts.figures, facts.model) == ("sglang", {}, "org/m")
    assert "--log-level" in facts.hint


@pytest.mark.parametrize("log", [EARLY, RANKS, STATES, WINDOWS])
@pytest.mark.parametrize("tail", [False, True])
@pytest.mark.parametrize("lines", range(1, 12))
def test_a_log_that_breaks_off_is_read_as_far_as_it_goes(spec: Any, log: str, lines: int, tail: bool) -> None:
    config = {EARLY: QWEN_7B, RANKS: KIMI, STATES: GRANITE_MICRO, WINDOWS: MIMO_FLASH}[log]
    facts = read_log("\n".join(log.splitlines()[lines:] if tail else log.splitlines()[:lines]))
    if facts is not None:
        assert Verdict.UNEXPLAINED not in {finding.verdict for finding in explain_log(facts, spec(**config))}


@pytest.mark.parametrize(
    ("log", "config"), [(EARLY, QWEN_7B), (RANKS, KIMI), (STATES, GRANITE_MICRO), (WINDOWS, MIMO_FLASH)]
)
def test_no_other_figure_agrees(spec: Any, agreeing: Any, log: str, config: dict[str, Any]) -> None:
    assert agreeing(log, spec(**config)) == []
