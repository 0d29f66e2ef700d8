"""The model classes that TensorRT-LLM runs.

From NVIDIA/TensorRT-LLM, read 2026-11-30: of the PyTorch backend `tensorrt_llm/_torch/models/_arch_index.py` at
065ff9e (after 1.2; a class may be newer than the release), of engines that TensorRT built MODEL_MAP of
`tensorrt_llm/models/__init__.py` at 02267d3, and which classes came with 1.3 or run in AutoDeploy alone from
docs/source/models/supported-models.md (1.2, 1.3.0rc13 to rc24 and 00b6d5a). It reads no GGUF files.
"""

from typing import Final

from kvplan.core.allocation import Setup
from kvplan.core.specs import ModelSpec
from kvplan.engines.classes import class_remark, file_remark
from kvplan.errors import UnsupportedModelError

_RUN: Final = frozenset({
    "AfmoeForCausalLM", "BartForConditionalGeneration", "Cohere2ForCausalLM", "DeciLMForCausalLM",
    "DeepseekV32ForCausalLM", "DeepseekV3ForCausalLM", "DeepseekV4ForCausalLM", "Exaone4ForCausalLM",
    "Exaone4_5_ForConditionalGeneration", "ExaoneMoEForCausalLM", "Gemma3ForCausalLM", "Gemma3ForConditionalGeneration",
    "Gemma4ForCausalLM", "Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration",
    "Glm4MoeForCausalLM", "GlmMoeDsaForCausalLM", "GptOssForCausalLM", "HCXVisionForCausalLM",
    "HunYuanDenseV1ForCausalLM", "HunYuanMoEV1ForCausalLM", "KimiK25ForConditionalGeneration",
    "KimiK3ForConditionalGeneration", "KimiLinearForCausalLM", "LagunaForCausalLM", "Llama4ForConditionalGeneration",
    "LlamaForCausalLM", "LlavaLlamaModel", "LlavaNextForConditionalGeneration", "MBartForConditionalGeneration",
    "MiniCPMV4_6ForConditionalGeneration", "MiniMaxM2ForCausalLM", "MiniMaxM3SparseForCausalLM",
    "MiniMaxM3SparseForConditionalGeneration", "Mistral3ForConditionalGeneration", "MistralForCausalLM",
    "MistralLarge3ForCausalLM", "MixtralForCausalLM", "MllamaForConditionalGeneration", "NemotronForCausalLM",
    "NemotronHForCausalLM", "NemotronHPuzzleForCausalLM", "NemotronH_Nano_Omni_Reasoning_V3", "NemotronH_Nano_VL_V2",
    "Phi3ForCausalLM", "Phi4MMForCausalLM", "PixtralForConditionalGeneration", "Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM", "Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration", "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM", "Qwen3NextForCausalLM", "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration", "Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration", "SeedOssForCausalLM", "Starcoder2ForCausalLM",
    "Step3p5ForCausalLM", "Step3p7ForConditionalGeneration", "T5ForConditionalGeneration",
    "WhisperForConditionalGeneration",
})  # fmt: skip
_SINCE_1_3: Final = frozenset({
    "AfmoeForCausalLM", "Cohere2ForCausalLM", "DeepseekV4ForCausalLM", "Gemma4ForCausalLM",
    "Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration", "GlmMoeDsaForCausalLM",
    "KimiK25ForConditionalGeneration", "KimiK3ForConditionalGeneration", "LagunaForCausalLM", "Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration",
    "Step3p5ForCausalLM", "Step3p7ForConditionalGeneration",
})  # fmt: skip
_AUTO_DEPLOY: Final = frozenset({
    "DeepSeekV2ForCausalLM", "DeepseekV2ForCausalLM", "ExaoneForCausalLM", "Gemma3nForConditionalGeneration",
    "Glm4MoeLiteForCausalLM", "GraniteForCausalLM", "GraniteMoeHybridForCausalLM", "InternLM3ForCausalLM",
    "Olmo3ForCausalLM", "OpenELMForCausalLM", "SkyworkR1V2ForConditionalGeneration", "SmolLM3ForCausalLM",
})  # fmt: skip
"""AutoDeploy alone runs them."""
_BUILT: Final = frozenset({
    "ArcticForCausalLM", "BaiChuanForCausalLM", "BaichuanForCausalLM", "BloomForCausalLM", "ChatGLMForCausalLM",
    "ChatGLMForConditionalGeneration", "ChatGLMModel", "CogVLMForCausalLM", "CohereForCausalLM", "DbrxForCausalLM",
    "DeciLMForCausalLM", "DeepseekForCausalLM", "DeepseekV2ForCausalLM", "ExaoneForCausalLM", "FalconForCausalLM",
    "FuyuForCausalLM", "GPT2LMHeadModel", "GPTBigCodeForCausalLM", "GPTJForCausalLM", "GPTNeoXForCausalLM",
    "Gemma2ForCausalLM", "Gemma3ForCausalLM", "GemmaForCausalLM", "GraniteForCausalLM", "GraniteMoeForCausalLM",
    "Grok1ModelForCausalLM", "InternLM2ForCausalLM", "InternLMForCausalLM", "JAISLMHeadModel", "LlamaForCausalLM",
    "LlavaLlamaModel", "LlavaNextForConditionalGeneration", "MPTForCausalLM", "MambaForCausalLM", "MistralForCausalLM",
    "MixtralForCausalLM", "MllamaForConditionalGeneration", "MptForCausalLM", "NemotronForCausalLM", "OPTForCausalLM",
    "Phi3ForCausalLM", "Phi3SmallForCausalLM", "Phi3VForCausalLM", "Phi4MMForCausalLM", "PhiForCausalLM",
    "PhiMoEForCausalLM", "QWenForCausalLM", "QWenLMHeadModel", "Qwen2ForCausalLM", "Qwen2MoeForCausalLM",
    "Qwen2VLForConditionalGeneration", "Qwen3ForCausalLM", "RWForCausalLM", "RecurrentGemmaForCausalLM",
    "SkyworkForCausalLM", "Starcoder2ForCausalLM",
})  # fmt: skip
"""Of engines that TensorRT built."""


def check_model(model: ModelSpec, setup: Setup) -> tuple[str, ...]:
    """Return what to know of how TensorRT-LLM runs *model*.

    Raises:
        UnsupportedModelError: It does not run it, or in AutoDeploy alone, whose cache is not counted.
    """
    name = model.architecture
    if setup.option("backend") in ("tensorrt", "trt"):
        return (*class_remark("TensorRT", _BUILT, model, fallback=False), *file_remark("TensorRT-LLM", model))
    if name in _AUTO_DEPLOY - _RUN:
        raise UnsupportedModelError(
            f"TensorRT-LLM runs {name} in AutoDeploy alone, whose cache is not counted here", where=model.name
        )
    until = "engines that TensorRT built run it: --engine-option backend=tensorrt" if name in _BUILT else ""
    remarks = (*class_remark("TensorRT-LLM", _RUN, model, until, fallback=False), *file_remark("TensorRT-LLM", model))
    if name in _SINCE_1_3 and (setup.version or (1, 2))[:2] < (1, 3):
        return (*remarks, f"TensorRT-LLM runs {name} from 1.3 on; 1.2 has the rules that are counted here")
    return remarks
