"""Whatever a config says of its weights, they are counted or one line says what is wrong."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvplan.errors import InputError, UnsupportedModelError
from kvplan.store.architectures import ARCHITECTURES
from kvplan.store.configs import read_geometry
from kvplan.store.shaping import SHAPING_KEYS
from kvplan.store.weights import WEIGHTS, predict_weights

BASE = {
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64, "vocab_size": 100,
    "max_position_embeddings": 256, "head_dim": 16, "intermediate_size": 48, "num_experts": 4, "num_local_experts": 4,
    "n_routed_experts": 4, "moe_num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24,
    "share_expert_dim": 24, "kv_lora_rank": 24, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 12, "index_head_dim": 16, "index_n_heads": 2, "mamba_n_heads": 8, "mamba_d_head": 16,
    "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4,
    "ssm_state_size": 8, "mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 2, "conv_kernel": 4, "state_size": 8,
    "expand": 2, "num_heads": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "conv_L_cache": 3, "ffn_dim": 48,
    "hybrid_override_pattern": "M*E-", "moe_shared_expert_intermediate_size": 24, "intermediate_size_mlp": 48,
    "block_configs": [{"attention": {"n_heads_in_group": 4, "no_op": False}, "ffn": {"ffn_mult": 1.5}}] * 4,
    "attn_config": {"kv_n_heads": 2}, "ffn_config": {"moe_num_experts": 4, "ffn_hidden_size": 24}, "num_layers": 4,
    "ffn_hidden_size": 48, "expert_ffn_hidden_size": 24, "o_groups": 2, "o_lora_rank": 8, "num_experts_per_tok": 2,
    "hybrid_layer_pattern": [0, 1, 0, 1], "moe_layers_enum": [1, 3], "multi_query_attention": True,
    "multi_query_group_num": 2, "padded_vocab_size": 100, "time_step_rank": 4, "mamba_dt_rank": 4,
    "first_k_dense_replace": 1, "mlp_only_layers": [1], "moe_layers": [1], "moe_layer_freq": [0, 1, 1, 1],
    "mlp_layer_types": ["dense"] + ["sparse"] * 3, "num_nextn_predict_layers": 1, "mtp_num_hidden_layers": 1,
    "block_ffn_dim_multiplier": 1.0, "attention_other_setting": {"num_attention_heads": 4}, "moe_layer_end_index": 2,
    "linear_attn_config": {"num_heads": 2, "head_dim": 8, "short_conv_kernel_size": 4, "full_attn_layers": [2, 4],
                           "kda_layers": [1, 3]},
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [16, 16], "modules_to_not_convert": ["x"]},
}  # fmt: skip
OWN = {
    "deepseek_v4": {"compress_ratios": [0, 4, 128, 4], "sliding_window": 32, "head_dim": 32, "num_key_value_heads": 1,
                    "mlp_layer_types": ["hash_moe"] + ["moe"] * 3},
    "deepseek_ref": {"compress_ratios": [0, 4, 128, 4], "sliding_window": 32, "mlp_layer_types": None, "head_dim": 32,
                     "num_key_value_heads": 1},
    "lfm2": {"full_attn_idxs": [1]}, "lfm2_moe": {"full_attn_idxs": [1]},
    "minimax": {"attn_type_list": [0, 1, 0, 1]}, "minimax_text_01": {"attn_type_list": [0, 1, 0, 1]},
    "olmo_hybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "mimo_v2_flash": {"sliding_window": 32}, "step3p5": {"sliding_window": 32}, "step3p7": {"sliding_window": 32},
    "mellum": {"sliding_window": None}, "cohere2_moe": {"sliding_window": None},
    "gemma4_unified_text": {"num_kv_shared_layers": 0},
    "openelm": {"num_kv_heads": [1, 2, 2, 4], "num_query_heads": [4, 4, 8, 8], "ffn_multipliers": [0.5, 1, 2, 4],
                "ffn_dim_divisor": 16},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "whisper": {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "decoder_attention_heads": 4,
                "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "max_source_positions": 20, "max_target_positions": 20},
    "nemotron_h": {"num_hidden_layers": 4, "mtp_hybrid_override_pattern": "*E"},
    "gemma3n_text": {"num_kv_shared_layers": 0}, "gemma4_text": {"num_kv_shared_layers": 0},
}  # fmt: skip


def complete(model_type):
    """A config of the family with every key that it may need."""
    row = ARCHITECTURES[model_type]
    reads = (row.cache.reads if row.cache else frozenset()) | set(row.head_dim_keys)
    own = {key: value for key, value in BASE.items() if key not in SHAPING_KEYS or key in reads}
    own.pop("multi_query_attention" if model_type != "chatglm" else "", None)
    own.pop("multi_query_group_num" if model_type != "chatglm" else "", None)
    return {"model_type": model_type, **own, **OWN.get(model_type, {})}


CHOICES = (
    "block_multiple_of", "decoder_sparse_step", "deepstack_visual_indexes", "expansion_ratio", "expert_layer_period",
    "hc_mult", "hidden_size_per_layer_input", "interleave_moe_layer_step", "laurel_rank", "moe_layer_interval",
    "n_inner", "n_shared_experts", "shared_intermediate_size", "word_embed_proj_dim", "vision_config", "expert_dtype",
)  # fmt: skip

SETTINGS = settings(deadline=None, max_examples=600, suppress_health_check=[HealthCheck.too_slow])

plain = st.none() | st.booleans() | st.integers(-3, 40) | st.integers(0, 2**70) | st.floats() | st.text(max_size=4)
names = st.sampled_from((*sorted(BASE), "quant_method", "weights", "targets", "bits", "group_size", "ffn", "attention"))
words = st.sampled_from(("gptq", "modelopt", "compressed-tensors", "NVFP4", "sparse", "no_op", "re:(", "Linear"))
values = st.recursive(
    plain | words,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=3),
    max_leaves=6,
)


@SETTINGS
@given(
    model_type=st.sampled_from(sorted(WEIGHTS)),
    left_out=st.sets(st.sampled_from(sorted(BASE)), max_size=3),
    changes=st.dictionaries(st.sampled_from(sorted([*BASE, *CHOICES])), values, max_size=3),
)
def test_no_value_gives_anything_but_weights_or_one_line(model_type, left_out, changes):
    config = {**complete(model_type), **changes}
    config = {key: value for key, value in config.items() if key not in left_out}
    try:
        found = predict_weights(config, read_geometry(config, "config.json"), "config.json")
    except (InputError, UnsupportedModelError) as error:
        assert_one_line(str(error))
        return
    assert found.model.parameters >= 1
    assert found.model.nbytes >= 1


def assert_one_line(line):
    assert "\n" not in line
    assert len(line) < 500
    assert line.startswith("config.json: ")


def test_fewer_bits_take_fewer_bytes_in_every_family():
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    for model_type in sorted(WEIGHTS):
        config = {**complete(model_type), "quantization_config": None}
        geometry = read_geometry(config, "config.json")
        plain_bytes = predict_weights(config, geometry, "config.json").model
        stored = predict_weights({**config, "quantization_config": fp8}, geometry, "config.json").model
        assert stored.parameters == plain_bytes.parameters
        assert stored.nbytes < plain_bytes.nbytes
