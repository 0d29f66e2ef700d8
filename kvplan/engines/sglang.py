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
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from kvplan.core.allocation import CacheGroup, CachePart, Setup
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
    rank_heads,
    refuse_layer,
    state_parts,
)
from kvplan.engines.sglang_formats import FORMATS, FP4_NAMES, SPARSE_LATENT
from kvplan.engines.sglang_pools import PoolRules, TokenPools
from kvplan.errors import UnsupportedFormatError, UnsupportedModelError, UnsupportedSettingError
from kvplan_kernels.layout import round_up

NAME: Final = "sglang"
RULES: Final = "0.5.23"
OLDEST: Final = (0, 5, 9)
"""Before it pools of windows were split by other rules, and those of states by a share of the static memory."""
_SLOT_CHARGED: Final = (0, 5, 17)
"""The release from which the slot that padding writes to is taken out of the memory of states."""
_OWN_INDEXERS: Final = (0, 5, 18)
"""The release from which a layer that takes another's choice of tokens has no buffer for an indexer's keys."""
_REQUEST_CAP: Final = (0, 5, 21)
"""The release from which the windows of a known number of requests are counted where no prefix is kept."""
_EXTRA_BUFFER: Final = (0, 5, 15)
"""The release from which states that prefixes share are kept beside those that requests write."""

_PAGE_TOKENS, _SPARSE_PAGE_TOKENS = 1, 64
_EVICTION_TOKENS: Final = 128
"""Tokens by which a window runs over before what it no longer sees is given back (SGLANG_SWA_EVICTION_INTERVAL)."""
_CHUNK_TOKENS: Final = 8192
"""Of a prefill on devices of 60 to 160 GiB; 2,048 to 16,384 on others (handle_gpu_memory_settings)."""
_INDEXER_BYTES_OF_128: Final = 132
_CONV_BITS: Final = 16
"""Inputs of a convolution are bf16 whatever the model runs in (SGLANG_MAMBA_CONV_DTYPE)."""
STATE_BITS: Final = {"float32": 32, "bfloat16": 16, "float16": 16}
STRATEGIES: Final = {"no_buffer": 3, "extra_buffer_lazy": 4, "extra_buffer": 5}
"""How states are kept for prefixes, with the slots that a request is counted for."""
_WINDOW_RATIO, _STATE_RATIO = 0.8, 0.9
"""Tokens of the pool of windows to those of the full pool; memory of states to that of tokens."""

_WINDOW_CLASSES: Final = frozenset({
    "BeamForCausalLM", "Gemma4ForCausalLM", "Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration",
    "GptOssForCausalLM", "GraniteMoeSWAForCausalLM", "GraniteSWAForCausalLM", "IQuestQ1ForCausalLM",
    "InklingForConditionalGeneration", "LagunaForCausalLM", "Llama4ForConditionalGeneration", "MellumForCausalLM",
    "MiMoV2FlashForCausalLM", "MiMoV2ForCausalLM", "MuseGlimmerForCausalLM", "MuseGlimmerForConditionalGeneration",
    "Step3p5ForCausalLM", "Step3p7ForConditionalGeneration", "UnlimitedOCRForCausalLM",
})  # fmt: skip
"""Model classes whose windows have a pool of their own (srt/configs/model_config.py, is_hybrid_swa_model)."""
_STATE_CLASSES: Final = frozenset({
    "BailingMoeV2_5ForCausalLM", "BailingMoeV3ForCausalLM", "BailingMoeV3VLForConditionalGeneration",
    "FalconH1ForCausalLM", "FalconMambaForCausalLM", "GraniteMoeHybridForCausalLM", "KimiK3ForConditionalGeneration",
    "KimiK3LinearForCausalLM", "KimiLinearForCausalLM", "Lfm2ForCausalLM", "Lfm2MoeForCausalLM",
    "Lfm2VlForConditionalGeneration", "Mamba2ForCausalLM", "MambaForCausalLM", "NemotronHForCausalLM",
    "NemotronHPuzzleForCausalLM", "Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration",
})  # fmt: skip
"""Model classes whose states SGLang pools (srt/configs/hybrid_arch.py)."""
_FEW_GROUPS: Final = {"FalconH1ForCausalLM": 1, "GraniteMoeHybridForCausalLM": 1, "Mamba2ForCausalLM": 1,
                      "NemotronHForCausalLM": 8}  # fmt: skip
"""Ranks up to which the groups of Mamba 2's convolution divide; beyond it SGLang repeats them on each rank."""
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
    rules = [_rules(setup, groups, max(slots, default=0)) for groups in stages]
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
    if any(state.name not in _STATES for state in states) or (states and model.architecture not in _STATE_CLASSES):
        raise refuse_layer("SGLang", model, states[0].name)
    groups = _FEW_GROUPS.get(model.architecture)
    if states and groups and _ranks(setup) > groups:
        raise refuse_layer("SGLang", model, f"the groups of its convolution on {_ranks(setup)} ranks")
    for side in (side for layer in model.layers for side in layer.sides):
        if side.name != "indexer keys" or side.tokens_per_entry != 1:
            raise refuse_layer("SGLang", model, side.name)
    if form.name in FP4_NAMES and any(_in_window_pool(model, layer, setup) for layer in model.layers):
        raise UnsupportedFormatError(f"{NAME}'s pool of windows takes no {form.name}", hint="use fp8_e4m3")


def _ranks(setup: Setup) -> int:
    """Return the ranks that share a sequence's heads: those of tensor parallelism without data parallel attention."""
    if "enable-dp-attention" not in setup.options:
        return setup.tensor_parallel
    replicas = _count(setup, "dp-size", setup.tensor_parallel)
    if setup.tensor_parallel % replicas:
        message = f"{replicas} replicas of attention do not divide {setup.tensor_parallel} ranks"
        raise UnsupportedSettingError(message, where="--engine-option dp-size", hint="give a divisor of --tp")
    return setup.tensor_parallel // replicas


def _count(setup: Setup, name: str, default: int) -> int:
    text = setup.option(name)
    if text is None:
        return default
    if not text.isdecimal() or int(text) < 1:
        raise UnsupportedSettingError(
            f"{name}={text[:40]} is no count", where="--engine-option", hint=f"write it as {name}=8"
        )
    return int(text)


def _share(setup: Setup, name: str, default: float) -> float:
    text = setup.option(name)
    try:
        value = default if text is None else float(text)
    except ValueError:
        value = -1
    if not 0 < value <= 1:
        raise UnsupportedSettingError(
            f"{name}={text} is no share", where="--engine-option", hint=f"write it as {name}=0.5"
        )
    return value


def _stages(model: ModelSpec, setup: Setup, layers: int) -> list[range]:
    """Return the layers of each pipeline stage; the last stages have one more where it does not divide."""
    stages, count = setup.pipeline_parallel, len(model.layers)
    check_stages(model, setup)
    starts = [count // stages * number + max(0, number - stages + count % stages) for number in range(stages)]
    return [range(start, end) for start, end in zip(starts, [*starts[1:], layers], strict=True)]


def _in_window_pool(model: ModelSpec, layer: LayerSpec, setup: Setup) -> bool:
    pooled = model.architecture in _WINDOW_CLASSES and "disable-hybrid-swa-memory" not in setup.options
    return pooled and layer.window_tokens is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Buffers:
    """What one layer has in one pool.

    Attributes:
        empty_bytes: Of a token, what is allocated and never filled.
    """

    part: CachePart | None
    empty_bytes: float = 0


def _groups(model: ModelSpec, form: EngineFormat, setup: Setup, layers: Sequence[LayerSpec]) -> tuple[CacheGroup, ...]:
    """Return the pools of a stage: of tokens, of windows, of states, those of them that it has."""
    windows = [layer for layer in layers if _in_window_pool(model, layer, setup)]
    others = [layer for layer in layers if not _in_window_pool(model, layer, setup)]
    page, kinds = _page_tokens(model, setup), Counter(layers).items()

    def states(layer: LayerSpec) -> list[CachePart]:
        return state_parts(model, layer, _ranks(setup), partial(_state_bits, setup))

    found = [
        _token_group(model, form, setup, others, page),
        _window_group(model, form, setup, windows, page),
        _group([(_Buffers(part=part), n) for layer, n in kinds for part in states(layer)], None),
    ]
    groups = [group for group in found if group is not None]
    return tuple(replace(g, spare_blocks=_state_spares(setup)) if g.block_tokens is None else g for g in groups)


def _page_tokens(model: ModelSpec, setup: Setup) -> int:
    """Return the tokens of a page, which divide the chunks of a prefill (srt/arg_groups/validation_hook.py)."""
    if setup.block_tokens:
        chunk = setup.max_batched_tokens or _CHUNK_TOKENS
        if chunk % setup.block_tokens:
            message = f"pages of {setup.block_tokens} tokens do not divide SGLang's prefill chunks of {chunk}"
            raise UnsupportedSettingError(message, where="--block-size", hint="use a power of 2")
        return setup.block_tokens
    return _SPARSE_PAGE_TOKENS if any(layer.sides for layer in model.layers) else _PAGE_TOKENS


def _group(buffers: Iterable[tuple[_Buffers, int]], page: int | None) -> CacheGroup | None:
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
    shape = _pool_shape(model, list(kinds))
    return _group(
        ((b, n) for layer, n in kinds.items() for b in _token_buffers(model, layer, form, setup, shape)), page
    )


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


def _token_buffers(
    model: ModelSpec, layer: LayerSpec, form: EngineFormat, setup: Setup, shape: LayerSpec | None
) -> list[_Buffers]:
    """Return the buffers of *layer* in a pool whose layers have the K and V of *shape*."""
    if shape is None or (not layer.kv_heads and any(one.states for one in model.layers)):
        return []  # layers of states have no tokens, and beside them other layers have none either
    if shape.kind is LayerKind.LATENT:
        return [_latent_buffers(model, layer, form, setup), *_side_buffers(model, layer, setup)]
    if form.name in FP4_NAMES and shape.value_dim not in (None, shape.head_dim):
        raise UnsupportedFormatError(f"{NAME} {form.name} takes one head size, and {model.name} has another for V")
    stored = head_bytes(shape, form.key, form.value)
    held = rank_heads(model, shape, _ranks(setup)) * stored
    if layer.shared_with is not None or not layer.kv_heads:
        return [_Buffers(part=None, empty_bytes=held)]
    part = CachePart(
        name="sliding attention" if layer.window_tokens else "full attention",
        layers=1,
        logical_unit_bytes=layer.kv_heads * stored / _ranks(setup),
        unit_bytes=held,
        window_tokens=layer.window_tokens,
    )
    return [_Buffers(part=part)]


def _pool_shape(model: ModelSpec, pool: Sequence[LayerSpec]) -> LayerSpec | None:
    """Return a layer of the shape that all layers of *pool* have; None where none has K and V."""
    attends = [layer for layer in pool if layer.kv_heads]
    shapes = {(layer.kind is LayerKind.LATENT, layer.kv_heads, layer.head_dim, layer.value_dim) for layer in attends}
    if len(shapes) > 1:
        raise refuse_layer("SGLang", model, "K and V of several shapes in one pool")
    if attends and attends[0].kind is not LayerKind.LATENT and attends[0].value_dim == 0:
        raise refuse_layer("SGLang", model, "keys that are read as values")
    return attends[0] if attends else None


def _latent_buffers(model: ModelSpec, layer: LayerSpec, form: EngineFormat, setup: Setup) -> _Buffers:
    """Return the buffer of a latent vector, which every rank holds whole."""
    stored = form.latent_bytes(layer.head_dim, layer.rope_dim)
    if form.quantized and any(one.sides for one in model.layers):
        stored = _sparse_latent_bytes(layer, form, setup)
    if stored is None:
        raise UnsupportedFormatError(f"{NAME} has no latent cache (MLA) in {form.name}", hint="use bf16 or fp8_e4m3")
    part = CachePart(name="latent attention", layers=1, logical_unit_bytes=stored / _ranks(setup), unit_bytes=stored)
    return _Buffers(part=part)


def _sparse_latent_bytes(layer: LayerSpec, form: EngineFormat, setup: Setup) -> float | None:
    """Return the bytes of a latent vector for sparse attention, whose TensorRT-LLM kernels read it without scales."""
    if form.name != "fp8_e4m3":
        raise UnsupportedFormatError(f"{NAME}'s sparse MLA takes bf16 and fp8_e4m3, not {form.name}")
    if "trtllm" in (setup.option("dsa-prefill-backend"), setup.option("dsa-decode-backend")):
        return form.latent_bytes(layer.head_dim, layer.rope_dim)
    latent = layer.head_dim - layer.rope_dim
    return float(SPARSE_LATENT.vector_bytes(latent)) + layer.rope_dim * 2


def _side_buffers(model: ModelSpec, layer: LayerSpec, setup: Setup) -> list[_Buffers]:
    sides = layer.sides or _missing_sides(model, setup)
    found: list[_Buffers] = []
    for side in sides:
        stored = side.elements * _INDEXER_BYTES_OF_128 / 128
        part = CachePart(name=side.name, layers=1, logical_unit_bytes=stored / _ranks(setup), unit_bytes=stored)
        found.append(_Buffers(part=part) if layer.sides else _Buffers(part=None, empty_bytes=stored))
    return found


def _missing_sides(model: ModelSpec, setup: Setup) -> tuple[SideCache, ...]:
    """Return what a layer without an indexer has buffers for all the same, where others have one."""
    if setup.version is None or setup.version >= _OWN_INDEXERS:
        return ()
    return next((layer.sides for layer in model.layers if layer.sides), ())


def _state_bits(setup: Setup, state: StateCache) -> int:
    if state.name != "recurrent state":
        return _CONV_BITS
    stated = setup.option("mamba-ssm-dtype")
    return state.item_bits if stated is None else STATE_BITS[stated]


def _state_spares(setup: Setup) -> int:
    """Return the slots that a request takes beside its own state (_calculate_mamba_ratio).

    Where prefixes are kept that is two of those that a prefix hit may branch from, and with `extra_buffer` two that the
    next states of a prefix are written to; a request that drafts has a state for each token of a step beside them.
    """
    drafted = setup.draft_tokens + 1 if setup.draft_tokens else 0
    return state_slots(setup) - 1 + drafted


def state_slots(setup: Setup) -> int:
    """Return the slots of the pool that a request is counted for."""
    if setup.prefix_caching is False:
        return 1
    strategy = setup.option("mamba-radix-cache-strategy")
    if strategy is None:
        strategy = "extra_buffer" if setup.version is None or setup.version >= _EXTRA_BUFFER else "no_buffer"
    return STRATEGIES[strategy]


def _rules(setup: Setup, groups: Sequence[CacheGroup], slot_bytes: float) -> PoolRules:
    stated = setup.option("max-mamba-cache-size")
    slots = None if stated is None else _count(setup, "max-mamba-cache-size", 1)
    if setup.prefix_caching is False and setup.sequences is not None and slots is None:
        slots = setup.sequences
    newer = setup.version is None or setup.version >= _SLOT_CHARGED
    return PoolRules(
        window_ratio=_share(setup, "swa-full-tokens-ratio", _WINDOW_RATIO),
        window_tokens=_request_cap(setup, groups),
        state_ratio=_share(setup, "mamba-full-memory-ratio", _STATE_RATIO),
        slot_bytes=slot_bytes,
        slots=slots,
        request_slots=state_slots(setup),
        draft_slots=setup.draft_tokens + 1 if setup.draft_tokens else 0,
        charged_slots=1 if newer else 0,
        tokens_max=None if setup.option("max-total-tokens") is None else _count(setup, "max-total-tokens", 1),
    )


def _request_cap(setup: Setup, groups: Sequence[CacheGroup]) -> int | None:
    """Return the tokens of the pool of windows where the most requests are known and no prefix is kept."""
    newer = setup.version is None or setup.version >= _REQUEST_CAP
    if setup.prefix_caching is not False or setup.sequences is None or not newer or len(groups) < 2:
        return None
    window = next((group for group in groups if group.held_tokens_max is not None), None)
    if window is None:
        return None
    page = window.units_per_block
    each = (window.held_tokens_max or 0) + 2 * page
    return round_up(each * setup.sequences + 2 * (setup.max_batched_tokens or _CHUNK_TOKENS) + page, page)


def _notes(model: ModelSpec, setup: Setup) -> tuple[str, ...]:
    notes: list[str] = []
    if any(layer.window_tokens and not _in_window_pool(model, layer, setup) for layer in model.layers):
        notes.append(f"SGLang keeps every token of the windows of {model.architecture}")
    if any(layer.sides for layer in model.layers):
        notes.append(
            "sparse MLA in fp8_e4m3 is counted as FlashMLA reads it; SGLang's default on Blackwell is without scales: "
            "--engine-option dsa-decode-backend=trtllm"
        )
    if any(_in_window_pool(model, layer, setup) for layer in model.layers):
        notes.append("windows have their share of the pool whatever is asked of them (--swa-full-tokens-ratio)")
    if any(layer.states for layer in model.layers):
        notes.append("states take their share of the pool first (--mamba-full-memory-ratio); tokens have the rest")
    return tuple(notes)


_FLAG_VALUES: Final = {"fp16": "auto"}
"""There is no word for fp16: `auto` is the type that the model runs in."""


def launch(setting: Launch) -> LaunchText:
    """Return the command `sglang serve` and the same as the YAML that its `--config` reads.

    The flags are those of sglang 0.5.23 (srt/arg_groups/fields, 2026-10-30). `mem-fraction-static` is the part of what
    is free before loading that weights and pools take; SGLang chooses it from the device where it is left out.
    """
    values: dict[str, str | int | float | bool] = {
        "kv-cache-dtype": _FLAG_VALUES.get(setting.format, setting.format),
        "page-size": setting.block_tokens,
        "context-length": setting.context_tokens,
        "max-running-requests": setting.sequences,
        "mem-fraction-static": round(setting.memory_utilization, 4),
    }
    if setting.blocks:
        values["max-total-tokens"] = setting.blocks * setting.block_tokens
    if setting.max_batched_tokens:
        values["chunked-prefill-size"] = setting.max_batched_tokens
    if setting.tensor_parallel > 1:
        values["tp-size"] = setting.tensor_parallel
    if setting.pipeline_parallel > 1:
        values["pp-size"] = setting.pipeline_parallel
    flags, said = [], {"model-path": setting.model, **values}
    if setting.prefix_caching is False:
        flags, said["disable-radix-cache"] = ["--disable-radix-cache"], True
    command = shell_line(["sglang", "serve", "--model-path", setting.model], values, flags)
    return LaunchText(command=command, file_name="sglang.yaml", file_text=yaml_text(said))
