"""Config keys that shape a cache, and what each of them says."""

from typing import Final

LATENT: Final = "latent attention (MLA)"
RECURRENT: Final = "layers with a recurrent state"
UNEVEN: Final = "layers or heads of several shapes"
SIZED: Final = "a head size under a key that is not read"
SHARED: Final = "layers that share another layer's cache"
SPARSE: Final = "attention that selects or compresses tokens"
CHUNKED: Final = "chunked attention"
CROSS: Final = "cross-attention"

SHAPING_KEYS: Final = {
    "kv_lora_rank": LATENT, "qk_rope_head_dim": LATENT, "qk_nope_head_dim": LATENT, "v_head_dim": UNEVEN,
    "mla_use_nope": LATENT, "linear_attn_config": RECURRENT, "linear_num_key_heads": RECURRENT,
    "linear_num_value_heads": RECURRENT, "linear_conv_kernel_dim": RECURRENT, "full_attention_interval": RECURRENT,
    "ssm_state_size": RECURRENT, "state_size": RECURRENT, "mamba_d_state": RECURRENT, "mamba_num_heads": RECURRENT,
    "mamba_head_dim": RECURRENT, "conv_kernel": RECURRENT, "conv_L_cache": RECURRENT, "time_step_rank": RECURRENT,
    "lru_width": RECURRENT, "rescale_every": RECURRENT, "attn_layer_period": RECURRENT, "full_attn_idxs": RECURRENT,
    "hybrid_override_pattern": RECURRENT, "layers_block_type": RECURRENT, "block_types": RECURRENT,
    "hybrid_layer_pattern": UNEVEN, "block_configs": UNEVEN, "global_head_dim": UNEVEN, "swa_head_dim": UNEVEN,
    "num_global_key_value_heads": UNEVEN, "swa_num_key_value_heads": UNEVEN, "swa_v_head_dim": UNEVEN,
    "attention_k_eq_v": UNEVEN, "attn_config": UNEVEN, "kv_channels": SIZED, "pruned_heads": UNEVEN,
    "attention_head_dim": SIZED, "num_kv_shared_layers": SHARED, "use_cla": SHARED, "cla_share_factor": SHARED,
    "num_kv_reuse_layers": SHARED, "kv_sharing": SHARED, "compress_ratios": SPARSE, "index_topk": SPARSE,
    "index_head_dim": SPARSE, "index_n_heads": SPARSE, "sparse_attention_config": SPARSE, "sparse_config": SPARSE,
    "attention_chunk_size": CHUNKED, "cross_attention_layers": CROSS, "add_cross_attention": CROSS,
    "is_encoder_decoder": CROSS, "attn_type_list": RECURRENT, "per_layer_config": UNEVEN,
    "attention_other_setting": UNEVEN, "compress_rates": SPARSE, "attn_layer_indices": RECURRENT,
    "linear_attention_layers": RECURRENT,
}  # fmt: skip
"""Config keys that say, where set, that a layer caches something else than K and V of one shape.

Keys named here are refused where set, but for those that the family of the model type reads: a config may carry them
though its model type is known.
"""
