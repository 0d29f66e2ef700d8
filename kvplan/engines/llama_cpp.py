"""llama.cpp: one buffer of cells for the whole context, made when the server starts.

The rules are those of ggml-org/llama.cpp at 0c1e570 (version 0.5.0), read 2026-11-30: `src/llama-context.cpp` (how many
cells), `src/llama-kv-cache.cpp` and `-iswa.cpp` (what a cell takes), `src/llama-memory-recurrent.cpp` (states),
`tools/server/server.cpp` (slots). Cells are padded to 256. Slots that nobody counted are 4 and share one buffer; a
number of slots of one's own gives each a buffer of its own, unless they are unified. Layers with a window have a buffer
with their windows and one batch more. States are float32, one for each slot, those of convolutions too.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Final

from kvplan.core.allocation import Setup
from kvplan.core.packing import EngineFormat, Packing
from kvplan.core.specs import LayerKind, LayerSpec, ModelSpec, SideCache
from kvplan.engines.engine import check_drafts, head_bytes, refuse_layer
from kvplan.engines.llama_cpp_buffers import DRAFT, PAD_CELLS, BufferAllocation, CellCache, Slots
from kvplan.engines.llama_cpp_devices import TENSOR_SPLIT, placed
from kvplan.engines.llama_cpp_formats import BLOCK_ELEMENTS, FORMATS, NAME, find_pair
from kvplan.engines.llama_cpp_models import CHUNK_TOKENS, drafts, keeps_states_of_drafts, keeps_windows, refusal
from kvplan.errors import UnsupportedFormatError, UnsupportedModelError, UnsupportedSettingError
from kvplan.units import format_bytes

RULES: Final = "0.5"
AUTO_SLOTS: Final = 4
BATCH_TOKENS: Final = 512
"""`--ubatch-size` where nothing is said."""
SWA_FULL: Final = "swa-full"
UNIFIED: Final = "kv-unified"
NO_FLASH_ATTENTION: Final = "flash-attn=off"
_OLD_BUILDS: Final = range(6000, 6183)
_FIRST_NEW_BUILD: Final = 7079
_STATE_BITS: Final = 32
_DRAFT_TYPES: Final = (FORMATS[0], FORMATS[0])


def allocate(model: ModelSpec, format_name: str, setup: Setup) -> BufferAllocation:
    """Return llama.cpp's buffers on the device that holds the most.

    Raises:
        UnsupportedFormatError: llama.cpp has no such format, or not for this model.
        UnsupportedModelError: llama.cpp does not run the model, or how it keeps what a layer caches is not known here.
        UnsupportedSettingError: More devices than layers, tensor parallelism, or an option that cannot be.
    """
    key, value = find_pair(format_name)
    _check_model(model, setup)
    _check_formats(model, key, value, setup)
    place, slots = placed(model, setup), _slots(setup)

    def made(layers: Sequence[int]) -> BufferAllocation:
        return _device(model, layers, key, value, setup, slots)

    def held(part: BufferAllocation) -> float:
        return part.server_bytes(setup.context_tokens)

    left = made(place.main_memory)
    if not any(place.devices):
        return replace(left, notes=(*left.notes, "the cache is in main memory"))
    binding = max((made(layers) for layers in place.devices), key=held)
    if not held(left):
        return binding
    note = f"{len(place.main_memory)} layers keep {format_bytes(held(left))} of cache in main memory"
    return replace(binding, notes=(*binding.notes, note))


def _check_model(model: ModelSpec, setup: Setup) -> None:
    reason = refusal(model)
    if reason:
        raise UnsupportedModelError(reason, where=model.name)
    check_drafts(model, setup)
    if setup.draft_tokens and not drafts(model):
        raise UnsupportedModelError(f"llama.cpp is not known to draft with layers of {model.name}", where=model.name)


def _check_formats(model: ModelSpec, key: EngineFormat, value: EngineFormat, setup: Setup) -> None:
    """Refuse what llama.cpp refuses when it makes a context (`llama_init_from_model`)."""
    latent = any(layer.kind is LayerKind.LATENT for layer in model.layers)
    if latent and key is not value:
        raise UnsupportedFormatError(f"{NAME} takes one format for K and V of a model with MLA", hint=f"use {key.name}")
    if value.quantized and NO_FLASH_ATTENTION in setup.options:
        raise UnsupportedFormatError(f"{NAME} has V in {value.name} with flash attention only", hint="leave it on")
    for layer in model.layers:
        value_dim = layer.head_dim if layer.value_dim is None else layer.value_dim
        for form, elements in ((key, layer.head_dim), (value, value_dim)):
            if form.quantized and elements % BLOCK_ELEMENTS:
                message = f"{NAME} {form.name} takes head sizes that are multiples of {BLOCK_ELEMENTS}, not {elements}"
                raise UnsupportedFormatError(message, hint="use f16 or bf16")


def _slots(setup: Setup) -> Slots:
    pad, first = _padding(setup)
    shared = setup.sequences is None or UNIFIED in setup.options
    count = AUTO_SLOTS if setup.sequences is None else setup.sequences
    return Slots(
        count=count,
        shared=shared,
        counted=1 if setup.sequences is None else count,
        batch_tokens=setup.max_batched_tokens or BATCH_TOKENS,
        pad_cells=pad,
        window_first=first,
    )


def _padding(setup: Setup) -> tuple[int, bool]:
    """Return what cells are padded to, and whether a window's are before the context caps them.

    Up to November 2025 that was 256 with flash attention and 32 without (ggml-org/llama.cpp#7257, at b6153); between
    #16812 and #17046 of that month nothing was padded.
    """
    build = setup.version[0] if setup.version and len(setup.version) == 1 else _FIRST_NEW_BUILD
    if build >= _FIRST_NEW_BUILD:
        return PAD_CELLS, False
    if build not in _OLD_BUILDS:
        message = f"how llama.cpp b{build} pads its cells is not known here"
        known = f"b{_OLD_BUILDS[0]} to b{_OLD_BUILDS[-1]} and b{_FIRST_NEW_BUILD} on are"
        raise UnsupportedSettingError(message, where="--engine-version", hint=known)
    return (32 if NO_FLASH_ATTENTION in setup.options else PAD_CELLS), True


def _device(
    model: ModelSpec, indexes: Sequence[int], key: EngineFormat, value: EngineFormat, setup: Setup, slots: Slots
) -> BufferAllocation:
    caches: dict[tuple[str, int | None, bool], CellCache] = {}
    layers = [model.layers[index] for index in indexes if index < len(model.layers)]
    drafting = [model.draft_layers[index - len(model.layers)] for index in indexes if index >= len(model.layers)]
    alike = Counter(layers)  # most layers are
    for made, count in [
        *((_caches(model, layer, key, value, setup), count) for layer, count in alike.items()),
        *((_draft_caches(layer, key, value), count) for layer, count in Counter(drafting).items()),
    ]:
        for cache in made:
            kind = (cache.name, cache.window_tokens, cache.window_kept)
            caches[kind] = _joined(caches.get(kind), cache, count)
    states = [(state, count) for layer, count in alike.items() for state in layer.states]
    rows = 1 + (setup.draft_tokens if keeps_states_of_drafts(model) else 0)
    return BufferAllocation(
        caches=tuple(caches.values()),
        state_layers=sum(bool(layer.states) for layer in layers),
        state_bytes=rows * sum(count * (state.elements * _STATE_BITS // 8) for state, count in states),
        state_logical_bytes=sum(count * state.nbytes for state, count in states),
        states=rows,
        slots=slots,
        setup=setup,
        notes=_notes(setup, slots, tuple(caches.values())),
    )


def _joined(held: CellCache | None, other: CellCache, count: int) -> CellCache:
    """Return *held* with *count* layers more, each as *other*."""
    return replace(
        other,
        layers=count + (held.layers if held else 0),
        cell_bytes=count * other.cell_bytes + (held.cell_bytes if held else 0),
        logical_bytes=count * other.logical_bytes + (held.logical_bytes if held else 0),
    )


def _caches(
    model: ModelSpec, layer: LayerSpec, key: EngineFormat, value: EngineFormat, setup: Setup
) -> list[CellCache]:
    """Return what *layer* keeps in cells: K and V or a latent vector, and the keys of an indexer."""
    if layer.shared_with is not None or not layer.kv_heads:
        return []
    window = CHUNK_TOKENS if layer.kind is LayerKind.CHUNKED else layer.window_tokens
    kept = window is not None and keeps_windows(model) and SWA_FULL not in setup.options
    stored = Fraction(layer.kv_heads * head_bytes(layer, key.key, value.value))
    attention = CellCache(
        name="attention" if window is None else "attention with a window",
        layers=1,
        cell_bytes=stored + _value_padding(model, layer, value.value, setup),
        logical_bytes=stored,
        window_tokens=window,
        window_kept=kept,
    )
    return [attention, *(_side_cache(model, layer, side, key.key) for side in layer.sides)]


def _draft_caches(layer: LayerSpec, key: EngineFormat, value: EngineFormat) -> list[CellCache]:
    """Return what a layer that drafts keeps: K and V alone, in a context with a type of its own."""
    if not layer.kv_heads:
        return []
    stored, asked = (
        Fraction(layer.kv_heads * head_bytes(layer, one.key, other.value))
        for one, other in (_DRAFT_TYPES, (key, value))
    )
    return [CellCache(name=DRAFT, layers=1, cell_bytes=stored, logical_bytes=asked)]


def _value_padding(model: ModelSpec, layer: LayerSpec, packing: Packing, setup: Setup) -> Fraction:
    """Return what is added to a cell's V without flash attention, which keeps V transposed in rows of one length."""
    if NO_FLASH_ATTENTION not in setup.options or layer.value_dim == 0:
        return Fraction(0)
    widest = max(_value_elements(other) for other in model.layers if other.shared_with is None)
    return packing.vector_bytes(widest) - packing.vector_bytes(_value_elements(layer))


def _value_elements(layer: LayerSpec) -> int:
    return layer.kv_heads * (layer.head_dim if layer.value_dim is None else layer.value_dim)


def _side_cache(model: ModelSpec, layer: LayerSpec, side: SideCache, packing: Packing) -> CellCache:
    """Return the keys of an indexer, which are kept in K's format (src/llama-kv-cache-dsa.cpp)."""
    if side.name != "indexer keys" or side.tokens_per_entry != 1 or layer.kind is not LayerKind.LATENT:
        raise refuse_layer(NAME, model, side.name)
    stored = packing.vector_bytes(side.elements)
    return CellCache(name=side.name, layers=1, cell_bytes=stored, logical_bytes=stored)


def _notes(setup: Setup, slots: Slots, caches: Sequence[CellCache]) -> tuple[str, ...]:
    notes: list[str] = []
    windows = any(cache.window_kept for cache in caches)
    if setup.sequences is None:
        notes.append(
            f"llama-server makes {AUTO_SLOTS} slots that share the context where --parallel is not given"
            + (", with a window or state for each: --sequences 1 counts one" if windows else "")
        )
    if windows and setup.max_batched_tokens is None:
        notes.append(f"windows are counted with a batch of {BATCH_TOKENS} tokens more (--ubatch-size)")
    if any(cache.window_tokens and not cache.window_kept for cache in caches):
        notes.append("llama.cpp keeps every token of these windows")
    if setup.pipeline_parallel > 1 and setup.option(TENSOR_SPLIT) is None:
        notes.append("devices are counted as alike: by default llama.cpp splits layers by free memory (--tensor-split)")
    return tuple(notes)


def default_format(model: ModelSpec) -> str:
    """Return what is cached in where nothing is said: fp16."""
    return "f16"
