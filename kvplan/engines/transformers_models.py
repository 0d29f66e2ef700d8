"""The models that transformers runs by its own code.

The classes of huggingface/transformers 5.24, src/transformers/models/auto/modeling_auto.py, whose config is read here.
Left out: DeepSeek V4, whose cache holds tokens that await their entry in buffers of its own, and MiniMax, whose cache
is none of cache_utils.py.
"""

from typing import Final

RUN: Final = frozenset({
    "AXK1ForCausalLM", "ApertusForCausalLM", "ArceeForCausalLM", "AriaForConditionalGeneration",
    "AriaTextForCausalLM", "BambaForCausalLM", "BioGptForCausalLM", "BitNetForCausalLM", "BloomForCausalLM",
    "CodeGenForCausalLM", "Cohere2ForCausalLM", "CohereForCausalLM", "CwmForCausalLM", "DbrxForCausalLM",
    "DeepseekV2ForCausalLM", "DeepseekV32ForCausalLM", "DeepseekV3ForCausalLM", "DiffLlamaForCausalLM",
    "Dots1ForCausalLM", "Ernie4_5ForCausalLM", "Ernie4_5_MoeForCausalLM", "Exaone4ForCausalLM",
    "ExaoneMoeForCausalLM", "FalconForCausalLM", "FalconH1ForCausalLM", "FalconMambaForCausalLM",
    "FlexOlmoForCausalLM", "GPT2LMHeadModel", "GPTBigCodeForCausalLM", "GPTJForCausalLM", "GPTNeoXForCausalLM",
    "Gemma2ForCausalLM", "Gemma3ForCausalLM", "Gemma3ForConditionalGeneration", "Gemma3nForCausalLM",
    "Gemma3nForConditionalGeneration", "Gemma4ForCausalLM", "Gemma4ForConditionalGeneration", "GemmaForCausalLM",
    "Glm4ForCausalLM", "Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM", "GlmForCausalLM", "GlmMoeDsaForCausalLM",
    "GptOssForCausalLM", "GraniteForCausalLM", "GraniteMoeForCausalLM", "GraniteMoeHybridForCausalLM",
    "GraniteMoeSWAForCausalLM", "GraniteMoeSharedForCausalLM", "GraniteSWAForCausalLM", "HeliumForCausalLM",
    "HunYuanDenseV1ForCausalLM", "HunYuanMoEV1ForCausalLM", "HyperCLOVAXForCausalLM",
    "InternVLForConditionalGeneration", "Jais2ForCausalLM", "JambaForCausalLM", "KimiLinearForCausalLM",
    "Lfm2ForCausalLM", "Lfm2MoeForCausalLM", "Llama4ForCausalLM", "Llama4ForConditionalGeneration",
    "LlamaForCausalLM", "LlavaForConditionalGeneration", "LlavaNextForConditionalGeneration",
    "LongcatFlashForCausalLM", "Mamba2ForCausalLM", "MambaForCausalLM", "MiMoV2FlashForCausalLM",
    "MiniCPM3ForCausalLM", "MiniMaxM2ForCausalLM", "Ministral3ForCausalLM", "MinistralForCausalLM",
    "Mistral3ForConditionalGeneration", "MistralForCausalLM", "MixtralForCausalLM", "MptForCausalLM",
    "NanoChatForCausalLM", "NemotronForCausalLM", "NemotronHForCausalLM", "OPTForCausalLM", "Olmo2ForCausalLM",
    "Olmo3ForCausalLM", "OlmoForCausalLM", "OlmoHybridForCausalLM", "OlmoeForCausalLM", "PersimmonForCausalLM",
    "Phi3ForCausalLM", "Phi4MultimodalForCausalLM", "PhiForCausalLM", "PhimoeForCausalLM", "Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM", "Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration",
    "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Qwen3NextForCausalLM", "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration", "Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration", "SeedOssForCausalLM", "SmolLM3ForCausalLM",
    "SolarOpenForCausalLM", "StableLmForCausalLM", "Starcoder2ForCausalLM", "Step3p7ForConditionalGeneration",
    "VaultGemmaForCausalLM", "WhisperForConditionalGeneration", "YoutuForCausalLM",
})  # fmt: skip
