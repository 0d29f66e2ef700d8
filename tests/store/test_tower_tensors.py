"""The weights of models that see, held equal to the tensors of tiny models of transformers."""

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from kvplan.errors import UnsupportedModelError
from kvplan.store.configs import read_geometry
from kvplan.store.weights import predict_weights

TEXT = {
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32, "vocab_size": 99,
    "intermediate_size": 48, "max_position_embeddings": 256, "head_dim": 8, "pad_token_id": 0,
}  # fmt: skip
PATCHES = {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3}
QWEN = {"depth": 3, "hidden_size": 40, "intermediate_size": 56, "num_heads": 5, "out_hidden_size": 32, **PATCHES}
ENCODER = {"hidden_size": 40, "intermediate_size": 56, "num_attention_heads": 5, "num_hidden_layers": 3,
           "patch_size": 4, "image_size": 16}  # fmt: skip
PIXTRAL = {**ENCODER, "model_type": "pixtral", "head_dim": 8}
DELTA = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 2}
MODELS = {
    "qwen3_vl": ("qwen3_vl", {}, {**QWEN, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}, {}),
    "qwen3_5": ("qwen3_5", DELTA, {**QWEN, "num_position_embeddings": 16, "deepstack_visual_indexes": []}, {}),
    "qwen2_5_vl": ("qwen2_5_vl", {}, {**QWEN, "fullatt_block_indexes": [1]}, {}),
    "qwen2_vl": ("qwen2_vl", {}, {**PATCHES, "depth": 3, "embed_dim": 40, "hidden_size": 32, "mlp_ratio": 2,
                                  "num_heads": 5}, {}),
    "mistral3": ("mistral3", {"model_type": "mistral"}, PIXTRAL, {"spatial_merge_size": 2}),
    "llava of CLIP": ("llava", {"model_type": "llama"}, {**ENCODER, "model_type": "clip_vision_model"}, {}),
    "llava of Pixtral": ("llava", {"model_type": "mistral"}, PIXTRAL, {"multimodal_projector_bias": False}),
    "gemma3": ("gemma3", {}, {**ENCODER, "vision_use_head": False}, {"mm_tokens_per_image": 4}),
    "gemma3 with a head": ("gemma3", {}, ENCODER, {"mm_tokens_per_image": 4}),
    "gemma4": ("gemma4", {"global_head_dim": 16, "vocab_size_per_layer_input": 99, "hidden_size_per_layer_input": 8},
               {**ENCODER, "head_dim": 8, "num_key_value_heads": 5, "position_embedding_size": 12,
                "pooling_kernel_size": 3, "standardize": True}, {"audio_config": None}),
    "kimi_k25": ("kimi_k25", {
        "model_type": "deepseek_v3", "q_lora_rank": 16, "kv_lora_rank": 24, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 12, "v_head_dim": 20, "first_k_dense_replace": 1, "n_routed_experts": 4,
        "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1},
        {**ENCODER, "pos_emb_height": 6, "pos_emb_width": 7}, {
            "projection_hidden_size": 40, "tie_word_embeddings": False}),
    "llama4": ("llama4", {"num_local_experts": 2, "intermediate_size_mlp": 48},
               {**ENCODER, "intermediate_size": 160, "vision_output_dim": 24, "projector_input_dim": 24,
                "projector_output_dim": 24}, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(MODELS))
def test_the_weights_of_a_model_that_sees_are_those_of_its_tensors(name):
    outer, text, vision, more = MODELS[name]
    config = CONFIG_MAPPING[outer](text_config={**TEXT, **text}, vision_config=dict(vision), **more).to_dict()
    model = AutoModelForImageTextToText.from_config(CONFIG_MAPPING[outer].from_dict(config), dtype=torch.bfloat16)
    elements = sum({id(one): one.numel() for one in model.state_dict(keep_vars=True).values()}.values())
    found = predict_weights(config, read_geometry(config, "config.json"), "config.json")
    assert found.model.parameters == elements


def test_a_quantization_of_the_language_model_is_not_of_the_tower():
    outer, text, vision, more = MODELS["mistral3"]
    config = CONFIG_MAPPING[outer](text_config={**TEXT, **text}, vision_config=dict(vision), **more).to_dict()
    fp8 = {"quant_method": "fp8"}
    inside = {**config, "text_config": {**config["text_config"], "quantization_config": fp8}}
    found = [
        predict_weights(one, read_geometry(one, "config.json"), "config.json").model.nbytes
        for one in (config, inside, {**config, "quantization_config": fp8})
    ]
    assert found[0] > found[1] > found[2]


def test_a_part_that_hears_or_is_not_described_is_told_apart_from_none():
    text = {"model_type": "gemma4_text", "global_head_dim": 16, **TEXT}
    for config, message in [
        ({"model_type": "gemma4", "text_config": text, "vision_config": {}, "audio_config": {"a": 1}}, "audio_config"),
        ({"model_type": "other", "text_config": text}, "the weights of what other has beside its language model"),
    ]:
        with pytest.raises(UnsupportedModelError, match=message):
            predict_weights(config, read_geometry(config, "config.json"), "config.json")
