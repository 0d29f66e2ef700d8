"""A config's word on its cache: `kv_cache_scheme` or `kv_cache_quant_algo` in what it says of its quantization.

Spellings are those of NVIDIA Model Optimizer and compressed-tensors as vLLM reads them (vllm-project/vllm,
vllm/utils/torch_utils.py, `get_kv_cache_quant_algo_string`, main of 2026-11).
"""

from collections.abc import Mapping
from typing import Any, Final

from kvplan.core.specs import StatedCache
from kvplan.errors import UnsupportedModelError

_HOLDERS: Final = ("quantization_config", "compression_config")
_KEYS: Final = ("kv_cache_scheme", "kv_cache_quant_algo")
_WORDS: Final = {"fp8": "fp8_e4m3", "nvfp4": "nvfp4", "int8": "int8"}
_NONE: Final = ("", "none", "auto", "mixed_precision")
_KINDS: Final[Mapping[Any, str]] = {(8, "float"): "fp8_e4m3", (4, "float"): "nvfp4"}


def read_stated_cache(config: Mapping[str, Any], where: str) -> StatedCache | None:
    """Return what *config*, read from *where*, says of the cache; None where it says nothing.

    Raises:
        UnsupportedModelError: It says what is not known; the key is named.
    """
    for holder in (config, *(inner for inner in config.values() if isinstance(inner, Mapping))):
        for name in _HOLDERS:
            said = holder.get(name)
            if isinstance(said, Mapping) and (found := _read(said, where)):
                return found
    return None


def _read(said: Mapping[str, Any], where: str) -> StatedCache | None:
    inner = said.get("quantization")
    for holder in (inner, said) if isinstance(inner, Mapping) else (said,):
        for key in _KEYS:
            form = _format(key, holder.get(key), where)
            if form:
                return StatedCache(format=form, library=_library(said))
    return None


def _library(said: Mapping[str, Any]) -> str:
    """Return the library's name; some of Model Optimizer's configs name only the algorithm."""
    method = str(said.get("quant_method") or "modelopt").replace("_", "-")
    return "modelopt" if method.startswith("modelopt") else method


def _format(key: str, value: Any, where: str) -> str:
    """Return kvplan's name of what a key says; empty where that is nothing."""
    if value is None or (isinstance(value, str) and value.lower() in _NONE):
        return ""
    form = ""
    if isinstance(value, str):
        form = _WORDS.get(value.lower(), "")
    elif isinstance(value, Mapping) and not value.get("dynamic"):
        form = _KINDS.get((value.get("num_bits"), value.get("type")), "")
    if not form:
        raise UnsupportedModelError(
            f"{key} says {str(value)[:80]!r}, which is not known here",
            where=where,
            hint="fp8, nvfp4 and int8 with scales of the checkpoint are",
        )
    return form
