"""Loading a model with its weights: from this machine only, by the library's own code only, and if it fits."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from kvplan.core.specs import ModelSpec
from kvplan.errors import InputError, UnsupportedModelError
from kvplan.runtime.conversion import check_complete, converted_folder, quiet
from kvplan.runtime.dense import LayerAttention
from kvplan.runtime.memory import require_memory
from kvplan.runtime.probe import probe
from kvplan.store.models import find_model, load_model_spec
from kvplan_kernels.cache import TORCH_FLOAT

_TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer.model", "vocab.json")
_WORKING_SHARE: Final = 1.1
"""Of the weights' bytes; buffers and the library's own objects come on top of them."""


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class LoadedModel:
    """A model that is ready to run on a paged cache.

    Attributes:
        model: The library's causal language model, with kvplan's attention set.
        tokenizer: None where the model's files hold none.
        layers: What each layer's attention computes.
    """

    model: Any
    tokenizer: Any
    spec: ModelSpec
    layers: tuple[LayerAttention, ...]

    @property
    def device(self) -> str:
        """Where its weights lie, as torch names it."""
        return str(self.model.device)


def load_model(
    name_or_path: str, *, dtype: torch.dtype | None = None, cache_conversion: bool = True, device: str = "cpu"
) -> LoadedModel:
    """Return the model called *name_or_path*: demo, a folder, a GGUF file, or an id in the local Hugging Face cache.

    Args:
        name_or_path: As a user names it.
        dtype: Of weights and activations; None is the 16-bit type the model was published in.
        cache_conversion: Whether a GGUF file's weights are kept as safetensors in the user's cache folder, so that
            the next load takes a second and not a dozen.
        device: Where to run it, as torch names it; it is read into the processor's memory first.

    Raises:
        InputError: There is no such model, or its files are damaged.
        UnsupportedModelError: Its cache or its attention is of a kind that kvplan does not run.
        DoesNotFitError: It needs more memory than is available.
    """
    spec = load_model_spec(name_or_path)
    if not spec.has_weights:
        raise InputError(f"{name_or_path} holds a config without weights; running a model takes both")
    dtype = dtype or TORCH_FLOAT[spec.float_type]
    path = find_model(name_or_path)
    if path.suffix.lower() == ".gguf":
        check_memory(spec, dtype, copies=2)
        path = converted_folder(path, spec, keep=cache_conversion)
    check_memory(spec, dtype, copies=1)
    if device != "cpu":
        check_memory(spec, dtype, copies=1, device=device)
    return attach(_read_weights(path, dtype).to(device), _read_tokenizer(path), spec)


def attach(model: Any, tokenizer: Any, spec: ModelSpec) -> LoadedModel:
    """Return *model* with kvplan's attention in place; it is looked at before it is trusted."""
    model.eval()
    return LoadedModel(model=model, tokenizer=tokenizer, spec=spec, layers=probe(model, spec))


def check_memory(spec: ModelSpec, dtype: torch.dtype, *, copies: int, device: str = "cpu") -> None:
    """Refuse a model whose weights, *copies* times over, exceed the memory that is available now."""
    parameters = spec.parameters or (spec.weight_bytes or 0) // 2
    require_memory(int(parameters * dtype.itemsize * copies * _WORKING_SHARE), f"loading {spec.name}", device)


def _read_weights(folder: Path, dtype: torch.dtype) -> Any:
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    if not any(folder.glob("*.safetensors")):
        raise InputError(f"{folder} holds no safetensors weights", hint="convert the model to safetensors first")
    try:
        with quiet():
            model, report = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=dtype,
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=False,
                attn_implementation="eager",
                output_loading_info=True,
            )
    except (SafetensorError, OSError) as error:
        raise InputError(f"weights cannot be read: {_first_line(error)}", where=str(folder)) from error
    except RuntimeError as error:
        if "mismatch" not in str(error):
            raise  # of memory, not of the files
        raise InputError("the weights are not of the shapes that config.json says", where=str(folder)) from error
    except (ValueError, KeyError) as error:
        raise UnsupportedModelError(f"transformers cannot build {folder}: {_first_line(error)}") from error
    check_complete(folder, report)
    return model


def _read_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    if not any((folder / name).exists() for name in _TOKENIZER_FILES):
        return None
    try:
        with quiet():
            return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise InputError(f"tokenizer cannot be read: {_first_line(error)}", where=str(folder)) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
