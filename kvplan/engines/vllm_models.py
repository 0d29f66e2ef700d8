"""The model classes that vLLM runs.

From vllm-project/vllm 0.29.0 (PyPI), `vllm/model_executor/models/registry.py`, read 2026-11-30: the classes of text and
of multimodal models, those that it names as run by transformers' modelling code, and those that earlier releases ran.
It has no reader of GGUF files (0.29.0 has no `gguf_loader.py`).
"""

from typing import Final

from kvplan.core.allocation import Setup
from kvplan.core.specs import ModelSpec
from kvplan.engines.classes import class_remark, file_remark, is_plain
from kvplan.errors import UnsupportedSettingError

_RUN: Final = frozenset({
    "AXK1ForCausalLM", "AfmoeForCausalLM", "ApertusForCausalLM", "ArceeForCausalLM", "AriaForConditionalGeneration",
    "BagelForConditionalGeneration", "BailingMoeForCausalLM", "BailingMoeV2ForCausalLM", "BailingMoeV2_5ForCausalLM",
    "BailingMoeV3ForCausalLM", "BeeForConditionalGeneration", "BloomForCausalLM", "ChatGLMForConditionalGeneration",
    "ChatGLMModel", "Cohere2ForCausalLM", "Cohere2MoeForCausalLM", "Cohere2VisionForConditionalGeneration",
    "CohereForCausalLM", "Cosmos3EdgeForConditionalGeneration", "Cosmos3ForConditionalGeneration", "CwmForCausalLM",
    "DbrxForCausalLM", "DeciLMForCausalLM", "DeepseekForCausalLM", "DeepseekOCR2ForCausalLM", "DeepseekOCRForCausalLM",
    "DeepseekV2ForCausalLM", "DeepseekV32ForCausalLM", "DeepseekV3ForCausalLM", "DeepseekV4ForCausalLM",
    "DeepseekVLV2ForCausalLM", "DiffusionGemmaForBlockDiffusion", "Dots3NoteForCausalLM", "DotsOCRForCausalLM",
    "Eagle2_5_VLForConditionalGeneration", "Ernie4_5ForCausalLM", "Ernie4_5_MoeForCausalLM",
    "Ernie4_5_VLMoeForConditionalGeneration", "Exaone4ForCausalLM", "Exaone4_5_ForConditionalGeneration",
    "ExaoneForCausalLM", "ExaoneMoeForCausalLM", "FalconForCausalLM", "FalconH1ForCausalLM", "FalconMambaForCausalLM",
    "GLM4VForCausalLM", "GPT2LMHeadModel", "GPTJForCausalLM", "GPTNeoXForCausalLM", "Gemma2ForCausalLM",
    "Gemma3ForCausalLM", "Gemma3ForConditionalGeneration", "Gemma3nForCausalLM", "Gemma3nForConditionalGeneration",
    "Gemma4ForCausalLM", "Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration", "GemmaForCausalLM",
    "Glm4ForCausalLM", "Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM", "Glm4vForConditionalGeneration",
    "Glm4vMoeForConditionalGeneration", "GlmForCausalLM", "GlmMoeDsaForCausalLM", "GlmOcrForConditionalGeneration",
    "GptOssForCausalLM", "Granite4VisionForConditionalGeneration", "GraniteForCausalLM", "GraniteMoeForCausalLM",
    "GraniteMoeHybridForCausalLM", "GraniteMoeSWAForCausalLM", "GraniteMoeSharedForCausalLM", "GraniteSWAForCausalLM",
    "H2OVLChatModel", "HCXVisionV2ForCausalLM", "HYV3ForCausalLM", "HYV4ForCausalLM", "HfMoondream",
    "HrmTextForCausalLM", "HyperCLOVAXForCausalLM", "IQuestCoderForCausalLM", "IQuestLoopCoderForCausalLM",
    "Idefics3ForConditionalGeneration", "InklingForCausalLM", "InklingForConditionalGeneration", "InternLM2ForCausalLM",
    "InternLM3ForCausalLM", "InternS1ForConditionalGeneration", "InternS1ProForConditionalGeneration",
    "InternS2MobiusForConditionalGeneration", "InternS2PreviewForConditionalGeneration", "InternVLChatModel",
    "InternVLForConditionalGeneration", "IsaacForConditionalGeneration", "Jais2ForCausalLM", "JambaForCausalLM",
    "KananaVForConditionalGeneration", "KeyeForConditionalGeneration", "KeyeVL1_5ForConditionalGeneration",
    "KimiK25ForConditionalGeneration", "KimiK3ForConditionalGeneration", "KimiLinearForCausalLM",
    "KimiVLForConditionalGeneration", "LLaMAForCausalLM", "LagunaForCausalLM", "Lfm2ForCausalLM", "Lfm2MoeForCausalLM",
    "Lfm2VlForConditionalGeneration", "LightOnOCRForConditionalGeneration", "Llama4ForCausalLM",
    "Llama4ForConditionalGeneration", "LlamaForCausalLM", "Llama_Nemotron_Nano_VL", "LlavaForConditionalGeneration",
    "LlavaNextForConditionalGeneration", "LlavaNextVideoForConditionalGeneration",
    "LlavaOnevision2ForConditionalGeneration", "LlavaOnevisionForConditionalGeneration", "LongcatFlashForCausalLM",
    "LongcatFlashNgramForCausalLM", "Mamba2ForCausalLM", "MambaForCausalLM", "MellumForCausalLM", "MiDashengLMModel",
    "MiMoForCausalLM", "MiMoV2FlashForCausalLM", "MiMoV2ForCausalLM", "MiMoV2OmniForCausalLM", "MiniCPM3ForCausalLM",
    "MiniCPMForCausalLM", "MiniCPMO", "MiniCPMV", "MiniCPMV4_6ForConditionalGeneration", "MiniMaxM2ForCausalLM",
    "MiniMaxM3SparseForCausalLM", "MiniMaxM3SparseForConditionalGeneration", "Ministral3ForCausalLM",
    "Mistral3ForConditionalGeneration", "MistralForCausalLM", "MistralLarge3ForCausalLM", "MixtralForCausalLM",
    "Molmo2ForConditionalGeneration", "MolmoForCausalLM", "Moondream3ForCausalLM", "MoonshotKimiaForCausalLM",
    "MossTranscribeDiarizeForConditionalGeneration", "MuseGlimmerForCausalLM", "MuseGlimmerForConditionalGeneration",
    "NVLM_D", "NemotronForCausalLM", "NemotronHForCausalLM", "NemotronHPuzzleForCausalLM",
    "NemotronH_Nano_Omni_Reasoning_V3", "NemotronH_Nano_VL_V2", "NemotronH_Omni_Reasoning_V3",
    "NemotronH_Super_Omni_Reasoning_V3", "NemotronParseForConditionalGeneration", "OPTForCausalLM",
    "OlmoHybridForCausalLM", "OlmoeForCausalLM", "OpenCUAForConditionalGeneration",
    "OpenPanguVLForConditionalGeneration", "OpenVLAForActionPrediction", "OrionForCausalLM", "Ovis", "Ovis2_5",
    "Ovis2_6ForCausalLM", "Ovis2_6_MoeForCausalLM", "PaddleOCRVLForConditionalGeneration",
    "PaliGemmaForConditionalGeneration", "PanguEmbeddedForCausalLM", "PanguProMoEV2ForCausalLM",
    "PanguUltraMoEForCausalLM", "Param2MoEForCausalLM", "Phi3ForCausalLM", "Phi3VForCausalLM", "Phi4ForCausalLMV",
    "Phi4MMForCausalLM", "PhiForCausalLM", "PhiMoEForCausalLM", "PixtralForConditionalGeneration", "Plamo3ForCausalLM",
    "QianfanOCRForConditionalGeneration", "Qwen2ForCausalLM", "Qwen2MoeForCausalLM", "Qwen2VLForConditionalGeneration",
    "Qwen2_5OmniForConditionalGeneration", "Qwen2_5OmniModel", "Qwen2_5_VLForConditionalGeneration", "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM", "Qwen3NextForCausalLM", "Qwen3OmniMoeForConditionalGeneration",
    "Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration", "Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration",
    "Qwen4ExpForCausalLM", "Qwen4ExpForConditionalGeneration", "RForConditionalGeneration", "Rnj1ForCausalLM",
    "SarvamMLAForCausalLM", "SarvamMoEForCausalLM", "SeedOssForCausalLM", "SkyworkR1VChatModel",
    "SmolVLMForConditionalGeneration", "SolarForCausalLM", "StableLmForCausalLM", "Step1ForCausalLM",
    "Step3TextForCausalLM", "Step3VLForConditionalGeneration", "Step3p5ForCausalLM", "Step3p7ForConditionalGeneration",
    "StepVLForConditionalGeneration", "TeleChat2ForCausalLM", "TeleChat3ForCausalLM", "TeleFLMForCausalLM",
    "UnlimitedOCRForCausalLM", "WhisperForConditionalGeneration", "Zamba2ForCausalLM",
})  # fmt: skip
_BY_TRANSFORMERS: Final = frozenset({
    "Emu3ForConditionalGeneration", "FlexOlmoForCausalLM", "GPTBigCodeForCausalLM", "HunYuanDenseV1ForCausalLM",
    "HunYuanMoEV1ForCausalLM", "HunYuanVLForConditionalGeneration", "Olmo2ForCausalLM", "Olmo3ForCausalLM",
    "OlmoForCausalLM", "SmolLM3ForCausalLM", "Starcoder2ForCausalLM", "VaultGemmaForCausalLM",
})  # fmt: skip
"""Run by transformers' modelling code, and attended to by vLLM's own layers (_TRANSFORMERS_SUPPORTED_MODELS)."""
_RUN_TO: Final = {
    "Phi3SmallForCausalLM": (0, 9),
    "Phi4MultimodalForCausalLM": (0, 12),
    **dict.fromkeys(("BaiChuanForCausalLM", "BaichuanForCausalLM", "BambaForCausalLM", "InternLMForCausalLM",
        "MiniMaxForCausalLM", "MiniMaxM1ForCausalLM", "MiniMaxText01ForCausalLM", "QWenLMHeadModel",
        "XverseForCausalLM"), (0, 23)),
    **dict.fromkeys(("AquilaForCausalLM", "AquilaModel", "Grok1ModelForCausalLM"), (0, 24)),
    "PersimmonForCausalLM": (0, 25),
    **dict.fromkeys(("ArcticForCausalLM", "MPTForCausalLM", "MptForCausalLM", "RWForCausalLM",
        "StableLMEpochForCausalLM"), (0, 28)),
}  # fmt: skip
"""The last release that ran them (_PREVIOUSLY_SUPPORTED_MODELS)."""


_HYBRIDS_SINCE: Final = (0, 11)
"""The oldest release whose figures of models with windows were compared."""


def check_model(model: ModelSpec, setup: Setup) -> tuple[str, ...]:
    """Return what to know of how vLLM runs *model*.

    Raises:
        UnsupportedModelError: It does not run it.
        UnsupportedSettingError: The release is older than what is known of such a model.
    """
    if setup.version is not None and setup.version < _HYBRIDS_SINCE and not is_plain(model, windows=False):
        message = "how vLLM before 0.11 keeps windows and states is not known here"
        raise UnsupportedSettingError(message, where="--engine-version", hint="give 0.11 or on")
    last = _RUN_TO.get(model.architecture)
    former = last is not None and setup.version is not None and setup.version[:2] <= last
    known = _RUN | _BY_TRANSFORMERS | ({model.architecture} if former else set())
    until = f"vLLM ran it up to {last[0]}.{last[1]}" if last else ""
    return (*class_remark("vLLM", known, model, until), *file_remark("vLLM 0.29", model))
