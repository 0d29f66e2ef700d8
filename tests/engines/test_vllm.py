"""vLLM's allocator against what vLLM printed.

Each row names where it was printed. A printed GiB stands for all bytes that round to it, so a figure that follows from
one has a band.
"""

from typing import Any

import pytest

from kvplan.core.allocation import PADDING_LAYERS, REPLICATED, Setup
from kvplan.core.specs import ModelSpec
from kvplan.engines.engine import Launch
from kvplan.engines.vllm import allocate, launch
from kvplan.errors import InputError, UnsupportedFormatError

GIB = 1 << 30
LLAMA_8B = {"layers": 32, "heads": 32, "kv": 8, "hidden": 4096}
LLAMA_2_7B = {"layers": 32, "heads": 32, "kv": 32, "hidden": 4096}
QWEN_72B = {"layers": 80, "heads": 64, "kv": 8, "hidden": 8192, "model_type": "qwen2"}
MISTRAL_24B = {"layers": 40, "heads": 32, "kv": 8, "hidden": 5120, "head_dim": 128, "model_type": "mistral",
               "sliding_window": None}  # fmt: skip
QWEN_30B = {"layers": 48, "heads": 32, "kv": 4, "hidden": 2048, "head_dim": 128, "model_type": "qwen3_moe",
            "max_position_embeddings": 262144}  # fmt: skip
MINIMAX = {"layers": 62, "heads": 48, "kv": 8, "hidden": 3072, "head_dim": 128, "model_type": "minimax_m2",
           "max_position_embeddings": 196608}  # fmt: skip
GPT_OSS_120B = {"layers": 36, "heads": 64, "kv": 8, "hidden": 2880, "head_dim": 64, "model_type": "gpt_oss",
                "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 18}  # fmt: skip
GEMMA_3_27B = {"layers": 62, "heads": 32, "kv": 16, "hidden": 5376, "head_dim": 128, "model_type": "gemma3_text",
               "sliding_window": 1024, "sliding_window_pattern": 6}  # fmt: skip
GEMMA_4_31B = {"layers": 60, "heads": 32, "kv": 16, "hidden": 5376, "head_dim": 256, "global_head_dim": 512,
               "num_global_key_value_heads": 4, "model_type": "gemma4_text", "sliding_window": 1024,
               "max_position_embeddings": 262144, "attention_k_eq_v": True,
               "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10}  # fmt: skip
QWEN_36_35B = {"layers": 40, "heads": 16, "kv": 2, "hidden": 2048, "head_dim": 256, "model_type": "qwen3_5_moe_text",
               "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
               "linear_num_key_heads": 16, "linear_num_value_heads": 32, "mamba_ssm_dtype": "float32",
               "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 10,
               "max_position_embeddings": 262144}  # fmt: skip
DEEPSEEK_R1 = {"layers": 61, "heads": 128, "kv": 128, "hidden": 7168, "model_type": "deepseek_v3",
               "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "gib", "block", "context", "tokens", "concurrency"),
    [
        # https://github.com/vllm-project/vllm/issues/10517, 0.6, RTX 3090
        (LLAMA_8B, 3.81, 16, 20000, 31232, 1.56),
        (LLAMA_8B, 2.89, 16, 29000, 23648, 0.82),
        # https://github.com/vllm-project/vllm/issues/12330, 0.6.6, A100
        (LLAMA_8B, 11.12, 16, 8192, 91056, 11.12),
        # https://github.com/vllm-project/vllm/issues/11230, 0.6.4
        (QWEN_72B, 0.39, 16, 8192, 1280, 0.16),
        # llm-d-planner docs/empirical-vllm-memory-results.md, 0.11, blocks of 128
        (MISTRAL_24B, 28.2, 128, 16000, 184832, 11.55),
    ],
)
def test_a_pool_holds_as_many_tokens_as_vllm_printed(
    spec: Any, config: dict[str, Any], gib: float, block: int, context: int, tokens: int, concurrency: float
) -> None:
    allocation = allocate(spec(**config), "bf16", Setup(context_tokens=context, block_tokens=block))
    half = 0.005 if gib < 20 else 0.05
    counts = [allocation.capacity(round((gib + off) * GIB)).blocks * block for off in (-half, half)]
    assert counts[0] <= tokens <= counts[1]
    shown = [blocks / block * block / context for blocks in counts]
    assert shown[0] - 0.005 <= concurrency <= shown[1] + 0.005


@pytest.mark.parametrize(
    ("config", "options", "context", "gib"),
    [
        # https://github.com/eugr/spark-vllm-docker/issues/396, 0.29.1rc1, two ranks
        (MINIMAX, {"tensor_parallel": 2}, 196608, 23.25),
        # https://github.com/vllm-project/vllm/issues/34076, 0.15.2rc1: all layers, though half are on each stage
        (QWEN_30B, {}, 262144, 24.0),
        # https://github.com/vllm-project/vllm-metal/issues/505: every layer kept whole
        (GEMMA_4_31B, {"options": frozenset({"disable-hybrid-kv-cache-manager"})}, 262144, 220.0),
        # https://github.com/vllm-project/tpu-inference/pull/223
        (LLAMA_8B, {}, 131072, 16.0),
        # https://github.com/vllm-project/vllm/issues/27508, 0.11, 1,024 tokens a batch
        (GPT_OSS_120B, {"max_batched_tokens": 1024, "version": (0, 11)}, 131072, 4.54),
    ],
)
def test_a_sequence_needs_what_vllm_printed(
    spec: Any, config: dict[str, Any], options: dict[str, Any], context: int, gib: float
) -> None:
    allocation = allocate(spec(**config), "bf16", Setup(context_tokens=context, **options))
    assert round(allocation.sequence_bytes(context) / GIB, 2) == gib


@pytest.mark.parametrize(
    ("config", "options", "context", "gib", "longest"),
    [
        (MINIMAX, {"tensor_parallel": 2}, 196608, 22.5, 190272),
        (GEMMA_4_31B, {"options": frozenset({"disable-hybrid-kv-cache-manager"})}, 262144, 20.13, 23984),
    ],
)
def test_the_longest_context_is_the_one_that_vllm_estimated(
    spec: Any, config: dict[str, Any], options: dict[str, Any], context: int, gib: float, longest: int
) -> None:
    allocation = allocate(spec(**config), "bf16", Setup(context_tokens=context, **options))
    half = 0.05 if gib == 22.5 else 0.005
    band = [allocation.capacity(round((gib + off) * GIB)).max_context for off in (-half, half)]
    assert band[0] <= longest <= band[1]


def test_a_stage_of_a_pipeline_holds_its_layers(spec: Any) -> None:
    """https://github.com/vllm-project/vllm/issues/34076: 3.18 GiB for 16 layers, of which vLLM made 34,736 tokens of 48
    layers; the stage itself holds three times as many."""
    model = spec(**QWEN_30B)
    whole = allocate(model, "bf16", Setup(context_tokens=262144)).capacity(round(3.18 * GIB)).max_context
    assert 34672 <= whole <= 34784
    staged = allocate(model, "bf16", Setup(context_tokens=262144, pipeline_parallel=3))
    assert 3 * whole <= staged.capacity(round(3.18 * GIB)).max_context < 3 * whole + 48


def test_windows_and_padding_layers_of_gemma_3(spec: Any) -> None:
    """A public log of 0.11.0rc2: 109.86 GiB, 89,994 blocks, 8 padding layers, 50.05x of 4,096 tokens."""
    allocation = allocate(spec(**GEMMA_3_27B), "bf16", Setup(context_tokens=4096, max_batched_tokens=8192))
    assert len(allocation.groups) == 7
    assert {group.bytes_per_block for group in allocation.groups} == {1310720}
    assert allocation.sequence_blocks(4096) == 256 + 6 * 257
    capacity = allocation.capacity(round(109.86 * GIB))
    assert abs(capacity.blocks - 89994) <= 4
    assert round(89994 / allocation.sequence_blocks(4096), 2) == 50.05
    padding = {term.name: term.bytes for term in allocation.terms(4096)}[PADDING_LAYERS]
    assert padding == 8 * 257 * 131072


def test_unlike_pages_of_gemma_4_are_made_alike(spec: Any) -> None:
    """anchors of public logs: 27.04 GiB a sequence of 262,144 where the geometry is 20.78; one batch is in flight."""
    setup = Setup(context_tokens=262144, max_batched_tokens=8192, version=(0, 25))
    allocation = allocate(spec(**GEMMA_4_31B), "bf16", setup)
    assert sorted({group.block_tokens for group in allocation.groups}) == [16, 32]
    assert round(allocation.logical_bytes(262144) / GIB, 2) == 20.78
    assert round(allocation.sequence_bytes(262144) / GIB, 2) == 27.04


def test_attention_blocks_grow_to_hold_a_state(spec: Any) -> None:
    """A public log of 0.20.0, Qwen3.6-35B-A3B in fp8: blocks of 2,096 tokens, 82.42 GiB, 108.50x of 65,536."""
    setup = Setup(context_tokens=65536, prefix_caching=True, max_batched_tokens=8192)
    allocation = allocate(spec(**QWEN_36_35B), "fp8_e4m3", setup)
    assert {group.block_tokens for group in allocation.groups} == {2096, None}
    assert {group.bytes_per_block for group in allocation.groups} == {21463040}
    assert allocation.sequence_blocks(65536) == 32 + 3 * 2
    capacity = allocation.capacity(round(82.42 * GIB))
    assert (capacity.blocks, round(capacity.max_concurrency, 2), capacity.tokens) == (4123, 108.50, 7110656)


def test_a_latent_vector_is_on_every_rank(spec: Any) -> None:
    """https://github.com/sgl-project/sglang/issues/6027 prints 70,272 bytes a token on each of 16 ranks; vLLM's are
    the same."""
    for ranks in (1, 8, 16):
        allocation = allocate(spec(**DEEPSEEK_R1), "bf16", Setup(context_tokens=64, tensor_parallel=ranks))
        assert allocation.growth_bytes(64) == 70272
        assert {term.name: term.bytes for term in allocation.terms(64)}.get(REPLICATED, 0) == 64 * 70272 * (
            1 - 1 / ranks
        )


def test_heads_are_repeated_where_there_are_more_ranks(spec: Any) -> None:
    model = spec(**LLAMA_8B)
    growth = [allocate(model, "bf16", Setup(context_tokens=64, tensor_parallel=n)).growth_bytes(64) for n in (1, 8, 16)]
    assert growth == [131072, 16384, 16384]


@pytest.mark.parametrize(
    ("form", "bytes_a_token"),
    [
        ("fp8", 65536), ("fp8_e4m3", 65536), ("vllm:fp8_e5m2", 65536), ("bfloat16", 131072),
        ("int8_per_token_head", 32 * 8 * 2 * (128 + 4)), ("int4_per_token_head", 32 * 8 * 2 * (64 + 4)),
        ("nvfp4", 32 * 8 * 2 * (64 + 8)),
        # 28 layers compressed to 134 bytes of K and V a head, the first and last two in 16 bits
        ("turboquant_4bit_nc", 28 * 8 * 134 + 4 * 8 * 512), ("turboquant_k8v4", 28 * 8 * 196 + 4 * 8 * 512),
        ("turboquant_k3v4_nc", 28 * 8 * 118 + 4 * 8 * 512), ("turboquant_3bit_nc", 28 * 8 * 102 + 4 * 8 * 512),
    ],
)  # fmt: skip
def test_formats_take_what_vllms_pages_take(spec: Any, form: str, bytes_a_token: int) -> None:
    assert allocate(spec(**LLAMA_8B), form, Setup(context_tokens=64)).growth_bytes(64) == bytes_a_token


def test_sparse_latents_keep_the_position_in_16_bits(spec: Any) -> None:
    sparse = spec(**DEEPSEEK_R1 | {"model_type": "deepseek_v32", "index_head_dim": 128, "index_topk": 2048,
                                   "index_n_heads": 64})  # fmt: skip
    assert allocate(sparse, "fp8", Setup(context_tokens=64)).growth_bytes(64) == 61 * (656 + 132)


def test_layers_that_are_skipped_stay_in_16_bits(spec: Any) -> None:
    options = frozenset({"kv-cache-dtype-skip-layers=sliding_window"})
    setup = Setup(context_tokens=131072, max_batched_tokens=1024, options=options)
    groups = allocate(spec(**GPT_OSS_120B), "fp8", setup).groups
    assert {group.parts[0].name: group.block_tokens for group in groups} == {
        "sliding attention": 16, "full attention": 32,
    }  # fmt: skip


def test_two_batches_are_in_flight_from_0_26_on(spec: Any) -> None:
    def held(version: tuple[int, ...] | None) -> int | None:
        setup = Setup(context_tokens=131072, max_batched_tokens=2048, version=version)
        return allocate(spec(**GPT_OSS_120B), "bf16", setup).groups[0].held_tokens_max

    assert [held(None), held((0, 25, 3)), held((0, 26, 1))] == [127 + 2048, 127 + 2048, 127 + 4096]


@pytest.mark.parametrize(
    ("config", "form", "options", "error"),
    [
        (DEEPSEEK_R1, "nvfp4", {}, UnsupportedFormatError),
        (LLAMA_8B, "q8_0", {}, UnsupportedFormatError),
        (LLAMA_8B, "fp8_ds_mla", {}, UnsupportedFormatError),
        (MISTRAL_24B | {"head_dim": 96}, "turboquant_4bit_nc", {}, UnsupportedFormatError),
        (LLAMA_8B, "bf16", {"tensor_parallel": 3}, InputError),
        (LLAMA_8B, "bf16", {"pipeline_parallel": 33}, InputError),
        (LLAMA_8B, "bf16", {"draft_tokens": 1}, InputError),
    ],
)
def test_what_vllm_does_not_have_is_refused(
    spec: Any, config: dict[str, Any], form: str, options: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        allocate(spec(**config), form, Setup(context_tokens=64, **options))


DEEPSEEK_V4_FLASH = {"layers": 43, "heads": 64, "kv": 1, "hidden": 4096, "model_type": "deepseek_v4", "head_dim": 512,
                     "qk_rope_head_dim": 64, "sliding_window": 128, "index_head_dim": 128, "index_topk": 512,
                     "index_n_heads": 64, "compress_ratios": [0, 0, *[4, 128] * 20, 4],
                     "max_position_embeddings": 1048576}  # fmt: skip


def test_compressed_entries_share_blocks_with_windows_and_states(spec: Any) -> None:
    """https://github.com/vllm-project/vllm/issues/44376, 0.22, DeepSeek V4 Flash by the class LLM, whose batches are of
    16,384 tokens: 30,000 tokens need 6.66 GiB; 5.44 GiB hold 13,528."""
    setup = Setup(context_tokens=30000, max_batched_tokens=16384, tensor_parallel=2, version=(0, 22))
    allocation = allocate(spec(**DEEPSEEK_V4_FLASH), "fp8", setup)
    assert len(allocation.groups) == 5
    assert round(allocation.charged_bytes(30000) / GIB, 2) == 6.66
    band = [allocation.capacity(round((5.44 + off) * GIB)).max_context for off in (-0.005, 0.005)]
    assert band[0] <= 13528 <= band[1]


def test_tokens_of_compressed_caches_are_those_that_were_printed(spec: Any) -> None:
    """https://github.com/vllm-project/vllm/issues/51041, 0.26.0: some 150,000 tokens in 7.7 GiB."""
    setup = Setup(context_tokens=121344, max_batched_tokens=8192, tensor_parallel=2, version=(0, 26, 0))
    tokens = allocate(spec(**DEEPSEEK_V4_FLASH), "fp8", setup).capacity(round(7.7 * GIB)).tokens
    assert 149_000 <= tokens <= 152_000


def test_compressed_caches_have_no_other_formats(spec: Any) -> None:
    with pytest.raises(UnsupportedFormatError, match="no compressed cache in nvfp4"):
        allocate(spec(**DEEPSEEK_V4_FLASH), "nvfp4", Setup(context_tokens=64))


def test_the_command_has_vllms_own_flags() -> None:
    """Flags of vllm/engine/arg_utils.py, read 2026-11-30."""
    text = launch(
        Launch(
            model="org/m", format="fp8_e4m3", block_tokens=64, context_tokens=8192, sequences=34, tensor_parallel=2,
            max_batched_tokens=4096, prefix_caching=True, memory_utilization=0.92,
        )
    )  # fmt: skip
    assert text.command == (
        "vllm serve org/m --kv-cache-dtype fp8_e4m3 --block-size 64 --max-model-len 8192 --max-num-seqs 34 "
        "--gpu-memory-utilization 0.92 --max-num-batched-tokens 4096 --tensor-parallel-size 2 --enable-prefix-caching"
    )
    assert text.file_text.splitlines()[:3] == ["model: org/m", "kv-cache-dtype: fp8_e4m3", "block-size: 64"]
    assert "enable-prefix-caching: true" in text.file_text


def test_one_block_is_kept_empty_and_tables_are_counted_for_the_sequences(spec: Any) -> None:
    alone = allocate(spec(**LLAMA_8B), "bf16", Setup(context_tokens=8192))
    assert [(term.name, term.bytes) for term in alone.beside] == [("null block", 16 * 131072)]
    served = allocate(spec(**LLAMA_8B), "bf16", Setup(context_tokens=8192, sequences=256))
    assert served.beside[1].bytes == 256 * (8192 // 16) * 4


def test_a_model_type_without_attention_takes_its_states(spec: Any) -> None:
    model: ModelSpec = spec(24, None, None, 768, model_type="mamba", state_size=16, conv_kernel=4,
                            intermediate_size=1536)  # fmt: skip
    allocation = allocate(model, "bf16", Setup(context_tokens=1024))
    assert allocation.growth_bytes(1024) == 0
    assert allocation.sequence_bytes(1) == allocation.sequence_bytes(1 << 20) == 24 * (1536 * 3 * 2 + 1536 * 16 * 2)
    wide = Setup(context_tokens=1024, options=frozenset({"mamba-ssm-cache-dtype=float32"}))
    assert allocate(model, "bf16", wide).sequence_bytes(1) == 24 * (1536 * 3 * 2 + 1536 * 16 * 4)
