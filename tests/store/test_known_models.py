"""Facts of released models, worked out by hand from their config.json, that the reader is held to.

Each row has the keys that shape the cache, what one more token adds at the model's longest context and what a sequence
takes beside that, in bf16, as products of what the config says. The configs were read on 2026-11-30 at
https://huggingface.co/<name>/blob/main/config.json, or where a row gives another source. Rows marked with what an
engine printed agree with its log.
"""

from typing import Any

import pytest

from kvplan.core.logical import logical_size
from kvplan.core.specs import ModelSpec
from kvplan.store.configs import read_geometry
from kvplan_kernels.format import parse

MLA = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
DELTA = {"linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
         "linear_num_key_heads": 16, "full_attention_interval": 4, "mamba_ssm_dtype": "float32"}  # fmt: skip
NEMOTRON = {"model_type": "nemotron_h", "mamba_head_dim": 64, "n_groups": 8, "conv_kernel": 4, "expand": 2}


def shape(layers: int | None, heads: int | None, hidden: int, context: int | None, kv: int | None = None) -> Any:
    """The keys that every config has."""
    keys = {"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv, "hidden_size": hidden,
            "max_position_embeddings": context, "vocab_size": 1000}  # fmt: skip
    return {key: value for key, value in keys.items() if value is not None}


def every(pattern: str, kinds: dict[str, str]) -> list[str]:
    return [kinds[letter] for letter in pattern]


SF = {"s": "sliding_attention", "f": "full_attention"}
MODELS: dict[str, tuple[dict[str, Any], int, int]] = {
    # K and V of every token
    "meta-llama/Llama-3.1-8B": (  # vLLM: 131072 tokens need 16.0 GiB
        {"model_type": "llama", **shape(32, 32, 4096, 131072, 8)}, 32 * 2 * 8 * 128 * 2, 0),
    "meta-llama/Llama-3.1-405B": (
        {"model_type": "llama", **shape(126, 128, 16384, 131072, 8)}, 126 * 2 * 8 * 128 * 2, 0),
    "Qwen/Qwen3-8B": (
        {"model_type": "qwen3", "head_dim": 128, **shape(36, 32, 4096, 40960, 8)}, 36 * 2 * 8 * 128 * 2, 0),
    "Qwen/Qwen3-235B-A22B": (
        {"model_type": "qwen3_moe", "head_dim": 128, **shape(94, 64, 4096, 40960, 4)}, 94 * 2 * 4 * 128 * 2, 0),
    "MiniMaxAI/MiniMax-M2.7": (  # vLLM: 196608 tokens need 23.25 GiB on each of two GPUs
        {"model_type": "minimax_m2", "head_dim": 128, **shape(62, 48, 3072, 196608, 8)}, 62 * 2 * 8 * 128 * 2, 0),
    "microsoft/Phi-3.5-mini-instruct": (
        {"model_type": "phi3", "sliding_window": 262144, **shape(32, 32, 3072, 131072, 32)}, 32 * 2 * 32 * 96 * 2, 0),
    "google/gemma-2b": (
        {"model_type": "gemma", "head_dim": 256, **shape(18, 8, 2048, 8192, 1)}, 18 * 2 * 1 * 256 * 2, 0),
    "tiiuae/falcon-7b": (
        {"model_type": "falcon", "multi_query": True, **shape(32, 71, 4544, 2048)}, 32 * 2 * 1 * 64 * 2, 0),
    "tiiuae/falcon-40b": (
        {"model_type": "falcon", "multi_query": True, "new_decoder_architecture": True, "num_kv_heads": 8,
         **shape(60, 128, 8192, 2048)}, 60 * 2 * 8 * 64 * 2, 0),
    "bigcode/starcoder": (
        {"model_type": "gpt_bigcode", "n_embd": 6144, "n_head": 48, "n_layer": 40, "n_positions": 8192,
         "multi_query": True, "vocab_size": 49152}, 40 * 2 * 1 * 128 * 2, 0),
    "THUDM/chatglm3-6b": (
        {"model_type": "chatglm", "kv_channels": 128, "multi_query_attention": True, "multi_query_group_num": 2,
         "num_attention_heads": 32, "num_layers": 28, "hidden_size": 4096, "seq_length": 8192,
         "padded_vocab_size": 65024}, 28 * 2 * 2 * 128 * 2, 0),
    "databricks/dbrx-base": (
        {"model_type": "dbrx", "d_model": 6144, "n_heads": 48, "n_layers": 40, "max_seq_len": 32768,
         "vocab_size": 100352, "attn_config": {"clip_qkv": 8, "kv_n_heads": 8, "model_type": "", "max_length": 20}},
        40 * 2 * 8 * 128 * 2, 0),
    "mosaicml/mpt-7b": (
        {"model_type": "mpt", "d_model": 4096, "n_heads": 32, "n_layers": 32, "max_seq_len": 2048, "vocab_size": 50432,
         "attn_config": {"attn_impl": "torch", "alibi": True}}, 32 * 2 * 32 * 128 * 2, 0),
    "nvidia/Llama-3_3-Nemotron-Super-49B-v1": (
        {"model_type": "nemotron-nas", **shape(80, 64, 8192, 131072), "num_key_value_heads": None, "block_configs": [
            {"attention": {"n_heads_in_group": None if index % 80 >= 49 else 8, "no_op": index >= 49}}
            for index in range(80)]}, 49 * 2 * 8 * 128 * 2, 0),
    # windows and chunks
    "openai/gpt-oss-120b": (  # vLLM: 131072 tokens need 4.50 GiB in full layers
        {"model_type": "gpt_oss", "head_dim": 64, "sliding_window": 128, "layer_types": every("sf" * 18, SF),
         **shape(36, 64, 2880, 131072, 8)}, 18 * 2 * 8 * 64 * 2, 18 * 2 * 8 * 64 * 2 * 128),
    "google/gemma-3-27b-it": (
        {"model_type": "gemma3", "text_config": {
            "model_type": "gemma3_text", "head_dim": 128, "num_attention_heads": 32, "num_key_value_heads": 16,
            "num_hidden_layers": 62, "hidden_size": 5376, "sliding_window": 1024}},
        10 * 2 * 16 * 128 * 2, 52 * 2 * 16 * 128 * 2 * 1024),
    "google/gemma-3n-E4B": (  # llama.cpp: 256 MiB of full layers at 32768 tokens
        {"model_type": "gemma3n", "text_config": {
            "num_hidden_layers": 35, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256,
            "layer_types": every("ssssf" * 7, SF), "sliding_window": 512, "num_kv_shared_layers": 15}},
        4 * 2 * 2 * 256 * 2, 16 * 2 * 2 * 256 * 2 * 512),
    "google/gemma-4-26B-A4B": (
        {"model_type": "gemma4", "text_config": {
            "model_type": "gemma4_text", "attention_k_eq_v": True, "global_head_dim": 512, "head_dim": 256,
            "num_global_key_value_heads": 2, "layer_types": every("sssssf" * 5, SF), "sliding_window": 1024,
            "num_kv_shared_layers": 0, **shape(30, 16, 2816, 262144, 8)}},
        5 * 2 * 2 * 512 * 2, 25 * 2 * 8 * 256 * 2 * 1024),
    "google/gemma-4-31B-it": (  # vLLM, all layers taken for full: (81920 + 50 * 2 * 16 * 256 * 2) B a token
        {"model_type": "gemma4", "text_config": {
            "model_type": "gemma4_text", "attention_k_eq_v": True, "global_head_dim": 512, "head_dim": 256,
            "num_global_key_value_heads": 4, "layer_types": every("sssssf" * 10, SF), "sliding_window": 1024,
            **shape(60, 32, 5376, 262144, 16)}},
        10 * 2 * 4 * 512 * 2, 50 * 2 * 16 * 256 * 2 * 1024),
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": (
        {"model_type": "llama4", "text_config": {
            "model_type": "llama4_text", "attention_chunk_size": 8192, "head_dim": 128,
            **shape(48, 40, 5120, 10485760, 8)}},
        12 * 2 * 8 * 128 * 2, 36 * 2 * 8 * 128 * 2 * 8192),
    "XiaomiMiMo/MiMo-V2-Flash": (
        {"model_type": "mimo_v2_flash", "head_dim": 192, "v_head_dim": 128, "swa_num_key_value_heads": 8,
         "swa_head_dim": 192, "swa_v_head_dim": 128, "sliding_window": 128, "attention_chunk_size": 128,
         "hybrid_layer_pattern": [0, 1, 1, 1, 1] + [0, 1, 1, 1, 1, 1] * 7 + [0], **shape(48, 64, 4096, 262144, 4)},
        9 * 4 * (192 + 128) * 2, 39 * 8 * (192 + 128) * 2 * 128),
    "stepfun-ai/Step-3.7-Flash": (
        {"model_type": "step3p7", "head_dim": 128, "sliding_window": 512, "num_nextn_predict_layers": 3,
         "layer_types": every("fsss" * 11 + "f", SF), **shape(45, 64, 4096, 65536, 8)},
        12 * 2 * 8 * 128 * 2, 33 * 2 * 8 * 128 * 2 * 512),
    # latent vectors, with and without the keys of an indexer
    "deepseek-ai/DeepSeek-R1": (  # vLLM: 70272 B a token on each rank
        {"model_type": "deepseek_v3", **MLA, **shape(61, 128, 7168, 163840, 128)}, 61 * (512 + 64) * 2, 0),
    "moonshotai/Kimi-K2.5": (
        {"model_type": "kimi_k25", "text_config": {
            "model_type": "kimi_k2", **MLA, "pruned_heads": {}, **shape(61, 64, 7168, 262144, 64)}},
        61 * (512 + 64) * 2, 0),
    "deepseek-ai/DeepSeek-V3.2": (
        {"model_type": "deepseek_v32", **MLA, "index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048,
         **shape(61, 128, 7168, 163840, 128)}, 61 * (512 + 64 + 128) * 2, 0),
    "zai-org/GLM-5.2": (
        {"model_type": "glm_moe_dsa", **MLA, "qk_nope_head_dim": 192, "v_head_dim": 256, "head_dim": 192,
         "index_head_dim": 128, "index_n_heads": 32, "index_topk": 2048, "index_topk_freq": 4,
         "index_skip_topk_offset": 3, **shape(78, 64, 6144, 1048576, 64)}, 78 * (512 + 64) * 2 + 21 * 128 * 2, 0),
    "deepseek-ai/DeepSeek-V4-Flash": (
        {"model_type": "deepseek_v4", "head_dim": 512, "qk_rope_head_dim": 64, "index_head_dim": 128,
         "index_n_heads": 64, "index_topk": 512, "sliding_window": 128, "compress_ratios": [0, 0] + [4, 128] * 20
         + [4, 0], **shape(43, 64, 4096, 1048576, 1)},
        21 * (512 + 128) * 2 // 4 + 20 * 512 * 2 // 128, 43 * 512 * 2 * 128),
    # recurrent states
    "Qwen/Qwen3.5-35B-A3B": (  # vLLM: a state of 2,146,304 B a layer
        {"model_type": "qwen3_5_moe", "text_config": {
            "model_type": "qwen3_5_moe_text", **DELTA, "linear_num_value_heads": 32, "head_dim": 256,
            **shape(40, 16, 2048, 262144, 2)}},
        10 * 2 * 2 * 256 * 2, 30 * ((2 * 16 + 32) * 128 * 3 * 2 + 32 * 128 * 128 * 4)),
    "Qwen/Qwen3.6-27B": (
        {"model_type": "qwen3_5", "text_config": {
            "model_type": "qwen3_5_text", **DELTA, "linear_num_value_heads": 48, "head_dim": 256,
            **shape(64, 24, 5120, 262144, 4)}},
        16 * 2 * 4 * 256 * 2, 48 * ((2 * 16 + 48) * 128 * 3 * 2 + 48 * 128 * 128 * 4)),
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": (
        {**NEMOTRON, "mamba_num_heads": 64, "ssm_state_size": 128, "head_dim": 128, "mamba_ssm_cache_dtype": "float32",
         "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
         **shape(52, 32, 2688, 262144, 2)},
        6 * 2 * 2 * 128 * 2, 23 * ((64 * 64 + 2 * 8 * 128) * 3 * 2 + 64 * 64 * 128 * 4)),
    "nvidia/Nemotron-H-56B-Base-8K": (
        {**NEMOTRON, "mamba_num_heads": 256, "ssm_state_size": 256, "attention_head_dim": 128,
         "hybrid_override_pattern": "M-M-M-M*-" + "M-M-M-M-M*-" * 9 + "M-M-M-M-M-", **shape(118, 64, 8192, 8192, 8)},
        10 * 2 * 8 * 128 * 2, 54 * ((256 * 64 + 2 * 8 * 256) * 3 * 2 + 256 * 64 * 256 * 4)),
    "moonshotai/Kimi-K3": (
        {"model_type": "kimi_k3", "text_config": {
            "model_type": "kimi_linear", **MLA, "mla_use_nope": True, "linear_attn_config": {
                "num_heads": 96, "head_dim": 128, "short_conv_kernel_size": 4,
                "full_attn_layers": [*range(4, 93, 4), 93], "kda_layers": [n for n in range(1, 93) if n % 4]},
            **shape(93, 96, 7168, 1048576, 96)}},
        24 * (512 + 64) * 2, 69 * (3 * 96 * 128 * 3 * 2 + 96 * 128 * 128 * 4)),
    "arcee-ai/Trinity-Nano-Base": (  # llama.cpp: 59.5 MiB of K in 14 full layers at 16384 tokens in q8_0
        {"model_type": "afmoe", "head_dim": 128, "global_attn_every_n_layers": 4, "sliding_window": 2048,
         **shape(56, 8, 1024, 131072, 2)}, 14 * 2 * 2 * 128 * 2, 42 * 2 * 2 * 128 * 2 * 2048),
    "apple/OpenELM-270M": (
        {"model_type": "openelm", "num_transformer_layers": 16, "model_dim": 1280, "head_dim": 64, "vocab_size": 32000,
         "max_context_length": 2048, "num_kv_heads": [3] * 5 + [4] * 7 + [5] * 4,
         "num_query_heads": [12] * 5 + [16] * 7 + [20] * 4}, 2 * (5 * 3 + 7 * 4 + 4 * 5) * 64 * 2, 0),
    "google/recurrentgemma-2b": (
        {"model_type": "recurrent_gemma", "lru_width": 2560, "attention_window_size": 2048, "conv1d_width": 4,
         "block_types": ["recurrent", "recurrent", "attention"], "head_dim": 256, **shape(26, 10, 2560, 8192, 1)},
        0, 8 * 2 * 256 * 2 * 2048 + 18 * (2560 * 3 * 2 + 2560 * 4)),
    "NX-AI/xLSTM-7b": (
        {"model_type": "xlstm", "num_heads": 8, "qk_dim_factor": 0.5, "v_dim_factor": 1.0, "num_blocks": 32,
         "embedding_dim": 4096, "hidden_size": 4096, "vocab_size": 50304},
        0, 32 * (8 * 256 * 512 + 8 * 256 + 8) * 4),
    "RWKV/rwkv-4-169m-pile": (
        {"model_type": "rwkv", "attention_hidden_size": 768, "context_length": 1024, "rescale_every": 6,
         **shape(12, None, 768, None)}, 0, 12 * (2 * 768 * 2 + 3 * 768 * 4)),
    "Zyphra/Zamba2-1.2B": (
        {"model_type": "zamba2", "mamba_d_state": 128, "mamba_ngroups": 1, "n_mamba_heads": 64, "mamba_expand": 2,
         "mamba_d_conv": 4, "attention_head_dim": 128, "layers_block_type": [
             "hybrid" if layer in (5, 11, 17, 23, 29, 35) else "mamba" for layer in range(38)],
         **shape(38, 32, 2048, 4096, 32)},
        6 * 2 * 32 * 128 * 2, 38 * ((4096 + 2 * 128) * 3 * 2 + 4096 * 128 * 4)),
    "ai21labs/Jamba-v0.1": (
        {"model_type": "jamba", "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "attn_layer_period": 8,
         "attn_layer_offset": 4, **shape(32, 32, 4096, 262144, 8)},
        4 * 2 * 8 * 128 * 2, 28 * (8192 * 3 * 2 + 8192 * 16 * 4)),
    "state-spaces/mamba-2.8b-hf": (  # llama.cpp keeps both in 32 bits: 23.75 MiB
        {"model_type": "mamba", "state_size": 16, "conv_kernel": 4, "expand": 2, "intermediate_size": 5120,
         **shape(64, None, 2560, None)}, 0, 64 * (5120 * 3 * 2 + 5120 * 16 * 4)),
    "RWKV/rwkv-5-world-3b": (
        {"model_type": "rwkv5", "attention_hidden_size": 2560, "head_size": 64, "context_length": 4096,
         "rescale_every": 6, **shape(32, None, 2560, None)}, 0, 32 * (2 * 2560 * 2 + 2560 * 64 * 4)),
}  # fmt: skip


def spec(config: dict[str, Any]) -> ModelSpec:
    found = read_geometry(config, "config.json")
    return ModelSpec(
        name="m", digest="d", architecture=found.architecture, layers=found.layers, query_heads=found.query_heads,
        hidden_size=found.hidden_size, vocab_size=found.vocab_size, context_tokens=found.context_tokens,
    )  # fmt: skip


@pytest.mark.parametrize("name", sorted(MODELS))
def test_the_cache_of_a_released_model_is_as_worked_out(name: str) -> None:
    config, growth, fixed = MODELS[name]
    model = spec(config)
    size = logical_size(model, parse("bf16"), model.context_tokens)
    assert (size.growth_bytes_per_token, size.fixed_bytes_per_sequence) == (growth, fixed)


@pytest.mark.parametrize(
    ("name", "drafts"),
    [("deepseek_v3", 1), ("deepseek_v32", 1), ("glm_moe_dsa", 1)],
)
def test_layers_that_draft_are_told_apart(name: str, drafts: int) -> None:
    config = next(config for config, _, _ in MODELS.values() if config["model_type"] == name)
    found = read_geometry({**config, "num_nextn_predict_layers": drafts}, "config.json")
    assert found.draft_layers == (found.layers[0],) * drafts
    assert len(found.layers) == config["num_hidden_layers"]


def per_token(config: dict[str, Any]) -> int:
    """Bytes in bf16 that one more token adds at the model's longest context."""
    model = spec(config)
    size = logical_size(model, parse("bf16"), model.context_tokens)
    assert size.growth_bytes_per_token == int(size.growth_bytes_per_token)
    return int(size.growth_bytes_per_token)


FALCON = {"hidden_size": 8192, "n_layer": 60, "n_head": 128, "vocab_size": 65024}
STARCODER = {"model_type": "gpt_bigcode", "n_embd": 6144, "n_head": 48, "n_layer": 40, "n_positions": 8192,
             "vocab_size": 49152}  # fmt: skip
MPT = {"model_type": "mpt", "d_model": 4096, "n_heads": 32, "n_layers": 32, "max_seq_len": 2048, "vocab_size": 50432}
QWEN25 = {"model_type": "qwen2", "max_window_layers": 28, **shape(28, 28, 3584, 131072, 4)}
MISTRAL = {"model_type": "mistral", **shape(32, 32, 4096, 32768, 8)}
TRAPS = {
    "Falcon 7B: one KV head, not 71": (
        {"model_type": "falcon", "multi_query": True, **shape(32, 71, 4544, 2048)}, 8192),
    "Falcon 7B of 2023, model_type RefinedWebModel": (
        {"model_type": "RefinedWebModel", "hidden_size": 4544, "n_layer": 32, "n_head": 71, "multi_query": True,
         "vocab_size": 65024}, 8192),
    "Falcon 40B of 2023, model_type RefinedWeb": ({"model_type": "RefinedWeb", "n_head_kv": 8, **FALCON}, 122_880),
    "Falcon 40B: the new architecture wins over multi_query": (
        {"model_type": "falcon", "multi_query": True, "new_decoder_architecture": True, "num_kv_heads": 8,
         **shape(60, 128, 8192, 2048)}, 122_880),
    "Falcon 180B: 81,920 B in 8 bits": (  # the figure of a TensorRT-LLM config with an FP8 cache
        {"model_type": "falcon", "new_decoder_architecture": True, "num_kv_heads": 8, **shape(80, 232, 14848, 2048)},
        2 * 81_920),
    "StarCoder: one KV head by default": (STARCODER, 20_480),
    "StarCoder without multi_query": ({**STARCODER, "multi_query": False}, 983_040),
    "bigcode/tiny_starcoder_py": (
        {"model_type": "gpt_bigcode", "n_embd": 768, "n_head": 12, "n_layer": 20, "n_positions": 8192,
         "multi_query": True, "vocab_size": 49152}, 5_120),
    "DBRX: what a library left in attn_config means nothing": (
        {"model_type": "dbrx", "d_model": 6144, "n_heads": 48, "n_layers": 40, "max_seq_len": 32768,
         "vocab_size": 100352, "attn_config": {
             "clip_qkv": 8, "kv_n_heads": 8, "model_type": "", "torch_dtype": None, "max_length": 20,
             "tie_word_embeddings": True, "rope_theta": 500000}}, 163_840),
    "MPT 7B": ({**MPT, "attn_config": {"attn_impl": "torch", "alibi": True}}, 524_288),
    "Krutrim 1, an MPT with grouped queries": (
        {**MPT, "attn_config": {"attn_type": "grouped_query_attention", "kv_n_heads": 8}}, 131_072),
    "Gemma 2 9B: the head size that it says": (
        {"model_type": "gemma2", "head_dim": 256, "sliding_window": None, **shape(42, 16, 3584, 8192, 8)}, 344_064),
    "a head size of null is derived": (
        {"model_type": "llama", "head_dim": None, **shape(42, 16, 3584, 8192, 8)}, 301_056),
    "a head size of 0 is derived": ({"model_type": "llama", "head_dim": 0, **shape(42, 16, 3584, 8192, 8)}, 301_056),
    "Qwen2.5: a window that is switched off": (
        {**QWEN25, "use_sliding_window": False, "sliding_window": 131072}, 57_344),
    "Phi-3: a window as long as the context": (
        {"model_type": "phi3", "sliding_window": 262144, **shape(32, 32, 3072, 131072, 32)}, 393_216),
    "Mistral 7B v0.1: all of its layers slide": ({**MISTRAL, "sliding_window": 4096}, 0),
    "Mistral 7B v0.2: null is no window": ({**MISTRAL, "sliding_window": None}, 131_072),
    "a model without attention adds nothing": (
        {"model_type": "falcon_mamba", "state_size": 16, "conv_kernel": 4, "expand": 2,
         **shape(64, None, 4096, None)}, 0),
    "a language model inside one that hears": (
        {"model_type": "qwen2_5_omni", "vision_config": {"hidden_size": 1}, "thinker_config": {
            "vision_config": {"num_hidden_layers": 3},
            "text_config": {**QWEN25, "use_sliding_window": False}}}, 57_344),
}  # fmt: skip
"""Configs that calculators got wrong. Sources: the configs and reports of tiiuae/falcon-*, bigcode/*, databricks/dbrx,
krutrim-ai-labs/Krutrim-1-instruct; ai-dynamo/dynamo#14431 (head_dim); unslothai/unsloth#5225 (windows, shared layers);
Andyyyy64/whichllm#124 (null windows); ggml-org/llama.cpp#5328 (Mamba)."""


@pytest.mark.parametrize("name", sorted(TRAPS))
def test_a_config_that_calculators_got_wrong_is_read(name: str) -> None:
    config, growth = TRAPS[name]
    assert per_token(config) == growth


def test_gemma_3n_has_a_third_of_what_its_layers_would_have() -> None:
    config = MODELS["google/gemma-3n-E4B"][0]  # unslothai/unsloth#5225, and what llama.cpp prints of full layers
    model = spec(config)
    at = [logical_size(model, parse("bf16"), tokens).bytes_per_sequence for tokens in (512, 32768)]
    assert at[1] == (256 + 16) * 2**20
    assert at[1] - at[0] == 4 * 2 * 2 * 256 * 2 * (32768 - 512)
