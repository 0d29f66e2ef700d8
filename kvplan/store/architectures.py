"""The architectures whose cache kvplan counts, and the config keys that would shape a cache otherwise.

Defaults and window rules are those of the configuration classes of transformers 5.24: what a key means when a config
leaves it out.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final


class WindowRule(StrEnum):
    """Which layers a config's `sliding_window` is for, where no `layer_types` says so."""

    NONE = "none"
    ALL = "all"
    AFTER = "after"
    """Layers from `max_window_layers` on."""
    PATTERN = "pattern"
    """All but every n-th, n from `sliding_window_pattern`."""
    LISTED = "listed"
    """Those that `layer_types` names; without it nothing is known."""


class HeadRule(StrEnum):
    """Where the number of KV heads stands."""

    GROUPED = "grouped"
    """The key for it; as many as query heads where that is null or left out without a default."""
    MULTI_QUERY = "multi_query"
    """One head where `multi_query` is true, which it is by default, else as many as query heads."""
    FALCON = "falcon"
    """The key for it under `new_decoder_architecture` or spelled `n_head_kv`, else as MULTI_QUERY."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """How one model type's config says what its layers cache.

    Attributes:
        name: The model class, where the config names none.
        gated: Whether the window counts only under `use_sliding_window`.
        tied: Whether input and output embeddings are one tensor where the config does not say.
        defaults: Values of keys that a config may leave out.
    """

    name: str
    heads: HeadRule = HeadRule.GROUPED
    window: WindowRule = WindowRule.NONE
    gated: bool = False
    tied: bool = False
    defaults: dict[str, int] = field(default_factory=dict)


_LLAMA: Final = {
    "num_hidden_layers": 32, "num_attention_heads": 32, "hidden_size": 4096, "vocab_size": 32000,
    "max_position_embeddings": 2048,
}  # fmt: skip
_MISTRAL: Final = {
    **_LLAMA, "num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072,
}  # fmt: skip
_GEMMA3: Final = {
    "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "hidden_size": 2304,
    "vocab_size": 262208, "max_position_embeddings": 131072, "sliding_window": 4096, "sliding_window_pattern": 6,
}  # fmt: skip
_QWEN_WINDOW: Final = {"max_window_layers": 28, "sliding_window": 4096}
_QWEN3_VL: Final = {"head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 128000}

ARCHITECTURES: Final[dict[str, Architecture]] = {
    "apertus": Architecture(name="ApertusForCausalLM"),
    "arcee": Architecture(name="ArceeForCausalLM"),
    "baichuan": Architecture(name="BaichuanForCausalLM"),
    "bitnet": Architecture(name="BitNetForCausalLM", defaults={"num_key_value_heads": 5}),
    "bloom": Architecture(name="BloomForCausalLM", tied=True, defaults={"max_position_embeddings": 2048}),
    "cohere": Architecture(name="CohereForCausalLM", tied=True),
    "cohere2": Architecture(name="Cohere2ForCausalLM", tied=True, window=WindowRule.PATTERN,
                            defaults={"sliding_window": 4096, "sliding_window_pattern": 4}),
    "codegen": Architecture(name="CodeGenForCausalLM"),
    "deepseek": Architecture(name="DeepseekForCausalLM"),
    "dots1": Architecture(name="Dots1ForCausalLM", window=WindowRule.AFTER,
                          defaults={"max_window_layers": 62, "sliding_window": 4096, "num_key_value_heads": 32}),
    "ernie4_5": Architecture(name="Ernie4_5ForCausalLM", tied=True, defaults={"num_key_value_heads": 2,
                                                                             "head_dim": 128}),
    "ernie4_5_moe": Architecture(name="Ernie4_5_MoeForCausalLM", tied=True, defaults={"num_key_value_heads": 4}),
    "exaone4": Architecture(name="Exaone4ForCausalLM", window=WindowRule.PATTERN,
                            defaults={"sliding_window": 4096, "sliding_window_pattern": 4}),
    "falcon": Architecture(name="FalconForCausalLM", heads=HeadRule.FALCON, tied=True,
                           defaults={"max_position_embeddings": 2048}),
    "flex_olmo": Architecture(name="FlexOlmoForCausalLM"),
    "gemma": Architecture(name="GemmaForCausalLM", tied=True, defaults={"head_dim": 256,
                                                                       "num_key_value_heads": 16}),
    "gemma2": Architecture(name="Gemma2ForCausalLM", tied=True, window=WindowRule.PATTERN,
                           defaults={"head_dim": 256, "num_key_value_heads": 4, "sliding_window": 4096,
                                     "sliding_window_pattern": 2}),
    "gemma3_text": Architecture(name="Gemma3ForCausalLM", tied=True, window=WindowRule.PATTERN, defaults=_GEMMA3),
    "glm": Architecture(name="GlmForCausalLM", defaults={"head_dim": 128, "num_key_value_heads": 2}),
    "glm4": Architecture(name="Glm4ForCausalLM", defaults={"head_dim": 128, "num_key_value_heads": 2}),
    "glm4_moe": Architecture(name="Glm4MoeForCausalLM", defaults={"num_key_value_heads": 8}),
    "gpt2": Architecture(name="GPT2LMHeadModel", tied=True, defaults={"max_position_embeddings": 1024,
                                                                     "vocab_size": 50257}),
    "gpt_bigcode": Architecture(name="GPTBigCodeForCausalLM", heads=HeadRule.MULTI_QUERY, tied=True),
    "gpt_neox": Architecture(name="GPTNeoXForCausalLM"),
    "gpt_oss": Architecture(name="GptOssForCausalLM", window=WindowRule.PATTERN,
                            defaults={"head_dim": 64, "num_key_value_heads": 8, "sliding_window": 128,
                                      "sliding_window_pattern": 2}),
    "gptj": Architecture(name="GPTJForCausalLM"),
    "granite": Architecture(name="GraniteForCausalLM"),
    "granitemoe": Architecture(name="GraniteMoeForCausalLM"),
    "granitemoeshared": Architecture(name="GraniteMoeSharedForCausalLM"),
    "helium": Architecture(name="HeliumForCausalLM", defaults={"head_dim": 128}),
    "hunyuan_v1_dense": Architecture(name="HunYuanDenseV1ForCausalLM"),
    "internlm": Architecture(name="InternLMForCausalLM"),
    "internlm2": Architecture(name="InternLM2ForCausalLM"),
    "jais2": Architecture(name="Jais2ForCausalLM", defaults={"head_dim": 128}),
    "llama": Architecture(name="LlamaForCausalLM", defaults=_LLAMA),
    "mimo": Architecture(name="MiMoForCausalLM", window=WindowRule.AFTER, gated=True),
    "minicpm": Architecture(name="MiniCPMForCausalLM", tied=True),
    "minimax_m2": Architecture(name="MiniMaxM2ForCausalLM", defaults={"num_key_value_heads": 8, "head_dim": 128}),
    "ministral": Architecture(name="MinistralForCausalLM", window=WindowRule.ALL,
                              defaults={"num_key_value_heads": 8, "sliding_window": 4096}),
    "ministral3": Architecture(name="Ministral3ForCausalLM", window=WindowRule.ALL,
                               defaults={"num_key_value_heads": 8, "head_dim": 128}),
    "mistral": Architecture(name="MistralForCausalLM", window=WindowRule.ALL, defaults=_MISTRAL),
    "mixtral": Architecture(name="MixtralForCausalLM", window=WindowRule.ALL, defaults={"num_key_value_heads": 8}),
    "nemotron": Architecture(name="NemotronForCausalLM"),
    "olmo": Architecture(name="OlmoForCausalLM"),
    "olmo2": Architecture(name="Olmo2ForCausalLM"),
    "olmo3": Architecture(name="Olmo3ForCausalLM", window=WindowRule.PATTERN,
                          defaults={"sliding_window": 4096, "sliding_window_pattern": 4}),
    "olmoe": Architecture(name="OlmoeForCausalLM"),
    "opt": Architecture(name="OPTForCausalLM", tied=True, defaults={"max_position_embeddings": 2048}),
    "persimmon": Architecture(name="PersimmonForCausalLM"),
    "phi": Architecture(name="PhiForCausalLM"),
    "phi-msft": Architecture(name="PhiForCausalLM"),
    "phi3": Architecture(name="Phi3ForCausalLM", window=WindowRule.ALL),
    "phimoe": Architecture(name="PhimoeForCausalLM", window=WindowRule.ALL, defaults={"num_key_value_heads": 8}),
    "qwen2": Architecture(name="Qwen2ForCausalLM", window=WindowRule.AFTER, gated=True,
                          defaults={**_QWEN_WINDOW, "num_key_value_heads": 32, "max_position_embeddings": 32768}),
    "qwen2_5_vl_text": Architecture(name="Qwen2_5_VLForConditionalGeneration", window=WindowRule.AFTER, gated=True,
                                    defaults={"max_window_layers": 80, "sliding_window": 4096,
                                              "num_key_value_heads": 8, "max_position_embeddings": 32768}),
    "qwen2_moe": Architecture(name="Qwen2MoeForCausalLM", window=WindowRule.AFTER, gated=True,
                              defaults={**_QWEN_WINDOW, "num_key_value_heads": 16}),
    "qwen2_vl_text": Architecture(name="Qwen2VLForConditionalGeneration", window=WindowRule.AFTER, gated=True,
                                  defaults={"max_window_layers": 80, "sliding_window": 4096,
                                            "num_key_value_heads": 8, "max_position_embeddings": 32768}),
    "qwen3": Architecture(name="Qwen3ForCausalLM", window=WindowRule.AFTER, gated=True,
                          defaults={**_QWEN_WINDOW, "num_key_value_heads": 32, "head_dim": 128,
                                    "max_position_embeddings": 32768}),
    "qwen3_moe": Architecture(name="Qwen3MoeForCausalLM", window=WindowRule.ALL, gated=True,
                              defaults={"sliding_window": 4096, "num_key_value_heads": 4}),
    "qwen3_vl_moe_text": Architecture(name="Qwen3VLMoeForConditionalGeneration",
                                      defaults={**_QWEN3_VL, "num_key_value_heads": 16}),
    "qwen3_vl_text": Architecture(name="Qwen3VLForConditionalGeneration",
                                  defaults={**_QWEN3_VL, "num_key_value_heads": 32}),
    "RefinedWeb": Architecture(name="FalconForCausalLM", heads=HeadRule.FALCON, tied=True,
                               defaults={"max_position_embeddings": 2048}),
    "RefinedWebModel": Architecture(name="FalconForCausalLM", heads=HeadRule.FALCON, tied=True,
                                    defaults={"max_position_embeddings": 2048}),
    "seed_oss": Architecture(name="SeedOssForCausalLM", defaults={"num_key_value_heads": 8, "head_dim": 128}),
    "smollm3": Architecture(name="SmolLM3ForCausalLM", tied=True, window=WindowRule.LISTED, gated=True,
                            defaults={"num_key_value_heads": 4}),
    "stablelm": Architecture(name="StableLmForCausalLM"),
    "starcoder2": Architecture(name="Starcoder2ForCausalLM", tied=True, window=WindowRule.ALL,
                               defaults={"num_key_value_heads": 2}),
    "vaultgemma": Architecture(name="VaultGemmaForCausalLM", tied=True, window=WindowRule.PATTERN,
                               defaults={"head_dim": 256, "num_key_value_heads": 4, "sliding_window": 4096,
                                         "sliding_window_pattern": 2}),
}  # fmt: skip
"""By the config's `model_type`."""

GGUF_MODEL_TYPES: Final = {
    "arcee": "arcee", "bloom": "bloom", "cohere2": "cohere2", "command-r": "cohere", "exaone4": "exaone4",
    "ernie4_5": "ernie4_5", "falcon": "falcon", "gemma": "gemma", "gemma2": "gemma2", "gemma3": "gemma3_text",
    "glm4": "glm4", "gpt-oss": "gpt_oss", "gpt2": "gpt2", "gptj": "gptj", "gptneox": "gpt_neox", "granite": "granite",
    "granitemoe": "granitemoe", "internlm2": "internlm2", "llama": "llama", "minicpm": "minicpm",
    "minimax-m2": "minimax_m2", "mistral": "mistral", "mistral3": "ministral3", "nemotron": "nemotron", "olmo": "olmo",
    "olmo2": "olmo2", "olmoe": "olmoe", "phi2": "phi", "phi3": "phi3", "phimoe": "phimoe", "qwen2": "qwen2",
    "qwen2moe": "qwen2_moe", "qwen3": "qwen3", "qwen3moe": "qwen3_moe", "seed_oss": "seed_oss", "smollm3": "smollm3",
    "stablelm": "stablelm", "starcoder": "gpt_bigcode", "starcoder2": "starcoder2",
}  # fmt: skip
"""By a GGUF file's `general.architecture`."""

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
    "is_encoder_decoder": CROSS,
}  # fmt: skip
"""Config keys that say, where set, that a layer caches something else than K and V of one shape.

Keys named here are refused where set: a config may carry them though its model type is in the table above.
"""

SUPPORTED: Final = "supported are full and sliding-window attention with K and V heads of one size"
