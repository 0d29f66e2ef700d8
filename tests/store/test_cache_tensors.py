"""The geometry read from a config is that of the tensors that transformers caches for a tiny random model of it.

transformers 5.24 keeps a token less of a window than a query sees, for the query's own comes with it, and an input more
of a convolution than the next step reads. Nothing else differs.
"""

from dataclasses import replace

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, WhisperForConditionalGeneration
from transformers.models.mistral4.modeling_mistral4 import Mistral4Model
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLTextModel
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLTextModel
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextModel
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeTextModel
from transformers.models.step3p7.modeling_step3p7 import Step3p7TextModel

from kvplan.core.logical import layer_bytes
from kvplan.core.specs import LayerKind
from kvplan.store.architectures import ARCHITECTURES
from kvplan.store.configs import language_keys, read_geometry
from kvplan.store.weights import WEIGHTS, model_weights
from kvplan_kernels.format import parse

TOKENS, WINDOW = 40, 16
BASE = {
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32, "vocab_size": 99,
    "intermediate_size": 48, "max_position_embeddings": 256, "tie_word_embeddings": False, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MOE = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_local_experts": 4,
    "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
}  # fmt: skip
MLA = {"kv_lora_rank": 24, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 20,
       "num_key_value_heads": 4, "first_k_dense_replace": 1}  # fmt: skip
MIXER = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 12, "mamba_d_conv": 4,
         "mamba_expand": 2, "mamba_chunk_size": 8}  # fmt: skip
DELTA = {"head_dim": 16, "linear_key_head_dim": 8, "linear_value_head_dim": 10, "linear_num_key_heads": 2,
         "linear_num_value_heads": 4, "linear_conv_kernel_dim": 3}  # fmt: skip
GEMMA = {"head_dim": 16, "sliding_window": WINDOW, "vocab_size_per_layer_input": 99, "hidden_size_per_layer_input": 8}
LISTED = ["sliding_attention", "full_attention"] * 2
TINY = {
    "llama": {},
    "gpt_oss": {"head_dim": 16, "sliding_window": WINDOW, **MOE},
    "glm4_moe": MOE,
    "gemma3_text": {"head_dim": 16, "sliding_window": WINDOW, "layer_types": LISTED},
    "gemma3n_text": {**GEMMA, "layer_types": LISTED, "num_kv_shared_layers": 2, "num_hidden_layers": 4,
                     "laurel_rank": 4, "activation_sparsity_pattern": [0.0] * 4},
    "gemma4_text": {**GEMMA, "global_head_dim": 24, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
                    "layer_types": LISTED},
    "llama4_text": {"head_dim": 16, "attention_chunk_size": WINDOW, "intermediate_size_mlp": 48, **MOE},
    "deepseek_v2": {**MLA, **MOE},
    "deepseek_v3": {**MLA, **MOE},
    "glm4_moe_lite": {**MLA, **MOE},
    "axk1": {**MLA, **MOE},
    "longcat_flash": {**MLA, **MOE, "head_dim": 8},
    "minicpm3": MLA,
    "youtu": {**MLA, "head_dim": 8},
    "sarvam_mla": {**MLA, **MOE},
    "deepseek_v32": {**MLA, **MOE, "index_head_dim": 16, "index_n_heads": 2, "index_topk": 8},
    "glm_moe_dsa": {**MLA, **MOE, "index_head_dim": 16, "index_n_heads": 2, "index_topk": 8,
                    "indexer_types": ["full", "full", "shared", "full"]},
    "qwen3_next": {**DELTA, **MOE, "shared_expert_intermediate_size": 16},
    "qwen3_5_text": DELTA,
    "olmo_hybrid": {**DELTA, "head_dim": 8, "linear_num_key_heads": 4, "layer_types": [
        "linear_attention", "full_attention"] * 2},
    "qwen3_5_moe_text": {**DELTA, **MOE, "shared_expert_intermediate_size": 16},
    "mamba": {"state_size": 12, "conv_kernel": 4, "expand": 2, "intermediate_size": 64},
    "falcon_mamba": {"state_size": 12, "conv_kernel": 4, "expand": 2, "intermediate_size": 64},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 12, "conv_kernel": 4, "n_groups": 2, "chunk_size": 8},
    "falcon_h1": {**MIXER, "mamba_d_ssm": 64},
    "bamba": {**MIXER, "attn_layer_indices": [1, 3]},
    "granitemoehybrid": {**MIXER, **MOE, "layer_types": ["mamba", "attention"] * 2, "shared_intermediate_size": 16},
    "jamba": {"mamba_d_state": 12, "mamba_d_conv": 4, "mamba_expand": 2, "attn_layer_period": 2,
              "attn_layer_offset": 1, "use_mamba_kernels": False, "mamba_dt_rank": 4, **MOE},
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 12, "head_dim": 16,
                   "hybrid_override_pattern": "M*-E", "moe_shared_expert_intermediate_size": 16, **MOE},
    "kimi_linear": {**MLA, **MOE, "linear_attn_config": {
        "num_heads": 2, "head_dim": 8, "short_conv_kernel_size": 4, "full_attn_layers": [2, 4], "kda_layers": [1, 3]}},
    "lfm2": {"conv_L_cache": 3, "full_attn_idxs": [1, 3]},
    "minimax": {"head_dim": 8, "layer_types": ["linear_attention", "full_attention"] * 2, **MOE},
    "minimax_m2": {"head_dim": 16, "attn_type_list": [1] * 4, **MOE},
    "mimo_v2_flash": {"head_dim": 24, "v_head_dim": 16, "sliding_window": WINDOW, **MOE,
                      "hybrid_layer_pattern": [0, 1, 1, 1],
                      "layer_types": ["full_attention"] + ["sliding_attention"] * 3},
    "step3p5": {"head_dim": 16, "sliding_window": WINDOW, "layer_types": LISTED, "share_expert_dim": 16, **MOE},
    "deepseek_v4": {"head_dim": 32, "qk_rope_head_dim": 8, "num_key_value_heads": 1, "sliding_window": WINDOW,
                    "index_head_dim": 16, "index_n_heads": 2, "index_topk": 2, "q_lora_rank": 16, "o_lora_rank": 8,
                    "o_groups": 2, "compress_ratios": [0, 4, 128, 4], **MOE},
    "axk2": {**MLA, **MOE, "index_head_dim": 16, "index_n_heads": 2, "index_topk": 8, "head_dim": 8},
    "bailing_hybrid": {**MLA, **MOE, "head_dim": 8, "layer_group_size": 2, "short_conv_kernel_size": 4},
    "gemma4_unified_text": {"head_dim": 16, "sliding_window": WINDOW, "global_head_dim": 24, "layer_types": LISTED,
                            "num_global_key_value_heads": 1, "attention_k_eq_v": True},
    "zamba": {"n_mamba_heads": 2, "mamba_d_state": 12, "mamba_d_conv": 4, "mamba_expand": 2, "attn_layer_period": 2,
              "attn_layer_offset": 1, "attention_head_dim": 16, "attention_hidden_size": 64, "num_key_value_heads": 4},
    "zamba2": {"n_mamba_heads": 4, "mamba_d_state": 12, "mamba_d_conv": 4, "mamba_ngroups": 2, "mamba_expand": 2,
               "layers_block_type": ["mamba", "hybrid"] * 2, "chunk_size": 8, "num_key_value_heads": 4},
    "afmoe": {"head_dim": 8, "sliding_window": WINDOW, **MOE},
    "cohere2_moe": {"head_dim": 8, "sliding_window": WINDOW, "layer_types": LISTED, **MOE},
    "laguna": {"head_dim": 8, "sliding_window": WINDOW, "layer_types": LISTED, "shared_expert_intermediate_size": 16,
               **MOE},
    "mellum": {"head_dim": 8, "sliding_window": WINDOW, "layer_types": LISTED, **MOE},
    "flint": {"head_dim": 8, "sliding_window": WINDOW, "layer_types": LISTED, "shared_expert_intermediate_size": 16,
              **MOE},
    "beam": {"head_dim": 8, "sliding_window": WINDOW, "layer_types": LISTED, **MOE},
    "gpt_neo": {"num_layers": 4, "num_heads": 4, "window_size": WINDOW, "attention_types": [[["global", "local"], 2]],
                "num_key_value_heads": 4},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 4, "max_seq_len": 256},
}  # fmt: skip


def cached(model_type, config):
    """The layers of the cache after a forward pass over TOKENS tokens, in bf16."""
    torch.manual_seed(0)
    if model_type == "step3p5":  # a text model that no Auto class builds
        config._attn_implementation = "eager"
        model = Step3p7TextModel(config).to(torch.bfloat16)
    else:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="eager")
    with torch.no_grad():
        cache = model.eval()(torch.randint(3, 99, (1, TOKENS)), use_cache=True).past_key_values
    for layer, state in zip(cache.layers, getattr(cache, "linear_cache", []), strict=False):
        layer.recurrent_states = state  # MiniMax's cache has a list of its own
    return cache.layers


def nbytes(layer, *names):
    """Bytes of the tensors that the cache's layer has under these names, inside lists and dicts too."""
    return sum(tensor.nbytes for name in names for tensor in tensors(getattr(layer, name, None)))


def tensors(value):
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in tensors(item)]
    return [value] if isinstance(value, torch.Tensor) else []


def kept(layer):
    """The bytes that transformers keeps of one layer, a token of a window and an input of a convolution aside."""
    keys, values = (getattr(layer, name, None) for name in ("keys", "values"))
    same = keys is not None and keys.shape == values.shape and torch.equal(keys, values)  # DeepSeek V4's K is its V
    return nbytes(
        layer, "keys", *([] if same else ["values"]), "indexer_keys", "compressed_kv", "recurrent_states", "conv_states"
    )


def expected(spec, model_type):
    """The bytes that the geometry says, with transformers' token less of a window and input more of a convolution."""
    tokens = TOKENS if spec.window_tokens is None else min(TOKENS, spec.window_tokens - 1)
    total = layer_bytes(replace(spec, window_tokens=tokens, sides=(), states=()), parse("bf16"), TOKENS)
    total += layer_bytes(replace(spec, kind=LayerKind.NONE, states=()), parse("bf16"), TOKENS)
    for state in spec.states:
        kernel = TINY[model_type].get("linear_conv_kernel_dim", TINY[model_type].get("conv_L_cache", 4))
        total += state.nbytes * kernel // (kernel - 1) if state.name == "convolution inputs" else state.nbytes
    return total


@pytest.mark.parametrize("model_type", sorted(TINY))
def test_the_geometry_is_that_of_the_tensors_that_transformers_caches(model_type):
    values = {**BASE, **TINY[model_type]}
    config = CONFIG_MAPPING[model_type](**values)
    found = read_geometry({**values, "model_type": model_type}, "config.json")
    assert read_geometry(config.to_dict(), "config.json").layers == found.layers
    layers = cached(model_type, config)
    assert [kept(layer) for layer in layers] == [expected(spec, model_type) for spec in found.layers]


def test_every_family_that_transformers_has_is_compared():
    families = {name for name, row in ARCHITECTURES.items() if row.cache and name in CONFIG_MAPPING}
    assert families - set(TINY) == {
        "dbrx",
        "lfm2_moe",
        "mistral4",
        "recurrent_gemma",
        "rwkv",
        "step3p7",
        "whisper",
        "xlstm",
    }


MHA = {"num_key_value_heads": 4}
WEIGHED = {
    "hy_v3": {"head_dim": 8, **MOE},
    "iquestcoder": {"head_dim": 8},
    "recurrent_gemma": {"attention_window_size": WINDOW, "lru_width": 24, "conv1d_width": 4, "num_key_value_heads": 1,
                        "block_types": ["recurrent", "recurrent", "attention"]},
    "rwkv": {"attention_hidden_size": 32},
    "mistral4": {**MLA, **MOE, "head_dim": 20},
    **dict.fromkeys(("biogpt", "bloom", "codegen", "gpt2", "gpt_neox", "gptj", "persimmon"), MHA),
    **dict.fromkeys((
        "exaone_moe", "flex_olmo", "granitemoe", "granitemoe_swa", "granitemoeshared", "mixtral", "olmoe",
        "phimoe", "qwen3_moe", "qwen3_vl_moe_text", "sarvam_moe", "solar_open"), MOE),
    "opt": {**MHA, "ffn_dim": 48},
    "falcon": {"num_key_value_heads": None},
    "gpt_bigcode": {"num_key_value_heads": None},
    "helium": {"head_dim": 8},
    "deepseek_v4": {"intermediate_size": 16, "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
                    "num_experts_per_tok": 2},
    "qwen2_moe": {**MOE, "shared_expert_intermediate_size": 16},
    "aria_text": {"moe_num_experts": 4},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_intermediate_size": 16},
    "gemma": {"head_dim": 16},
    "longcat_flash": {"zero_expert_num": 0, "expert_ffn_hidden_size": 16, "ffn_hidden_size": 48},
    "step3p5": {"moe_layers_enum": [1, 3]},
    "dots1": {"n_shared_experts": 2, **MOE},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8, "num_experts": 4, "moe_topk": 2},
    "ministral": {"head_dim": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, **MOE, "num_dense_layers": 1},
    "dbrx": {"d_model": 32, "n_heads": 4, "n_layers": 4, "max_seq_len": 256,
             "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
             "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2}},
}  # fmt: skip
"""What tiny models need beside BASE and TINY to be built, or for the class to read what the config says."""
SWITCHED = {
    "attention_bias": True, "mlp_bias": True, "use_bias": True, "use_qkv_bias": True, "qk_layernorm": True,
    "use_qk_norm": True, "tie_word_embeddings": True, "mamba_proj_bias": True, "mamba_conv_bias": False,
    "use_conv_bias": False, "conv_bias": True, "bias": True, "enable_bias": False, "use_parallel_residual": True,
    "use_post_norm": False, "parallel_attn": False, "mamba_rms_norm": True, "lm_head_bias": True, "qkv_bias": False,
    "attention_out_bias": True, "decoder_sparse_step": 2, "interleave_moe_layer_step": 2, "expert_layer_period": 4,
    "hidden_size_per_layer_input": 0, "enable_moe_block": True, "use_double_wide_mlp": True,
    "shared_intermediate_size": 24, "layer_norm_elementwise_affine": False, "word_embed_proj_dim": 16,
    "moe_latent_size": 8, "hc_mult": 2, "block_auto_adjust_ff_dim": False, "n_inner": 40, "use_expert_bias": False,
    "first_k_dense_replace": 2, "n_shared_experts": 3, "num_shared_experts": 3, "moe_num_shared_experts": 0,
    "laurel_rank": 6, "altup_num_inputs": 3,
}  # fmt: skip
"""Other choices of every key that adds weights or leaves them out."""
UNTIED = {"tie_word_embeddings": False}
KEPT = {
    **dict.fromkeys(("kimi_linear", "nemotron_h", "dbrx"), UNTIED),  # never tied, whatever the config says
    "glm4_moe_lite": {"first_k_dense_replace": 1},  # not read by the class
    "mimo_v2_flash": {"first_k_dense_replace": 1},
    "hy_v3": {"first_k_dense_replace": 1},
    "mellum": {"first_k_dense_replace": 0},
    "gemma4_text": {"num_kv_shared_layers": 2, "num_experts": 4, "moe_intermediate_size": 16},
    "internlm3": {"qkv_bias": True},
}  # fmt: skip
TEXT_MODELS = {
    "mistral4": Mistral4Model, "qwen2_vl_text": Qwen2VLTextModel, "qwen2_5_vl_text": Qwen2_5_VLTextModel,
    "qwen3_vl_text": Qwen3VLTextModel, "qwen3_vl_moe_text": Qwen3VLMoeTextModel, "step3p5": Step3p7TextModel,
}  # fmt: skip
"""Classes without an output embedding, of text models that no Auto class builds."""
COMPUTED = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")


def stored_elements(model_type, config):
    """Elements of what a checkpoint of the model holds, each tensor once."""
    text = TEXT_MODELS.get(model_type)
    model = text(config) if text else AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    tensors = {id(tensor): tensor for name, tensor in model.state_dict(keep_vars=True).items()
               if not name.endswith(COMPUTED)}  # fmt: skip
    return sum(tensor.numel() for tensor in tensors.values())


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("switched", [False, True])
@pytest.mark.parametrize("model_type", sorted(set(WEIGHTS) & set(CONFIG_MAPPING) - {"step3p7", "whisper"}))
def test_the_weights_of_a_config_are_those_of_the_model(model_type, switched):
    values = {**BASE, **TINY.get(model_type, {}), **WEIGHED.get(model_type, {})}
    if switched:
        values |= SWITCHED | KEPT.get(model_type, {})
    if model_type in TEXT_MODELS:
        values["tie_word_embeddings"] = True
    config = CONFIG_MAPPING[model_type](**values)
    elements = stored_elements(model_type, config)
    for spelling in ({**values, "model_type": model_type}, config.to_dict()):
        geometry = read_geometry(spelling, "config.json")
        weights = model_weights(language_keys(spelling, "config.json"), geometry)
        assert sum(weight.elements for weight in weights) == elements


def test_every_family_has_weights_that_are_compared_or_is_named_here():
    assert set(ARCHITECTURES) - set(WEIGHTS) == {
        "axk2", "bailing_hybrid", "beam", "cohere2_moe", "flint", "gpt_neox_japanese", "laguna", "phi4_multimodal",
        "rwkv5", "rwkv6", "rwkv7", "xlstm", "zamba", "zamba2",
    }  # fmt: skip
    unlike = set(WEIGHTS) - set(CONFIG_MAPPING)
    assert unlike == {
        "RefinedWeb", "RefinedWebModel", "baichuan", "chatglm", "deepseek", "deepseek_ref", "internlm", "internlm2",
        "kimi_k2", "mimo", "minicpm", "minimax_text_01", "nemotron-nas", "openelm", "phi-msft", "qwen",
    }  # fmt: skip


STATEFUL = {"vocab_size": 99, "num_hidden_layers": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def run(model_type, values):
    config = CONFIG_MAPPING[model_type](**values)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        answer = model(torch.randint(3, 99, (1, TOKENS)), use_cache=True)
    for spelling in ({**values, "model_type": model_type}, config.to_dict()):
        yield model, answer, read_geometry(spelling, "config.json").layers


def test_rwkv_4_keeps_two_tokens_and_three_numbers_a_channel():
    values = {**STATEFUL, "hidden_size": 32, "attention_hidden_size": 32}
    for _, answer, layers in run("rwkv", values):
        assert sum(state.nbytes for layer in layers for state in layer.states) == nbytes(answer, "state")


def test_xlstm_keeps_a_matrix_a_vector_and_a_number_a_head():
    values = {**STATEFUL, "hidden_size": 256, "num_heads": 4, "num_hidden_layers": 2}
    for _, answer, layers in run("xlstm", values):
        kept_elements = sum(one.numel() for one in tensors(answer.cache_params.rnn_state))
        assert sum(state.elements for layer in layers for state in layer.states) == kept_elements


def test_recurrent_gemma_keeps_a_state_in_two_of_three_layers():
    values = {**STATEFUL, "num_attention_heads": 4, "num_key_value_heads": 1, "hidden_size": 32, "lru_width": 24,
              "conv1d_width": 4, "attention_window_size": WINDOW, "intermediate_size": 48,
              "max_position_embeddings": 256, "block_types": ["recurrent", "recurrent", "attention"]}  # fmt: skip
    for model, _, layers in run("recurrent_gemma", values):
        blocks = [layer.temporal_block for layer in model.model.layers]
        held = [
            nbytes(one, "conv1d_state") + nbytes(getattr(one, "rg_lru", None), "recurrent_states") for one in blocks
        ]
        assert [sum(state.nbytes for state in layer.states) for layer in layers] == held
        assert (layers[2].window_tokens, layers[2].kv_heads, layers[2].head_dim) == (WINDOW, 1, 8)


WHISPER = {
    "vocab_size": 60, "d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 24, "decoder_ffn_dim": 40, "num_mel_bins": 8,
    "max_source_positions": 20, "max_target_positions": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 3, "suppress_tokens": None, "begin_suppress_tokens": None,
}  # fmt: skip


def test_whisper_has_the_weights_of_an_encoder_and_a_decoder():
    config = CONFIG_MAPPING["whisper"](**WHISPER)
    model = WhisperForConditionalGeneration(config)
    stored = {id(one): one.numel() for one in model.state_dict(keep_vars=True).values()}
    spelling = config.to_dict()
    weights = model_weights(language_keys(spelling, "config.json"), read_geometry(spelling, "config.json"))
    assert sum(weight.elements for weight in weights) == sum(stored.values())


def test_whisper_keeps_what_its_encoder_said_beside_a_cache_of_its_own():
    config = CONFIG_MAPPING["whisper"](**WHISPER)
    model = WhisperForConditionalGeneration(config).to(torch.bfloat16).eval()
    sound = torch.zeros(1, 8, 40, dtype=torch.bfloat16)
    with torch.no_grad():
        cache = model(sound, decoder_input_ids=torch.zeros(1, TOKENS, dtype=int), use_cache=True).past_key_values
    own, crossed = (sum(nbytes(layer, "keys", "values") for layer in part.layers)
                    for part in (cache.self_attention_cache, cache.cross_attention_cache))  # fmt: skip
    for spelling in ({**WHISPER, "model_type": "whisper", "is_encoder_decoder": True}, config.to_dict()):
        layers = read_geometry(spelling, "config.json").layers
        assert sum(state.nbytes for layer in layers for state in layer.states) == crossed
        assert sum(layer_bytes(layer, parse("bf16"), TOKENS) for layer in layers) == own + crossed
