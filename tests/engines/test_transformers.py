"""What is counted of transformers' caches against the tensors that they are, in tiny random models."""

import json
from typing import Any

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
    QuantizedCache,
    StaticCache,
)

from kvplan.core.allocation import Setup
from kvplan.core.specs import ModelSpec
from kvplan.engines import ENGINES
from kvplan.engines import allocate as checked
from kvplan.engines.engine import Launch, find_format
from kvplan.engines.transformers_cache import (
    EXTRA_INPUT,
    FORMATS,
    NAME,
    QUERY_ITSELF,
    ROWS,
    SCALES,
    STATIC,
    WAITING,
    allocate,
    cache_config,
    launch,
)
from kvplan.errors import InputError, UnsupportedFormatError, UnsupportedModelError
from kvplan.store.configs import read_geometry

TOKENS, WINDOW = 40, 16
LLAMA_8B = {"layers": 32, "heads": 32, "kv": 8, "hidden": 4096}
BASE = {
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32, "vocab_size": 99,
    "intermediate_size": 48, "max_position_embeddings": 256, "tie_word_embeddings": False, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_local_experts": 4,
       "n_routed_experts": 4, "n_group": 1, "topk_group": 1}  # fmt: skip
MLA = {"kv_lora_rank": 24, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 20,
       "num_key_value_heads": 4, "first_k_dense_replace": 1}  # fmt: skip
MIXER = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 12, "mamba_d_conv": 4,
         "mamba_expand": 2, "mamba_chunk_size": 8}  # fmt: skip
DELTA = {"head_dim": 16, "linear_key_head_dim": 8, "linear_value_head_dim": 10, "linear_num_key_heads": 2,
         "linear_num_value_heads": 4, "linear_conv_kernel_dim": 3}  # fmt: skip
LISTED = ["sliding_attention", "full_attention"] * 2
TINY = {
    "llama": {},
    "gemma3_text": {"head_dim": 16, "sliding_window": WINDOW, "layer_types": LISTED},
    "gpt_oss": {"head_dim": 16, "sliding_window": WINDOW, **MOE},
    "llama4_text": {"head_dim": 16, "attention_chunk_size": WINDOW, "intermediate_size_mlp": 48, **MOE},
    "deepseek_v3": {**MLA, **MOE},
    "deepseek_v32": {**MLA, **MOE, "index_head_dim": 16, "index_n_heads": 2, "index_topk": 8},
    "qwen3_5_text": DELTA,
    "mamba": {"state_size": 12, "conv_kernel": 4, "expand": 2, "intermediate_size": 64},
    "falcon_h1": {**MIXER, "mamba_d_ssm": 64},
    "lfm2": {"conv_L_cache": 3, "full_attn_idxs": [1, 3]},
}  # fmt: skip


def tiny(model_type: str) -> tuple[Any, Any, ModelSpec]:
    """The config, a random model of it in bf16, and its geometry."""
    values = {**BASE, **TINY[model_type]}
    config = CONFIG_MAPPING[model_type](**values)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="eager").eval()
    return config, model, read_spec({**values, "model_type": model_type})


def read_spec(config: dict[str, Any]) -> ModelSpec:
    found = read_geometry(config, "config.json")
    return ModelSpec(
        name="m", digest="d", architecture=found.architecture, layers=found.layers, query_heads=found.query_heads,
        hidden_size=found.hidden_size, vocab_size=found.vocab_size, context_tokens=found.context_tokens,
    )  # fmt: skip


def tensors(value: Any, seen: set[int]) -> int:
    """Bytes of all tensors in a cache's layer, of each once."""
    if isinstance(value, torch.Tensor):
        storage = value.untyped_storage().data_ptr()
        new = storage not in seen and value.numel() > 1
        seen.add(storage)
        return value.nbytes if new else 0
    if isinstance(value, dict):
        value = list(value.values())
    return sum(tensors(item, seen) for item in value) if isinstance(value, list | tuple) else 0


def cached_bytes(cache: Any, names: tuple[str, ...]) -> int:
    seen: set[int] = set()
    return sum(tensors(getattr(layer, name, None), seen) for layer in cache.layers for name in names)


def quantized_bytes(layer: Any) -> int:
    """Bytes of the codes, scales and zeros of K and V of one layer."""
    found = 0
    for held in (layer._quantized_keys, layer._quantized_values):
        codes, meta = (
            held if isinstance(held, tuple) else (held._data._data, {"scale": held._scale, "zero": held._shift})
        )
        found += codes.nbytes + meta["scale"].nbytes + meta["zero"].nbytes
    return found


HELD = ("keys", "values", "indexer_keys", "conv_states", "recurrent_states")


@pytest.mark.parametrize("model_type", sorted(TINY))
def test_a_cache_that_grows_is_as_large_as_counted(model_type: str) -> None:
    _, model, spec = tiny(model_type)
    with torch.no_grad():
        cache = model(torch.randint(3, 99, (1, TOKENS)), use_cache=True).past_key_values
    counted = allocate(spec, "bf16", Setup(context_tokens=TOKENS)).sequence_bytes(TOKENS)
    assert cached_bytes(cache, HELD) == counted


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "gpt_oss"])
def test_a_static_cache_has_its_size_from_the_start(model_type: str) -> None:
    config, model, spec = tiny(model_type)
    cache = StaticCache(config=config, max_cache_len=TOKENS)
    with torch.no_grad():
        model(torch.randint(3, 99, (1, 3)), cache=cache, use_cache=True)
    setup = Setup(context_tokens=TOKENS, options=frozenset({STATIC}))
    assert cached_bytes(cache, HELD) == allocate(spec, "bf16", setup).sequence_bytes(TOKENS)


def test_an_fp8_cache_has_a_scale_of_each_tensor() -> None:
    config, model, spec = tiny("llama")
    cache = QuantizedCache(backend="fp8", config=config)
    with torch.no_grad():
        model(torch.randint(3, 99, (1, TOKENS)), cache=cache, use_cache=True)
    scales = 4 * 2 * 4  # single numbers, which `tensors` leaves out
    counted = allocate(spec, "fp8", Setup(context_tokens=TOKENS))
    assert cached_bytes(cache, ("keys", "values", "_quantized_keys", "_quantized_values")) + scales == (
        counted.sequence_bytes(TOKENS)
    )
    assert {term.name: term.bytes for term in counted.terms(TOKENS)} == {SCALES: scales}


@pytest.mark.usefixtures("quanto_in_python")
@pytest.mark.parametrize("tokens", [32, 96])
@pytest.mark.parametrize("name", [form.name for form in FORMATS if form.quantized and form.name != "fp8"])
def test_a_quantized_cache_is_as_large_as_counted(name: str, tokens: int) -> None:
    """By the classes of optimum-quanto and hqq, of 2 heads of 64, in bf16."""
    config = CONFIG_MAPPING["llama"](**BASE | {"hidden_size": 256, "num_hidden_layers": 2})
    spec = read_spec(BASE | {"hidden_size": 256, "num_hidden_layers": 2, "model_type": "llama"})
    if name in ("hqq-int2-axis1", "hqq-int1-axis1"):
        with pytest.raises(UnsupportedFormatError, match="packs 2 groups of a token into broken bytes"):
            allocate(spec, name, Setup(context_tokens=64))
        return
    cache: Any = QuantizedCache(config=config, **cache_config(find_format(NAME, FORMATS, name)))
    tensor = torch.randn(1, 2, tokens, 64, dtype=torch.bfloat16)
    for layer in cache.layers:
        layer.update(tensor, tensor)

    setup = Setup(context_tokens=64, options=frozenset({"residual_length=1"}))
    assert sum(map(quantized_bytes, cache.layers)) == allocate(spec, name, setup).sequence_bytes(tokens)


def test_a_window_keeps_a_token_less_and_a_convolution_an_input_more() -> None:
    _, _, spec = tiny("gemma3_text")
    terms = {term.name: term.bytes for term in allocate(spec, "bf16", Setup(context_tokens=64)).terms(TOKENS)}
    assert terms == {QUERY_ITSELF: -2 * 2 * 2 * 16 * 2}
    _, _, states = tiny("lfm2")
    inputs = {term.name: term.bytes for term in allocate(states, "bf16", Setup(context_tokens=64)).terms(TOKENS)}
    assert inputs == {EXTRA_INPUT: 2 * 32 * 2}


@pytest.mark.parametrize(
    ("form", "options", "tensor_bytes"),
    [
        # K of 64 tokens of 2 heads of 128, measured with optimum-quanto 0.2.7 and hqq 0.2.8.post1
        ("quanto-int4", (), 8192 + 512 + 512), ("quanto-int2", (), 4096 + 512 + 512),
        ("hqq-int8", (), 16384 + 512 + 512), ("hqq-int4", (), 8192 + 512 + 512), ("hqq-int3", (), 7168 + 512 + 512),
        ("hqq-int2", (), 4096 + 512 + 512), ("hqq-int1", (), 2048 + 512 + 512),
        ("quanto-int4", ("q_group_size=32",), 8192 + 1024 + 1024),
    ],
)  # fmt: skip
def test_groups_have_a_scale_and_a_zero_in_16_bits(
    spec: Any, form: str, options: tuple[str, ...], tensor_bytes: int
) -> None:
    model = spec(1, 2, 2, 256)
    setup = Setup(context_tokens=64, options=frozenset({"residual_length=1", *options}))
    assert allocate(model, form, setup).sequence_bytes(64) == 2 * tensor_bytes


def test_quanto_fills_rows_to_whole_bytes(spec: Any) -> None:
    """K of 65 tokens of 2 heads of 96: 195 groups in 98 rows of 64 bytes, measured with optimum-quanto 0.2.7."""
    setup = Setup(context_tokens=64, options=frozenset({"residual_length=1"}))
    allocation = allocate(spec(1, 2, 2, 192), "quanto-int4", setup)
    assert allocation.sequence_bytes(65) == 2 * (6272 + 390 + 390)
    assert {term.name: term.bytes for term in allocation.terms(65)} == {ROWS: 2 * 32}


def test_tokens_wait_in_16_bits_until_all_are_quantized(spec: Any) -> None:
    """`QuantizedLayer.update`: the first tokens at once, then none until residual_length are there."""
    allocation = allocate(spec(**LLAMA_8B), "quanto-int4", Setup(context_tokens=4096))
    token, quantized = 131072, 32 * 2 * 8 * (64 + 2 * 4)
    assert allocation.sequence_bytes(1) == quantized
    assert allocation.sequence_bytes(128) == quantized + 127 * token
    assert allocation.sequence_bytes(4096) == (4096 - 127) * quantized + 127 * token
    assert {term.name: term.bytes for term in allocation.terms(4096)} == {WAITING: 127 * (token - quantized)}
    assert (allocation.growth_bytes(64), allocation.growth_bytes(4096)) == (token, quantized)


@pytest.mark.parametrize(
    ("config", "form", "setup", "error", "message"),
    [
        ({"layers": 4, "heads": 8, "kv": 4, "hidden": 512, "model_type": "gemma3_text"}, "quanto-int4", {},
         UnsupportedFormatError, "full attention alone"),
        ({"layers": 32, "heads": 32, "kv": 1, "hidden": 2560}, "quanto-int4", {}, UnsupportedFormatError,
         "groups of 64 do not divide the 80"),
        (LLAMA_8B, "quanto-int4", {"options": frozenset({STATIC})}, UnsupportedFormatError, "static"),
        (LLAMA_8B, "q4_0", {}, UnsupportedFormatError, "no cache format"),
        (LLAMA_8B, "bf16", {"version": (4, 57)}, InputError, "transformers 4.57"),
        (LLAMA_8B, "bf16", {"pipeline_parallel": 2}, InputError, "device_map"),
        (LLAMA_8B, "bf16", {"tensor_parallel": 16}, InputError, "16 tensor parallel ranks"),
        (LLAMA_8B, "quanto-int4", {"options": frozenset({"q_group_size=x"})}, InputError, "'x'"),
        (LLAMA_8B, "bf16", {"options": frozenset({"nbits=4"})}, InputError, "nbits=4"),
        (LLAMA_8B | {"model_type": "minicpm"}, "bf16", {}, UnsupportedModelError, "MiniCPMForCausalLM"),
        (LLAMA_8B | {"model_type": "minimax", "layer_types": ["full_attention", "linear_attention"] * 16}, "bf16", {},
         UnsupportedModelError, "MiniMaxForCausalLM"),
    ],
)  # fmt: skip
def test_what_transformers_does_not_have_is_refused(
    spec: Any, config: dict[str, Any], form: str, setup: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        checked(ENGINES["transformers"], spec(**config), form, Setup(context_tokens=64, **setup))


def test_a_batch_fits_as_long_as_its_sequences_do(spec: Any) -> None:
    capacity = allocate(spec(**LLAMA_8B), "bf16", Setup(context_tokens=2048)).capacity(1 << 30)
    assert (capacity.max_concurrency, capacity.max_context) == (4, 8192)
    halves = allocate(spec(**LLAMA_8B), "bf16", Setup(context_tokens=2048, tensor_parallel=2))
    assert halves.sequence_bytes(2048) == 2048 * 65536


def test_the_call_and_the_config_are_those_that_generate_reads() -> None:
    """GenerationConfig of src/transformers/generation/configuration_utils.py (5.24), which takes these keys."""
    text = launch(Launch(model="m", format="quanto-int4", block_tokens=1, context_tokens=64, sequences=1))
    assert text.command == (
        'model.generate(**inputs, cache_implementation="quantized", cache_config={"backend": "quanto", "nbits": 4, '
        '"q_group_size": 64, "residual_length": 128})'
    )
    read = GenerationConfig.from_dict(json.loads(text.file_text))
    assert read.cache_implementation == "quantized"
    assert read.cache_config == {"backend": "quanto", "nbits": 4, "q_group_size": 64, "residual_length": 128}
    plain = launch(Launch(model="m", format="bf16", block_tokens=1, context_tokens=64, sequences=1))
    assert plain.command == 'model.generate(**inputs, cache_implementation="dynamic")'
    axis = launch(Launch(model="m", format="hqq-int8-axis1", block_tokens=1, context_tokens=64, sequences=1))
    assert '"nbits": 8, "axis_key": 1, "axis_value": 1, "q_group_size"' in axis.command
    fp8 = launch(Launch(model="m", format="fp8", block_tokens=1, context_tokens=64, sequences=1))
    assert 'cache_config={"backend": "fp8"}' in fp8.command


def test_the_dynamic_cache_is_what_generate_takes() -> None:
    config, _, _ = tiny("gemma3_text")
    kinds = {type(layer).__name__ for layer in DynamicCache(config=config).layers}
    assert kinds == {"DynamicLayer", "DynamicSlidingWindowLayer"}
