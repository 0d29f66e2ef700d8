"""vLLM: blocks of one size for all groups of layers, drawn from one pool.

The rules are those of vllm-project/vllm `vllm/v1/core/kv_cache_utils.py` and `vllm/v1/kv_cache_interface.py`, read
2026-11-30 at 001cabc and at 0.28, and the platform's alignment of attention and state pages. Layers are grouped by
what they keep. Pages of unlike groups are made alike by more tokens a block, else by padding; groups get as many layers
each, so that a block of any group takes the same bytes. A window keeps what it sees less one token, the tokens that are
in flight, and a block, since it need not begin at one's start.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from kvplan.core.allocation import CacheGroup, CachePart, GroupedAllocation, Setup, Term
from kvplan.core.packing import EngineFormat
from kvplan.core.specs import LayerKind, LayerSpec, ModelSpec, SideCache, StateCache
from kvplan.engines.commands import shell_line, yaml_text
from kvplan.engines.engine import (
    Launch,
    LaunchText,
    check_drafts,
    check_stages,
    find_format,
    head_bytes,
    rank_elements,
    rank_heads,
    refuse_layer,
    stated_type,
)
from kvplan.engines.vllm_compressed import allocate_compressed, is_compressed
from kvplan.engines.vllm_formats import BOUNDARY_LAYERS, FORMATS, SPARSE_LATENT
from kvplan.errors import UnsupportedFormatError, UnsupportedModelError
from kvplan_kernels.layout import BLOCK_TABLE_ENTRY_BYTES, ceil_div, round_up

NAME: Final = "vllm"
RULES: Final = "0.25"
"""Of which public logs of windows are reproduced; what changed later is counted where a newer release is named."""
BATCHED_TOKENS: Final = 8192
"""Of the API server on devices of 70 GiB and more; 2,048 on smaller ones (vllm/engine/arg_utils.py)."""
HYBRID_OFF: Final = "disable-hybrid-kv-cache-manager"
BLOCK_TOKENS: Final = 16
_LATENT_BLOCK_TOKENS: Final = 64
_INDEXER_BYTES_OF_128: Final = 132
"""128 keys in 8 bits with a float32 scale (vllm/v1/attention/backends/mla/indexer.py)."""
_IN_FLIGHT_DOUBLED: Final = (0, 26)
"""The release from which blocks are freed a step later, with asynchronous scheduling, which is the default."""
SKIP_LAYERS: Final = "kv-cache-dtype-skip-layers"
STATE_TYPE: Final = "mamba-ssm-cache-dtype"
_GROWTH: Final = 1.5
"""Groups are of the smallest kind's size, or of the largest's where that has less than so many times its layers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Page:
    """What one layer keeps, in pages.

    Attributes:
        units: Tokens of a page; None for a state.
        unit_bytes: Stored on this rank.
        logical_bytes: This rank's share of the geometry.
        padding_bytes: Of a page.
    """

    name: str
    units: int | None
    unit_bytes: float
    logical_bytes: float
    padding_bytes: float = 0
    window_tokens: int | None = None
    held_tokens_max: int | None = None
    spare: int = 0

    @property
    def nbytes(self) -> float:
        return (self.units or 1) * self.unit_bytes + self.padding_bytes

    @property
    def kind(self) -> tuple[object, ...]:
        """What pages of one block table have in common: which tokens they hold."""
        return self.units, self.held_tokens_max, self.spare


Placed = tuple[int, _Page]
"""A page with the number of its layer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockPool(GroupedAllocation):
    """A pool of which one block is kept empty: it stands for those that windows gave back."""

    @property
    def beside(self) -> tuple[Term, ...]:
        """The null block, and the block tables of as many sequences as were said (vllm/v1/worker/block_table.py)."""
        size = self.groups[0].bytes_per_block
        null = Term("null block", size, "one block of the pool holds nothing")
        if self.setup.sequences is None:
            return (null,)
        context, count = self.setup.context_tokens, self.setup.sequences
        columns = sum(ceil_div(context, group.units_per_block) for group in self.groups if group.block_tokens)
        states = sum(group.block_tokens is None for group in self.groups)
        entries = count * (columns + states)
        formula = f"{entries} entries of {BLOCK_TABLE_ENTRY_BYTES} B for {count} sequences, not in the pool"
        return (null, Term("block tables", entries * BLOCK_TABLE_ENTRY_BYTES, formula))


def allocate(model: ModelSpec, format_name: str, setup: Setup) -> GroupedAllocation:
    """Return vLLM's allocation on the pipeline stage whose blocks are largest.

    Raises:
        UnsupportedFormatError: vLLM has no such format, or not for this model.
        UnsupportedModelError: How vLLM keeps what a layer caches is not known here.
        UnsupportedSettingError: Ranks or stages do not divide the model.
    """
    form = find_format(NAME, FORMATS, format_name)
    layers = _layers(model, setup)
    if is_compressed(layers):
        return allocate_compressed(model, form, setup, in_flight_tokens(setup))
    if not _hybrid(setup, layers):
        layers = [_whole(layer) for layer in layers]
    block_tokens = _attention_block_tokens(model, form, setup, layers)
    made: dict[tuple[LayerSpec, str], list[_Page]] = {}
    placed: list[Placed] = []
    for index, layer in enumerate(layers):
        own = _format_of(form, setup, model, layers, index)
        if (layer, own.name) not in made:  # most layers are alike
            made[layer, own.name] = _pages(model, layer, own, setup, block_tokens)
        placed += [(index, page) for page in made[layer, own.name]]
    if not placed:
        raise UnsupportedModelError(f"{model.name} caches nothing", where=model.name)
    tables = _grouped(placed)
    stages = [_stage(tables, stage) for stage in _stages(model, setup, len(layers))]
    binding = max(stages, key=lambda groups: groups[0].bytes_per_block)
    return BlockPool(groups=binding, setup=setup, notes=_notes(setup, layers))


def _layers(model: ModelSpec, setup: Setup) -> list[LayerSpec]:
    """Return the layers that cache, those that draft included where it is asked for."""
    check_drafts(model, setup)
    return [*model.layers, *(model.draft_layers if setup.draft_tokens else ())]


def _hybrid(setup: Setup, layers: Sequence[LayerSpec]) -> bool:
    """Whether windows are kept as windows: off where chunked attention is, for its latency, or by the flag."""
    chunked = any(layer.kind is LayerKind.CHUNKED for layer in layers)
    return HYBRID_OFF not in setup.options and not chunked


def _whole(layer: LayerSpec) -> LayerSpec:
    """Return *layer* as it is kept without the hybrid manager: every token."""
    windowed = layer.kind in (LayerKind.SLIDING, LayerKind.CHUNKED)
    return replace(layer, kind=LayerKind.FULL) if windowed else layer


def _format_of(
    form: EngineFormat, setup: Setup, model: ModelSpec, layers: Sequence[LayerSpec], index: int
) -> EngineFormat:
    """Return what layer *index* caches in: 16 bits where quantizing skips it."""
    skipped = (setup.option(SKIP_LAYERS) or "").split(":")
    sliding = "sliding_window" in skipped and layers[index].kind is LayerKind.SLIDING
    dense = form.name.startswith("turboquant") and not any(layer.states for layer in layers)
    edge = dense and not BOUNDARY_LAYERS <= index < len(model.layers) - BOUNDARY_LAYERS
    return FORMATS[0] if sliding or edge or str(index) in skipped else form


def _pages(model: ModelSpec, layer: LayerSpec, form: EngineFormat, setup: Setup, block_tokens: int) -> list[_Page]:
    pages: list[_Page] = []
    if layer.shared_with is None and layer.kind is LayerKind.LATENT:
        pages.append(_latent_page(model, layer, form, setup, block_tokens))
    elif layer.shared_with is None and layer.kv_heads:
        pages.append(_attention_page(model, layer, form, setup, block_tokens))
    pages += [_side_page(model, layer, side, setup, block_tokens) for side in layer.sides]
    if layer.states:
        pages.append(_state_page(model, layer, setup, _attention_page_bytes(model, form, setup, block_tokens)))
    return pages


def _attention_page(model: ModelSpec, layer: LayerSpec, form: EngineFormat, setup: Setup, block_tokens: int) -> _Page:
    if form.name.startswith("turboquant") and layer.head_dim & (layer.head_dim - 1):
        raise UnsupportedFormatError(f"{NAME} {form.name} takes head sizes that are powers of 2, not {layer.head_dim}")
    if form.name == SPARSE_LATENT:
        raise UnsupportedFormatError(f"{NAME} {form.name} is for sparse MLA, and {model.name} has heads of K and V")
    stored = head_bytes(layer, form.key, form.value)
    if form.name.startswith("turboquant"):
        stored = round_up(ceil_div(round(8 * stored), 8), 2)
    window = layer.window_tokens if layer.kind is LayerKind.SLIDING else None
    return _Page(
        name="sliding attention" if window else "full attention",
        units=block_tokens,
        unit_bytes=rank_heads(model, layer, setup.tensor_parallel) * stored,
        logical_bytes=layer.kv_heads * stored / setup.tensor_parallel,
        window_tokens=layer.window_tokens,
        held_tokens_max=None if window is None else window - 1 + in_flight_tokens(setup),
        spare=0 if window is None else 1,
    )


def in_flight_tokens(setup: Setup) -> int:
    """Return the tokens whose blocks a window cannot give back yet: one batch, or two since asynchronous scheduling."""
    batches = 2 if (setup.version or ()) >= _IN_FLIGHT_DOUBLED else 1
    return batches * (setup.max_batched_tokens or BATCHED_TOKENS)


_SPARSE_NAMES: Final = (SPARSE_LATENT, "fp8_e4m3")
"""Two names for one layout (vllm `v1/attention/backends/mla/flashmla_sparse.py`)."""


def _latent_page(model: ModelSpec, layer: LayerSpec, form: EngineFormat, setup: Setup, block_tokens: int) -> _Page:
    """Return the page of a latent vector, which every rank holds whole."""
    sparse = form.quantized and any(other.sides for other in model.layers)  # read in 8 bits by a layout of its own
    if sparse and form.name not in _SPARSE_NAMES:
        raise UnsupportedFormatError(
            f"{NAME} has no cache for sparse attention in {form.name}", hint=f"use bf16 or {SPARSE_LATENT}"
        )
    stored = (find_format(NAME, FORMATS, SPARSE_LATENT) if sparse else form).latent_bytes(
        layer.head_dim, layer.rope_dim
    )
    if stored is None:
        raise UnsupportedFormatError(f"{NAME} has no latent cache (MLA) in {form.name}", hint="use bf16 or fp8_e4m3")
    return _Page(
        name="latent attention",
        units=block_tokens,
        unit_bytes=stored,
        logical_bytes=stored / setup.tensor_parallel,
    )


def _side_page(model: ModelSpec, layer: LayerSpec, side: SideCache, setup: Setup, block_tokens: int) -> _Page:
    if side.name != "indexer keys" or side.tokens_per_entry != 1 or layer.kind is not LayerKind.LATENT:
        raise refuse_layer("vLLM", model, side.name)
    stored = side.elements * _INDEXER_BYTES_OF_128 / 128
    return _Page(name=side.name, units=block_tokens, unit_bytes=stored, logical_bytes=stored / setup.tensor_parallel)


def _state_page(model: ModelSpec, layer: LayerSpec, setup: Setup, page_bytes: float) -> _Page:
    stored = _state_bytes(model, layer, setup)
    spare = setup.draft_tokens + (1 if setup.prefix_caching else 0)
    return _Page(
        name="recurrent state",
        units=None,
        unit_bytes=stored,
        logical_bytes=stored,
        padding_bytes=max(0.0, page_bytes - stored),
        spare=spare,
    )


def _state_bytes(model: ModelSpec, layer: LayerSpec, setup: Setup) -> int:
    ranks = setup.tensor_parallel
    return sum(rank_elements(model, state, ranks) * _state_bits(state, setup) // 8 for state in layer.states)


def _state_bits(state: StateCache, setup: Setup) -> int:
    """Return the bits of an element: `auto` is the type that the model runs in (MambaStateDtypeCalculator)."""
    chosen = setup.option(STATE_TYPE)
    if state.free_type:
        return 32 if chosen == "float32" else 16
    return state.item_bits


def _attention_block_tokens(model: ModelSpec, form: EngineFormat, setup: Setup, layers: Sequence[LayerSpec]) -> int:
    """Return the tokens of a block of attention: enough that its page holds a recurrent state where there is one."""
    latent = any(layer.kind is LayerKind.LATENT for layer in layers)
    least = _LATENT_BLOCK_TOKENS if latent else BLOCK_TOKENS
    states = [_state_bytes(model, layer, setup) for layer in layers if layer.states]
    token_bytes = _attention_page_bytes(model, form, setup, 1) if states else 0
    if not token_bytes:
        return setup.block_tokens or least
    aligned = round_up(ceil_div(max(states), round(token_bytes)), least)
    return max(setup.block_tokens or 0, aligned)


def _attention_page_bytes(model: ModelSpec, form: EngineFormat, setup: Setup, block_tokens: int) -> float:
    """Return the bytes of a page of attention that state pages are made as large as; 0 without attention."""
    attends = [layer for layer in model.layers if layer.kv_heads and layer.shared_with is None]
    if not attends:
        return 0
    make = _latent_page if attends[0].kind is LayerKind.LATENT else _attention_page
    return make(model, attends[0], form, setup, block_tokens).nbytes


def _grouped(placed: Sequence[Placed]) -> list[list[Placed]]:
    """Return the groups of pages, each with one block table."""
    if len({page.kind for _, page in placed}) == 1:
        return [list(placed)]
    alike = _unified(placed)
    by_page: dict[_Page, list[Placed]] = {}
    for index, page in alike:
        by_page.setdefault(page, []).append((index, page))
    counts = [len(layers) for layers in by_page.values()]
    size = max(counts) if max(counts) < _GROWTH * min(counts) else min(counts)
    split = [(layers, ceil_div(len(layers), size)) for layers in by_page.values()]
    return [layers[number::groups] for layers, groups in split for number in range(groups)]


def _unified(placed: Sequence[Placed]) -> list[Placed]:
    """Return the pages made as large as the largest: by more tokens a page, else by padding."""
    most = max(page.nbytes for _, page in placed)
    made: list[Placed] = []
    for index, page in placed:
        if page.units is not None and most % page.nbytes == 0:
            made.append((index, replace(page, units=page.units * round(most / page.nbytes))))
        else:
            made.append((index, replace(page, padding_bytes=page.padding_bytes + most - page.nbytes)))
    return made


def _stages(model: ModelSpec, setup: Setup, layers: int) -> list[range]:
    """Return the layers of each stage; what does not divide goes to the stages before the last (get_pp_indices)."""
    stages, count = setup.pipeline_parallel, len(model.layers)
    check_stages(model, setup)
    sizes = [count // stages] * stages
    for number in range(2, count % stages + 2):
        sizes[-number] += 1
    starts = [sum(sizes[:number]) for number in range(stages)] + [layers]
    return [range(start, end) for start, end in pairwise(starts)]


def _stage(groups: Sequence[Sequence[Placed]], stage: range) -> tuple[CacheGroup, ...]:
    """Return the groups as a stage holds them: all as many layers as the largest, empty ones included."""
    own = [[page for index, page in group if index in stage] for group in groups]
    slots = max(len(pages) for pages in own)
    uniform = len(groups) == 1
    return tuple(
        _cache_group(group[0][1], pages, 0 if uniform else slots - len(pages))
        for group, pages in zip(groups, own, strict=True)
    )


def _cache_group(first: _Page, pages: Sequence[_Page], empty: int) -> CacheGroup:
    parts = tuple(
        CachePart(
            name=page.name,
            layers=count,
            logical_unit_bytes=count * page.logical_bytes,
            unit_bytes=count * page.unit_bytes,
            window_tokens=page.window_tokens,
        )
        for page, count in Counter(pages).items()
    )
    return CacheGroup(
        parts=parts,
        block_tokens=first.units,
        page_padding_bytes=sum(page.padding_bytes for page in pages),
        padding_layer_bytes=empty * first.nbytes,
        held_tokens_max=first.held_tokens_max,
        spare_blocks=first.spare,
    )


def _notes(setup: Setup, layers: Sequence[LayerSpec]) -> tuple[str, ...]:
    notes: list[str] = []
    windows = any(layer.kind is LayerKind.SLIDING for layer in layers)
    if windows and setup.max_batched_tokens is None:
        notes.append(
            f"windows are counted with {BATCHED_TOKENS} tokens in flight, vLLM's default on devices of 70 GiB and more"
        )
    if windows and setup.version is None:
        notes.append(
            "from 0.26 vLLM keeps two batches in flight with asynchronous scheduling: --engine-version 0.26 counts so"
        )
    if any(layer.kind is LayerKind.FULL and layer.window_tokens for layer in layers):
        notes.append("vLLM keeps every token of these windows: its hybrid manager is off")
    return tuple(notes)


def launch(setting: Launch) -> LaunchText:
    """Return the command `vllm serve` and the same as the YAML that its `--config` reads."""
    values: dict[str, str | int | float | bool] = {
        "kv-cache-dtype": _FLAG_VALUES.get(setting.format, setting.format),
        "block-size": setting.block_tokens,
        "max-model-len": setting.context_tokens,
        "max-num-seqs": setting.sequences,
        "gpu-memory-utilization": round(setting.memory_utilization, 4),
    }
    if setting.max_batched_tokens:
        values["max-num-batched-tokens"] = setting.max_batched_tokens
    if setting.tensor_parallel > 1:
        values["tensor-parallel-size"] = setting.tensor_parallel
    if setting.pipeline_parallel > 1:
        values["pipeline-parallel-size"] = setting.pipeline_parallel
    flags: list[str] = []
    said = {"model": setting.model, **values}
    if setting.prefix_caching is not None:
        flags.append("--enable-prefix-caching" if setting.prefix_caching else "--no-enable-prefix-caching")
        said["enable-prefix-caching"] = setting.prefix_caching
    command = shell_line(["vllm", "serve", setting.model], values, flags)
    return LaunchText(command=command, file_name="vllm.yaml", file_text=yaml_text(said))


_FLAG_VALUES: Final = {"bf16": "bfloat16", "fp16": "float16"}


def default_format(model: ModelSpec) -> str:
    """Return what `auto` is: 8 bits for sparse attention, else what the checkpoint says, else the run's type.

    So vllm `models/config.py`, and `resolve_kv_cache_dtype_string` of `utils/torch_utils.py` for Model Optimizer's
    checkpoints; `model_executor/layers/attention/attention.py` for those of compressed-tensors.
    """
    sparse = any(layer.sides for layer in model.layers)
    return SPARSE_LATENT if sparse else _STATED(model)


_STATED: Final = stated_type(
    {
        "modelopt": {"fp8_e4m3": "fp8_e4m3", "nvfp4": "nvfp4"},
        "compressed-tensors": {"fp8_e4m3": "fp8_e4m3"},
    }
)
