"""SGLang's pools against what SGLang printed.

Each row names where it was printed. SGLang's GB are GiB, to two decimals, and buffers have one page more than tokens.
"""

from typing import Any

import pytest

from kvplan.core.allocation import BEHIND_WINDOW, REPLICATED, SPARE, Setup
from kvplan.engines import ENGINES
from kvplan.engines import allocate as checked
from kvplan.engines.engine import Launch
from kvplan.engines.sglang import allocate
from kvplan.engines.sglang_launch import launch
from kvplan.engines.sglang_pools import EMPTY_LAYERS
from kvplan.errors import InputError, UnsupportedFormatError, UnsupportedModelError

GIB = 1 << 30
LLAMA_8B = {"layers": 32, "heads": 32, "kv": 8, "hidden": 4096}
QWEN3_06B = {"layers": 28, "heads": 16, "kv": 8, "hidden": 1024, "head_dim": 128, "model_type": "qwen3"}
QWEN25_05B = {"layers": 24, "heads": 14, "kv": 2, "hidden": 896, "model_type": "qwen2"}
QWQ_32B = {"layers": 64, "heads": 40, "kv": 8, "hidden": 5120, "model_type": "qwen2"}
GPT2 = {"layers": 12, "heads": 12, "kv": None, "hidden": 768, "model_type": "gpt2"}
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
DEEPSEEK = {"layers": 61, "heads": 128, "kv": 128, "hidden": 7168, "model_type": "deepseek_v3", **LATENT}
KIMI = {"layers": 61, "heads": 64, "kv": 64, "hidden": 7168, "model_type": "kimi_k2", **LATENT}
INDEXER = {"index_head_dim": 128, "index_topk": 2048, "index_n_heads": 32}
GLM_52 = {"layers": 78, "heads": 64, "kv": 64, "hidden": 6144, "model_type": "glm_moe_dsa", **LATENT, **INDEXER,
          "index_topk_freq": 4, "index_skip_topk_offset": 3}  # fmt: skip
DELTA = {"linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
         "linear_num_key_heads": 16, "mamba_ssm_dtype": "float32"}  # fmt: skip
QWEN36_27B = {"layers": 64, "heads": 24, "kv": 4, "hidden": 5120, "head_dim": 256, "model_type": "qwen3_5_text",
              **DELTA, "linear_num_value_heads": 48,
              "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 16}  # fmt: skip
TINY_DELTA = {"layers": 8, "heads": 8, "kv": 2, "hidden": 1024, "head_dim": 128, "model_type": "qwen3_5_moe_text",
              **DELTA, "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 64,
              "linear_value_head_dim": 64,
              "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2}  # fmt: skip
GRANITE_SMALL = {"layers": 40, "heads": 32, "kv": 8, "hidden": 4096, "model_type": "granitemoehybrid",
                 "mamba_n_heads": 128, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1,
                 "mamba_d_conv": 4, "mamba_expand": 2,
                 "layer_types": (["mamba"] * 9 + ["attention"]) * 4}  # fmt: skip
MIMO_FLASH = {"layers": 48, "heads": 64, "kv": 4, "hidden": 4096, "model_type": "mimo_v2_flash", "head_dim": 192,
              "v_head_dim": 128, "swa_num_key_value_heads": 8, "swa_head_dim": 192, "swa_v_head_dim": 128,
              "sliding_window": 128, "hybrid_layer_pattern": [0, 1, 1, 1, 1] + [0, 1, 1, 1, 1, 1] * 7 + [0],
              "max_position_embeddings": 262144}  # fmt: skip
GEMMA_4 = {"model_type": "gemma4_text", "head_dim": 256, "global_head_dim": 512, "sliding_window": 1024,
           "attention_k_eq_v": True, "max_position_embeddings": 262144}  # fmt: skip
GEMMA_4_26B = {"layers": 30, "heads": 16, "kv": 8, "hidden": 2816, **GEMMA_4, "num_global_key_value_heads": 2,
               "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5}  # fmt: skip
GEMMA_4_31B = {"layers": 60, "heads": 32, "kv": 16, "hidden": 5376, **GEMMA_4, "num_global_key_value_heads": 4,
               "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10}  # fmt: skip
GEMMA_3_27B = {"layers": 62, "heads": 32, "kv": 16, "hidden": 5376, "head_dim": 128, "model_type": "gemma3_text",
               "sliding_window": 1024, "sliding_window_pattern": 6}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "form", "options", "tokens", "gib"),
    [
        # https://github.com/sgl-project/sglang/issues/6027, May 2025, 16 ranks: KV size 17.99 GB
        (DEEPSEEK, "bf16", {"tensor_parallel": 16}, 274934, [17.99]),
        # public log of QwQ-32B, 0.4.3, 4 ranks: K size 1.42 GB, V size 1.42 GB
        (QWQ_32B, "bf16", {"tensor_parallel": 4}, 46611, [1.42, 1.42]),
        # public logs of Qwen3-0.6B, August and May 2025
        (QWEN3_06B, "bf16", {}, 104273, [5.57, 5.57]),
        (QWEN3_06B, "bf16", {}, 15387, [0.82, 0.82]),
        # public logs of Qwen2.5-0.5B-Instruct, July and February 2026
        (QWEN25_05B, "bf16", {}, 2658165, [15.21, 15.21]),
        (QWEN25_05B, "bf16", {}, 20480, [0.12, 0.12]),
        # SGLang's LoRA notebook, May 2026, Llama-3.1-8B-Instruct
        (LLAMA_8B, "bf16", {}, 20480, [1.25, 1.25]),
        # public logs of Kimi K2.5 on 8 ranks, February and May 2026
        (KIMI, "bf16", {"tensor_parallel": 8}, 2454421, [160.63]),
        (KIMI, "bf16", {"tensor_parallel": 8}, 209413, [13.71]),
        # public log of Qwen3.8-27B-NVFP4, 2026: 16 layers of attention in fp8
        (QWEN36_27B, "fp8_e4m3", {}, 228520, [3.49, 3.49]),
        # public logs of GLM-5.2, July 2026: every layer has a buffer for an indexer's keys
        (GLM_52, "fp8_e4m3", {"version": (0, 5, 15)}, 131072, [7.51]),
        (GLM_52, "fp8_e4m3", {"version": (0, 5, 15)}, 262144, [15.01]),
        # kvcached's guide, 2025, gpt2: the physical line
        (GPT2, "fp16", {}, 248479, [4.27, 4.27]),
    ],
)
def test_a_pool_takes_what_sglang_printed(
    spec: Any, config: dict[str, Any], form: str, options: dict[str, Any], tokens: int, gib: list[float]
) -> None:
    full = allocate(spec(**config), form, Setup(context_tokens=64, **options)).full
    assert full is not None
    printed = (tokens + full.units_per_block) * full.bytes_per_block / full.units_per_block
    assert printed / GIB / len(gib) == pytest.approx(gib[0], abs=0.005)


def test_pools_of_windows_take_what_sglang_printed(spec: Any) -> None:
    """https://github.com/sgl-project/sglang/pull/18039, MiMo-V2-Flash on 4 ranks, pages of 64: 300,288 tokens in the
    pool of windows beside 375,360, K 8.38 GB and V 5.59 GB."""
    setup = Setup(context_tokens=262144, tensor_parallel=4, block_tokens=64)
    windows = allocate(spec(**MIMO_FLASH), "bf16", setup).windows
    assert windows is not None
    printed = (300288 + 64) * windows.bytes_per_block / 64 / GIB
    assert printed == pytest.approx(8.38 + 5.59, abs=0.01)


@pytest.mark.parametrize(
    ("config", "full", "window", "cell"),
    [(GEMMA_4_26B, 5 * 4096, 25 * 8192, 184320), (GEMMA_4_31B, 10 * 8192, 50 * 16384, 737280)],
)
def test_a_token_of_both_pools_takes_what_was_printed(
    spec: Any, config: dict[str, Any], full: int, window: int, cell: int
) -> None:
    """Public logs of June 2026, Gemma 4 26B and 31B: bytes of a token in a full and a sliding layer, and the cell."""
    pools = allocate(spec(**config), "bf16", Setup(context_tokens=64))
    assert pools.full is not None
    assert pools.windows is not None
    assert (pools.full.bytes_per_block, pools.windows.bytes_per_block) == (full, window)
    sizes = pools.sizes(100 * cell)
    assert (sizes.tokens, sizes.window_tokens) == (100, 80)


@pytest.mark.parametrize(
    ("config", "slots", "conv_gib", "state_gib"),
    [
        # public log of a small Qwen3.5 MoE on an A100, 2026
        (TINY_DELTA, 26652, 0.92, 19.52),
        # public log of granite-4.0-h-small, 2026
        (GRANITE_SMALL, 218, 0.37, 30.80),
    ],
)
def test_states_take_what_sglang_printed(
    spec: Any, config: dict[str, Any], slots: int, conv_gib: float, state_gib: float
) -> None:
    states = allocate(spec(**config), "bf16", Setup(context_tokens=64)).states
    assert states is not None
    assert (slots + 1) * states.bytes_per_block / GIB == pytest.approx(conv_gib + state_gib, abs=0.01)


def test_states_have_their_share_of_the_memory_first(spec: Any) -> None:
    """`_handle_max_mamba_cache` of 0.5.23, by hand: 0.9 / 1.9 of 19 GiB are 9 GiB, one slot is not used."""
    model = spec(**QWEN36_27B)
    slot = 48 * ((2 * 16 + 48) * 128 * 3 * 2 + 48 * 128 * 128 * 4)
    pools = allocate(model, "bf16", Setup(context_tokens=65536))
    sizes = pools.sizes(19 * GIB)
    assert sizes.slots == 9 * GIB // slot - 1
    assert sizes.tokens == (19 * GIB - (sizes.slots + 1) * slot) // (16 * 2 * 4 * 256 * 2)
    older = allocate(model, "bf16", Setup(context_tokens=65536, version=(0, 5, 16))).sizes(19 * GIB)
    assert older.slots == sizes.slots + 1
    assert pools.capacity(19 * GIB).max_concurrency == min(sizes.slots // 5, sizes.tokens // 65536)


@pytest.mark.parametrize(
    ("options", "slots"),
    [
        ({}, 5), ({"prefix_caching": False}, 1), ({"version": (0, 5, 12)}, 3),
        ({"options": frozenset({"mamba-radix-cache-strategy=extra_buffer_lazy"})}, 4),
    ],
)  # fmt: skip
def test_a_request_is_counted_for_slots_beside_its_own(spec: Any, options: dict[str, Any], slots: int) -> None:
    """`_calculate_mamba_ratio` of 0.5.23."""
    pools = allocate(spec(**QWEN36_27B), "bf16", Setup(context_tokens=64, **options))
    assert pools.states is not None
    assert pools.states.blocks(64) == slots
    spare = {term.name: term.bytes for term in pools.terms(64)}.get(SPARE, 0)
    assert spare == (slots - 1) * pools.states.bytes_per_block


def test_data_parallel_attention_holds_a_latent_vector_once(spec: Any) -> None:
    model = spec(**DEEPSEEK)
    shared = allocate(model, "bf16", Setup(context_tokens=64, tensor_parallel=8))
    own = allocate(
        model, "bf16", Setup(context_tokens=64, tensor_parallel=8, options=frozenset({"enable-dp-attention"}))
    )
    assert {term.name for term in shared.terms(64)} == {REPLICATED}
    assert not own.terms(64)
    assert shared.growth_bytes(64) == own.growth_bytes(64) == 70272


def test_windows_of_other_classes_are_kept_whole(spec: Any) -> None:
    """Gemma 3 is named as not supported (srt/arg_groups/model_overrides/gemma2_gemma3.py)."""
    pools = allocate(spec(**GEMMA_3_27B), "bf16", Setup(context_tokens=4096))
    assert pools.windows is None
    assert {term.name: term.bytes for term in pools.terms(4096)} == {BEHIND_WINDOW: 52 * 3072 * 8192}


def test_layers_that_share_or_do_not_attend_have_buffers(spec: Any) -> None:
    """`layer_num` is that of the model (srt/model_executor/model_runner_components/layer_setup.py)."""
    kinds = (["sliding_attention"] * 4 + ["full_attention"]) * 7
    sharing = spec(35, 8, 2, 2048, model_type="gemma3n_text", head_dim=256, sliding_window=512,
                   num_kv_shared_layers=15, layer_types=kinds)  # fmt: skip
    pools = allocate(sharing, "bf16", Setup(context_tokens=64))
    assert {term.name: term.bytes for term in pools.terms(64)} == {EMPTY_LAYERS: 64 * 15 * 2 * 2 * 256 * 2}
    blocks = [{"attention": {"n_heads_in_group": 8, "no_op": False}}, {"attention": {"no_op": True}}] * 2
    skipping = spec(4, 64, None, 8192, model_type="nemotron-nas", block_configs=blocks)
    assert allocate(skipping, "bf16", Setup(context_tokens=64)).growth_bytes(64) == 4 * 2 * 8 * 128 * 2


def test_layers_without_an_indexer_lost_its_buffer_in_0_5_18(spec: Any) -> None:
    model = spec(**GLM_52)
    growth = [
        allocate(model, "fp8_e4m3", Setup(context_tokens=64, version=version)).growth_bytes(64)
        for version in ((0, 5, 17), (0, 5, 18), None)
    ]
    assert growth == [78 * (656 + 132), 78 * 656 + 21 * 132, 78 * 656 + 21 * 132]
    raw = Setup(context_tokens=64, options=frozenset({"dsa-decode-backend=trtllm"}))
    assert allocate(model, "fp8_e4m3", raw).growth_bytes(64) == 78 * 576 + 21 * 132


def test_the_pool_of_windows_follows_the_requests_without_prefixes(spec: Any) -> None:
    """`compute_swa_request_cap` of 0.5.23: window, 128 tokens to be given back and two pages a request, two chunks."""
    setup = Setup(context_tokens=262144, block_tokens=64, prefix_caching=False, sequences=10, max_batched_tokens=8192)
    model = spec(**MIMO_FLASH)
    assert allocate(model, "bf16", setup).sizes(40 * GIB).window_tokens == 10 * (128 + 128 + 128) + 2 * 8192 + 64
    older = Setup(**{**_fields(setup), "version": (0, 5, 20)})
    sizes = allocate(model, "bf16", older).sizes(40 * GIB)
    assert sizes.window_tokens == int(sizes.tokens * 0.8) // 64 * 64


def _fields(setup: Setup) -> dict[str, Any]:
    return {name: getattr(setup, name) for name in Setup.__dataclass_fields__}


def test_the_last_stages_have_one_layer_more(spec: Any) -> None:
    """`get_pp_indices` of srt/distributed/utils.py: 7 layers on 3 stages are 2, 2 and 3."""
    pools = allocate(spec(7, 8, 8, 512), "bf16", Setup(context_tokens=64, pipeline_parallel=3))
    assert pools.groups[0].layers == 3


@pytest.mark.parametrize(
    ("form", "bytes_a_token"),
    [
        ("bfloat16", 131072), ("sglang:fp8_e5m2", 65536), ("fp8_e4m3", 65536),
        ("mxfp8", 32 * 8 * 2 * (128 + 4)), ("nvfp4", 32 * 8 * 2 * (64 + 8)), ("fp4_e2m1", 32 * 8 * 2 * (64 + 8)),
    ],
)  # fmt: skip
def test_formats_take_what_sglangs_buffers_take(spec: Any, form: str, bytes_a_token: int) -> None:
    assert allocate(spec(**LLAMA_8B), form, Setup(context_tokens=64)).growth_bytes(64) == bytes_a_token


@pytest.mark.parametrize(
    ("config", "form", "options", "error"),
    [
        (DEEPSEEK, "nvfp4", {}, UnsupportedFormatError),
        (DEEPSEEK, "mxfp8", {}, UnsupportedFormatError),
        (GLM_52, "fp8_e5m2", {}, UnsupportedFormatError),
        (MIMO_FLASH, "fp4_mx_block16", {}, UnsupportedFormatError),
        (LLAMA_8B, "q8_0", {}, UnsupportedFormatError),
        (LLAMA_8B, "fp8", {}, UnsupportedFormatError),
        (LLAMA_8B, "bf16", {"tensor_parallel": 3}, InputError),
        (LLAMA_8B, "bf16", {"pipeline_parallel": 33}, InputError),
        (LLAMA_8B, "bf16", {"version": (0, 4, 6)}, InputError),
        (LLAMA_8B, "bf16", {"draft_tokens": 1}, InputError),
        (GEMMA_4_26B, "bf16", {"options": frozenset({"swa-full-tokens-ratio=2"})}, InputError),
        (QWEN36_27B, "bf16", {"options": frozenset({"mamba-ssm-dtype=int8"})}, InputError),
        (LLAMA_8B, "bf16", {"options": frozenset({"max-total-tokens=many"})}, InputError),
        (GRANITE_SMALL, "bf16", {"tensor_parallel": 2}, UnsupportedModelError),
    ],
)
def test_what_sglang_does_not_have_is_refused(
    spec: Any, config: dict[str, Any], form: str, options: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        checked(ENGINES["sglang"], spec(**config), form, Setup(context_tokens=64, **options))


def test_states_of_classes_that_sglang_does_not_pool_are_refused(spec: Any) -> None:
    jamba = spec(8, 8, 8, 512, model_type="jamba", mamba_d_state=16, mamba_d_conv=4, mamba_expand=2,
                 attn_layer_period=8, attn_layer_offset=4)  # fmt: skip
    with pytest.raises(UnsupportedModelError, match="convolution inputs"):
        allocate(jamba, "bf16", Setup(context_tokens=64))


def test_the_command_has_sglangs_own_flags() -> None:
    """Flags of srt/arg_groups/fields of 0.5.23, and keys of srt/utils/server_args_config_parser.py, 2026-10-30."""
    setting = Launch(
        model="org/m", format="fp8_e4m3", block_tokens=64, context_tokens=8192, sequences=34, tensor_parallel=2,
        max_batched_tokens=4096, prefix_caching=False, memory_utilization=0.85, blocks=100,
    )  # fmt: skip
    text = launch(setting)
    assert text.command == (
        "sglang serve --model-path org/m --kv-cache-dtype fp8_e4m3 --page-size 64 --context-length 8192 "
        "--max-running-requests 34 --mem-fraction-static 0.85 --max-total-tokens 6400 --chunked-prefill-size 4096 "
        "--tp-size 2 --disable-radix-cache"
    )
    assert text.file_text.splitlines()[:3] == ["model-path: org/m", "kv-cache-dtype: fp8_e4m3", "page-size: 64"]
    assert "disable-radix-cache: true" in text.file_text
