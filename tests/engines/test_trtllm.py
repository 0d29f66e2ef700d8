"""TensorRT-LLM's pools against what TensorRT-LLM printed, each row with where that was."""

from typing import Any

import pytest
import yaml

from kvplan.core.allocation import BEHIND_WINDOW, REPLICATED, Setup
from kvplan.engines import ENGINES
from kvplan.engines import allocate as checked
from kvplan.engines.engine import Launch
from kvplan.engines.trtllm import EMPTY_LAYERS, allocate, launch
from kvplan.errors import InputError, UnsupportedFormatError, UnsupportedModelError

GIB = 1 << 30
LLAMA_8B = {"layers": 32, "heads": 32, "kv": 8, "hidden": 4096}
LLAMA_2_7B = {"layers": 32, "heads": 32, "kv": 32, "hidden": 4096}
QWEN3_06B = {"layers": 28, "heads": 16, "kv": 8, "hidden": 1024, "head_dim": 128, "model_type": "qwen3"}
FALCON_180B = {"layers": 80, "heads": 232, "kv": None, "hidden": 14848, "model_type": "falcon", "num_kv_heads": 8,
               "new_decoder_architecture": True}  # fmt: skip
GPT_OSS_120B = {"layers": 36, "heads": 64, "kv": 8, "hidden": 2880, "head_dim": 64, "model_type": "gpt_oss",
                "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 18}  # fmt: skip
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
DEEPSEEK = {"layers": 61, "heads": 128, "kv": 128, "hidden": 7168, "model_type": "deepseek_v3", **LATENT}
DEEPSEEK_32 = DEEPSEEK | {"model_type": "deepseek_v32", "index_head_dim": 128, "index_topk": 2048, "index_n_heads": 64}
QWEN3_NEXT = {"layers": 48, "heads": 16, "kv": 2, "hidden": 2048, "head_dim": 256, "model_type": "qwen3_next",
              "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
              "linear_num_key_heads": 16, "linear_num_value_heads": 32, "mamba_ssm_dtype": "float32",
              "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 12}  # fmt: skip
BUILT = frozenset({"backend=tensorrt"})
WINDOWS = frozenset({"max-attention-window"})


@pytest.mark.parametrize(
    ("config", "form", "block", "tokens", "gib"),
    [
        # https://github.com/NVIDIA/TensorRT-LLM/issues/1400, 0.8: 69524783104 bytes
        (LLAMA_2_7B, "fp16", 64, 132608, 64.75),
        # TensorRT-LLM docs, reference/memory: an engine of Llama-2-7B in FP8
        (LLAMA_2_7B, "fp8", 64, 259840, 63.44),
        # public log, 2025: Llama-3.1-8B with FP8 cache in blocks of 32
        (LLAMA_8B, "fp8", 32, 263008, 16.05),
        # ai-dynamo/dynamo, components/backends/trtllm, February 2025: DeepSeek-R1-Distill-Llama-8B
        (LLAMA_8B, "bf16", 64, 220480, 26.91),
        # public log, 2026: Qwen3-Reranker-0.6B
        (QWEN3_06B, "bf16", 32, 643136, 68.69),
        # public log, 2025-12-20, gpt-oss-120b: windows are kept whole; the profiling pass and the pool that serves
        (GPT_OSS_120B, "bf16", 32, 8224, 0.56),
        (GPT_OSS_120B, "bf16", 32, 86720, 5.95),
    ],
)
def test_a_pool_takes_what_was_printed(
    spec: Any, config: dict[str, Any], form: str, block: int, tokens: int, gib: float
) -> None:
    pools = allocate(spec(**config), form, Setup(context_tokens=8192, block_tokens=block))
    assert tokens % block == 0
    assert tokens * pools.growth_bytes(64) / GIB == pytest.approx(gib, abs=0.005)


def test_the_memory_that_was_free_makes_the_blocks_that_were_printed(spec: Any) -> None:
    """A public log of Llama-3.1-8B in FP8, 2025: 17.83 GiB free, nine tenths of it 8,219 blocks of 32 tokens."""
    pools = allocate(spec(**LLAMA_8B), "fp8", Setup(context_tokens=8192, options=BUILT))
    band = [pools.capacity(int((17.83 + off) * GIB * 0.9)).blocks for off in (-0.005, 0.005)]
    assert band[0] <= 8219 <= band[1]


def test_tokens_round_up_to_a_block_until_1_3(spec: Any) -> None:
    """A public log of gpt-oss-120b, 2025-12-20: 86,711 tokens of 73,728 bytes became 86,720; 001541b rounds down."""
    model, pool = spec(**GPT_OSS_120B), 86711 * 73728
    for version, tokens in ((None, 86720), ((1, 2), 86720), ((1, 3), 86688)):
        capacity = allocate(model, "bf16", Setup(context_tokens=8192, version=version)).capacity(pool)
        assert (capacity.tokens, capacity.blocks) == (tokens, tokens // 32)


def test_a_pool_shorter_than_the_context_holds_none(spec: Any) -> None:
    """The same log: 131,072 tokens were asked for, and 86,720 are the longest sequence."""
    capacity = allocate(spec(**GPT_OSS_120B), "bf16", Setup(context_tokens=131072)).capacity(86711 * 73728)
    assert (capacity.max_concurrency, capacity.max_context) == (0, 86720)


def test_windows_are_kept_whole_unless_they_are_asked_for(spec: Any) -> None:
    model = spec(**GPT_OSS_120B)
    whole = allocate(model, "bf16", Setup(context_tokens=8192))
    assert {term.name: term.bytes for term in whole.terms(8192)} == {BEHIND_WINDOW: 18 * (8192 - 128) * 2048}
    kept = allocate(model, "bf16", Setup(context_tokens=8192, options=WINDOWS))
    assert [(group.held_tokens_max, group.blocks(8192)) for group in kept.windows] == [(None, 256), (128, 5)]


def test_windows_share_the_memory(spec: Any) -> None:
    """Equal shares with PyTorch (calculate_max_num_blocks_for_vswa), by window times bytes in built engines
    (BlockManager::calculateWindowSizeToShare)."""
    model, block = spec(**GPT_OSS_120B), 32 * 18 * 2048
    equal = allocate(model, "bf16", Setup(context_tokens=8192, options=WINDOWS))
    assert equal.pool_blocks(1000 * block) == (500, 500)
    assert equal.capacity(1000 * block).tokens == 1000 * 32
    weighted = allocate(model, "bf16", Setup(context_tokens=8192, options=WINDOWS | BUILT))
    assert weighted.pool_blocks(6500 * block) == (6400, 100)


@pytest.mark.parametrize(("ranks", "bytes_a_token"), [(1, 81920), (8, 10240), (2, 40960)])
def test_the_heads_of_falcon_180b_are_shared(spec: Any, ranks: int, bytes_a_token: int) -> None:
    pools = allocate(spec(**FALCON_180B), "fp8", Setup(context_tokens=2048, tensor_parallel=ranks))
    assert pools.growth_bytes(64) == bytes_a_token


def test_a_latent_vector_is_on_every_rank_unless_attention_is_data_parallel(spec: Any) -> None:
    model = spec(**DEEPSEEK)
    shared = allocate(model, "bf16", Setup(context_tokens=64, tensor_parallel=8))
    assert shared.growth_bytes(64) == 70272
    assert {term.name for term in shared.terms(64)} == {REPLICATED}
    own = Setup(context_tokens=64, tensor_parallel=8, options=frozenset({"enable-attention-dp"}))
    assert not allocate(model, "bf16", own).terms(64)


def test_sparse_latents_have_an_indexers_keys_beside_them(spec: Any) -> None:
    """DSACacheManager: 576 elements, 128 keys in 8 bits with a float32 scale; each layer has a buffer for them."""
    assert allocate(spec(**DEEPSEEK_32), "fp8", Setup(context_tokens=64)).growth_bytes(64) == 61 * (576 + 132)
    glm = DEEPSEEK_32 | {"model_type": "glm_moe_dsa", "index_topk_freq": 4, "index_skip_topk_offset": 3}
    pools = allocate(spec(**glm), "fp8", Setup(context_tokens=64))
    assert pools.growth_bytes(64) == 61 * (576 + 132)
    assert [term.name for term in pools.terms(64)] == [EMPTY_LAYERS]


def test_states_are_held_for_every_sequence_of_a_batch(spec: Any) -> None:
    """PythonMambaCacheManager: `max_batch_size` states beside the blocks of attention."""
    model = spec(**QWEN3_NEXT)
    state = 36 * ((2 * 16 + 32) * 128 * 3 * 2 + 32 * 128 * 128 * 4)
    token = 12 * 2 * 2 * 256 * 2
    pools = allocate(model, "bf16", Setup(context_tokens=8192, sequences=64))
    assert pools.states is not None
    assert pools.states.bytes_per_block == state
    capacity = pools.capacity(20 * GIB)
    assert capacity.tokens == -(-((20 * GIB - 64 * state) // token) // 32) * 32
    assert capacity.max_concurrency == min(64, capacity.blocks // 256)
    free = allocate(model, "bf16", Setup(context_tokens=8192)).capacity(20 * GIB)
    assert free.max_concurrency == 20 * GIB // (state + 8192 * token)


@pytest.mark.parametrize(("option", "bits"), [("", 16), ("auto", 16), ("float32", 32), ("bfloat16", 16)])
def test_a_state_whose_type_nothing_says_is_of_the_type_that_the_model_runs_in(
    spec: Any, option: str, bits: int
) -> None:
    """`validate_and_set_mamba_ssm_cache_dtype` of model_loader.py, read 2026-11-30."""
    model = spec(**{key: value for key, value in QWEN3_NEXT.items() if key != "mamba_ssm_dtype"})
    options = frozenset({f"mamba-ssm-cache-dtype={option}"} if option else set())
    pools = allocate(model, "bf16", Setup(context_tokens=8192, options=options))
    assert pools.states is not None
    assert pools.states.bytes_per_block == 36 * ((2 * 16 + 32) * 128 * 3 * 2 + 32 * 128 * 128 * bits // 8)


def test_the_first_stages_have_one_layer_more_and_the_last_those_that_draft(spec: Any) -> None:
    """Mapping.pp_layers and get_pp_layers: 61 layers on 2 stages are 31 and 30, and 31 with the one that drafts."""
    model = spec(**DEEPSEEK, num_nextn_predict_layers=1)
    staged = allocate(model, "bf16", Setup(context_tokens=64, pipeline_parallel=2))
    assert staged.growth_bytes(64) == 31 * 1152
    drafting = allocate(model, "bf16", Setup(context_tokens=64, pipeline_parallel=4, draft_tokens=1))
    assert drafting.growth_bytes(64) == 16 * 1152


@pytest.mark.parametrize(
    ("form", "bytes_a_token"),
    [("bfloat16", 131072), ("trtllm:fp8", 65536), ("fp8_e4m3", 65536), ("nvfp4", 32 * 8 * 2 * (64 + 8))],
)
def test_formats_take_what_the_pools_take(spec: Any, form: str, bytes_a_token: int) -> None:
    assert allocate(spec(**LLAMA_8B), form, Setup(context_tokens=64)).growth_bytes(64) == bytes_a_token


def test_int8_is_for_engines_that_tensorrt_built(spec: Any) -> None:
    with pytest.raises(UnsupportedFormatError, match="TensorRT built"):
        allocate(spec(**LLAMA_8B), "int8", Setup(context_tokens=64))
    assert allocate(spec(**LLAMA_8B), "int8", Setup(context_tokens=64, options=BUILT)).growth_bytes(64) == 65536


@pytest.mark.parametrize(
    ("config", "form", "options", "error"),
    [
        (DEEPSEEK, "nvfp4", {}, UnsupportedFormatError),
        (LLAMA_8B, "q8_0", {}, UnsupportedFormatError),
        (LLAMA_8B, "fp8_e5m2", {}, UnsupportedFormatError),
        (LLAMA_8B, "bf16", {"tensor_parallel": 3}, InputError),
        (LLAMA_8B, "bf16", {"pipeline_parallel": 33}, InputError),
        (LLAMA_8B, "bf16", {"draft_tokens": 1}, InputError),
        (LLAMA_8B, "bf16", {"options": frozenset({"max-tokens=many"})}, InputError),
        (QWEN3_NEXT, "bf16", {"options": frozenset({"mamba-ssm-cache-dtype=int8"})}, InputError),
    ],
)
def test_what_tensorrt_llm_does_not_have_is_refused(
    spec: Any, config: dict[str, Any], form: str, options: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        checked(ENGINES["trtllm"], spec(**config), form, Setup(context_tokens=64, **options))


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({"layers": 6, "heads": 8, "kv": 8, "hidden": 512, "model_type": "gemma4_text", "head_dim": 64,
          "global_head_dim": 128, "sliding_window": 64,
          "layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 2}, "head sizes"),
        ({"layers": 10, "heads": 8, "kv": 2, "hidden": 2048, "model_type": "gemma3n_text", "head_dim": 256,
          "sliding_window": 512, "num_kv_shared_layers": 5,
          "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 2}, "share a cache"),
        ({"layers": 8, "heads": 8, "kv": 8, "hidden": 512, "model_type": "jamba", "mamba_d_state": 16,
          "mamba_d_conv": 4, "mamba_expand": 2, "attn_layer_period": 8, "attn_layer_offset": 4}, "convolution"),
        ({"layers": 24, "heads": None, "kv": None, "hidden": 768, "model_type": "mamba", "state_size": 16,
          "conv_kernel": 4, "intermediate_size": 1536}, "convolution"),
    ],
)  # fmt: skip
def test_caches_that_its_manager_does_not_hold_are_refused(spec: Any, config: dict[str, Any], what: str) -> None:
    with pytest.raises(UnsupportedModelError, match=what):
        allocate(spec(**config), "bf16", Setup(context_tokens=64))


def test_the_command_has_tensorrt_llms_own_keys() -> None:
    """Keys of tensorrt_llm/llmapi/llm_args.py (TorchLlmArgs, KvCacheConfig), read 2026-11-30."""
    setting = Launch(
        model="org/m", format="fp8", block_tokens=32, context_tokens=8192, sequences=34, tensor_parallel=2,
        max_batched_tokens=4096, prefix_caching=True, memory_utilization=0.85, blocks=100,
    )  # fmt: skip
    text = launch(setting)
    assert text.command == "trtllm-serve org/m --extra_llm_api_options trtllm.yaml"
    assert text.file_text.splitlines() == [
        "max_batch_size: 34", "max_seq_len: 8192", "max_num_tokens: 4096", "tensor_parallel_size: 2",
        "kv_cache_config:", "  dtype: fp8", "  tokens_per_block: 32", "  free_gpu_memory_fraction: 0.85",
        "  max_tokens: 3200", "  enable_block_reuse: true",
    ]  # fmt: skip


@pytest.mark.parametrize(("form", "dtype"), [("bf16", "bfloat16"), ("fp16", "float16")])
def test_a_cache_in_16_bits_is_of_the_type_that_the_model_is_told_to_run_in(form: str, dtype: str) -> None:
    """kv_cache_config.dtype takes fp8, nvfp4 and auto (tensorrt_llm/_torch/pyexecutor/model_loader.py, 1.2)."""
    text = launch(Launch(model="org/m", format=form, block_tokens=32, context_tokens=512, sequences=1)).file_text
    said = yaml.safe_load(text)
    assert (said["dtype"], said["kv_cache_config"]["dtype"]) == (dtype, "auto")
    assert "kv_cache_quant_algo" in text


def test_a_format_that_is_chosen_when_an_engine_is_built_has_no_command() -> None:
    with pytest.raises(UnsupportedFormatError, match="no option"):
        launch(Launch(model="org/m", format="int8", block_tokens=32, context_tokens=512, sequences=1))
