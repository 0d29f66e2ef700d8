"""SGLang: a pool of tokens that all layers of full attention fill alike, and pools beside it for windows and states.

The rules are those of PyPI `sglang` 0.5.23 (2026-10-30), read 2026-11-30 with 0.5.9, 0.5.12 and 0.5.15 to 0.5.22, under
`srt/`: `mem_cache/kv_cache_configurator.py`, `mem_cache/memory_pool.py` and `model_executor/pool_configurator.py`
(before 0.5.17 `model_executor/model_runner_kv_cache_mixin.py`). Every layer of a model has buffers, also those that
share another's cache or have no attention. Windows have a pool of their own in the classes that SGLang lists, and are
kept whole in all others. Ranks of tensor parallelism beyond the KV heads, and all ranks of a latent cache, hold copies,
unless data parallel attention gives them sequences of their own.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from kvplan.core.allocation import CacheGroup, CachePart, Setup
from kvplan.core.packing import EngineFormat
from kvplan.core.specs import LayerKind, LayerSpec, ModelSpec
from kvplan.engines.engine import (
    check_drafts,
    check_stages,
    find_format,
    head_bytes,
    refuse_layer,
    state_parts,
)
from kvplan.engines.sglang_formats import FORMATS, FP4_NAMES, NAME
from kvplan.engines.sglang_layers import Buffers, in_window_pool, pool_shape, state_bits, token_buffers
from kvplan.engines.sglang_models import FEW_GROUPS, STATE_CLASSES
from kvplan.engines.sglang_options import CHUNK_TOKENS, pool_rules, sequence_ranks, state_spares
from kvplan.engines.sglang_pools import TokenPools
from kvplan.errors import UnsupportedFormatError, UnsupportedModelError, UnsupportedSettingError

RULES: Final = "0.5.23"
OLDEST: Final = (0, 5, 9)
"""Before it pools of windows were split by other rules, and those of states by a share of the static memory."""
_PAGE_TOKENS, _SPARSE_PAGE_TOKENS = 1, 64
_EVICTION_TOKENS: Final = 128
"""Tokens by which a window runs over before what it no longer sees is given back (SGLANG_SWA_EVICTION_INTERVAL)."""
_STATES: Final = ("convolution inputs", "recurrent state")


def allocate(model: ModelSpec, format_name: str, setup: Setup) -> TokenPools:
    """Return SGLang's pools on the pipeline stage whose tokens take most.

    Raises:
        UnsupportedFormatError: SGLang has no such format, or not for this model.
        UnsupportedModelError: How SGLang keeps what a layer caches is not known here.
        UnsupportedSettingError: Ranks or stages do not divide the model, or an option has no such value.
    """
    pools = allocate_stages(model, format_name, setup)
    return max(pools, key=lambda pool: pool.sequence_bytes(setup.context_tokens))


def allocate_stages(model: ModelSpec, format_name: str, setup: Setup) -> tuple[TokenPools, ...]:
    """Return the pools of each pipeline stage that caches anything; raises as `allocate` does."""
    form = find_format(NAME, FORMATS, format_name)
    layers = [*model.layers, *_drafts(model, setup)]
    _check_layers(model, form, setup)
    stages = [_groups(model, form, setup, [layers[n] for n in stage]) for stage in _stages(model, setup, len(layers))]
    slots = [group.bytes_per_block for groups in stages for group in groups if group.block_tokens is None]
    rules = [pool_rules(setup, groups, max(slots, default=0)) for groups in stages]
    pools = [
        TokenPools(groups=groups, setup=setup, rules=rule, notes=_notes(model, setup))
        for groups, rule in zip(stages, rules, strict=True)
        if groups
    ]
    if not pools:
        raise UnsupportedModelError(f"{model.name} caches nothing", where=model.name)
    return tuple(pools)


def key_share(model: ModelSpec, format_name: str) -> float:
    """Return the part of a pool that keys have; values have the rest."""
    form = find_format(NAME, FORMATS, format_name)
    for layer in model.layers:
        if layer.kv_heads and layer.kind is not LayerKind.LATENT:
            return form.key.vector_bytes(layer.head_dim) / head_bytes(layer, form.key, form.value)
    return 1.0


def _drafts(model: ModelSpec, setup: Setup) -> tuple[LayerSpec, ...]:
    check_drafts(model, setup)
    return model.draft_layers if setup.draft_tokens else ()


def _check_layers(model: ModelSpec, form: EngineFormat, setup: Setup) -> None:
    """Refuse what SGLang has no pool for, and what its pools are not known to do."""
    states = [state for layer in model.layers for state in layer.states]
    if any(state.name not in _STATES for state in states) or (states and model.architecture not in STATE_CLASSES):
        raise refuse_layer("SGLang", model, states[0].name)
    groups = FEW_GROUPS.get(model.architecture)
    if states and groups and sequence_ranks(setup) > groups:
        raise refuse_layer("SGLang", model, f"the groups of its convolution on {sequence_ranks(setup)} ranks")
    for side in (side for layer in model.layers for side in layer.sides):
        if side.name != "indexer keys" or side.tokens_per_entry != 1:
            raise refuse_layer("SGLang", model, side.name)
    if form.name in FP4_NAMES and any(in_window_pool(model, layer, setup) for layer in model.layers):
        raise UnsupportedFormatError(f"{NAME}'s pool of windows takes no {form.name}", hint="use fp8_e4m3")


def _stages(model: ModelSpec, setup: Setup, layers: int) -> list[range]:
    """Return the layers of each pipeline stage; the last stages have one more where it does not divide."""
    stages, count = setup.pipeline_parallel, len(model.layers)
    check_stages(model, setup)
    starts = [count // stages * number + max(0, number - stages + count % stages) for number in range(stages)]
    return [range(start, end) for start, end in zip(starts, [*starts[1:], layers], strict=True)]


def _groups(model: ModelSpec, form: EngineFormat, setup: Setup, layers: Sequence[LayerSpec]) -> tuple[CacheGroup, ...]:
    """Return the pools of a stage: of tokens, of windows, of states, those of them that it has."""
    windows = [layer for layer in layers if in_window_pool(model, layer, setup)]
    others = [layer for layer in layers if not in_window_pool(model, layer, setup)]
    page, kinds = _page_tokens(model, setup), Counter(layers).items()

    def states(layer: LayerSpec) -> list[CachePart]:
        return state_parts(model, layer, sequence_ranks(setup), partial(state_bits, setup))

    found = [
        _token_group(model, form, setup, others, page),
        _window_group(model, form, setup, windows, page),
        _group([(Buffers(part=part), n) for layer, n in kinds for part in states(layer)], None),
    ]
    groups = [group for group in found if group is not None]
    return tuple(replace(g, spare_blocks=state_spares(setup)) if g.block_tokens is None else g for g in groups)


def _page_tokens(model: ModelSpec, setup: Setup) -> int:
    """Return the tokens of a page, which divide the chunks of a prefill (srt/arg_groups/validation_hook.py)."""
    if setup.block_tokens:
        chunk = setup.max_batched_tokens or CHUNK_TOKENS
        if chunk % setup.block_tokens:
            message = f"pages of {setup.block_tokens} tokens do not divide SGLang's prefill chunks of {chunk}"
            raise UnsupportedSettingError(message, where="--block-size", hint="use a power of 2")
        return setup.block_tokens
    return _SPARSE_PAGE_TOKENS if any(layer.sides for layer in model.layers) else _PAGE_TOKENS


def _group(buffers: Iterable[tuple[Buffers, int]], page: int | None) -> CacheGroup | None:
    """Return the pool of *buffers*, each of so many layers; None where there are none."""
    counted: Counter[CachePart] = Counter()
    empty, some = 0.0, False
    for one, layers in buffers:
        some = True
        empty += layers * one.empty_bytes
        if one.part is not None:
            counted[one.part] += layers
    if not some:
        return None
    parts = tuple(
        replace(part, layers=n, logical_unit_bytes=n * part.logical_unit_bytes, unit_bytes=n * part.unit_bytes)
        for part, n in counted.items()
    )
    return CacheGroup(parts=parts, block_tokens=page, padding_layer_bytes=(page or 1) * empty)


def _token_group(
    model: ModelSpec, form: EngineFormat, setup: Setup, layers: Sequence[LayerSpec], page: int
) -> CacheGroup | None:
    """Return the pool of tokens of *layers*; None where they have none."""
    kinds = Counter(layers)  # most layers are alike
    shape = pool_shape(model, list(kinds))
    return _group(((b, n) for layer, n in kinds.items() for b in token_buffers(model, layer, form, setup, shape)), page)


def _window_group(
    model: ModelSpec, form: EngineFormat, setup: Setup, layers: Sequence[LayerSpec], page: int
) -> CacheGroup | None:
    """Return the pool of windows.

    A sequence holds its window, what has run over it since some was last given back, a page to begin at one's start
    and the page that the next token is written to (compute_swa_request_cap).
    """
    group = _token_group(model, form, setup, layers, page)
    if group is None:
        return None
    window = max(layer.window_tokens or 0 for layer in layers)
    return replace(group, held_tokens_max=window + _EVICTION_TOKENS, spare_blocks=2)


def _notes(model: ModelSpec, setup: Setup) -> tuple[str, ...]:
    notes: list[str] = []
    if any(layer.window_tokens and not in_window_pool(model, layer, setup) for layer in model.layers):
        notes.append(f"SGLang keeps every token of the windows of {model.architecture}")
    if any(layer.sides for layer in model.layers):
        notes.append(
            "sparse MLA in fp8_e4m3 is counted as FlashMLA reads it; SGLang's default on Blackwell is without scales: "
            "--engine-option dsa-decode-backend=trtllm"
        )
    if any(in_window_pool(model, layer, setup) for layer in model.layers):
        notes.append("windows have their share of the pool whatever is asked of them (--swa-full-tokens-ratio)")
    if any(layer.states for layer in model.layers):
        notes.append("states take their share of the pool first (--mamba-full-memory-ratio); tokens have the rest")
    return tuple(notes)
