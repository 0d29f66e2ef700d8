"""The models that llama.cpp runs, and what it does with their windows.

From ggml-org/llama.cpp at 0c1e570 (version 0.5.0), read 2026-11-30: the classes that its converter takes
(`TEXT_MODEL_MAP` of conversion/__init__.py), those whose loader keeps a window (`swa_type` in src/models) and how each
family's memory is made (`llama_model::create_memory` in src/llama-model.cpp).
"""

from typing import Final

from kvplan.core.specs import ModelSpec

_WINDOWED: Final = frozenset({
    "Cohere2ForCausalLM", "Exaone4ForCausalLM", "ExaoneMoEForCausalLM", "ExaoneMoeForCausalLM", "Gemma2ForCausalLM",
    "Gemma3ForCausalLM", "Gemma3ForConditionalGeneration", "Gemma3TextModel", "Gemma3nForCausalLM",
    "Gemma3nForConditionalGeneration", "Gemma4ForCausalLM", "Gemma4ForConditionalGeneration",
    "Gemma4UnifiedForConditionalGeneration", "GptOssForCausalLM", "GraniteMoeSWAForCausalLM", "GraniteSWAForCausalLM",
    "Llama4ForCausalLM", "Llama4ForConditionalGeneration", "MiMoV2FlashForCausalLM", "MiMoV2ForCausalLM",
    "Olmo3ForCausalLM", "Step3p5ForCausalLM", "Step3p7ForConditionalGeneration",
})  # fmt: skip
"""Their layers with a window are kept in a cache of their own; others' are kept whole, as Mistral's and Phi 3's are."""

_SHARING: Final = frozenset({
    "Gemma3nForCausalLM", "Gemma3nForConditionalGeneration", "Gemma4ForCausalLM", "Gemma4ForConditionalGeneration",
    "Gemma4UnifiedForConditionalGeneration",
})  # fmt: skip
"""Their late layers attend to the cache of an earlier one."""

_GEMMA_3N: Final = frozenset({"Gemma3nForCausalLM", "Gemma3nForConditionalGeneration"})
_GEMMA_3N_OWN_LAYERS: Final = 20
"""Layers that cache in any Gemma 3n (src/models/gemma3n.cpp)."""

_EXAONE_4: Final = "Exaone4ForCausalLM"
_EXAONE_4_WINDOWED_LAYERS: Final = 64
"""An Exaone 4 of another number of layers has its windows kept whole (src/models/exaone4.cpp)."""

CHUNK_TOKENS: Final = 8192
"""Of chunked attention, whatever the file says (src/models/llama4.cpp)."""

_REFUSED: Final = {
    "MiniCPM3ForCausalLM": "llama.cpp caches the K and V that MiniCPM 3 makes of its latent vectors, and their heads "
    "are not read here",
    "DeepseekV4ForCausalLM": "llama.cpp keeps DeepSeek V4's compressed entries in caches of their own "
    "(llama-kv-cache-dsv4.cpp), which are not counted here",
}
"""Classes that llama.cpp runs and whose cache is not counted, with the reason."""

_RUN: Final = _WINDOWED | frozenset(_REFUSED) | frozenset({
    "ApertusForCausalLM", "ArceeForCausalLM", "ArcticForCausalLM", "BaiChuanForCausalLM", "BaichuanForCausalLM",
    "BailingMoeForCausalLM", "BailingMoeV2ForCausalLM", "BambaForCausalLM", "BitNetForCausalLM", "BitnetForCausalLM",
    "BloomForCausalLM", "BloomModel", "ChatGLMForConditionalGeneration", "ChatGLMModel", "CohereForCausalLM",
    "DbrxForCausalLM", "DeciLMForCausalLM", "DeepseekForCausalLM", "DeepseekV2ForCausalLM", "DeepseekV32ForCausalLM",
    "DeepseekV3ForCausalLM", "Dots1ForCausalLM", "Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM",
    "Ernie4_5_MoeForCausalLM", "ExaoneForCausalLM", "FalconForCausalLM", "FalconH1ForCausalLM",
    "FalconMambaForCausalLM", "GPT2LMHeadModel", "GPTBigCodeForCausalLM", "GPTNeoXForCausalLM", "GemmaForCausalLM",
    "Glm4ForCausalLM", "Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM", "Glm4vForConditionalGeneration",
    "Glm4vMoeForConditionalGeneration", "GlmForCausalLM", "GlmMoeDsaForCausalLM", "GraniteForCausalLM",
    "GraniteMoeForCausalLM", "GraniteMoeHybridForCausalLM", "GraniteMoeSharedForCausalLM", "GrokForCausalLM",
    "HunYuanDenseV1ForCausalLM", "HunYuanMoEV1ForCausalLM", "InternLM2ForCausalLM", "InternLM3ForCausalLM",
    "Jais2ForCausalLM", "JambaForCausalLM", "KimiK25ForConditionalGeneration", "KimiK3ForConditionalGeneration",
    "KimiLinearForCausalLM", "KimiLinearModel", "KimiVLForConditionalGeneration", "LFM2ForCausalLM",
    "LLaMAForCausalLM", "Lfm2ForCausalLM", "Lfm2Model", "Lfm2MoeForCausalLM", "LlamaForCausalLM", "LlamaModel",
    "LlavaForConditionalGeneration", "MPTForCausalLM", "Mamba2ForCausalLM", "MambaForCausalLM", "MambaLMHeadModel",
    "MiniCPMForCausalLM", "MiniMaxM2ForCausalLM", "MiniMaxText01ForCausalLM", "Ministral3ForCausalLM",
    "Mistral3ForConditionalGeneration", "MistralForCausalLM", "MixtralForCausalLM", "MptForCausalLM",
    "NemotronForCausalLM", "NemotronHForCausalLM", "OLMoForCausalLM", "Olmo2ForCausalLM", "OlmoForCausalLM",
    "OlmoeForCausalLM", "OrionForCausalLM", "Phi3ForCausalLM", "Phi4ForCausalLMV", "PhiForCausalLM",
    "PhiMoEForCausalLM", "PhimoeForCausalLM", "QWenLMHeadModel", "Qwen2ForCausalLM", "Qwen2Model",
    "Qwen2MoeForCausalLM", "Qwen2VLForConditionalGeneration", "Qwen2VLModel", "Qwen2_5OmniModel",
    "Qwen2_5_VLForConditionalGeneration", "Qwen3ForCausalLM", "Qwen3Model", "Qwen3MoeForCausalLM",
    "Qwen3NextForCausalLM", "Qwen3OmniMoeForConditionalGeneration", "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration", "Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration", "RWForCausalLM", "Rwkv6ForCausalLM",
    "SarvamMoEForCausalLM", "SeedOssForCausalLM", "SmolLM3ForCausalLM", "SolarOpenForCausalLM",
    "StableLMEpochForCausalLM", "StableLmForCausalLM", "Starcoder2ForCausalLM", "YoutuForCausalLM",
})  # fmt: skip
"""Classes of decoders that the converter takes and of which a config is read here."""


_ROLLING_BACK: Final = frozenset({
    "NemotronHForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeForConditionalGeneration",
})  # fmt: skip
"""Those that draft and keep a state more for each token of a draft (`llm_arch_supports_rs_rollback`)."""

_DRAFTING: Final = _ROLLING_BACK | frozenset({
    "DeepseekV2ForCausalLM", "DeepseekV32ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM",
    "GlmMoeDsaForCausalLM", "KimiK25ForConditionalGeneration", "Qwen3NextForCausalLM",
})  # fmt: skip
"""Those with a graph of their layers for multi-token prediction (LLM_GRAPH_TYPE_DECODER_MTP in src/models)."""


def drafts(model: ModelSpec) -> bool:
    """Return whether llama.cpp drafts with the model's own layers."""
    return model.architecture in _DRAFTING


def keeps_states_of_drafts(model: ModelSpec) -> bool:
    """Return whether a slot keeps a state for each token of a draft, to go back to."""
    return model.architecture in _ROLLING_BACK


def keeps_windows(model: ModelSpec) -> bool:
    """Return whether llama.cpp keeps layers with a window in a cache of their own."""
    if model.architecture == _EXAONE_4 and len(model.layers) != _EXAONE_4_WINDOWED_LAYERS:
        return False
    return model.architecture in _WINDOWED


def refusal(model: ModelSpec) -> str:
    """Return why what llama.cpp caches of *model* is not counted; empty where it is."""
    if model.architecture in _REFUSED:
        return _REFUSED[model.architecture]
    if model.architecture not in _RUN:
        return f"llama.cpp's converter takes no {model.architecture[:60]}, or none that is known here"
    own = sum(layer.shared_with is None for layer in model.layers)
    if model.architecture in _GEMMA_3N and own != _GEMMA_3N_OWN_LAYERS:
        return f"llama.cpp caches the first {_GEMMA_3N_OWN_LAYERS} layers of any Gemma 3n, and this one has {own}"
    if own < len(model.layers) and model.architecture not in _SHARING:
        return "layers share another's cache, and llama.cpp is not known to let this family's do so"
    return ""
