"""Logs of llama.cpp and Ollama, cut to the lines that matter, and what is said of each figure."""

from typing import Any

import pytest

from kvplan.engines import explain_log, read_log
from kvplan.engines.llama_cpp_log import LlamaFacts
from kvplan.engines.logs import Finding, Verdict

LLAMA_8B = {"layers": 32, "heads": 32, "kv": 8, "hidden": 4096}
LLAMA_70B = {"layers": 80, "heads": 64, "kv": 8, "hidden": 8192}
BGE_SMALL = {"layers": 12, "heads": 12, "kv": 12, "hidden": 384}
QWEN_30B = {"layers": 48, "heads": 32, "kv": 4, "hidden": 2048, "head_dim": 128, "model_type": "qwen3_moe"}
QWEN_36_27B = {"layers": 64, "heads": 24, "kv": 4, "hidden": 5120, "head_dim": 256, "model_type": "qwen3_5_text",
               "linear_num_value_heads": 48, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
               "linear_value_head_dim": 128, "linear_num_key_heads": 16, "mamba_ssm_dtype": "float32"}  # fmt: skip
GPT_OSS_20B = {"layers": 24, "heads": 64, "kv": 8, "hidden": 2880, "head_dim": 64, "model_type": "gpt_oss",
               "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 12}  # fmt: skip
GEMMA_4_12B = {"layers": 48, "heads": 16, "kv": 8, "hidden": 3840, "head_dim": 256, "global_head_dim": 512,
               "num_global_key_value_heads": 1, "attention_k_eq_v": True, "model_type": "gemma4_text",
               "sliding_window": 1024, "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 8}  # fmt: skip

GEMMA = """
llama_init_from_model: enabling flash_attn since it is required for quantized V cache
llama_context: n_seq_max     = 4
llama_context: n_ctx         = 8192
llama_context: n_ctx_seq     = 8192
llama_context: n_ubatch      = 512
llama_context: flash_attn    = enabled
llama_context: kv_unified    = true
llama_kv_cache_iswa: creating non-SWA KV cache, size = 8192 cells
llama_kv_cache: size =   68.00 MiB (  8192 cells,   8 layers,  4/1 seqs), K (q8_0):   34.00 MiB, V (q8_0):   34.00 MiB
llama_kv_cache_iswa: creating     SWA KV cache, size = 4608 cells
llama_kv_cache: size =  765.00 MiB (  4608 cells,  40 layers,  4/1 seqs), K (q8_0):  382.50 MiB, V (q8_0):  382.50 MiB
"""
"""A public log, Gemma 4 12B, -c 8192, q8_0, slots left to llama-server."""

FOUR_DEVICES = """
llama_context: n_ctx_per_seq (8192) < n_ctx_train (131072) -- the full capacity of the model will not be utilized
llama_kv_cache_iswa: creating non-SWA KV cache, size = 8192 cells
llama_kv_cache:       HTP1 KV buffer size =    25.50 MiB
llama_kv_cache:       HTP3 KV buffer size =    25.50 MiB
llama_kv_cache:       HTP0 KV buffer size =    25.50 MiB
llama_kv_cache:       HTP2 KV buffer size =    25.50 MiB
llama_kv_cache: size =  102.00 MiB (  8192 cells,  12 layers,  1/1 seqs), K (q8_0):   51.00 MiB, V (q8_0):   51.00 MiB
llama_kv_cache_iswa: creating     SWA KV cache, size = 256 cells
llama_kv_cache:       HTP1 KV buffer size =     0.80 MiB
llama_kv_cache:       HTP3 KV buffer size =     0.53 MiB
llama_kv_cache:       HTP0 KV buffer size =     1.06 MiB
llama_kv_cache:       HTP2 KV buffer size =     0.80 MiB
llama_kv_cache: size =    3.19 MiB (   256 cells,  12 layers,  1/1 seqs), K (q8_0):    1.59 MiB, V (q8_0):    1.59 MiB
llama_context:       HTP0 compute buffer size =    16.06 MiB
"""
"""A public log, gpt-oss-20b on four devices."""

HYBRID = """
llama_model_loader: loaded meta data with 51 key-value pairs and 851 tensors from /models/q36-27b.gguf (version GGUF V3)
load_tensors:        CUDA0 model buffer size =  9815.23 MiB
llama_context: constructing llama_context
llama_context: n_seq_max     = 1
llama_context: n_ctx         = 131072
llama_context: n_ubatch      = 1024
llama_context: flash_attn    = auto
llama_context: kv_unified    = false
llama_kv_cache:        CPU KV buffer size =  4608.00 MiB
llama_kv_cache:      CUDA0 KV buffer size =  3584.00 MiB
llama_kv_cache: size = 8192.00 MiB (131072 cells,  16 layers,  1/1 seqs), K (f16): 4096.00 MiB, V (f16): 4096.00 MiB
llama_memory_recurrent:        CPU RS buffer size =    93.52 MiB
llama_memory_recurrent:      CUDA0 RS buffer size =    56.11 MiB
llama_memory_recurrent: size =  149.62 MiB (     1 cells,  64 layers,  1 seqs), R (f32): 5.62 MiB, S (f32): 144.00 MiB
sched_reserve:       CUDA0 compute buffer size =   505.00 MiB
sched_reserve: CPU compute buffer size is 569.0098 MiB, matches expectation of 569.0098 MiB
"""
"""A public log, Qwen3.6-27B with layers on both CPU and GPU."""

DRAFTING = """
0.06.588.132 I llama_context: n_ctx         = 8192
0.06.588.133 I llama_context: kv_unified    = true
0.06.599.084 I llama_kv_cache:    Vulkan0 KV buffer size =   512.00 MiB
0.06.683.016 I llama_memory_recurrent:    Vulkan0 RS buffer size =  1795.50 MiB
0.06.683.042 I llama_memory_recurrent: size = 1795.50 MiB (     4 cells,  64 layers,  4 seqs  2 rs_seq), R (f32): \
  67.50 MiB, S (f32): 1728.00 MiB
0.06.852.461 I srv    load_model: creating MTP draft context against the target model 'm.gguf'
0.06.852.524 I llama_context: n_ctx         = 8192
0.06.860.000 I llama_kv_cache:    Vulkan0 KV buffer size =    32.00 MiB
"""
"""A public log of 2026, a model of Qwen3.6-27B's shape with multi-token prediction."""

ENCODER = """
0.00.027.343 I llama_new_context_with_model: n_ctx         = 512
0.00.027.343 I llama_new_context_with_model: flash_attn    = 0
0.00.027.357 I llama_kv_cache_init: kv_size = 512, offload = 1, type_k = 'f16', type_v = 'f16', n_layer = 12
0.00.029.664 I llama_kv_cache_init:        CPU KV buffer size =     9.00 MiB
0.00.029.672 I llama_new_context_with_model: KV self size  =    9.00 MiB, K (f16):    4.50 MiB, V (f16):    4.50 MiB
"""
"""llama.cpp's CI log of 2024, bge-small."""

PADDED = """
llama_new_context_with_model: n_ctx      = 65536
llama_kv_cache_init:      CUDA0 KV buffer size =  4896.02 MiB
llama_kv_cache_init:      CUDA1 KV buffer size =  5984.02 MiB
llama_new_context_with_model: KV self size  = 10880.00 MiB, K (q8_0): 5440.00 MiB, V (q8_0): 5440.00 MiB
"""
"""A public log of 2024, a model of 70B in q8_0: buffers are larger than the cache by what aligns them."""

OLLAMA = """
msg=load request="{Operation:fit Parallel:1 BatchSize:512 FlashAttention:true KvSize:32768 KvCacheType: NumThreads:8}"
time=2025-10-22T02:17:57Z level=DEBUG source=device.go:217 msg="kv cache" device=CUDA0 size="3.0 GiB"
time=2025-10-22T02:17:58Z level=DEBUG source=device.go:217 msg="kv cache" device=CUDA0 size="1.9 GiB"
time=2025-10-22T02:17:58Z level=DEBUG source=device.go:222 msg="kv cache" device=CPU size="1.1 GiB"
"""
"""A public log, Qwen3-30B-A3B at 32k: what was tried first did not fit."""


def explained(spec: Any, log: str, config: dict[str, Any] | None) -> dict[str, Finding]:
    facts = read_log(log)
    assert facts is not None
    assert facts.engine == "llama.cpp"
    found: dict[str, Finding] = {}
    for finding in explain_log(facts, spec(**config) if config else None):
        found.setdefault(finding.what, finding)
    return found


@pytest.mark.parametrize(
    ("log", "config"),
    [(GEMMA, GEMMA_4_12B), (HYBRID, QWEN_36_27B), (ENCODER, BGE_SMALL), (PADDED, LLAMA_70B), (OLLAMA, QWEN_30B)],
)
def test_every_figure_follows(spec: Any, log: str, config: dict[str, Any]) -> None:
    found = explained(spec, log, config)
    assert {finding.verdict for finding in found.values()} == {Verdict.AGREES}


def test_advice_is_fewer_slots_and_not_a_shorter_context(spec: Any) -> None:
    cells = explained(spec, GEMMA, GEMMA_4_12B)["cells of the KV cache of windows"]
    assert cells.printed == "4608 cells"
    assert "4 slots with a window of 1,024 each and a batch of 512: --parallel 1 makes it 1,536 cells" in cells.reason
    assert "all caches 323.00 MiB instead of 833.00 MiB (-61%)" in cells.reason


def test_what_the_log_leaves_unsaid_is_named(spec: Any) -> None:
    short = "\n".join(line.partition(", K (")[0] for line in GEMMA.splitlines()).replace("n_ubatch      = 512", "")
    found = explained(spec, short, GEMMA_4_12B)
    assert (found["KV cache"].verdict, found["KV cache"].reason) == (Verdict.EXPLAINED, "the cache is in q8_0")
    assert found["cells of the KV cache of windows"].verdict is Verdict.AGREES
    named = explained(spec, FOUR_DEVICES.replace("n_ctx_per_seq (8192)", "n_ctx = 8192"), GPT_OSS_20B)
    assert named["cells of the KV cache of windows"].reason == "a batch of 128 tokens"
    assert named["buffers of the KV cache of windows"].verdict is Verdict.AGREES


def test_size_lines_are_one_cache_with_the_buffers_they_restate(spec: Any) -> None:
    found = explained(spec, FOUR_DEVICES, GPT_OSS_20B)
    assert (found["KV cache"].printed, found["KV cache"].recomputed) == ("102.00 MiB", "102.00 MiB")
    assert (found["buffers of the KV cache"].printed, found["buffers of the KV cache"].line) == ("102.00 MiB", 4)
    assert "one cache" in found["buffers of the KV cache"].reason


def test_states_are_of_fewer_layers_than_the_line_says(spec: Any) -> None:
    found = explained(spec, HYBRID, QWEN_36_27B)["recurrent states"]
    assert found.recomputed == "149.62 MiB"
    assert found.reason == "float32 of 48 layers for each of 1 slots; 64 layers are all of the model's"


def test_states_to_go_back_to_and_the_draft_s_own_context(spec: Any) -> None:
    facts = read_log(DRAFTING)
    assert isinstance(facts, LlamaFacts)
    assert [cache.context for cache in facts.caches] == [1, 2]
    verdicts = [(finding.what, finding.verdict) for finding in explain_log(facts, spec(**QWEN_36_27B))]
    assert verdicts == [
        ("KV cache", Verdict.AGREES), ("recurrent states", Verdict.AGREES), ("KV cache", Verdict.NOT_CHECKED),
    ]  # fmt: skip
    drafting = spec(**QWEN_36_27B | {"mtp_num_hidden_layers": 1})
    *own, last = explain_log(facts, drafting)
    assert {finding.verdict for finding in own} == {Verdict.AGREES}
    assert (last.verdict, last.recomputed) == (Verdict.AGREES, "32.00 MiB")
    assert last.reason == "f16 of the layers that draft, in a context of their own"
    other = explain_log(facts, spec(**QWEN_36_27B | {"mtp_num_hidden_layers": 2}))[-1]
    assert other.verdict is Verdict.NOT_CHECKED  # it may be a draft model's


def test_what_only_the_run_can_tell(spec: Any) -> None:
    facts = read_log(HYBRID)
    assert facts is not None
    assert facts.model == "/models/q36-27b.gguf"
    assert facts.measured.weights is not None
    assert facts.measured.weights.text == "9815.23 MiB"
    assert facts.measured.activations is not None
    assert facts.measured.activations.text == "505.00 MiB"


def test_older_padding_is_named(spec: Any) -> None:
    """b6182 had 640 cells for a window of 128 and a batch of 512."""
    log = """
version: 6182 (f44f793)
llama_context: n_seq_max     = 1
llama_context: n_ctx         = 8192
llama_context: n_ubatch      = 512
llama_kv_cache_unified_iswa: creating     SWA KV cache, size = 640 cells
llama_kv_cache_unified: size =   15.00 MiB (   640 cells,  12 layers,  1/1 seqs), K (f16): 7.50 MiB, V (f16): 7.50 MiB
"""
    found = explained(spec, log, GPT_OSS_20B)
    assert found["KV cache of windows"].verdict is Verdict.AGREES
    assert found["cells of the KV cache of windows"].recomputed == "640"
    assert "padded to 32" in found["cells of the KV cache of windows"].reason


def test_ollamas_devices_are_summed_and_what_it_tried_first_is_not(spec: Any) -> None:
    found = explained(spec, OLLAMA, QWEN_30B)["kv cache of 2 devices"]
    assert (found.printed, found.recomputed) == ("3072.00 MiB", "3072.00 MiB")
    windows = explained(spec, OLLAMA, GPT_OSS_20B)["kv cache of 2 devices"]
    assert windows.verdict is Verdict.NOT_CHECKED


@pytest.mark.parametrize(("config", "reason"), [(LLAMA_8B, "32"), (QWEN_36_27B, "no such cache")])
def test_another_model_is_not_an_explanation(spec: Any, config: dict[str, Any], reason: str) -> None:
    log = GEMMA if config is LLAMA_8B else GEMMA.replace("non-SWA", "indexer")
    found = explained(spec, log, config)
    assert Verdict.UNEXPLAINED in {finding.verdict for finding in found.values()}
    assert any(reason in finding.reason for finding in found.values())


def test_a_context_that_ollama_does_not_print_is_the_reason(spec: Any) -> None:
    """Heads of 80 take no q8_0, which was only tried."""
    log = "\n".join(line for line in OLLAMA.splitlines() if "KvSize" not in line)
    found = explained(spec, log, LLAMA_8B | {"head_dim": 80})["kv cache of 2 devices"]
    assert (found.verdict, found.reason) == (
        Verdict.NOT_CHECKED, "the context is not in the log: no KvSize is printed",
    )  # fmt: skip


def test_sums_that_do_not_add_up_are_not_explained(spec: Any) -> None:
    found = explained(spec, HYBRID.replace("3584.00", "3570.00"), QWEN_36_27B)
    assert found["buffers of the KV cache"].verdict is Verdict.UNEXPLAINED


def test_without_a_model_sums_are_still_checked(spec: Any) -> None:
    found = explained(spec, HYBRID, None)
    assert found["KV cache"].verdict is Verdict.NOT_CHECKED
    assert found["buffers of the KV cache"].verdict is Verdict.AGREES


def test_a_quiet_server_is_told_how_to_speak() -> None:
    facts = read_log("srv    load_model: initializing, n_slots = 4, n_ctx_slot = 8192, kv_unified = 'true'\n")
    assert facts is not None
    assert not facts.figures
    assert "-lv 4" in facts.hint


@pytest.mark.parametrize("log", [GEMMA, FOUR_DEVICES, HYBRID, DRAFTING, ENCODER, PADDED, OLLAMA])
def test_a_log_that_breaks_off_is_read_as_far_as_it_goes(spec: Any, log: str) -> None:
    configs = {GEMMA: GEMMA_4_12B, FOUR_DEVICES: GPT_OSS_20B, ENCODER: BGE_SMALL, PADDED: LLAMA_70B, OLLAMA: QWEN_30B}
    model = spec(**configs.get(log, QWEN_36_27B))
    for end in range(len(log.splitlines())):
        facts = read_log("\n".join(log.splitlines()[:end]))
        if facts is not None:
            explain_log(facts, model)


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        (("1536.00", "3584.00"), "they are one cache, 12, 28 layers on the devices"),
        (("1500.00", "3620.00"), "they are one cache"),
        (("5120.00",), "they are one cache"),
    ],
)
def test_buffers_of_devices_are_told_in_layers(spec: Any, sizes: tuple[str, ...], says: str) -> None:
    """https://github.com/ggml-org/llama.cpp/pull/6122: Command R, 40 layers of 128 MiB at a context of 4096."""
    buffers = "\n".join(f"llama_kv_cache:      CUDA{n} KV buffer size = {size} MiB" for n, size in enumerate(sizes))
    line = "llama_kv_cache: size = 5120.00 MiB (  4096 cells,  40 layers,  1/1 seqs), K (f16): 2560.00 MiB, V (f16): 2560.00 MiB"  # noqa: E501
    found = explained(spec, f"{buffers}\n{line}", None)
    buffers_finding = next(finding for name, finding in found.items() if name.startswith("buffers"))
    assert buffers_finding.reason.endswith(says)


@pytest.mark.parametrize(
    ("log", "config"),
    [
        (GEMMA, GEMMA_4_12B), (FOUR_DEVICES, GPT_OSS_20B), (HYBRID, QWEN_36_27B), (ENCODER, BGE_SMALL),
        (PADDED, LLAMA_70B), (OLLAMA, QWEN_30B), (DRAFTING, QWEN_36_27B | {"mtp_num_hidden_layers": 1}),
    ],
)  # fmt: skip
def test_no_other_figure_agrees(spec: Any, agreeing: Any, log: str, config: dict[str, Any]) -> None:
    assert agreeing(log, spec(**config)) == []
