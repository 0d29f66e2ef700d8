"""What is scored: one way to cache a passage, and which of its positions read a quantized token."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvplan.core.allocation import Setup
from kvplan.core.layouts import lay_out
from kvplan.core.packing import EngineFormat
from kvplan.core.specs import ModelSpec
from kvplan.core.tiers import lay_out_tiers
from kvplan.engines import transformers_cache
from kvplan.engines.engine import find_format
from kvplan.engines.formats import refuse_format
from kvplan.errors import InputError, UnsupportedFormatError
from kvplan.quality.passages import Passage
from kvplan.runtime.learned import require_calibration
from kvplan.runtime.library_cache import LibraryRuntime
from kvplan.runtime.loading import LoadedModel
from kvplan.runtime.ops import Kernel, unfused
from kvplan.runtime.server import Server
from kvplan.runtime.session import Runtime
from kvplan.runtime.tiered import TieredRuntime
from kvplan.store.calibrations import Calibration, learned_digest
from kvplan_kernels.format import CacheFormat, UnsupportedError, parse
from kvplan_kernels.layer_formats import ModelFormat, parse_formats
from kvplan_kernels.tier_formats import TieredFormat

_LIBRARY: Final = f"{transformers_cache.NAME}:"


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """What a lane has to hold, and with what.

    Attributes:
        tokens: Of the longest passage.
        batch: Passages at once.
        calibration: What formats have learned of the model.
    """

    block_tokens: int
    tokens: int
    batch: int
    kernel: Kernel | str
    threads: int | None = None
    calibration: Calibration | None = None


class Lane(ABC):
    """One way to compute the passages.

    Attributes:
        name: Of its format, as results call it.
        quantized: Whether it stores anything in fewer than 16 bits.
    """

    name: str
    quantized: bool

    @abstractmethod
    def quantized_positions(self, spec: ModelSpec, passage: Passage) -> int:
        """Return how many scored positions of *passage*, a document, attend to a quantized token."""

    def learned_digest(self, calibration: Calibration | None) -> str:
        """Return the SHA-256 of what its format has learned; empty where it learns nothing."""
        del calibration
        return ""

    @abstractmethod
    def check(self, spec: ModelSpec, documents: Sequence[Passage], room: Room) -> None:
        """Refuse what could not be scored.

        Raises:
            InputError: No scored position of *documents* attends to a quantized token, or the format learns and has
                not.
            UnsupportedFormatError: The model cannot be cached so.
        """

    @abstractmethod
    def open(self, loaded: LoadedModel, room: Room) -> Server[Any]:
        """Return what computes the passages."""


class FormatLane(Lane):
    """A format of kvplan's own, in pages, through its kernels.

    Attributes:
        form: The format.
        unfused: Whether torch's own attention reads the cache, and not the kernel.
    """

    def __init__(self, form: ModelFormat, *, unfused: bool = False) -> None:
        self.form = form
        self.unfused = unfused
        self.name = form.name
        self.quantized = form.quantized

    def quantized_positions(self, spec: ModelSpec, passage: Passage) -> int:
        """Return those that do; see `Lane.quantized_positions`."""
        first = len(passage.prompt)
        return sum(reads_quantized(spec, self.form, position) for position in range(first, first + len(passage.fed)))

    def learned_digest(self, calibration: Calibration | None) -> str:
        """Return that of the format; see `Lane.learned_digest`."""
        return learned_digest(self.form, calibration)

    def check(self, spec: ModelSpec, documents: Sequence[Passage], room: Room) -> None:
        """Refuse residuals that hold every prompt, and what has not learned; see `Lane.check`."""
        form = self.form
        lay_out(spec, form, room.block_tokens)
        if form.quantized and not any(self.quantized_positions(spec, document) for document in documents):
            quantized = (part for part in form.parts if part.quantized)
            least = min(quantized, key=lambda part: part.residual_tokens + part.sink_tokens)
            raise InputError(
                f"format {form}: no scored position attends to a quantized token; prompts have "
                f"{len(documents[0].prompt)} tokens, {least.residual_tokens} newest and {least.sink_tokens} first "
                "tokens stay in 16 bits",
                hint="use a longer context",
            )
        require_calibration(spec, form, room.calibration)

    def open(self, loaded: LoadedModel, room: Room) -> Runtime:
        """Return a runtime with pages for the whole batch."""
        blocks = room.batch * lay_out(loaded.spec, self.form, room.block_tokens).blocks(room.tokens)
        runtime = Runtime(
            loaded, self.form, block_tokens=room.block_tokens, blocks=blocks, slots=room.batch, kernel=room.kernel,
            threads=room.threads, calibration=room.calibration,
        )  # fmt: skip
        if self.unfused:
            runtime.ops = unfused(runtime.ops)
        return runtime


class TieredLane(Lane):
    """A format in tiers, in pages, through kvplan's kernels.

    Attributes:
        form: The format.
    """

    def __init__(self, form: TieredFormat) -> None:
        self.form = form
        self.name = form.name
        self.quantized = form.quantized

    def quantized_positions(self, spec: ModelSpec, passage: Passage) -> int:
        """Return those that read a quantized token or miss a dropped one; see `Lane.quantized_positions`."""
        del spec
        first = len(passage.prompt)
        return sum(self._loses(position, first) for position in range(first, first + len(passage.fed)))

    def _loses(self, position: int, prompt_tokens: int) -> bool:
        lengths = self.form.lengths(position + 1, prompt_tokens)
        stored = zip(self.form.tiers, lengths, strict=True)
        return sum(lengths) <= position or any(tier.form.quantized and length for tier, length in stored)

    def check(self, spec: ModelSpec, documents: Sequence[Passage], room: Room) -> None:
        """Refuse windows that hold every document; see `Lane.check`."""
        lay_out_tiers(spec, self.form, room.block_tokens)
        if self.quantized and not any(self.quantized_positions(spec, document) for document in documents):
            raise InputError(
                f"format {self.name}: all tokens that are scored attend to all others in 16 bits; documents have "
                f"{documents[0].tokens} tokens, the window {self.form.window_tokens}",
                hint="use a longer context",
            )

    def open(self, loaded: LoadedModel, room: Room) -> TieredRuntime:
        """Return a runtime with pages for the whole batch, whatever of each passage is its prompt."""
        layout = lay_out_tiers(loaded.spec, self.form, room.block_tokens)
        most = map(max, layout.blocks(room.tokens), layout.blocks(room.tokens, prompt_tokens=0))
        return TieredRuntime(
            loaded, self.form, block_tokens=room.block_tokens, blocks=tuple(room.batch * count for count in most),
            slots=room.batch, kernel=room.kernel, threads=room.threads,
        )  # fmt: skip


class LibraryLane(Lane):
    """A quantized cache of transformers, by the library's own classes.

    Attributes:
        form: The library's format.
    """

    def __init__(self, form: EngineFormat) -> None:
        self.form = form
        self.name = f"{_LIBRARY}{form.name}"
        self.quantized = True

    def quantized_positions(self, spec: ModelSpec, passage: Passage) -> int:
        """Return all of them: the library quantizes the whole prompt."""
        return len(passage.fed)

    def check(self, spec: ModelSpec, documents: Sequence[Passage], room: Room) -> None:
        """Refuse models that the library's class does not take; see `Lane.check`."""
        transformers_cache.allocate(spec, self.form.name, Setup(context_tokens=documents[0].tokens))

    def open(self, loaded: LoadedModel, room: Room) -> LibraryRuntime:
        """Return the model with caches that grow."""
        return LibraryRuntime(loaded, self.form)


def read_lane(name: str, spec: ModelSpec) -> Lane:
    """Return the lane of the format called *name*.

    The model's own 16-bit format is read by torch's attention: kvplan's kernel, the reference, is compared with it.

    Raises:
        UnsupportedFormatError: There is no such format, or it is another engine's and no code here computes it.
    """
    if name.startswith(_LIBRARY):
        form = find_format(transformers_cache.NAME, transformers_cache.FORMATS, name)
        if not form.quantized:
            raise UnsupportedFormatError(f"{name} is not quantized", hint=f"give {form.same_as}")
        return LibraryLane(form)
    try:
        own = parse_formats(name)
    except UnsupportedError as error:
        raise refuse_format(name, str(error)) from error
    if isinstance(own, TieredFormat):
        return TieredLane(own)
    return FormatLane(own, unfused=own == reference_format(spec))


def own_formats(names: Iterable[str], spec: ModelSpec) -> list[ModelFormat]:
    """Return those of the formats called *names* that are kvplan's own.

    Raises:
        UnsupportedFormatError: As `read_lane`.
    """
    lanes = (read_lane(name, spec) for name in names)
    return [lane.form for lane in lanes if isinstance(lane, FormatLane)]


def reference_format(spec: ModelSpec) -> CacheFormat:
    """Return the 16-bit format of the model's own type, which everything is compared with."""
    return parse(spec.float_type)


def reads_quantized(spec: ModelSpec, form: ModelFormat, position: int) -> bool:
    """Whether the token at *position* attends to a quantized token in any layer, in a cache of all up to itself."""
    for layer, stored in dict.fromkeys(zip(spec.layers, spec.layer_formats(form), strict=True)):
        last = _last_quantized(stored, position + 1)
        if last >= 0 and (layer.window_tokens is None or last > position - layer.window_tokens):
            return True
    return False


def _last_quantized(form: CacheFormat, tokens: int) -> int:
    """Return the newest of *tokens* tokens that is quantized in a layer; -1 where none is."""
    paged = max(0, tokens - form.sink_tokens)
    last = -1
    for tensor, flush in ((form.key, form.key_flush), (form.value, form.value_flush)):
        if tensor.quantized and flush.quantized_tokens(paged):
            last = max(last, form.sink_tokens + flush.quantized_tokens(paged) - 1)
    return last
