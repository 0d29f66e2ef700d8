import pytest
from transformers import CONFIG_MAPPING, DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer

from kvplan.core.specs import LayerKind
from kvplan.errors import InputError, UnsupportedModelError
from kvplan.store.architectures import ARCHITECTURES, GGUF_MODEL_TYPES
from kvplan.store.configs import read_geometry
from kvplan.store.keys import HeadRule, WindowRule
from kvplan.store.shaping import SHAPING_KEYS
from kvplan_kernels.format import FloatType

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "hidden_size": 512, "vocab_size": 1000, "max_position_embeddings": 4096,
    "torch_dtype": "float16",
}  # fmt: skip


def geometry(**changes):
    config = {**LLAMA, **changes}
    return read_geometry({key: value for key, value in config.items() if value is not ...}, "config.json")


def windows(found):
    return [layer.window_tokens for layer in found.layers]


def heads(found):
    (shape,) = {(layer.kv_heads, layer.head_dim) for layer in found.layers}
    return shape


def test_a_llama_config_is_read_whole():
    found = geometry()
    assert [layer.kind for layer in found.layers] == [LayerKind.FULL] * 4
    assert heads(found) == (2, 64)
    assert (found.architecture, found.query_heads, found.hidden_size) == ("LlamaForCausalLM", 8, 512)
    assert (found.vocab_size, found.context_tokens, found.float_type) == (1000, 4096, FloatType.FP16)


PLAIN_TYPES = sorted(
    name for name, row in ARCHITECTURES.items()
    if row.cache is None and name in CONFIG_MAPPING and name != "gpt_neo"  # whose class wants a list of all layers
)  # fmt: skip


@pytest.mark.parametrize("model_type", PLAIN_TYPES)
@pytest.mark.parametrize("changes", [{}, {"sliding_window": 96, "use_sliding_window": True, "max_window_layers": 3}])
def test_every_architecture_is_read_as_transformers_builds_its_cache(model_type, changes):
    architecture = ARCHITECTURES[model_type]
    if architecture.window is WindowRule.NONE:
        changes = {}
    config = CONFIG_MAPPING[model_type](num_hidden_layers=7, num_attention_heads=160, hidden_size=1280, **changes)
    found = read_geometry(config.to_dict(), "config.json")
    layers = DynamicCache(config=config).layers
    slides = [layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None for layer in layers]
    assert windows(found) == ([one if one and one < found.context_tokens else None for one in slides] or [None] * 7)
    kv_heads = getattr(config, "num_key_value_heads", None) or 160
    head_dim = getattr(config, "head_dim", None) or 8
    assert heads(found) == (1 if architecture.heads is not HeadRule.GROUPED else kv_heads, head_dim)
    assert (found.query_heads, found.hidden_size) == (160, 1280)
    assert found.context_tokens == getattr(config, "max_position_embeddings", found.context_tokens)
    assert found.vocab_size == config.vocab_size


def test_every_gguf_architecture_is_one_that_is_known():
    assert set(GGUF_MODEL_TYPES.values()) <= set(ARCHITECTURES)


@pytest.mark.parametrize("head_dim", [None, 0, ...])
def test_a_head_size_that_is_not_stated_is_derived(head_dim):
    assert heads(geometry(head_dim=head_dim)) == (2, 64)


def test_a_stated_head_size_wins_over_the_derived_one():
    assert heads(geometry(head_dim=256, hidden_size=3584, num_attention_heads=16)) == (2, 256)


def test_kv_heads_that_are_null_or_left_out_are_the_query_heads():
    assert heads(geometry(num_key_value_heads=None)) == (8, 64)
    assert heads(geometry(num_key_value_heads=...)) == (8, 64)


def test_what_a_class_has_by_default_is_taken_for_a_key_left_out():
    assert heads(geometry(model_type="mistral", num_key_value_heads=..., sliding_window=None)) == (8, 64)
    assert windows(geometry(model_type="mistral", max_position_embeddings=8192)) == [4096] * 4


GPT = {"num_hidden_layers": ..., "num_attention_heads": ..., "hidden_size": ..., "max_position_embeddings": ...,
       "num_key_value_heads": ..., "n_layer": 4, "n_head": 8, "n_embd": 512, "n_positions": 1024}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model_type": "gpt2", **GPT}, (8, 64)),
        ({"model_type": "gpt_bigcode", "multi_query": True, **GPT}, (1, 64)),
        ({"model_type": "gpt_bigcode", **GPT}, (1, 64)),
        ({"model_type": "gpt_bigcode", "multi_query": False, **GPT}, (8, 64)),
        ({"model_type": "falcon", "multi_query": True, "num_key_value_heads": ..., "num_kv_heads": 8}, (1, 64)),
        ({"model_type": "falcon", "multi_query": True, "new_decoder_architecture": True,
          "num_key_value_heads": ..., "num_kv_heads": 4}, (4, 64)),
        ({"model_type": "falcon", "multi_query": False, "num_key_value_heads": ...}, (8, 64)),
        ({"model_type": "RefinedWeb", "multi_query": True, "n_head_kv": 4, **GPT}, (4, 64)),
        ({"model_type": "RefinedWebModel", "multi_query": True, **GPT}, (1, 64)),
    ],
)  # fmt: skip
def test_older_spellings_and_multi_query_attention(changes, expected):
    found = geometry(**changes)
    assert heads(found) == expected
    assert len(found.layers) == 4


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 512}, [None] * 4),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 512, "max_window_layers": 3},
         [None, None, None, 512]),
        ({"model_type": "phi3", "sliding_window": 262144}, [None] * 4),
        ({"model_type": "phi3", "sliding_window": 2047}, [2047] * 4),
        ({"model_type": "mistral", "sliding_window": None}, [None] * 4),
        ({"model_type": "gemma2", "sliding_window": 512}, [512, None, 512, None]),
        ({"model_type": "gemma3_text", "sliding_window": 512, "sliding_window_pattern": 3}, [512, 512, None, 512]),
        ({"model_type": "gemma3_text", "sliding_window": 512, "sliding_window_pattern": 3,
          "layer_types": ["full_attention"] * 2 + ["sliding_attention"] * 2}, [None, None, 512, 512]),
        ({"model_type": "smollm3", "layer_types": ["full_attention"] * 4, "sliding_window": 512}, [None] * 4),
        ({"model_type": "llama", "sliding_window": 4096}, [None] * 4),
    ],
)  # fmt: skip
def test_windows_are_counted_where_the_architecture_has_them(changes, expected):
    assert windows(geometry(**changes)) == expected


@pytest.mark.parametrize(
    ("outer", "inner"), [("gemma3", "text_config"), ("qwen3_omni", "thinker_config"), ("internvl", "llm_config")]
)
def test_the_language_model_inside_another_is_found(outer, inner):
    text = {key: value for key, value in LLAMA.items() if key not in ("architectures", "torch_dtype")}
    nested = {"text_config": text} if inner == "thinker_config" else text
    config = {"model_type": outer, "dtype": "float16", inner: nested, "architectures": ["Outer"],
              "vision_config": {"num_hidden_layers": 99, "model_type": "clip"}}  # fmt: skip
    found = read_geometry(config, "config.json")
    assert (len(found.layers), found.architecture, found.float_type) == (4, "Outer", FloatType.FP16)


def test_a_nested_config_may_leave_out_what_its_class_has_by_default():
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024}
    found = read_geometry({"model_type": "gemma3", "text_config": text}, "config.json")
    assert heads(found) == (4, 256)
    assert windows(found).count(1024) == 29
    assert (found.context_tokens, found.vocab_size) == (131072, 262208)


@pytest.mark.parametrize("key", sorted(SHAPING_KEYS))
def test_a_key_that_shapes_the_cache_otherwise_is_refused_by_name(key):
    with pytest.raises(UnsupportedModelError, match=f"config.json: {key} says .*, which is not supported; supported"):
        geometry(**{key: 512})
    assert geometry(**{key: None}) == geometry(**{key: 0}) == geometry()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "mamba9"}, "model_type 'mamba9' is not known; supported are"),
        ({"model_type": "deepseek_v9", "kv_lora_rank": 512}, "kv_lora_rank says latent attention"),
        ({"model_type": "qwen2", "layer_types": ["full_attention"] * 3 + ["linear_attention"]}, "'linear_attention'"),
        ({"layer_types": ["sliding_attention"] * 4, "sliding_window": 9}, "sliding windows that llama is not known"),
        ({"sliding_window": 512}, "a window whose layers llama does not name"),
        ({"model_type": "smollm3", "use_sliding_window": True, "sliding_window": 9}, "whose layers smollm3"),
        ({"num_key_value_heads": [2, 2, 4, 4]}, "several shapes"),
        ({"multi_query": True}, "multi_query says"),
        ({"multi_query_group_num": 2}, "multi_query_group_num says"),
        ({"attn_type_list": [1, 0, 1, 0]}, "attn_type_list says"),
        ({"torch_dtype": "float8_e4m3fn"}, "weights in 'float8_e4m3fn'"),
    ],
)
def test_what_is_not_known_is_unsupported_and_never_guessed(changes, says):
    with pytest.raises(UnsupportedModelError) as caught:
        geometry(**changes)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": ...}, "has no model_type"),
        ({"num_hidden_layers": ...}, "has no num_hidden_layers"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": "4"}, "num_hidden_layers is '4'"),
        ({"num_hidden_layers": True}, "num_hidden_layers is 'True'"),
        ({"num_hidden_layers": 10**9}, "up to 10000"),
        ({"num_attention_heads": -8}, "num_attention_heads is '-8'"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0"),
        ({"num_key_value_heads": 3}, "8 query heads cannot share 3"),
        ({"hidden_size": 511}, "511 is no multiple of 8 heads; the config needs head_dim"),
        ({"vocab_size": ...}, "vocab_size"),
        ({"model_type": "qwen2", "layer_types": ["full_attention"]}, "list of 4 names"),
        ({"model_type": "gemma2", "sliding_window": None, "layer_types": ["sliding_attention"] * 4}, "without a"),
    ],
)
def test_values_that_cannot_be_are_refused(changes, says):
    if changes == {"vocab_size": ...}:
        changes = {"vocab_size": ..., "model_type": "olmo"}
    with pytest.raises(InputError) as caught:
        geometry(**changes)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("spelling", "expected"),
    [
        ({"torch_dtype": "bfloat16"}, FloatType.BF16),
        ({"torch_dtype": ..., "dtype": "float16"}, FloatType.FP16),
        ({"torch_dtype": "torch.float16"}, FloatType.FP16),
        ({"torch_dtype": "float32"}, FloatType.BF16),
        ({"torch_dtype": ...}, FloatType.BF16),
        ({"torch_dtype": None}, FloatType.BF16),
    ],
)
def test_the_16_bit_type_is_read_in_either_spelling(spelling, expected):
    assert geometry(**spelling).float_type is expected


SF = ["sliding_attention", "full_attention"]
GEMMA4 = {"model_type": "gemma4_text", "head_dim": 64, "global_head_dim": 128, "sliding_window": 512,
          "layer_types": SF * 2, "num_kv_shared_layers": 0}  # fmt: skip
LLAMA4 = {"model_type": "llama4_text", "head_dim": 64, "attention_chunk_size": 1024}
STEP = {"model_type": "step3p7", "head_dim": 64, "sliding_window": 512, "layer_types": SF * 2}
MLA = {"model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_rope_head_dim": 64}
NAS = {"model_type": "nemotron-nas", "num_key_value_heads": None}
KIMI = {**MLA, "model_type": "kimi_linear"}
KDA = {"num_heads": 2, "head_dim": 8, "short_conv_kernel_size": 4}


def block(**attention):
    return {"attention": attention}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({**GEMMA4, "num_kv_shared_layers": 2},
         [(2, 64, 512, None), (2, 128, None, None), (2, 64, 512, 0), (2, 128, None, 1)]),
        ({**GEMMA4, "num_global_key_value_heads": 1}, [(2, 64, 512, None), (2, 128, None, None)] * 2),
        ({**GEMMA4, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
         [(2, 64, 512, None), (1, 128, None, None)] * 2),
        ({**GEMMA4, "per_layer_config": {"01": {"head_dim": 256}, "03": {"num_key_value_heads": 4}}},
         [(2, 64, 512, None), (2, 256, None, None), (2, 64, 512, None), (4, 64, None, None)]),
        ({**LLAMA4, "no_rope_layers": [1, 0, 0, 1]},
         [(2, 64, 1024, None), (2, 64, None, None), (2, 64, None, None), (2, 64, 1024, None)]),
        ({**LLAMA4, "no_rope_layers": []}, [*[(2, 64, 1024, None)] * 3, (2, 64, None, None)]),
        ({**LLAMA4, "attention_chunk_size": None}, [(2, 64, None, None)] * 4),
        ({**LLAMA4, "attention_chunk_size": 4096}, [(2, 64, None, None)] * 4),
        ({**STEP, "layer_types": [*SF * 2, *SF, SF[0]], "num_nextn_predict_layers": 3},
         [(2, 64, 512, None), (2, 64, None, None)] * 2),
        ({**STEP, "attention_other_setting": {"num_attention_heads": 96, "num_attention_groups": 4}},
         [(4, 64, 512, None), (2, 64, None, None)] * 2),
        ({**NAS, "block_configs": [block(n_heads_in_group=4), block(no_op=True), block(replace_with_linear=True),
                                   block(n_heads_in_group=8)]},
         [(2, 64, None, None), (0, 0, None, None), (0, 0, None, None), (1, 64, None, None)]),
        ({"model_type": "granitemoehybrid", "layer_types": ["attention"] * 4, "mamba_n_heads": 0},
         [(2, 64, None, None)] * 4),
    ],
)  # fmt: skip
def test_layers_of_several_shapes(changes, expected):
    found = geometry(**changes).layers
    assert [(one.kv_heads, one.head_dim, one.window_tokens, one.shared_with) for one in found] == expected


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({**MLA, "index_topk": 8}, UnsupportedModelError, "index_topk says attention that selects"),
        ({**MLA, "kv_lora_rank": None}, InputError, "has no kv_lora_rank; a deepseek_v3 config needs it"),
        ({**MLA, "qk_rope_head_dim": 0}, InputError, "qk_rope_head_dim is 0"),
        ({**GEMMA4, "num_kv_shared_layers": 4}, InputError, "num_kv_shared_layers is 4 of 4 layers"),
        ({**GEMMA4, "num_kv_shared_layers": 3}, InputError, "layer 1 shares a cache of a kind that no layer before 1"),
        ({**GEMMA4, "use_bidirectional_attention": "all"}, UnsupportedModelError, "attention that is not causal"),
        ({**GEMMA4, "per_layer_config": {"1": {"chunk": 8}}}, UnsupportedModelError, "per_layer_config says 'chunk'"),
        ({**GEMMA4, "per_layer_config": [8]}, InputError, "per_layer_config is no object of objects"),
        ({"per_layer_config": {"1": {"head_dim": 8}}}, UnsupportedModelError, "per_layer_config says"),
        ({**LLAMA4, "layer_types": ["sliding_attention"] * 4}, UnsupportedModelError, "'sliding_attention'"),
        ({**STEP, "layer_types": SF * 3}, InputError, "layer_types must be a list of 4 names"),
        ({**NAS, "block_configs": [block(no_op=True)]}, InputError, "block_configs must be a list of 4 objects"),
        ({**NAS, "block_configs": [{}] * 4}, InputError, "block_configs has a layer without attention"),
        ({**NAS, "block_configs": [block(n_heads_in_group=3)] * 4}, InputError, "n_heads_in_group is '3'"),
        ({**NAS, "block_configs": [block(window_length=9)] * 4}, UnsupportedModelError, "attention to some of the"),
        ({**KIMI, "linear_attn_config": {**KDA}}, InputError, "has no full_attn_layers and kda_layers"),
        ({**KIMI, "linear_attn_config": {**KDA, "full_attn_layers": [4], "kda_layers": [0, 1, 2]}}, InputError,
         "does not name each of 4 layers once"),
        ({**KIMI, "linear_attn_config": [1]}, InputError, "linear_attn_config is '[1]'"),
        ({"model_type": "deepseek_v4", "head_dim": 512, "qk_rope_head_dim": 64, "index_head_dim": 128,
          "sliding_window": 128, "compress_ratios": [0, 8, 4, 4]}, UnsupportedModelError, "layers of kind '8'"),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "MM*"}, InputError, "num_hidden_layers says 4"),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "M?*-"}, UnsupportedModelError, "kind '?'"),
        ({"model_type": "nemotron_h"}, InputError, "has no layers_block_type and no hybrid_override_pattern"),
        ({"model_type": "mamba", "state_size": 16, "mamba_ssm_dtype": "float8"}, UnsupportedModelError, "'float8'"),
        ({"model_type": "bamba", "attn_layer_indices": [9], "mamba_n_heads": 8}, InputError, "attn_layer_indices must"),
        ({"model_type": "falcon_h1", "mamba_n_heads": 7}, InputError, "mamba_n_heads 7"),
        ({"model_type": "rwkv5", "head_size": 60}, InputError, "head_size 60 does not divide 512"),
        ({"model_type": "minimax"}, InputError, "has neither layer_types nor attn_type_list"),
        ({"model_type": "minimax_m2", "head_dim": 64, "attn_type_list": [1, 1, 1, 0]}, UnsupportedModelError, "'0'"),
        ({"model_type": "mpt", "attn_config": {"kv_n_heads": 3}}, InputError, "8 query heads cannot share 3"),
    ],
)  # fmt: skip
def test_what_a_family_does_not_say_or_says_in_an_unknown_way_is_named(changes, error, says):
    with pytest.raises(error) as caught:
        geometry(**changes)
    assert says in str(caught.value)


def test_a_state_is_of_the_type_that_the_config_names():
    mamba = {"model_type": "mamba", "state_size": 16, "intermediate_size": 1024}
    bits = [geometry(**mamba, **said).layers[0].states[1].item_bits
            for said in ({}, {"mamba_ssm_dtype": "bfloat16"}, {"mamba_ssm_cache_dtype": "torch.float32"})]  # fmt: skip
    assert bits == [32, 16, 32]
    assert geometry(**mamba).query_heads == 0


def test_a_nested_config_without_a_type_is_of_the_class_that_the_outer_type_names():
    text = {"num_hidden_layers": 10, "hidden_size": 2048, "num_kv_shared_layers": 5}
    found = read_geometry({"model_type": "gemma3n", "text_config": text}, "config.json")
    assert [layer.shared_with for layer in found.layers] == [None] * 5 + [3] * 4 + [4]
