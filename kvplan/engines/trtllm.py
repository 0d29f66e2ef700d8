"""TensorRT-LLM: blocks of some tokens of all layers, a pool of them for each window, and slots for recurrent states.

The rules are those of NVIDIA/TensorRT-LLM 1.2: of the PyTorch backend in `tensorrt_llm/_torch/pyexecutor/_util.py` and
`resource_manager.py` (KVCacheManager; at 001541b, early 2026, and before), of engines that TensorRT built in
`cpp/tensorrt_llm/batch_manager/kvCacheManager.cpp`, read 2026-11-30. All layers are kept whole unless windows are asked
for (`max_attention_window`); each window has a pool then. Ranks beyond the KV heads, and all ranks of a latent cache,
hold copies, unless attention is data parallel.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Final

from kvplan.core.allocation import (
    PADDING_LAYERS,
    CacheGroup,
    CachePart,
    Capacity,
    GroupedAllocation,
    Setup,
    Term,
    largest,
)  # fmt: skip
from kvplan.core.packing import BITS_16, EngineFormat, Packing
from kvplan.core.specs import LayerKind, LayerSpec, ModelSpec, StateCache
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
    stated_type,
)
from kvplan.errors import UnsupportedFormatError, UnsupportedModelError, UnsupportedSettingError
from kvplan_kernels.layout import ceil_div

NAME: Final = "trtllm"
RULES: Final = "1.2"
WINDOWS: Final = "max-attention-window"
"""The option that has windows kept as windows, each layer's own, as kv_cache_config.max_attention_window lists them."""
ATTENTION_DP: Final = "enable-attention-dp"
_FLOORED: Final = (1, 3)
"""The release from which the PyTorch backend rounds blocks down; until then it rounds up, as engines do."""
_BLOCK_TOKENS, _SPARSE_BLOCK_TOKENS = 32, 64
_INDEXER_BYTES_OF_128: Final = 132
EMPTY_LAYERS: Final = "buffers of layers that cache nothing"
_STATES: Final = ("convolution inputs", "recurrent state")
STATE_TYPE: Final = "mamba-ssm-cache-dtype"
STATE_BITS: Final = {"float32": 32, "bfloat16": 16, "float16": 16}
_STATE_CLASSES: Final = frozenset({"NemotronHForCausalLM", "Qwen3NextForCausalLM"})
"""Hybrid classes of 1.2 (tensorrt_llm/_torch/pyexecutor/config_utils.py: is_nemotron_hybrid, is_qwen3_next)."""

_KV: Final = "tensorrt_llm/llmapi/llm_args.py, KvCacheConfig.dtype, 2026-11-30"
_QUANT: Final = "nvidia.github.io/TensorRT-LLM, features/quantization, 1.0.0 to 1.4.0rc4, 2026-11-30"
_BYTE: Final = Packing(bits=8)
_NVFP4: Final = Packing(bits=4, group_elements=16, group_bits=8)
FORMATS: Final = (
    EngineFormat(
        name="bf16", key=BITS_16, value=BITS_16, latent=BITS_16, aliases=("bfloat16",), since="0.5", source=_KV,
    ),
    EngineFormat(
        name="fp16", key=BITS_16, value=BITS_16, latent=BITS_16, aliases=("float16",), since="0.5", source=_KV,
    ),
    EngineFormat(
        name="fp8", key=_BYTE, value=_BYTE, latent=_BYTE, same_as="fp8_e4m3", capability=89,
        why="FP8 is Ada's and later", since="0.5", source=_QUANT,
    ),
    EngineFormat(
        name="nvfp4", key=_NVFP4, value=_NVFP4, capability=100, why="FP4 is Blackwell's", since="1.2", source=_QUANT,
    ),
    EngineFormat(
        name="int8", key=_BYTE, value=_BYTE, since="0.5",
        source="TensorRT-LLM examples/quantization, --kv_cache_dtype int8, one scale a tensor, 2026-11-30",
    ),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowPools(GroupedAllocation):
    """A pool of blocks for each window, and a state for each sequence.

    Attributes:
        rounds_up: Whether a pool's last block may hold fewer tokens than the memory is for.
        by_window: Whether memory is shared by window times bytes; else windows have equal shares.
        tokens_max: `kv_cache_config.max_tokens`.
    """

    groups: tuple[CacheGroup, ...]
    setup: Setup
    rounds_up: bool
    by_window: bool
    tokens_max: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def windows(self) -> tuple[CacheGroup, ...]:
        """The pools of blocks."""
        return tuple(group for group in self.groups if group.block_tokens is not None)

    @property
    def states(self) -> CacheGroup | None:
        """The states of a sequence."""
        return next((group for group in self.groups if group.block_tokens is None), None)

    def terms(self, tokens: int) -> tuple[Term, ...]:
        """Return the terms between logical and allocated; their sum is the difference."""
        found = GroupedAllocation.terms(self, tokens)
        empty = "buffers of layers without an indexer of their own"
        return tuple(Term(EMPTY_LAYERS, t.bytes, empty) if t.name == PADDING_LAYERS else t for t in found)

    def pool_blocks(self, pool_bytes: float) -> tuple[int, ...]:
        """Return the blocks of each pool that *pool_bytes* make."""
        windows = self.windows
        weights = [self._weight(group) for group in windows]
        return tuple(
            self._blocks(group, pool_bytes * weight / sum(weights))
            for group, weight in zip(windows, weights, strict=True)
        )

    def _weight(self, group: CacheGroup) -> float:
        if not self.by_window:
            return 1.0
        window = group.held_tokens_max or self.setup.context_tokens
        return window * group.bytes_per_block / group.units_per_block

    def _blocks(self, group: CacheGroup, share_bytes: float) -> int:
        page = group.units_per_block
        tokens = int(share_bytes // (group.bytes_per_block / page))
        if self.tokens_max is not None:
            tokens = min(tokens, self.tokens_max)
        single = len(self.windows) == 1
        return ceil_div(tokens, page) if self.rounds_up and (single or self.by_window) else tokens // page

    def capacity(self, pool_bytes: int) -> Capacity:
        """Return what a pool of *pool_bytes* holds; tokens are those of all pools together, as TensorRT-LLM prints.

        States are `max_batch_size` of them, taken from the pool first; where that is not given, as many as are served.
        """
        if self.states is None or self.setup.sequences is not None:
            requests = self.setup.sequences or 0
            return self._capacity(pool_bytes - self._state_bytes(requests), requests if self.states else None)
        served = largest(
            lambda count: self._served(pool_bytes - self._state_bytes(count), self.setup.context_tokens) >= count
        )
        return self._capacity(pool_bytes - self._state_bytes(max(1, served)), None)

    def _state_bytes(self, sequences: int) -> float:
        return 0.0 if self.states is None else sequences * self.states.bytes_per_block

    def _served(self, bytes_left: float, tokens: int) -> int:
        if bytes_left < 0:
            return 0
        pools = zip(self.windows, self.pool_blocks(bytes_left), strict=True)
        return min(blocks // group.blocks(tokens) for group, blocks in pools)

    def _capacity(self, bytes_left: float, slots: int | None) -> Capacity:
        blocks = self.pool_blocks(max(0.0, bytes_left))
        served = self._served(bytes_left, self.setup.context_tokens)
        return Capacity(
            blocks=sum(blocks),
            tokens=sum(n * group.units_per_block for n, group in zip(blocks, self.windows, strict=True)),
            max_concurrency=served if slots is None else min(served, slots),
            max_context=largest(lambda tokens: self._served(bytes_left, tokens) >= 1),
        )


def allocate(model: ModelSpec, format_name: str, setup: Setup) -> WindowPools:
    """Return TensorRT-LLM's pools on the pipeline stage whose tokens take most.

    Raises:
        UnsupportedFormatError: TensorRT-LLM has no such format, or not for this model or backend.
        UnsupportedModelError: How TensorRT-LLM keeps what a layer caches is not known here.
        UnsupportedSettingError: Ranks or stages do not divide the model.
    """
    form = find_format(NAME, FORMATS, format_name)
    if form.name == "int8" and not _built(setup):
        raise UnsupportedFormatError(
            f"{NAME} caches in int8 in engines that TensorRT built alone", hint="--engine-option backend=tensorrt"
        )
    _check_layers(model)
    stages = [_groups(model, form, setup, layers) for layers in _stages(model, setup)]
    pools = [
        WindowPools(
            groups=groups, setup=setup, rounds_up=_built(setup) or (setup.version or ()) < _FLOORED,
            by_window=_built(setup), tokens_max=_tokens_max(setup), notes=_notes(model, setup),
        )
        for groups in stages
        if any(group.block_tokens for group in groups)
    ]  # fmt: skip
    if not pools:
        raise UnsupportedModelError(
            f"{model.name} has no attention, and TensorRT-LLM's cache is of it", where=model.name
        )
    return max(pools, key=lambda pool: pool.sequence_bytes(setup.context_tokens))


def _built(setup: Setup) -> bool:
    """Return whether the runtime is that of engines that TensorRT built, not of PyTorch."""
    return setup.option("backend") in ("tensorrt", "trt")


def _tokens_max(setup: Setup) -> int | None:
    text = setup.option("max-tokens")
    if text is not None and (not text.isdecimal() or int(text) < 1):
        raise UnsupportedSettingError(
            f"max-tokens={text[:40]} is no count", where="--engine-option", hint="as max-tokens=65536"
        )
    return None if text is None else int(text)


def _check_layers(model: ModelSpec) -> None:
    """Refuse what the manager of 1.2 does not hold."""
    shapes = {layer.head_dim for layer in model.layers if layer.kv_heads}
    if len(shapes) > 1:
        raise refuse_layer("TensorRT-LLM 1.2", model, "head sizes of several layers")
    for layer in model.layers:
        if layer.shared_with is not None:
            raise refuse_layer("TensorRT-LLM 1.2", model, "layers that share a cache")
        if layer.kind is not LayerKind.LATENT and layer.value_dim not in (None, layer.head_dim):
            raise refuse_layer("TensorRT-LLM 1.2", model, "values of another size than keys")
        known = model.architecture in _STATE_CLASSES and all(state.name in _STATES for state in layer.states)
        if layer.states and not known:
            raise refuse_layer("TensorRT-LLM 1.2", model, layer.states[0].name)
        for side in layer.sides:
            if side.name != "indexer keys" or side.tokens_per_entry != 1:
                raise refuse_layer("TensorRT-LLM 1.2", model, side.name)


def _stages(model: ModelSpec, setup: Setup) -> list[tuple[LayerSpec, ...]]:
    """Return the layers of each pipeline stage: the first have one more, the last those that draft (get_pp_layers)."""
    stages, count = setup.pipeline_parallel, len(model.layers)
    check_stages(model, setup)
    check_drafts(model, setup)
    starts = [count // stages * number + min(number, count % stages) for number in range(stages + 1)]
    found = [model.layers[start:end] for start, end in pairwise(starts)]
    if setup.draft_tokens:
        found[-1] += model.draft_layers
    return found


def _ranks(setup: Setup) -> int:
    return 1 if ATTENTION_DP in setup.options else setup.tensor_parallel


def _groups(model: ModelSpec, form: EngineFormat, setup: Setup, layers: Sequence[LayerSpec]) -> tuple[CacheGroup, ...]:
    """Return a pool for each window of the layers, and one of their states."""
    page = setup.block_tokens or (_SPARSE_BLOCK_TOKENS if any(one.sides for one in model.layers) else _BLOCK_TOKENS)
    pools: dict[int, list[LayerSpec]] = {}
    for layer in layers:
        if layer.kv_heads:
            pools.setdefault(_window(layer, setup) or 0, []).append(layer)
    groups = [_group(model, form, setup, pools[window], page, window) for window in sorted(pools)]
    states = [
        part for layer in layers for part in state_parts(model, layer, _ranks(setup), partial(_state_bits, setup))
    ]
    if states:
        groups.append(CacheGroup(parts=_counted(states), block_tokens=None))
    return tuple(groups)


def _window(layer: LayerSpec, setup: Setup) -> int | None:
    """Return the window that *layer* keeps; None where it keeps everything."""
    kept = WINDOWS in setup.options and layer.kind is LayerKind.SLIDING
    return layer.window_tokens if kept and (layer.window_tokens or 0) < setup.context_tokens else None


def _counted(parts: Sequence[CachePart]) -> tuple[CachePart, ...]:
    return tuple(
        replace(part, layers=n, logical_unit_bytes=n * part.logical_unit_bytes, unit_bytes=n * part.unit_bytes)
        for part, n in Counter(parts).items()
    )


def _group(
    model: ModelSpec, form: EngineFormat, setup: Setup, layers: Sequence[LayerSpec], page: int, window: int
) -> CacheGroup:
    """Return the pool of layers that keep a window, 0 for everything.

    A window that does not begin where a block does reaches into one more (kSWAExtraBlock of kvCacheManager.h).
    """
    parts = [part for layer in layers for part in _parts(model, layer, form, setup)]
    missing = sum(1 for layer in layers if not layer.sides) if any(one.sides for one in model.layers) else 0
    side = next((one.sides[0].elements for one in model.layers if one.sides), 0)
    return CacheGroup(
        parts=_counted(parts),
        block_tokens=page,
        padding_layer_bytes=page * missing * side * _INDEXER_BYTES_OF_128 / 128,
        held_tokens_max=window or None,
        spare_blocks=1 if window else 0,
    )


def _parts(model: ModelSpec, layer: LayerSpec, form: EngineFormat, setup: Setup) -> list[CachePart]:
    ranks = _ranks(setup)
    if layer.kind is LayerKind.LATENT:
        stored = form.latent_bytes(layer.head_dim, layer.rope_dim)
        if stored is None:
            raise UnsupportedFormatError(f"{NAME} has no latent cache (MLA) in {form.name}", hint="use bf16 or fp8")
        sizes = [("latent attention", stored)]
        sizes += [(side.name, side.elements * _INDEXER_BYTES_OF_128 / 128) for side in layer.sides]
        return [CachePart(name=n, layers=1, logical_unit_bytes=b / ranks, unit_bytes=b) for n, b in sizes]
    stored = head_bytes(layer, form.key, form.value)
    part = CachePart(
        name="sliding attention" if layer.window_tokens else "full attention",
        layers=1,
        logical_unit_bytes=layer.kv_heads * stored / ranks,
        unit_bytes=rank_heads(model, layer, ranks) * stored,
        window_tokens=layer.window_tokens,
    )
    return [part]


def _state_bits(setup: Setup, state: StateCache) -> int:
    """Return the bits of an element: `auto` is what the config says, else the type that the model runs in.

    validate_and_set_mamba_ssm_cache_dtype of model_loader.py; before late 2025 it read no config.
    """
    chosen = setup.option(STATE_TYPE)
    if state.name != "recurrent state":
        return state.item_bits
    return STATE_BITS.get(chosen or "", 16 if state.free_type else state.item_bits)


def _notes(model: ModelSpec, setup: Setup) -> tuple[str, ...]:
    notes: list[str] = []
    windows = any(layer.window_tokens for layer in model.layers)
    if windows and WINDOWS not in setup.options:
        notes.append(f"TensorRT-LLM 1.2 keeps windows whole unless they are asked for: --engine-option {WINDOWS}")
    elif windows:
        notes.append("each window has an equal share of the pool, and tokens are printed of all windows together")
    if any(layer.states for layer in model.layers):
        notes.append("a state is allocated for each of max_batch_size sequences, whether it is served or not")
    return tuple(notes)


_RUN_TYPES: Final = {"bf16": "bfloat16", "fp16": "float16"}
_CACHE_TYPES: Final = ("fp8", "nvfp4")
"""The words of kv_cache_config.dtype beside auto (_VALID_KV_CACHE_DTYPES of _torch/pyexecutor/model_loader.py)."""
_OF_CHECKPOINT: Final = (
    "# `auto` is the type above, unless the checkpoint quantizes its own cache (kv_cache_quant_algo): no word here "
    "undoes that.\n"
)


def launch(setting: Launch) -> LaunchText:
    """Return the command `trtllm-serve` with the YAML that it reads.

    Options and keys are those of tensorrt_llm/commands/serve.py and tensorrt_llm/llmapi/llm_args.py (TorchLlmArgs,
    KvCacheConfig), read 2026-11-30. `free_gpu_memory_fraction` is of what weights and activations leave free. A cache
    in 16 bits has the type that the model runs in, which `dtype` says.

    Raises:
        UnsupportedFormatError: No option says the format: int8 is chosen when an engine is built.
    """
    form = find_format(NAME, FORMATS, setting.format).name
    if form not in (*_RUN_TYPES, *_CACHE_TYPES):
        raise UnsupportedFormatError(f"trtllm-serve has no option for a cache in {form}", hint="use fp8")
    cache: dict[str, str | int | float | bool] = {
        "dtype": form if form in _CACHE_TYPES else "auto",
        "tokens_per_block": setting.block_tokens,
        "free_gpu_memory_fraction": round(setting.memory_utilization, 4),
    }
    if setting.blocks:
        cache["max_tokens"] = setting.blocks * setting.block_tokens
    if setting.prefix_caching is not None:
        cache["enable_block_reuse"] = setting.prefix_caching
    values: dict[str, str | int] = {"max_batch_size": setting.sequences, "max_seq_len": setting.context_tokens}
    if form in _RUN_TYPES:
        values["dtype"] = _RUN_TYPES[form]
    if setting.max_batched_tokens:
        values["max_num_tokens"] = setting.max_batched_tokens
    if setting.tensor_parallel > 1:
        values["tensor_parallel_size"] = setting.tensor_parallel
    if setting.pipeline_parallel > 1:
        values["pipeline_parallel_size"] = setting.pipeline_parallel
    return LaunchText(
        command=shell_line(["trtllm-serve", setting.model], {"extra_llm_api_options": "trtllm.yaml"}),
        file_name="trtllm.yaml",
        file_text=(_OF_CHECKPOINT if form in _RUN_TYPES else "") + yaml_text({**values, "kv_cache_config": cache}),
    )


default_format: Final = stated_type(
    {
        "modelopt": {"fp8_e4m3": "fp8", "nvfp4": "nvfp4", "int8": "int8"},
        "compressed-tensors": {"fp8_e4m3": "fp8"},
    }
)
"""What `auto` is: what the checkpoint says, else the run's type (NVIDIA/TensorRT-LLM
tensorrt_llm/_torch/model_config.py, main of 2026-11)."""
