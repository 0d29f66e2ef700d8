"""vLLM's caches of compressed entries (DeepSeek V4): one block holds a page of every layer that a group has.

The rules are those of vllm-project/vllm `vllm/models/deepseek_v4/attention.py` and `compressor.py`,
`vllm/v1/attention/backends/mla/sparse_swa.py` and `kv_cache_utils.py` (`_get_kv_cache_groups_uniform_groups`,
`_get_kv_cache_config_packed`), read 2026-11-30. Entries of all layers are one group; windows, and the states in which a
compressor gathers an entry, are split into groups that hold about as many layers. Pages are padded to 576 bytes and to
the next size that the entries have.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kvplan.core.allocation import CacheGroup, CachePart, Capacity, GroupedAllocation, Setup, largest
from kvplan.core.packing import EngineFormat
from kvplan.core.specs import LayerSpec, ModelSpec
from kvplan.errors import UnsupportedFormatError, UnsupportedSettingError
from kvplan_kernels.layout import ceil_div, round_up

ENTRIES: Final = "compressed entries"
_BLOCK_TOKENS: Final = 256
_WINDOW_BLOCK_TOKENS: Final = 64
_STATE_BLOCK_TOKENS: Final = {4: 4, 128: 8}
"""By the tokens of an entry: so that a page of states is no larger than one of entries."""
_ALIGNMENT_BYTES: Final = 576
_ENTRY_BYTES: Final = 584
"""Of 512 elements: 448 in E4M3, 64 for position in bf16, 8 for scales."""
_INDEXER_BYTES: Final = 132
_STATE_ITEM_BYTES: Final = 4
_OVERLAPPED: Final = 4
"""Entries of as many tokens overlap: their state is of two."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Page:
    """What one cache of one layer keeps.

    Attributes:
        unit_bytes: Of a token.
        nbytes: Of the page, aligned.
    """

    name: str
    tokens: int
    unit_bytes: float
    nbytes: int
    entry_tokens: int = 1
    window_tokens: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressedAllocation(GroupedAllocation):
    """Groups of unlike layers in blocks that have a page for each of the largest group's.

    Attributes:
        charged_block_bytes: What the check of a longest sequence charges for a block: as many of each page as the
            group with most layers has.
        weights: Of a block of each group, what its own pages are to those of the first.
    """

    charged_block_bytes: int
    weights: tuple[float, ...]

    def charged_bytes(self, tokens: int) -> float:
        """Return what vLLM's check of the longest sequence charges for *tokens*."""
        return self.sequence_blocks(tokens) * self.charged_block_bytes

    def capacity(self, pool_bytes: int) -> Capacity:
        """Return what a pool of *pool_bytes* holds; concurrency weighs groups by their pages, as vLLM prints it."""
        context = self.setup.context_tokens
        blocks = int(pool_bytes // self.groups[0].bytes_per_block)
        weighed = sum(group.blocks(context) * weight for group, weight in zip(self.groups, self.weights, strict=True))
        concurrency = blocks / ceil_div(round(1e6 * weighed), 10**6)
        return Capacity(
            blocks=blocks,
            tokens=int(concurrency * context),
            max_concurrency=concurrency,
            max_context=largest(lambda tokens: self.charged_bytes(tokens) <= pool_bytes),
        )


def is_compressed(layers: Sequence[LayerSpec]) -> bool:
    """Whether layers keep compressed entries."""
    return any(side.name == ENTRIES for layer in layers for side in layer.sides)


def allocate_compressed(
    model: ModelSpec, form: EngineFormat, setup: Setup, in_flight_tokens: int
) -> CompressedAllocation:
    """Return the allocation; every rank holds all of it.

    Raises:
        UnsupportedFormatError: vLLM has no such cache in the format.
        UnsupportedSettingError: Several pipeline stages, or ranks that do not divide the heads.
    """
    if setup.pipeline_parallel > 1:
        raise UnsupportedSettingError(
            "stages of compressed caches are not known here", where="--pp", hint="leave --pp out"
        )
    if model.query_heads % setup.tensor_parallel:
        message = f"{setup.tensor_parallel} ranks do not divide {model.query_heads} query heads of {model.name}"
        raise UnsupportedSettingError(message, where="--tp", hint="give a number of ranks that divides the heads")
    packed = form.name.startswith("fp8")
    if form.quantized and not packed:
        raise UnsupportedFormatError(f"vLLM has no compressed cache in {form.name}", hint="use fp8_e4m3 or bf16")
    pages = _Pages(model.layers, packed=packed)
    return _built(pages, setup, in_flight_tokens)


class _Pages:
    """The caches of all layers, by kind; those of layers that are alike are one object."""

    def __init__(self, layers: Sequence[LayerSpec], *, packed: bool) -> None:
        self._alignment = _ALIGNMENT_BYTES if packed else 1
        self._packed = packed
        ratios = sorted(_STATE_BLOCK_TOKENS)
        kinds = {
            layer: (self._entry_pages(layer), self._window_page(layer), [self._state_pages(layer, r) for r in ratios])
            for layer in set(layers)
        }
        made = [kinds[layer] for layer in layers]
        self.entries = [page for entries, _, _ in made for page in entries]
        self.windows = [window for _, window, _ in made]
        self.states = [[page for _, _, states in made for page in states[number]] for number in range(len(ratios))]

    def _page(self, name: str, tokens: int, unit_bytes: float, entry: int = 1, window: int | None = None) -> _Page:
        return _Page(
            name=name, tokens=tokens, unit_bytes=unit_bytes, entry_tokens=entry, window_tokens=window,
            nbytes=round_up(round(tokens * unit_bytes), self._alignment),
        )  # fmt: skip

    def _row(self, elements: int) -> int:
        return _ENTRY_BYTES * elements // 512 if self._packed else 2 * elements

    def _entry_pages(self, layer: LayerSpec) -> list[_Page]:
        made = []
        for side in layer.sides:
            each = self._row(side.elements) if side.name == ENTRIES else _INDEXER_BYTES * side.elements // 128
            ratio = side.tokens_per_entry
            made.append(self._page(side.name, _BLOCK_TOKENS, each / ratio, ratio))
        return made

    def _window_page(self, layer: LayerSpec) -> _Page:
        each = self._row(layer.head_dim)
        return self._page("sliding attention", _WINDOW_BLOCK_TOKENS, each, window=layer.window_tokens)

    def _state_pages(self, layer: LayerSpec, ratio: int) -> list[_Page]:
        spans = 2 if ratio == _OVERLAPPED else 1
        tokens, window = _STATE_BLOCK_TOKENS[ratio], spans * ratio
        return [
            self._page("states of compressors", tokens, 2 * spans * side.elements * _STATE_ITEM_BYTES, window=window)
            for side in layer.sides
            if side.tokens_per_entry == ratio
        ]


class _Padding(dict[int, int]):
    """The bytes that pages of so many bytes are made: the next size that the entries have, else their own."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        self.sizes = sizes

    def __missing__(self, nbytes: int) -> int:
        self[nbytes] = min((size for size in self.sizes if size >= nbytes), default=nbytes)
        return self[nbytes]


def _built(pages: _Pages, setup: Setup, in_flight: int) -> CompressedAllocation:
    padded = _Padding(sorted({page.nbytes for page in pages.entries}))
    most = max(Counter(page.nbytes for page in pages.entries).values())
    kinds = [kind for kind in (pages.windows, *pages.states) if kind]
    tuples = _tuples([most, *(_tuple_count(kind) for kind in kinds)])
    split = [pages.entries, *(part for kind in kinds for part in _split(kind, padded, tuples))]
    counts = [Counter(padded[page.nbytes] for page in group) for group in split]
    slots: Counter[int] = Counter()
    for count in counts:
        slots |= count
    block_bytes = sum(size * count for size, count in slots.items())
    own = [sum(size * count for size, count in group.items()) for group in counts]
    return CompressedAllocation(
        groups=tuple(
            _group(group, size, block_bytes, setup, in_flight) for group, size in zip(split, own, strict=True)
        ),
        setup=setup,
        charged_block_bytes=max(max(count.values()) for count in counts) * sum(padded.sizes),
        weights=tuple(size / own[0] for size in own),
    )


def _tuple_count(pages: Sequence[_Page]) -> int:
    """Return how many layers have each of the kind's pages."""
    return max(Counter(page.nbytes for page in pages).values())


def _tuples(counts: Sequence[int]) -> int:
    """Return the layers of a group for which rounding all counts up to multiples adds least; the larger of equals."""

    def added(size: int) -> int:
        return sum(-count % size for count in counts)

    return min(range(counts[0], max(counts) + 1), key=lambda size: (added(size), -size))


def _split(pages: Sequence[_Page], padded: Mapping[int, int], tuples: int) -> list[list[_Page]]:
    """Return a kind's pages in groups of about *tuples* layers."""
    by_size: dict[int, list[_Page]] = {}
    for page in pages:
        by_size.setdefault(padded[page.nbytes], []).append(page)
    groups = ceil_div(len(next(iter(by_size.values()))), tuples)
    return [[page for kind in by_size.values() for page in kind[number::groups]] for number in range(groups)]


def _group(pages: Sequence[_Page], padded_bytes: int, block_bytes: int, setup: Setup, in_flight: int) -> CacheGroup:
    first = pages[0]
    window = first.window_tokens
    parts = tuple(
        CachePart(
            name=page.name,
            layers=count,
            logical_unit_bytes=count * page.unit_bytes / setup.tensor_parallel,
            unit_bytes=count * page.unit_bytes,
            window_tokens=page.window_tokens,
            entry_tokens=page.entry_tokens,
        )
        for page, count in Counter(pages).items()
    )
    return CacheGroup(
        parts=parts,
        block_tokens=first.tokens,
        page_padding_bytes=padded_bytes - sum(page.tokens * page.unit_bytes for page in pages),
        padding_layer_bytes=block_bytes - padded_bytes,
        held_tokens_max=None if window is None else window - 1 + in_flight,
        spare_blocks=0 if window is None else 1,
    )
