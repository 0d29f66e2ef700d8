"""The model classes that SGLang runs.

From PyPI `sglang` 0.5.23 (2026-10-30), read 2026-11-30: the `EntryClass` of each module of `srt/models`, without those
that draft, embed, score or only listen; what it hands to transformers' modelling code (`srt/model_loader/utils.py`,
resolve_transformers_arch).
"""

from typing import Final

from kvplan.core.allocation import Setup
from kvplan.core.specs import ModelSpec
from kvplan.engines.classes import class_remark

_RUN: Final = frozenset({
    "AfmoeForCausalLM", "ApertusForCausalLM", "ArceeForCausalLM", "BaichuanForCausalLM",
    "BailingMM2NativeForConditionalGeneration", "BailingMMNativeForConditionalGeneration", "BailingMoEForCausalLM",
    "BailingMoeForCausalLM", "BailingMoeV2ForCausalLM", "BailingMoeV2_5ForCausalLM", "BailingMoeV3ForCausalLM",
    "BailingMoeV3VLForConditionalGeneration", "BeamForCausalLM", "ChatGLMModel", "Cohere2ForCausalLM",
    "Cohere2MoeForCausalLM", "Cohere2VisionForConditionalGeneration", "CohereForCausalLM",
    "Cosmos3EdgeForConditionalGeneration", "Cosmos3ForConditionalGeneration", "DFlashLagunaForCausalLM",
    "DbrxForCausalLM", "DeciLMForCausalLM", "DeepseekForCausalLM", "DeepseekOCRForCausalLM", "DeepseekV2ForCausalLM",
    "DeepseekV32ForCausalLM", "DeepseekV3ForCausalLM", "DeepseekV4ForCausalLM", "DeepseekVL2ForCausalLM",
    "DiffusionGemmaForBlockDiffusion", "Dots3NoteForCausalLM", "DotsOCRForCausalLM", "DotsVLMForCausalLM",
    "Ernie4_5_ForCausalLM", "Ernie4_5_MoeForCausalLM", "Ernie4_5_VLMoeForConditionalGeneration", "Exaone4ForCausalLM",
    "ExaoneForCausalLM", "ExaoneMoEForCausalLM", "ExaoneMoeForCausalLM", "FalconH1ForCausalLM",
    "FalconMambaForCausalLM", "GPT2LMHeadModel", "GPTBigCodeForCausalLM", "GPTJForCausalLM", "Gemma2ForCausalLM",
    "Gemma3ForCausalLM", "Gemma3ForConditionalGeneration", "Gemma3nForCausalLM", "Gemma3nForConditionalGeneration",
    "Gemma4ForCausalLM", "Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration", "GemmaForCausalLM",
    "GigaChat35ForCausalLM", "Glm4ForCausalLM", "Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM",
    "Glm4vForConditionalGeneration", "Glm4vMoeForConditionalGeneration", "Glm5NextForConditionalGeneration",
    "GlmMoeDsaForCausalLM", "GlmOcrForConditionalGeneration", "GptOssForCausalLM", "GraniteForCausalLM",
    "GraniteMoeForCausalLM", "GraniteMoeHybridForCausalLM", "GraniteMoeSWAForCausalLM", "GraniteMoeSharedForCausalLM",
    "GraniteSWAForCausalLM", "Grok1ForCausalLM", "Grok1ModelForCausalLM", "HYV3ForCausalLM", "HYV4ForCausalLM",
    "HrmTextForCausalLM", "HunYuanDenseV1ForCausalLM", "HunYuanMoEV1ForCausalLM", "IQuestCoderForCausalLM",
    "IQuestLoopCoderForCausalLM", "IQuestQ1ForCausalLM", "InklingForConditionalGeneration", "InternLM2ForCausalLM",
    "InternLM3ForCausalLM", "InternS1ForConditionalGeneration", "InternS1ProForConditionalGeneration",
    "InternS2MobiusForConditionalGeneration", "InternS2PreviewForConditionalGeneration", "InternVLChatModel",
    "JetNemotronForCausalLM", "JetVLMForConditionalGeneration", "K2HorizonForCausalLM",
    "KimiK25ForConditionalGeneration", "KimiK3ForConditionalGeneration", "KimiK3LinearForCausalLM",
    "KimiLinearForCausalLM", "KimiVLForConditionalGeneration", "LLaDA2MoeModelLM", "LagunaForCausalLM",
    "Lfm2ForCausalLM", "Lfm2MoeForCausalLM", "Lfm2VlForConditionalGeneration", "LightOnOCRForConditionalGeneration",
    "Llama4ForCausalLM", "Llama4ForConditionalGeneration", "LlamaForCausalLM", "LlavaForConditionalGeneration",
    "LlavaLlamaForCausalLM", "LlavaMistralForCausalLM", "LlavaQwenForCausalLM", "LlavaVidForCausalLM",
    "LocateAnythingForConditionalGeneration", "LongcatFlashForCausalLM", "Mamba2ForCausalLM", "MambaForCausalLM",
    "MellumForCausalLM", "MiMoForCausalLM", "MiMoV2FlashForCausalLM", "MiMoV2ForCausalLM", "MiniCPM3ForCausalLM",
    "MiniCPMForCausalLM", "MiniCPMO", "MiniCPMSALAForCausalLM", "MiniCPMV", "MiniCPMV4_6ForConditionalGeneration",
    "MiniCPMV4_7ForConditionalGeneration", "MiniMaxM2ForCausalLM", "MiniMaxM3SparseForCausalLM",
    "MiniMaxM3SparseForConditionalGeneration", "Ministral3ForCausalLM", "Mistral3ForConditionalGeneration",
    "MistralForCausalLM", "MistralLarge3ForCausalLM", "MixtralForCausalLM", "MllamaForConditionalGeneration",
    "MossVLForConditionalGeneration", "MultiModalityCausalLM", "MuseGlimmerForCausalLM",
    "MuseGlimmerForConditionalGeneration", "MuseSparkForConditionalGeneration", "NVILAForConditionalGeneration",
    "NVILALiteForConditionalGeneration", "NanbeigeForCausalLM", "NemotronHForCausalLM", "NemotronHPuzzleForCausalLM",
    "NemotronH_Nano_Omni_Reasoning_V3", "NemotronH_Nano_VL_V2", "NemotronH_Omni_Reasoning_V3", "OPTForCausalLM",
    "Olmo2ForCausalLM", "OlmoForCausalLM", "OlmoeForCausalLM", "OrionForCausalLM", "POINTSV15ChatModel",
    "PaddleOCRVLForConditionalGeneration", "PersimmonForCausalLM", "Phi3ForCausalLM", "Phi3SmallForCausalLM",
    "Phi4MMForCausalLM", "PhiForCausalLM", "PhiMoEForCausalLM", "PixtralForConditionalGeneration", "QWenLMHeadModel",
    "QuantMixtralForCausalLM", "Qwen2ForCausalLM", "Qwen2MoeForCausalLM", "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Qwen3NextForCausalLM",
    "Qwen3OmniMoeForConditionalGeneration", "Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration",
    "Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeForConditionalGeneration", "Qwen4ExpForConditionalGeneration", "SDARForCausalLM", "SDARMoeForCausalLM",
    "Sarashina2VisionForCausalLM", "SarvamMLAForCausalLM", "SarvamMoEForCausalLM", "SolarForCausalLM",
    "Spark2_5ForCausalLM", "StableLmForCausalLM", "Starcoder2ForCausalLM", "Step3VLForConditionalGeneration",
    "Step3p5ForCausalLM", "Step3p7ForConditionalGeneration", "StepVLForConditionalGeneration", "TeleFLMForCausalLM",
    "UnlimitedOCRForCausalLM", "WhisperForConditionalGeneration", "XllmForCausalLM", "XverseForCausalLM",
    "XverseMoeForCausalLM", "YiVLForCausalLM", "ZayaForCausalLM",
})  # fmt: skip


WINDOW_CLASSES: Final = frozenset({
    "BeamForCausalLM", "Gemma4ForCausalLM", "Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration",
    "GptOssForCausalLM", "GraniteMoeSWAForCausalLM", "GraniteSWAForCausalLM", "IQuestQ1ForCausalLM",
    "InklingForConditionalGeneration", "LagunaForCausalLM", "Llama4ForConditionalGeneration", "MellumForCausalLM",
    "MiMoV2FlashForCausalLM", "MiMoV2ForCausalLM", "MuseGlimmerForCausalLM", "MuseGlimmerForConditionalGeneration",
    "Step3p5ForCausalLM", "Step3p7ForConditionalGeneration", "UnlimitedOCRForCausalLM",
})  # fmt: skip
"""Model classes whose windows have a pool of their own (srt/configs/model_config.py, is_hybrid_swa_model)."""
STATE_CLASSES: Final = frozenset({
    "BailingMoeV2_5ForCausalLM", "BailingMoeV3ForCausalLM", "BailingMoeV3VLForConditionalGeneration",
    "FalconH1ForCausalLM", "FalconMambaForCausalLM", "GraniteMoeHybridForCausalLM", "KimiK3ForConditionalGeneration",
    "KimiK3LinearForCausalLM", "KimiLinearForCausalLM", "Lfm2ForCausalLM", "Lfm2MoeForCausalLM",
    "Lfm2VlForConditionalGeneration", "Mamba2ForCausalLM", "MambaForCausalLM", "NemotronHForCausalLM",
    "NemotronHPuzzleForCausalLM", "Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration",
})  # fmt: skip
"""Model classes whose states SGLang pools (srt/configs/hybrid_arch.py)."""
FEW_GROUPS: Final = {"FalconH1ForCausalLM": 1, "GraniteMoeHybridForCausalLM": 1, "Mamba2ForCausalLM": 1,
                      "NemotronHForCausalLM": 8}  # fmt: skip
"""Ranks up to which the groups of Mamba 2's convolution divide; beyond it SGLang repeats them on each rank."""


def check_model(model: ModelSpec, setup: Setup) -> tuple[str, ...]:
    """Return what to know of how SGLang runs *model*.

    Raises:
        UnsupportedModelError: It does not run it.
    """
    return class_remark("SGLang", _RUN, model)
