"""Whether an engine runs a model of some class, by the engine's own list or by transformers' modelling code."""

from collections.abc import Set
from typing import Final

from kvplan.core.specs import LayerKind, ModelSpec
from kvplan.errors import UnsupportedModelError

_COMPATIBLE: Final = frozenset({
    "AriaForConditionalGeneration", "AriaTextForCausalLM", "BitNetForCausalLM", "CodeGenForCausalLM", "CwmForCausalLM",
    "DiffLlamaForCausalLM", "Dots1ForCausalLM", "Ernie4_5ForCausalLM", "FlexOlmoForCausalLM", "FlintForCausalLM",
    "GPTNeoXForCausalLM", "GlmForCausalLM", "HeliumForCausalLM", "HyperCLOVAXForCausalLM",
    "InternVLForConditionalGeneration", "Jais2ForCausalLM", "LlavaNextForConditionalGeneration", "MinistralForCausalLM",
    "NanoChatForCausalLM", "NemotronForCausalLM", "Olmo3ForCausalLM", "PersimmonForCausalLM",
    "Phi4MultimodalForCausalLM", "PhimoeForCausalLM", "SeedOssForCausalLM", "SmolLM3ForCausalLM",
    "SolarOpenForCausalLM", "VaultGemmaForCausalLM",
})  # fmt: skip
"""Classes of transformers 5.24 whose `is_backend_compatible()` is true, with K and V in every layer."""


def class_remark(
    engine: str, known: Set[str], model: ModelSpec, until: str = "", *, fallback: bool = True
) -> tuple[str, ...]:
    """Return what to know of how *engine*, which has classes of its own for *known*, runs *model*.

    Args:
        engine: As its makers write it.
        known: Classes that need no remark.
        model: Whose class is asked for.
        until: What is known of a class that it had once.
        fallback: Whether it runs other classes by transformers' modelling code.

    Raises:
        UnsupportedModelError: It has no such class, and none that stands for it.
    """
    name = model.architecture[:60]
    if name in known:
        return ()
    if fallback and name in _COMPATIBLE and is_plain(model, windows=True):
        return (f"{engine} runs {name} by transformers' modelling code, with the engine's own attention and cache",)
    hint = until or "`kvplan size` without --engine counts its logical bytes"
    raise UnsupportedModelError(f"{engine} has no model class {name}", where=model.name, hint=hint)


def file_remark(engine: str, model: ModelSpec) -> tuple[str, ...]:
    """Return that *engine* reads no GGUF files, where *model* is one; its cache is the checkpoint's all the same."""
    if model.stored_weight_bytes is None:
        return ()
    return (f"{engine} reads no GGUF files: counted is the cache of the same model from a checkpoint",)


def is_plain(model: ModelSpec, *, windows: bool) -> bool:
    """Whether every layer keeps K and V of its own and nothing else; of every token, unless *windows* are allowed."""
    kinds = (LayerKind.FULL, LayerKind.SLIDING) if windows else (LayerKind.FULL, LayerKind.LATENT)
    return all(
        layer.kind in kinds and layer.shared_with is None and not layer.sides and not layer.states
        for layer in model.layers
    )
