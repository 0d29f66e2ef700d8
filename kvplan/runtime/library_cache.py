"""transformers' own quantized caches in the place of kvplan's pages: what they cost is measured on the real classes.

The library's layers do here what they do in `generate`: the prompt is attended to in 16 bits and then quantized whole,
each later forward pass dequantizes all that is held and attends to it with its own tokens in 16 bits, and once
`residual_length` tokens wait, what was dequantized is quantized once more with them (huggingface/transformers 5.24,
src/transformers/cache_utils.py, `QuantizedLayer.update`). Every sequence has a cache of its own, as a request alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

import torch
from torch import Tensor

from kvplan.core.packing import EngineFormat
from kvplan.engines.transformers_cache import NAME, PACKAGES, RESIDUAL, cache_config
from kvplan.errors import MissingPartError, UnsupportedFormatError
from kvplan.runtime.attention import Asked, handover_cache
from kvplan.runtime.dense import attend_masked
from kvplan.runtime.loading import LoadedModel
from kvplan.runtime.server import OrderedStep, Server, Spent, run_step

_INSTALL: Final = "pip install 'kvplan[transformers-cache]'"


@dataclass(kw_only=True, eq=False, slots=True)
class LibrarySequence:
    """One sequence.

    Attributes:
        layers: The library's own, one a layer of the model.
        length: Tokens held.
    """

    layers: Sequence[Any]
    length: int = 0


class LibraryRuntime(Server[LibrarySequence]):
    """One model with one of the library's quantized caches; torch's attention reads what it dequantizes."""

    def __init__(self, loaded: LoadedModel, form: EngineFormat) -> None:
        """Take *form* as the table of `kvplan.engines.transformers_cache` has it, for a model that its rules allow.

        Raises:
            MissingPartError: The package that packs its codes is not installed.
        """
        self.loaded = loaded
        self.format = f"{NAME}:{form.name}"
        self.name = "/".join(_releases(self.format, form))
        self.spent = Spent()
        self._config = cache_config(form)
        self._model_cache = handover_cache(len(loaded.spec.layers))

    def admit(self, tokens: int) -> "_LibraryIntake":
        """Return a new sequence with the library's layers, empty; see `Server.admit`."""
        from transformers import QuantizedCache

        try:
            cache = QuantizedCache(config=self.loaded.model.config, **self._config)
        except ImportError as error:
            raise MissingPartError(f"{self.format} cannot be run: {_line(error)}", hint=_INSTALL) from error
        return _LibraryIntake(self, LibrarySequence(layers=cache.layers))

    def reserve(self, sequence: LibrarySequence, tokens: int) -> None:
        """Do nothing: the library's tensors grow as they are appended to."""

    def step_sizes(self, sequences: list[LibrarySequence], tokens: int, limit: int) -> list[int]:
        """Return steps that end where all is quantized anew; see `Server.step_sizes`.

        A pass attends before its tokens are quantized, so the one that fills the residual ends with the last of them.
        """
        residual = int(self._config.get(RESIDUAL, 0))
        waiting = _waiting(sequences[0].layers[0])
        sizes: list[int] = []
        while (rest := tokens - sum(sizes)) > 0:
            room = max(1, residual - waiting) if residual else limit
            sizes.append(min(rest, limit, room))
            waiting = 0 if sizes[-1] == room else waiting + sizes[-1]
        return sizes

    def extend(self, sequence: LibrarySequence, token_ids: Sequence[int]) -> Tensor:
        """Append a chunk in one forward pass, as `prefill_chunk_size` of `generate` does; see `Server.extend`."""
        return self._run([sequence], torch.tensor([list(token_ids)], dtype=torch.int64), last_only=True)[0, -1]

    def step(self, sequences: list[LibrarySequence], token_ids: Tensor) -> Tensor:
        """Append and attend; see `Server.step`."""
        return self._run(sequences, token_ids, last_only=False)

    def free(self, sequence: LibrarySequence) -> None:
        """Let go of the tensors."""
        sequence.layers, sequence.length = (), 0

    def append(self, sequence: LibrarySequence, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append [1, kv_heads, tokens, head_dim] and return what is to be attended to, of all tokens held.

        Raises:
            UnsupportedFormatError: The library's code fails, or gives numbers that are not finite.
        """
        try:
            keys, values = sequence.layers[layer].update(key, value)
        except (ArithmeticError, AssertionError, ImportError, OSError, RuntimeError, TypeError, ValueError) as error:
            raise self._refusal(sequence, f"fails: {_line(error)}") from error
        if not (bool(keys.isfinite().all()) and bool(values.isfinite().all())):
            raise self._refusal(sequence, "gives keys or values that are not finite")
        return keys, values

    def _refusal(self, sequence: LibrarySequence, what: str) -> UnsupportedFormatError:
        return UnsupportedFormatError(f"{self.format}: the library's cache {what}, after {sequence.length} tokens")

    def _run(self, sequences: list[LibrarySequence], token_ids: Tensor, *, last_only: bool) -> Tensor:
        device, tokens = self.loaded.device, token_ids.shape[1]
        lengths = torch.tensor([[sequence.length] for sequence in sequences], device=device)
        positions = lengths + torch.arange(tokens, device=device)
        step = _LibraryStep(self, sequences)
        logits = run_step(
            self.loaded, self._model_cache, step, token_ids.to(device), positions, last_only=last_only
        )  # fmt: skip
        for sequence in sequences:
            sequence.length += tokens
        return logits


class _LibraryIntake:
    """A sequence whose first tokens are quantized whole, whatever its residual."""

    def __init__(self, runtime: LibraryRuntime, sequence: LibrarySequence) -> None:
        self.sequence = sequence
        self._runtime = runtime

    def store(self, layer: int, query: Tensor, key: Tensor, value: Tensor, poisons: Tensor) -> None:
        self._runtime.append(self.sequence, layer, key, value)


class _LibraryStep(OrderedStep):
    """Attention over what the library's layers give back: all that is held, dequantized, and the new tokens."""

    def __init__(self, runtime: LibraryRuntime, sequences: Sequence[LibrarySequence]) -> None:
        super().__init__(runtime.loaded.layers)
        self._runtime = runtime
        self._sequences = sequences

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, asked: Asked) -> Tensor:
        self.begin(layer)
        rows = []
        for row, sequence in enumerate(self._sequences):
            own = slice(row, row + 1)
            keys, values = self._runtime.append(sequence, layer, key[own], value[own])
            queries, held = query.shape[2], keys.shape[2]
            allowed = torch.ones(queries, held, dtype=torch.bool, device=query.device).tril(held - queries)
            rows.append(attend_masked(query[own], keys, values, allowed, self.layers[layer]))
        return torch.cat(rows).transpose(1, 2).contiguous()


def _waiting(layer: Any) -> int:
    """Return the tokens that wait in 16 bits; the library holds none as a tensor without dimensions."""
    return int(layer.keys.shape[-2]) if layer.keys.dim() == 4 else 0


def _releases(name: str, form: EngineFormat) -> list[str]:
    """Return the packages that the figures rest on, with their releases."""
    package = PACKAGES.get(str(cache_config(form)["backend"]))
    found = [f"{NAME}-{version(NAME)}"]
    if package is None:
        return found
    try:
        return [*found, f"{package}-{version(package)}"]
    except PackageNotFoundError as error:
        raise MissingPartError(f"{name} needs the package {package}", hint=_INSTALL) from error


def _line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
