"""Whatever a config says, of whichever family, it gives a geometry or one line that says what is wrong."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvplan.core.logical import layer_bytes, layer_growth_bytes
from kvplan.errors import InputError, UnsupportedModelError
from kvplan.store.architectures import ARCHITECTURES
from kvplan.store.configs import read_geometry
from kvplan_kernels.format import parse

LISTS = {
    "layer_types": ["full_attention", "linear_attention", "sliding_attention", "chunked_attention", "conv"],
    "layers_block_type": ["mamba", "attention", "moe", "mlp"], "hybrid_layer_pattern": [0, 1],
    "compress_ratios": [0, 4, 128], "indexer_types": ["full", "shared"], "attn_type_list": [0, 1],
    "no_rope_layers": [0, 1], "attn_layer_indices": [0, 1, 2, 3], "block_types": ["recurrent", "attention"],
    "num_kv_heads": [1, 2, 4],
}  # fmt: skip
BASE = {
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64, "vocab_size": 100,
    "max_position_embeddings": 256, "head_dim": 16, "sliding_window": 32, "kv_lora_rank": 24, "qk_rope_head_dim": 8,
    "index_head_dim": 16, "v_head_dim": 12, "swa_num_key_value_heads": 4, "swa_head_dim": 24, "swa_v_head_dim": 8,
    "num_kv_shared_layers": 1, "global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
    "attention_chunk_size": 32, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8,
    "mamba_d_conv": 4, "mamba_expand": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4, "ssm_state_size": 8,
    "mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 2, "conv_kernel": 4, "state_size": 8, "expand": 2,
    "num_heads": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "conv_L_cache": 3, "head_size": 16,
    "hybrid_override_pattern": "M*E-", "num_nextn_predict_layers": 1, "mamba_ssm_dtype": "float32",
    "linear_attn_config": {"num_heads": 2, "head_dim": 8, "short_conv_kernel_size": 4, "full_attn_layers": [2, 4],
                           "kda_layers": [1, 3]},
    "block_configs": [{"attention": {"n_heads_in_group": 4, "no_op": False}}] * 4,
    "attn_config": {"kv_n_heads": 2}, "decoder_attention_heads": 4, "decoder_layers": 2,
    "per_layer_config": {"1": {"head_dim": 32}}, "num_layers": 4,
}  # fmt: skip
COMMON = frozenset({
    "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size", "vocab_size", "head_dim",
    "max_position_embeddings", "sliding_window",
})  # fmt: skip
STATES = frozenset({
    "num_heads", "n_groups", "expand", "linear_key_head_dim", "linear_value_head_dim", "mamba_n_heads", "mamba_d_head",
    "mamba_n_groups", "mamba_d_conv", "mamba_expand", "attn_layer_offset", "head_size",
    "decoder_attention_heads", "decoder_layers",
})  # fmt: skip
CHOSEN = {
    "deepseek_ref": {"compress_ratios": [0, 4, 128, 4]}, "deepseek_v4": {"compress_ratios": [0, 4, 128, 4, 0]},
    "gemma4_text": {"layer_types": ["sliding_attention", "full_attention"] * 2}, "minimax_m2": {"sliding_window": None},
    "glm4_moe": {"sliding_window": None}, "bailing_hybrid": {"layer_group_size": 2},
    "gemma4_unified_text": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "openelm": {"num_kv_heads": [1, 2, 2, 4]}, "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "olmo_hybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "lfm2": {"full_attn_idxs": [1]}, "lfm2_moe": {"full_attn_idxs": [1]},
    "mimo_v2_flash": {"hybrid_layer_pattern": [0, 1, 0, 1]}, "minimax": {"attn_type_list": [0, 1, 0, 1]},
    "minimax_text_01": {"layer_types": ["linear_attention", "full_attention"] * 2},
}  # fmt: skip
SETTINGS = settings(deadline=None, max_examples=400, suppress_health_check=[HealthCheck.too_slow])

plain = (
    st.none()
    | st.booleans()
    | st.integers(-3, 40)
    | st.integers(0, 2**31)
    | st.integers(0, 2**70)
    | st.floats()
    | st.text(max_size=4)
)
words = st.sampled_from(("full_attention", "M", "*", "float32", "auto", "no_op", "0", 0, 1, 4))
values = st.recursive(
    plain | words,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.sampled_from(sorted(BASE)), inner, max_size=3),
    max_leaves=6,
)
lists = st.sampled_from(sorted(LISTS)).flatmap(
    lambda key: st.tuples(st.just(key), st.lists(st.sampled_from(LISTS[key]), min_size=4, max_size=4))
)


def outcome(config):
    """The geometry, or the line that says what is wrong; any other exception ends the test."""
    try:
        return read_geometry(config, "config.json"), ""
    except (InputError, UnsupportedModelError) as error:
        return None, str(error)


@SETTINGS
@given(
    model_type=st.sampled_from(sorted(ARCHITECTURES)),
    kept=st.sets(st.sampled_from(sorted(BASE)), max_size=6),
    listed=st.lists(lists, max_size=2),
    changes=st.dictionaries(st.sampled_from(sorted([*BASE, *LISTS])), values, max_size=3),
)
def test_no_value_gives_anything_but_a_geometry_or_one_line(model_type, kept, listed, changes):
    reads = ARCHITECTURES[model_type].cache.reads if ARCHITECTURES[model_type].cache else frozenset()
    own = {key: value for key, value in BASE.items() if key in COMMON | STATES | reads | kept}
    config = {"model_type": model_type, **own, **dict(listed), **changes}
    found, line = outcome(config)
    assert "\n" not in line
    assert len(line) < 500
    if found is None:
        assert line.startswith("config.json: ")
        return
    assert 1 <= len(found.layers) <= 20_000
    for layer in (*found.layers, *found.draft_layers):
        assert layer.kv_heads >= 0
        assert (layer.kv_heads == 0) == (layer.head_dim == 0)
        assert layer.window_tokens is None or layer.window_tokens >= 1
        assert layer.shared_with is None or found.layers[layer.shared_with].shared_with is None
        assert all(side.elements >= 1 and side.tokens_per_entry >= 1 for side in layer.sides)
        assert all(state.elements >= 0 for state in layer.states)
        assert layer_bytes(layer, parse("bf16"), 100) >= 0
        assert layer_growth_bytes(layer, parse("bf16"), 100) >= 0
    json.dumps([found.query_heads, found.hidden_size, found.vocab_size, found.context_tokens])


@pytest.mark.parametrize("model_type", sorted(name for name, row in ARCHITECTURES.items() if row.cache))
def test_each_family_is_read_from_what_it_needs(model_type):
    """The property above says nothing where every example is refused."""
    own = {key: value for key, value in BASE.items() if key in COMMON | STATES | ARCHITECTURES[model_type].cache.reads}
    found, line = outcome({"model_type": model_type, **own, **CHOSEN.get(model_type, {})})
    assert found is not None, line
