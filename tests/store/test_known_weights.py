"""Weights of released models that the prediction is held to, exactly.

Each row has the keys that shape the weights, and the number of parameters that is published with the model: what
Hugging Face counts in its safetensors files, or its card. Both were written down from knowledge of them, in November
2026, and not looked up: that a sum over hundreds of matrices comes out to the last parameter is what speaks for a row.
"""

from typing import Any

import pytest

from kvplan.store.configs import read_geometry
from kvplan.store.weights import PredictedWeights, predict_weights

GIB = 2**30
MLA = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", **MLA, "q_lora_rank": 1536, "n_routed_experts": 256, "n_shared_experts": 1,
    "moe_intermediate_size": 2048, "first_k_dense_replace": 3, "moe_layer_freq": 1, "num_nextn_predict_layers": 1,
}  # fmt: skip
GPT_OSS = {
    "model_type": "gpt_oss", "head_dim": 64, "sliding_window": 128,
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]},
}  # fmt: skip
QWEN3_NEXT = {
    "model_type": "qwen3_next", "head_dim": 256, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "full_attention_interval": 4, "num_experts": 512, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "decoder_sparse_step": 1, "num_nextn_predict_layers": 1,
}  # fmt: skip
QWEN3_TOWER = {
    "depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "num_position_embeddings": 2304,
    "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3,
}  # fmt: skip


def shape(
    layers: int, heads: int | None, hidden: int, context: int | None, kv: int | None, wide: int | None,
    vocabulary: int | None,
) -> dict[str, Any]:  # fmt: skip
    """The keys that every config has."""
    keys = {"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv, "hidden_size": hidden,
            "max_position_embeddings": context, "intermediate_size": wide, "vocab_size": vocabulary}  # fmt: skip
    return {key: value for key, value in keys.items() if value is not None}


LLAMA_8B = {"model_type": "llama", **shape(32, 32, 4096, 131072, 8, 14336, 128256)}
LLAMA_70B = {"model_type": "llama", **shape(80, 64, 8192, 131072, 8, 28672, 128256)}
QWEN3_8B = {"model_type": "qwen3", "head_dim": 128, **shape(36, 32, 4096, 40960, 8, 12288, 151936)}
QWEN3_32B = {"model_type": "qwen3", "head_dim": 128, **shape(64, 64, 5120, 40960, 8, 25600, 151936)}
QWEN3_30B = {"model_type": "qwen3_moe", "head_dim": 128, "num_experts": 128, "moe_intermediate_size": 768,
             **shape(48, 32, 2048, 40960, 4, 6144, 151936)}  # fmt: skip
MISTRAL_SMALL = {
    "model_type": "mistral3", "spatial_merge_size": 2, "multimodal_projector_bias": False,
    "text_config": {"model_type": "mistral", "head_dim": 128, "sliding_window": None,
                    **shape(40, 32, 5120, 131072, 8, 32768, 131072)},
    "vision_config": {"model_type": "pixtral", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
                      "num_attention_heads": 16, "patch_size": 14, "image_size": 1540},
}  # fmt: skip
GPT_OSS_20B = {**GPT_OSS, "num_local_experts": 32, **shape(24, 64, 2880, 131072, 8, 2880, 201088)}
GPT_OSS_120B = {**GPT_OSS, "num_local_experts": 128, **shape(36, 64, 2880, 131072, 8, 2880, 201088)}
DEEPSEEK_R1 = {**DEEPSEEK_V3, **shape(61, 128, 7168, 163840, 128, 18432, 129280)}
GLM_AIR = {"model_type": "glm4_moe", "head_dim": 128, "attention_bias": True, "use_qk_norm": False,
           "n_routed_experts": 128, "n_shared_experts": 1, "moe_intermediate_size": 1408, "first_k_dense_replace": 1,
           "num_nextn_predict_layers": 1, **shape(46, 96, 4096, 131072, 8, 10944, 151552)}  # fmt: skip
QWEN3_NEXT_80B = {**QWEN3_NEXT, **shape(48, 16, 2048, 262144, 2, 5120, 151936)}

MODELS: dict[str, tuple[dict[str, Any], int]] = {
    "openai-community/gpt2": (
        {"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768, "n_positions": 1024, "vocab_size": 50257},
        124_439_808),
    "EleutherAI/gpt-j-6b": (
        {"model_type": "gptj", "n_layer": 28, "n_head": 16, "n_embd": 4096, "n_positions": 2048, "vocab_size": 50400},
        6_050_882_784),
    "meta-llama/Llama-3.1-8B": (LLAMA_8B, 8_030_261_248),
    "meta-llama/Llama-3.1-70B": (LLAMA_70B, 70_553_706_496),
    "meta-llama/Llama-3.1-405B": (
        {"model_type": "llama", **shape(126, 128, 16384, 131072, 8, 53248, 128256)}, 405_853_388_800),
    "mistralai/Mistral-7B-v0.3": (
        {"model_type": "mistral", "sliding_window": None, **shape(32, 32, 4096, 32768, 8, 14336, 32768)},
        7_248_023_552),
    "mistralai/Mixtral-8x7B-v0.1": (
        {"model_type": "mixtral", "num_local_experts": 8, "sliding_window": None,
         **shape(32, 32, 4096, 32768, 8, 14336, 32000)}, 46_702_792_704),
    "Qwen/Qwen2-7B": ({"model_type": "qwen2", **shape(28, 28, 3584, 131072, 4, 18944, 152064)}, 7_615_616_512),
    "Qwen/Qwen1.5-MoE-A2.7B": (
        {"model_type": "qwen2_moe", "num_experts": 60, "moe_intermediate_size": 1408,
         "shared_expert_intermediate_size": 5632, **shape(24, 16, 2048, 8192, 16, 5632, 151936)}, 14_315_784_192),
    "Qwen/Qwen3-8B": (QWEN3_8B, 8_190_735_360),
    "Qwen/Qwen3-32B": (QWEN3_32B, 32_762_123_264),
    "Qwen/Qwen3-30B-A3B": (QWEN3_30B, 30_532_122_624),
    "Qwen/Qwen3-235B-A22B": (
        {"model_type": "qwen3_moe", "head_dim": 128, "num_experts": 128, "moe_intermediate_size": 1536,
         **shape(94, 64, 4096, 40960, 4, 12288, 151936)}, 235_093_634_560),
    "google/gemma-2b": (
        {"model_type": "gemma", "head_dim": 256, **shape(18, 8, 2048, 8192, 1, 16384, 256000)}, 2_506_172_416),
    "google/gemma-2-9b": (
        {"model_type": "gemma2", "head_dim": 256, **shape(42, 16, 3584, 8192, 8, 14336, 256000)}, 9_241_705_984),
    "microsoft/phi-2": ({"model_type": "phi", **shape(32, 32, 2560, 2048, 32, 10240, 51200)}, 2_779_683_840),
    "microsoft/Phi-3.5-mini-instruct": (
        {"model_type": "phi3", **shape(32, 32, 3072, 131072, 32, 8192, 32064)}, 3_821_079_552),
    "THUDM/chatglm3-6b": (
        {"model_type": "chatglm", "kv_channels": 128, "multi_query_attention": True, "multi_query_group_num": 2,
         "num_attention_heads": 32, "num_layers": 28, "hidden_size": 4096, "seq_length": 8192, "add_qkv_bias": True,
         "add_bias_linear": False, "ffn_hidden_size": 13696, "padded_vocab_size": 65024}, 6_243_584_000),
    "Qwen/Qwen-1_8B": (
        {"model_type": "qwen", "kv_channels": 128, **shape(24, 16, 2048, 8192, None, 11008, 151936)}, 1_836_828_672),
    "tiiuae/falcon-40b": (
        {"model_type": "falcon", "new_decoder_architecture": True, "num_kv_heads": 8, "bias": False,
         **shape(60, 128, 8192, 2048, None, None, 65024)}, 41_303_293_952),
    "databricks/dbrx-base": (
        {"model_type": "dbrx", "d_model": 6144, "n_heads": 48, "n_layers": 40, "max_seq_len": 32768,
         "vocab_size": 100352, "attn_config": {"clip_qkv": 8, "kv_n_heads": 8},
         "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16}}, 131_596_523_520),
    "allenai/OLMoE-1B-7B-0924": (
        {"model_type": "olmoe", "num_experts": 64, **shape(16, 16, 2048, 4096, 16, 1024, 50304)}, 6_919_161_856),
    "openai/gpt-oss-20b": (GPT_OSS_20B, 20_914_757_184),
    "openai/gpt-oss-120b": (GPT_OSS_120B, 116_829_156_672),
    "MiniMaxAI/MiniMax-M2": (
        {"model_type": "minimax_m2", "head_dim": 128, "num_local_experts": 256,
         **shape(62, 48, 3072, 196608, 8, 1536, 200064)}, 228_689_764_864),
    "deepseek-ai/DeepSeek-R1": (DEEPSEEK_R1, 671_026_419_200),  # without what drafts; "671B" in its card
    "ai21labs/Jamba-v0.1": (
        {"model_type": "jamba", "num_experts": 16, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2,
         "mamba_dt_rank": 256, "expert_layer_period": 2, "expert_layer_offset": 1, "attn_layer_period": 8,
         "attn_layer_offset": 4, **shape(32, 32, 4096, 262144, 8, 14336, 65536)}, 51_570_323_328),
    "state-spaces/mamba-2.8b-hf": (
        {"model_type": "mamba", "state_size": 16, "conv_kernel": 4, "expand": 2, "time_step_rank": 160,
         **shape(64, None, 2560, None, None, 5120, 50280)}, 2_768_345_600),
    "tiiuae/falcon-mamba-7b": (
        {"model_type": "falcon_mamba", "state_size": 16, "conv_kernel": 4, "expand": 16, "time_step_rank": 256,
         "tie_word_embeddings": False, **shape(64, None, 4096, None, None, 8192, 65024)}, 7_272_665_088),
    "LiquidAI/LFM2-1.2B": (
        {"model_type": "lfm2", "conv_L_cache": 3, "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": True,
         "block_multiple_of": 256, "full_attn_idxs": [2, 5, 8, 10, 12, 14],
         **shape(16, 32, 2048, 128000, 8, 12288, 65536)}, 1_170_340_608),
    "moonshotai/Kimi-Linear-48B-A3B-Instruct": (
        {"model_type": "kimi_linear", **MLA, "q_lora_rank": None, "mla_use_nope": True, "num_experts": 256,
         "num_shared_experts": 1, "moe_intermediate_size": 1024, "first_k_dense_replace": 1, "linear_attn_config": {
             "num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4,
             "full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "kda_layers": [n for n in range(1, 27) if n % 4]},
         **shape(27, 32, 2304, 1048576, 32, 9216, 163840)}, 49_122_681_728),
    "nvidia/Llama-3_3-Nemotron-Super-49B-v1": (  # its first two layers, worked out by hand
        {"model_type": "nemotron-nas", "block_configs": [
            {"attention": {"n_heads_in_group": 8}, "ffn": {"ffn_mult": 5.25}}] * 2,
         **shape(2, 64, 8192, 131072, None, None, 128256)},
        2 * 128256 * 8192 + 8192 + 2 * (8192 * 2 * (8192 + 1024) + 3 * 8192 * 28672 + 2 * 8192)),
    "apple/OpenELM-270M": (
        {"model_type": "openelm", "num_transformer_layers": 16, "model_dim": 1280, "head_dim": 64, "vocab_size": 32000,
         "max_context_length": 2048, "ffn_dim_divisor": 256, "share_input_output_layers": True,
         "num_kv_heads": [3] * 5 + [4] * 7 + [5] * 4, "num_query_heads": [12] * 5 + [16] * 7 + [20] * 4,
         "ffn_multipliers": [0.5, 0.73, 0.97, 1.2, 1.43, 1.67, 1.9, 2.13, 2.37, 2.6, 2.83, 3.07, 3.3, 3.53, 3.77, 4.0]},
        271_527_168),
    "google/recurrentgemma-2b": (
        {"model_type": "recurrent_gemma", "lru_width": 2560, "attention_window_size": 2048, "conv1d_width": 4,
         "block_types": ["recurrent", "recurrent", "attention"], "head_dim": 256,
         **shape(26, 10, 2560, 8192, 1, 15360, 256000)}, 2_682_862_080),
    "openai/whisper-large-v3": (
        {"model_type": "whisper", "d_model": 1280, "encoder_layers": 32, "decoder_layers": 32,
         "encoder_attention_heads": 20, "decoder_attention_heads": 20, "encoder_ffn_dim": 5120, "decoder_ffn_dim": 5120,
         "num_mel_bins": 128, "max_source_positions": 1500, "max_target_positions": 448, "vocab_size": 51866,
         "is_encoder_decoder": True}, 1_543_490_560),
    "mistralai/Mistral-Small-3.2-24B-Instruct-2506": (MISTRAL_SMALL, 24_011_361_280),
    "google/gemma-3-27b-it": (
        {"model_type": "gemma3",
         "text_config": {"model_type": "gemma3_text", "head_dim": 128, "sliding_window": 1024,
                         **shape(62, 32, 5376, None, 16, 21504, None)},
         "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304,
                           "num_hidden_layers": 27, "num_attention_heads": 16, "patch_size": 14, "image_size": 896,
                           "vision_use_head": False}}, 27_432_406_640),
    "meta-llama/Llama-4-Scout-17B-16E": (
        {"model_type": "llama4",
         "text_config": {"model_type": "llama4_text", "head_dim": 128, "intermediate_size_mlp": 16384,
                         "num_local_experts": 16, "interleave_moe_layer_step": 1,
                         **shape(48, 40, 5120, 10485760, 8, 8192, 202048)},
         "vision_config": {"model_type": "llama4_vision_model", "hidden_size": 1408, "intermediate_size": 5632,
                           "num_hidden_layers": 34, "num_attention_heads": 16, "patch_size": 14, "image_size": 336,
                           "projector_input_dim": 4096, "projector_output_dim": 4096, "vision_output_dim": 4096}},
        108_641_793_536),
    "Qwen/Qwen2.5-VL-7B-Instruct": (
        {"model_type": "qwen2_5_vl", **shape(28, 28, 3584, 128000, 4, 18944, 152064),
         "vision_config": {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": 3584,
                           "num_heads": 16, "in_chans": 3, "patch_size": 14, "spatial_merge_size": 2,
                           "temporal_patch_size": 2}}, 8_292_166_656),
    "Qwen/Qwen3-VL-2B-Instruct": (
        {"model_type": "qwen3_vl", "tie_word_embeddings": True,
         "text_config": {"model_type": "qwen3_vl_text", "head_dim": 128,
                         **shape(28, 16, 2048, 262144, 8, 6144, 151936)},
         "vision_config": {**QWEN3_TOWER, "out_hidden_size": 2048, "deepstack_visual_indexes": [5, 11, 17]}},
        2_127_532_032),
}  # fmt: skip


def predicted(config: dict[str, Any], **changes: Any) -> PredictedWeights:
    config = {**config, **changes}
    return predict_weights(config, read_geometry(config, "config.json"), "config.json")


@pytest.mark.parametrize("name", sorted(MODELS))
def test_the_parameters_of_a_released_model_are_predicted_exactly(name: str) -> None:
    config, parameters = MODELS[name]
    assert predicted(config).model.parameters == parameters


@pytest.mark.parametrize(
    ("config", "in_files", "embeddings"),
    [(GLM_AIR, 110_468_824_832, 2 * 151552 * 4096), (QWEN3_NEXT_80B, 81_324_862_720, 0)],
    ids=["zai-org/GLM-4.5-Air", "Qwen/Qwen3-Next-80B-A3B-Instruct"],
)
def test_layers_that_draft_are_the_rest_of_the_files(config: dict[str, Any], in_files: int, embeddings: int) -> None:
    weights = predicted(config)
    assert weights.drafts is not None
    assert weights.model.parameters + weights.drafts.parameters + embeddings == in_files  # GLM's hold them twice


FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
ROW_FP8 = {
    "quantization_config": {"quant_method": "compressed-tensors", "ignore": ["lm_head"], "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}}},
}  # fmt: skip
PLANNER = "llm-d-planner docs/empirical-vllm-memory-results.md, vLLM 0.11.0"


@pytest.mark.parametrize(
    ("config", "logged_gib", "below", "above"),
    [
        pytest.param(LLAMA_8B, 14.99, 0.003, 0, id=f"Llama-3.1-8B-Instruct: {PLANNER}"),
        pytest.param(LLAMA_8B, 14.96, 0, 0.001, id="Meta-Llama-3-8B: vllm-project/vllm#12330, 0.6.6"),
        pytest.param(MISTRAL_SMALL, 44.76, 0.001, 0, id=f"Mistral-Small-3.2-24B: {PLANNER}"),
        pytest.param(QWEN3_32B, 61.03, 0.001, 0, id=f"Qwen3-32B: {PLANNER}"),
        pytest.param(QWEN3_8B, 15.2683, 0.001, 0, id="Qwen3-8B: a public log of vLLM 0.9"),
        pytest.param(LLAMA_70B | ROW_FP8, 2 * 33.88, 0.002, 0.001,
                     id=f"RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic on two GPUs: {PLANNER}"),
        pytest.param(GPT_OSS_20B, 13.47, 0.06, 0, id=f"gpt-oss-20b: {PLANNER}"),
        pytest.param(GPT_OSS_120B, 64.38, 0.06, 0, id=f"gpt-oss-120b: {PLANNER}"),
    ],
)  # fmt: skip
def test_the_bytes_are_what_an_engine_printed_after_loading(
    config: dict[str, Any], logged_gib: float, below: float, above: float
) -> None:
    """vLLM's figure has its tables of positions too; of gpt-oss it pads 2880 features to a multiple of 256."""
    found = predicted(config).model.nbytes / GIB
    assert logged_gib * (1 - below) - 0.01 <= found <= logged_gib * (1 + above) + 0.01


def test_fp8_in_blocks_has_a_scale_for_each_block_begun() -> None:
    plain, stored = predicted(QWEN3_8B).model, predicted(QWEN3_8B | FP8).model
    matrices = 36 * (4096 * (4096 * 2 + 1024 * 2) + 3 * 4096 * 12288)
    assert plain.parameters == stored.parameters
    assert plain.nbytes - stored.nbytes == matrices - matrices // 128**2 * 4
