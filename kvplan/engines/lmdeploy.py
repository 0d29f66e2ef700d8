"""LMDeploy's TurboMind: blocks of all layers, drawn from one region of what is free once weights are loaded.

The rules are those of InternLM/lmdeploy at 1263d5c (0.16, 2026-08-21): `block::Layout` in
src/turbomind/kernels/attention/block.h (what a block takes), src/turbomind/memory (how objects lie in slabs),
GatedDeltaNetLayer.cc (states), and BlockManager.cc before de8b40a for releases to 0.14. Every token is kept whatever
the window. A sequence with recurrent layers has one state beside its blocks.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Final

from kvplan.core.allocation import BlockGroup, CacheGroup, CachePart, Capacity, GroupedAllocation, Setup, Term, largest
from kvplan.core.packing import BITS_16, EngineFormat, Packing
from kvplan.core.specs import LayerKind, LayerSpec, ModelSpec
from kvplan.engines.commands import shell_line
from kvplan.engines.engine import Launch, LaunchText, find_format, head_bytes, rank_elements, rank_heads, refuse_layer
from kvplan.errors import UnsupportedFormatError, UnsupportedModelError, UnsupportedSettingError
from kvplan_kernels.layout import ceil_div

NAME: Final = "lmdeploy"
RULES: Final = "0.16"
BLOCK_TOKENS: Final = 64
FLOAT_STATES: Final = "LMDEPLOY_FP32_MAMBA_SSM_DTYPE=1"
"""An environment variable, given as an option: recurrent states in float32."""
STATE_TYPE: Final = "states in another type"
EXTRA_INPUT: Final = "an input more of each convolution"

_SLABS_SINCE: Final = (0, 15)
_PAGE_BYTES: Final = 32 << 20
_SLAB_BYTES_MAX: Final = 1 << 30
_SLAB_USED: Final = 0.95
_HEAD_DIMS: Final = (64, 128, 192, 256)
_LATENT_DIM: Final = 576
_PYTORCH_ONLY: Final = ("fp8", "fp8_e4m3", "fp8_e5m2", "turbo_quant", "16", "17", "42")

_SOURCE: Final = "lmdeploy/cli/utils.py, --quant-policy, and block.h, token_param_size, 2026-08-21"
_INT8: Final = Packing(bits=8, vector_bits=32)
_INT4: Final = Packing(bits=4, vector_bits=32)
FORMATS: Final = (
    EngineFormat(
        name="bf16", key=BITS_16, value=BITS_16, latent=BITS_16, aliases=("none", "0"), capability=80,
        why="older devices run in fp16", source=_SOURCE,
    ),
    EngineFormat(name="fp16", key=BITS_16, value=BITS_16, latent=BITS_16, source=_SOURCE),
    EngineFormat(
        name="int8", key=_INT8, value=_INT8, latent=_INT8, same_as="int8", aliases=("8",), capability=70,
        why="TurboMind's kernels begin at Volta", since="0.4", source=_SOURCE,
    ),
    EngineFormat(
        name="int4", key=_INT4, value=_INT4, latent=_INT4, same_as="int4", aliases=("4",), capability=70,
        why="TurboMind's kernels begin at Volta", since="0.4", source=_SOURCE,
    ),
)  # fmt: skip

_RUN: Final = frozenset({
    "Glm4MoeLiteForCausalLM", "GptOssForCausalLM", "InternLM2ForCausalLM", "InternLM3ForCausalLM",
    "InternS1ForConditionalGeneration", "InternVLChatModel", "InternVLForConditionalGeneration", "LlamaForCausalLM",
    "MixtralForCausalLM", "Qwen2ForCausalLM", "Qwen2MoeForCausalLM", "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM",
    "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration",
})  # fmt: skip
"""lmdeploy/turbomind/supported_models.py, SUPPORTED_ARCHS of 0.16."""
_RUN_TO_0_9: Final = frozenset({
    "BaiChuanForCausalLM", "BaichuanForCausalLM", "ChatGLMForConditionalGeneration", "ChatGLMModel",
    "DeepseekV2ForCausalLM", "InternLMForCausalLM", "LlavaForConditionalGeneration", "MistralForCausalLM",
    "QWenLMHeadModel",
})  # fmt: skip
"""Those of 0.9.2 that are there no more."""
_LAST_WITH_THEM: Final = (0, 9)


@dataclass(frozen=True, kw_only=True, slots=True)
class TurboMindAllocation(GroupedAllocation):
    """Blocks of attention, and one state of each sequence.

    Attributes:
        state_layers: Layers with a state.
        state_objects: Objects that a sequence's state lies in, by their bytes.
        state_logical_bytes: Of a state, by the geometry: this rank's share of it.
        state_terms: What lies between.
    """

    state_layers: int = 0
    state_objects: Counter[int]
    state_logical_bytes: int = 0
    state_terms: tuple[Term, ...] = ()

    @property
    def blocks(self) -> tuple[BlockGroup, ...]:
        """The group of attention, and that of states."""
        group = self.groups[0]
        attention = BlockGroup(
            layers=group.layers, block_tokens=group.block_tokens, bytes_per_block=round(group.bytes_per_block)
        )
        if not self.state_layers:
            return (attention,)
        return (attention, BlockGroup(layers=self.state_layers, block_tokens=None, bytes_per_block=self.state_bytes))

    @property
    def state_bytes(self) -> int:
        """Bytes of a sequence's state."""
        return sum(size * count for size, count in self.state_objects.items())

    def logical_bytes(self, tokens: int) -> float:
        """Return geometry times format of a sequence of *tokens*, this rank's share."""
        return sum(group.logical_bytes(tokens) for group in self.groups) + self.state_logical_bytes

    def sequence_bytes(self, tokens: int) -> float:
        """Return what a sequence of *tokens* takes."""
        return sum(group.blocks(tokens) * group.bytes_per_block for group in self.groups) + self.state_bytes

    def terms(self, tokens: int) -> tuple[Term, ...]:
        """Return the terms that are not nothing."""
        return (*GroupedAllocation.terms(self, tokens), *self.state_terms)

    def capacity(self, pool_bytes: int) -> Capacity:
        """Return what *pool_bytes* hold: whole slabs of objects of one size, or blocks alone in releases to 0.14."""
        context = self.setup.context_tokens
        group = self.groups[0]
        block = round(group.bytes_per_block)

        def holds(blocks: int, states: int) -> bool:
            objects = Counter({size: count * states for size, count in self.state_objects.items()})
            objects[block] += blocks
            if not in_slabs(self.setup):
                return sum(size * count for size, count in objects.items()) <= pool_bytes
            return _slab_bytes(objects) <= pool_bytes // _PAGE_BYTES * _PAGE_BYTES

        blocks = largest(lambda count: holds(count, 0))
        return Capacity(
            blocks=blocks,
            tokens=blocks * group.units_per_block,
            max_concurrency=largest(lambda count: holds(count * group.blocks(context), count)),
            max_context=largest(lambda tokens: holds(group.blocks(tokens), 1)),
        )


def in_slabs(setup: Setup) -> bool:
    """Return whether blocks are objects in slabs, as they are from 0.15 on."""
    return setup.version is None or setup.version >= _SLABS_SINCE


def slab_bytes(object_bytes: int) -> int:
    """Return the size of the slabs for objects: a power of 2, doubled until objects fill it or it is 1 GiB.

    >>> slab_bytes(8 << 20) >> 20, slab_bytes(22 << 20) >> 20
    (32, 512)
    """
    size = max(_PAGE_BYTES, 1 << (object_bytes - 1).bit_length())
    while size // object_bytes * object_bytes / size < _SLAB_USED and size < _SLAB_BYTES_MAX:
        size *= 2
    return size


def _slab_bytes(objects: Counter[int]) -> int:
    return sum(ceil_div(count, slab_bytes(size) // size) * slab_bytes(size) for size, count in objects.items() if count)


def allocate(model: ModelSpec, format_name: str, setup: Setup) -> TurboMindAllocation:
    """Return TurboMind's allocation of a rank.

    Raises:
        UnsupportedFormatError: TurboMind has no such format.
        UnsupportedModelError: TurboMind does not run the model, or how it keeps what a layer caches is not known here.
        UnsupportedSettingError: Ranks do not divide the heads, or it has no such option.
    """
    form = _find(format_name)
    _check(model, setup)
    layers = [layer for layer in model.layers if layer.kv_heads]
    if not layers:
        raise refuse_layer("TurboMind", model, "a model without attention")
    kinds = Counter((layer, layer.window_tokens) for layer in layers)
    parts = tuple(_part(model, layer, count, form, setup) for (layer, _), count in kinds.items())
    group = CacheGroup(parts=parts, block_tokens=setup.block_tokens or BLOCK_TOKENS)
    objects, logical, terms = _states(model, setup)
    return TurboMindAllocation(
        groups=(group,), setup=setup, notes=_notes(setup, layers), state_objects=objects,
        state_layers=sum(bool(layer.states) for layer in model.layers), state_logical_bytes=logical, state_terms=terms,
    )  # fmt: skip


def _find(name: str) -> EngineFormat:
    word = name.removeprefix(f"{NAME}:")
    if word in _PYTORCH_ONLY:
        raise UnsupportedFormatError(f"LMDeploy has {word} in its PyTorch engine and not in TurboMind")
    return find_format(NAME, FORMATS, name)


def _check(model: ModelSpec, setup: Setup) -> None:
    old = setup.version is not None and setup.version[:2] <= _LAST_WITH_THEM
    if model.architecture not in (_RUN | _RUN_TO_0_9 if old else _RUN):
        raise UnsupportedModelError(
            f"TurboMind {RULES} runs no {model.architecture[:60]}; LMDeploy's PyTorch engine is not counted here",
            where=model.name,
        )
    if setup.pipeline_parallel > 1:
        raise UnsupportedSettingError("TurboMind has no pipeline stages", where="--pp", hint="use --tp")
    if setup.draft_tokens:
        raise refuse_layer("TurboMind", model, "draft layers")
    if not in_slabs(setup) and any(layer.states for layer in model.layers):
        raise refuse_layer("TurboMind before 0.15", model, "states")


def _part(model: ModelSpec, layer: LayerSpec, count: int, form: EngineFormat, setup: Setup) -> CachePart:
    if layer.shared_with is not None or layer.sides or layer.kind is LayerKind.CHUNKED:
        raise refuse_layer("TurboMind", model, "shared layers, side caches or chunks")
    latent = layer.kind is LayerKind.LATENT
    known = (_LATENT_DIM,) if latent else _HEAD_DIMS
    if layer.head_dim not in known or (not latent and layer.value_dim not in (None, layer.head_dim)):
        what = f"a head size of {layer.head_dim}" + (" (MLA)" if latent else "")
        raise UnsupportedModelError(f"TurboMind has no kernel for {what}", where=model.name)
    stored = head_bytes(layer, form.key, form.value)
    ranks = setup.tensor_parallel
    return CachePart(
        name="latent attention" if latent else "attention",
        layers=count,
        logical_unit_bytes=count * layer.kv_heads * stored / ranks,
        unit_bytes=count * rank_heads(model, layer, ranks) * stored,
        window_tokens=layer.window_tokens,
    )


def _states(model: ModelSpec, setup: Setup) -> tuple[Counter[int], int, tuple[Term, ...]]:
    """Return the objects of a sequence's state, its logical bytes, and the terms between them.

    Recurrent states have an object a layer in the type that the model runs in, whatever the config says: less than the
    geometry where that is float32 (state_dtype of lmdeploy/turbomind/turbomind.py, 0.16). All convolutions share one
    object, and keep as many inputs as they are long.
    """
    objects: Counter[int] = Counter()
    inputs = logical = 0
    types = Counter({STATE_TYPE: 0, EXTRA_INPUT: 0})
    for state in (state for layer in model.layers for state in layer.states):
        elements = rank_elements(model, state, setup.tensor_parallel)
        logical += elements * state.item_bits // 8
        if state.inputs:
            widened = elements // state.inputs * (state.inputs + 1)
            inputs += 2 * widened
            types[EXTRA_INPUT] += 2 * (widened - elements)
        else:
            stored = elements * (4 if FLOAT_STATES in setup.options else 2)
            objects[stored] += 1
            types[STATE_TYPE] += stored - elements * state.item_bits // 8
    if inputs:
        objects[inputs] += 1
    formulas = {
        STATE_TYPE: f"recurrent states in the model's own type whatever the config says, or float32 by {FLOAT_STATES}",
        EXTRA_INPUT: "a convolution of k keeps k inputs, and its next step reads k - 1",
    }
    return objects, logical, tuple(Term(name, size, formulas[name]) for name, size in types.items() if size)


def _notes(setup: Setup, layers: list[LayerSpec]) -> tuple[str, ...]:
    notes: list[str] = []
    if any(layer.window_tokens for layer in layers):
        notes.append("TurboMind keeps every token of these windows")
    if in_slabs(setup):
        notes.append("what a pool holds is counted from its first page of 32 MiB: up to one may be lost before it")
    return tuple(notes)


def launch(setting: Launch) -> LaunchText:
    """Return the command `lmdeploy serve api_server` and the same as a TurbomindEngineConfig in Python.

    The part of memory is left to LMDeploy: its `--cache-max-entry-count` is of what is free once weights are loaded.
    """
    policy = {"int8": 8, "int4": 4}.get(_find(setting.format).name, 0)
    values: dict[str, int | bool | str] = {
        "quant_policy": policy,
        "cache_block_seq_len": setting.block_tokens,
        "session_len": setting.context_tokens,
        "max_batch_size": setting.sequences,
    }
    if not policy:
        values["dtype"] = {"bf16": "bfloat16", "fp16": "float16"}[_find(setting.format).name]
    if setting.tensor_parallel > 1:
        values["tp"] = setting.tensor_parallel
    if setting.max_batched_tokens:
        values["max_prefill_token_num"] = setting.max_batched_tokens
    named = {name.replace("_", "-"): value for name, value in values.items()}
    flags = ["--enable-prefix-caching"] if setting.prefix_caching else []
    if setting.prefix_caching:
        values["enable_prefix_caching"] = True
    arguments = ", ".join(f"{name}={value!r}" for name, value in values.items())
    return LaunchText(
        command=shell_line(
            ["lmdeploy", "serve", "api_server", setting.model], {"backend": "turbomind", **named}, flags
        ),
        file_name="lmdeploy_config.py",
        file_text=f"from lmdeploy import TurbomindEngineConfig\n\nconfig = TurbomindEngineConfig({arguments})\n",
    )
