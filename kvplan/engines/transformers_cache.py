"""transformers' own caches: tensors that grow with each token, buffers of a length, or quantized ones with a residual.

The rules are those of huggingface/transformers 5.24, src/transformers/cache_utils.py, read 2026-11-30; what the
quantized backends store was measured with optimum-quanto 0.2.7 and hqq 0.2.8.post1. A window keeps a token less than a
query sees, for the query's own comes with it; a convolution of k keeps k inputs. Of a quantized cache all that is there
at first is quantized, then tokens wait in 16 bits until there are `residual_length`, and all is quantized anew.

Groups lie along the axis of the format's name. At 0, the library's default, quanto's are of consecutive channels, and
hqq's of elements that lie a 64th of the whole cache apart: other ones at each length. At quanto's -1 they are of one
channel's consecutive tokens, over the end of a head into the next; at hqq's 1 of consecutive channels, as the library's
documentation advises. hqq 0.2.8.post1 does not read 3 bits back at axis 1.
"""

import json
from collections import Counter
from dataclasses import dataclass
from typing import Final

from kvplan.core.allocation import Allocation, BlockGroup, Capacity, Setup, Term, largest
from kvplan.core.packing import BITS_16, EngineFormat, Packing
from kvplan.core.specs import LayerKind, LayerSpec, ModelSpec
from kvplan.engines.engine import CHECKPOINT, GGUF, Engine, Launch, LaunchText, find_format, refuse_layer, run_type
from kvplan.engines.limits import Limits
from kvplan.engines.transformers_models import RUN
from kvplan.errors import UnsupportedFormatError, UnsupportedModelError, UnsupportedSettingError
from kvplan_kernels.layout import ceil_div, round_up

NAME: Final = "transformers"
RULES: Final = "5.24"
STATIC: Final = "cache_implementation=static"
GROUP: Final = "q_group_size"
RESIDUAL: Final = "residual_length"
GROUP_ELEMENTS: Final = 64
RESIDUAL_TOKENS: Final = 128

WAITING: Final = "tokens that wait in 16 bits"
QUERY_ITSELF: Final = "the query's own token of a window"
EXTRA_INPUT: Final = "an input more of each convolution"
ROWS: Final = "rows to whole bytes"
SCALES: Final = "a scale of each tensor"
_FORMULAS: Final = {
    WAITING: "up to residual_length - 1 of the newest tokens, until all are quantized anew",
    QUERY_ITSELF: "a window of w keeps w - 1 tokens",
    EXTRA_INPUT: "a convolution of k keeps k inputs, and its next step reads k - 1",
    ROWS: "quanto packs rows of a group each, as many as share a byte",
    SCALES: "a float32 for K and one for V of each layer",
}
_TENSOR_SCALE_BYTES: Final = 4
_WORD_ELEMENTS, _WORD_BITS = 10, 32
"""hqq keeps ten codes of 3 bits in 32."""

_SOURCE: Final = "src/transformers/cache_utils.py, 2026-11-30"
_NEAREST: Final = {8: "int8", 4: "int4", 2: "int2"}
"""By bits, of the formats that a search has by default; groups are whole heads there."""


PACKAGES: Final = {"quanto": "optimum-quanto", "hqq": "hqq"}
"""What a backend needs beside transformers itself, as it is installed."""
_CHANNEL_AXIS: Final = {"quanto": 0, "hqq": 1}
"""At which groups are of consecutive channels: what nearest formats group too."""


def _grouped(backend: str, bits: int, axis: int = 0) -> EngineFormat:
    packing = _packing(backend, bits, GROUP_ELEMENTS)
    like = _NEAREST.get(bits, "") if axis == _CHANNEL_AXIS[backend] else ""
    return EngineFormat(
        name=f"{backend}-int{bits}{f'-axis{axis}' if axis else ''}", key=packing, value=packing, latent=packing,
        since="4.42", source=_SOURCE, like=like, why=f"needs the package {PACKAGES[backend]}",
    )  # fmt: skip


def _packing(backend: str, bits: int, group: int) -> Packing:
    """Return codes of a group with a scale and a zero in the model's own type; hqq's 3 bits fill whole words."""
    words = ceil_div(group, _WORD_ELEMENTS) * _WORD_BITS - 3 * group if backend == "hqq" and bits == 3 else 0
    return Packing(bits=bits, group_elements=group, group_bits=32 + words)


_E4M3: Final = Packing(bits=8)
FORMATS: Final = (
    EngineFormat(name="bf16", key=BITS_16, value=BITS_16, latent=BITS_16, same_as="bf16", source=_SOURCE),
    EngineFormat(name="fp16", key=BITS_16, value=BITS_16, latent=BITS_16, same_as="fp16", source=_SOURCE),
    EngineFormat(
        name="fp8", key=_E4M3, value=_E4M3, latent=_E4M3, like="fp8_e4m3",
        since="September 2026 (huggingface/transformers#48677)",
        source=_SOURCE,
    ),
    *(_grouped("quanto", bits) for bits in (4, 2)),
    *(_grouped("quanto", bits, axis=-1) for bits in (4, 2)),
    *(_grouped("hqq", bits) for bits in (8, 4, 3, 2, 1)),
    *(_grouped("hqq", bits, axis=1) for bits in (8, 4, 2, 1)),
)  # fmt: skip


def cache_config(form: EngineFormat) -> dict[str, str | int]:
    """Return what `QuantizedCache` is made with, as `cache_config` of `generate` takes it.

    >>> cache_config(find_format(NAME, FORMATS, "quanto-int4"))
    {'backend': 'quanto', 'nbits': 4, 'q_group_size': 64, 'residual_length': 128}
    """
    backend, axis = _backend(form), _axis(form)
    if backend not in PACKAGES:
        return {"backend": backend}
    axes = {"axis_key": axis, "axis_value": axis} if axis else {}
    bits = {"nbits": form.key.bits}
    return {"backend": backend, **bits, **axes, GROUP: GROUP_ELEMENTS, RESIDUAL: RESIDUAL_TOKENS}


def _backend(form: EngineFormat) -> str:
    return form.name.partition("-")[0]


def _axis(form: EngineFormat) -> int:
    return int(form.name.partition("-axis")[2] or 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldLayers:
    """Layers that cache alike.

    Attributes:
        count: How many.
        elements: Of K and of V of a token, on this rank.
        token_units: What they take, in units of the storage.
        side_bytes: Of what grows beside them, a token.
        state_bytes: Of a sequence's states, by the geometry.
        input_bytes: What convolutions keep beside them.
    """

    count: int
    elements: tuple[int, int]
    token_units: int
    window_tokens: int | None = None
    side_bytes: int = 0
    state_bytes: int = 0
    input_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Storage:
    """How tokens are stored.

    Attributes:
        backend: Of a quantized cache; empty where values are stored themselves.
        packing: Of a group.
        axis: Along which groups lie, in the library's count.
        residual_tokens: Tokens at which all is quantized anew; 0 where tokens are appended as they are stored.
        static: Whether buffers have their length from the start.
    """

    backend: str
    packing: Packing
    axis: int = 0
    residual_tokens: int = 0
    static: bool = False

    @property
    def units(self) -> int:
        """Units of a byte: what bits and the parts of groups are whole numbers of."""
        return 8 * (self.packing.group_elements or 1)

    def token_units(self, elements: int) -> int:
        """Return what a token's *elements* take in units, groups counted in parts."""
        return elements * (self.packing.bits * (self.packing.group_elements or 1) + self.packing.group_bits)

    def row_padding(self, elements: int) -> int:
        """Return what packing adds to a tensor of *elements*."""
        group = self.packing.group_elements or 1
        rows, columns = (elements // group, group) if self.axis == 0 else (group, elements // group)
        return (round_up(rows, 8 // self.packing.bits) - rows) * columns * self.packing.bits // 8

    def waiting(self, tokens: int) -> int:
        """Return the most tokens of *tokens* that wait to be quantized."""
        return min(tokens - 1, self.residual_tokens - 1) if self.residual_tokens and tokens else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheAllocation(Allocation):
    """The tensors of one sequence of a batch."""

    layers: tuple[HeldLayers, ...]
    storage: Storage
    setup: Setup
    notes: tuple[str, ...] = ()

    @property
    def blocks(self) -> tuple[BlockGroup, ...]:
        """Layers that cache alike, with what a token or a state takes in all of them."""
        found: list[BlockGroup] = []
        for layer in self.layers:
            token = layer.token_units / self.storage.units + layer.side_bytes
            state = layer.state_bytes + layer.input_bytes
            found += [BlockGroup(layers=layer.count, block_tokens=1, bytes_per_block=round(layer.count * token))] * (
                token > 0
            )
            found += [BlockGroup(layers=layer.count, block_tokens=None, bytes_per_block=layer.count * state)] * (
                state > 0
            )
        return tuple(found)

    def logical_bytes(self, tokens: int) -> float:
        """Return geometry times format of a sequence of *tokens*, this rank's share."""
        total, units = 0, self.storage.units
        for layer in self.layers:
            seen = tokens if layer.window_tokens is None else min(tokens, layer.window_tokens)
            beside = tokens * layer.side_bytes + layer.state_bytes
            total += layer.count * (seen * layer.token_units + units * beside)
        return total / units

    def logical_growth_bytes(self, tokens: int) -> float:
        """Return what one more token adds to that."""
        return self.logical_bytes(tokens + 1) - self.logical_bytes(tokens)

    def sequence_bytes(self, tokens: int) -> float:
        """Return the bytes of all tensors of a sequence of *tokens*, with the most that may wait to be quantized."""
        return self.logical_bytes(tokens) + sum(self._terms(tokens).values())

    def growth_bytes(self, tokens: int) -> float:
        """Return what one more token takes, averaged over the rows that share a byte."""
        rows = 8 if self.storage.backend == "quanto" else 1
        return (self.sequence_bytes(tokens + rows) - self.sequence_bytes(tokens)) / rows

    def terms(self, tokens: int) -> tuple[Term, ...]:
        """Return the terms that are not nothing."""
        return tuple(Term(name, size, _FORMULAS[name]) for name, size in self._terms(tokens).items() if size)

    def _terms(self, tokens: int) -> dict[str, float]:
        store, terms = self.storage, dict.fromkeys(_FORMULAS, 0.0)
        waiting, units = store.waiting(tokens), store.units
        for layer in self.layers:
            if waiting:
                whole = 2 * units * sum(layer.elements)
                terms[WAITING] += layer.count * waiting * (whole - layer.token_units) / units
            if store.backend == "quanto":
                rows = (store.row_padding((tokens - waiting) * part) for part in layer.elements)
                terms[ROWS] += layer.count * sum(rows)
            if layer.window_tokens is not None and not store.static and tokens >= layer.window_tokens:
                terms[QUERY_ITSELF] -= layer.count * layer.token_units / units
            terms[EXTRA_INPUT] += layer.count * layer.input_bytes
            if store.backend == "fp8":
                terms[SCALES] += layer.count * 2 * _TENSOR_SCALE_BYTES
        return terms

    def capacity(self, pool_bytes: int) -> Capacity:
        """Return the largest batch, and the longest sequence alone."""
        longest = largest(lambda tokens: self.sequence_bytes(tokens) <= pool_bytes)
        each = self.sequence_bytes(self.setup.context_tokens)
        return Capacity(
            blocks=longest,
            tokens=longest,
            max_concurrency=int(pool_bytes // each) if each else 0,
            max_context=longest,
        )


def allocate(model: ModelSpec, format_name: str, setup: Setup) -> CacheAllocation:
    """Return the tensors of transformers' cache.

    Raises:
        UnsupportedFormatError: transformers has no such format, or not for this model.
        UnsupportedModelError: It does not run the model itself, or how it keeps what a layer caches is not known here.
        UnsupportedSettingError: Ranks do not divide the heads, or it has no such option.
    """
    form = find_format(NAME, FORMATS, format_name)
    _check(model, setup)
    storage = _storage(form, setup)
    if form.quantized:
        _check_quantized(model, form, storage)
    layers = tuple(_held(model, layer, count, setup, storage) for layer, count in Counter(model.layers).items())
    return CacheAllocation(layers=layers, storage=storage, setup=setup, notes=_notes(storage))


def _check(model: ModelSpec, setup: Setup) -> None:
    if model.architecture not in RUN:
        message = f"what {model.architecture[:60]} caches is in no class of transformers {RULES} that is counted here"
        raise UnsupportedModelError(message, where=model.name)
    if setup.pipeline_parallel > 1:
        message = "device_map places layers by their size, and which device holds which is not known here"
        raise UnsupportedSettingError(message, where="--pp", hint="leave it out")
    if setup.draft_tokens:
        raise refuse_layer(NAME, model, "draft layers")


def _storage(form: EngineFormat, setup: Setup) -> Storage:
    group, residual = (
        _number(setup, name, own) for name, own in ((GROUP, GROUP_ELEMENTS), (RESIDUAL, RESIDUAL_TOKENS))
    )
    if not form.quantized:
        return Storage(backend="", packing=form.key, static=STATIC in setup.options)
    if STATIC in setup.options:
        raise UnsupportedFormatError("transformers has no static cache that is quantized", hint=f"leave out {STATIC}")
    backend = _backend(form)
    if backend not in PACKAGES:
        return Storage(backend=backend, packing=form.key)
    packing = _packing(backend, form.key.bits, group)
    return Storage(backend=backend, packing=packing, axis=_axis(form), residual_tokens=residual)


def _number(setup: Setup, name: str, own: int) -> int:
    text = setup.option(name)
    if text is None:
        return own
    if not text.isdecimal() or not 1 <= int(text) <= 1 << 20:
        raise UnsupportedSettingError(
            f"{name} is {text[:60]!r}", where="--engine-option", hint="give a number of 1 or more"
        )
    return int(text)


def _check_quantized(model: ModelSpec, form: EngineFormat, storage: Storage) -> None:
    """Refuse what `QuantizedCache` refuses, and groups that a step may leave unfilled."""
    plain = (LayerKind.FULL, LayerKind.LATENT)
    if any(layer.kind not in plain or layer.states or layer.sides for layer in model.layers):
        message = f"transformers quantizes full attention alone, and {model.name} has other layers"
        raise UnsupportedFormatError(message, hint="use bf16 or fp16")
    group = storage.packing.group_elements or 1
    for layer in model.layers:
        for elements in _elements(layer):
            if elements % group:
                message = f"{NAME} {form.name}: groups of {group} do not divide the {elements} elements of a token"
                raise UnsupportedFormatError(message, hint=f"give --engine-option {GROUP}=N")
            if storage.backend == "hqq" and storage.axis and elements // group % (8 // storage.packing.bits):
                message = f"{NAME} {form.name}: hqq packs {elements // group} groups of a token into broken bytes"
                raise UnsupportedFormatError(message, hint=f"use {form.name.partition('-axis')[0]}")


def _elements(layer: LayerSpec) -> tuple[int, int]:
    """Return the elements of K and of V of a token; of a latent vector, what is not rotated and what is."""
    if layer.kind is LayerKind.LATENT:
        return layer.head_dim - layer.rope_dim, layer.rope_dim
    value_dim = layer.head_dim if layer.value_dim is None else layer.value_dim
    return layer.kv_heads * layer.head_dim, layer.kv_heads * value_dim


def _held(model: ModelSpec, layer: LayerSpec, count: int, setup: Setup, storage: Storage) -> HeldLayers:
    ranks = setup.tensor_parallel
    if ranks > 1 and (layer.kind is not LayerKind.FULL or layer.states or layer.kv_heads % ranks):
        message = f"how {ranks} tensor parallel ranks share what {model.name} caches is not known here"
        raise UnsupportedSettingError(message, where="--tp", hint="give a number of ranks that divides the KV heads")
    if any(side.tokens_per_entry != 1 for side in layer.sides):
        raise refuse_layer(NAME, model, layer.sides[0].name)
    own = layer.shared_with is None and layer.kv_heads > 0
    key, value = _elements(layer) if own else (0, 0)
    states = [(state.nbytes, state.inputs) for state in layer.states]
    return HeldLayers(
        count=count,
        elements=(key // ranks, value // ranks),
        token_units=storage.token_units(key // ranks + value // ranks),
        window_tokens=layer.window_tokens if own else None,
        side_bytes=sum(side.elements * side.item_bits // 8 for side in layer.sides),
        state_bytes=sum(nbytes for nbytes, _ in states),
        input_bytes=sum(nbytes // inputs for nbytes, inputs in states if inputs),
    )


def _notes(storage: Storage) -> tuple[str, ...]:
    if storage.static:
        return ("buffers have this size from the first token on",)
    if storage.residual_tokens:
        whole = "each step dequantizes the whole of a layer: as much as its 16 bits more, for a moment"
        raises = f"it raises where heads times tokens are no multiple of {GROUP} when all is quantized"
        return (whole, raises) if storage.backend == "quanto" and storage.axis else (whole,)
    return ("each step copies a layer to append to it: as much as the layer more, for a moment",)


def launch(setting: Launch) -> LaunchText:
    """Return the call of `generate`, and the same as the keys of generation_config.json."""
    form = find_format(NAME, FORMATS, setting.format)
    if not form.quantized:
        keys = '"cache_implementation": "dynamic"'
        call = 'cache_implementation="dynamic"'
    else:
        config = json.dumps(cache_config(form))
        keys = f'"cache_implementation": "quantized",\n  "cache_config": {config}'
        call = f'cache_implementation="quantized", cache_config={config}'
    return LaunchText(
        command=f"model.generate(**inputs, {call})",
        file_name="generation_config.json",
        file_text=f"{{\n  {keys}\n}}\n",
    )


LIMITS: Final = Limits(
    oldest=(5,), newest=(5, 24),
    options={"cache_implementation": "static", GROUP: "N", RESIDUAL: "N"},
    unused={"block_tokens": "grows tensors and has no blocks", "prefix_caching": "keeps no prefixes"},
)  # fmt: skip
"""How version 4 caches windows and latent vectors (MLA) is not counted here."""

ENGINE: Final = Engine(
    name=NAME, title="transformers", rules=RULES, allocate=allocate, launch=launch, formats=FORMATS,
    default_format=run_type, limits=LIMITS, dequantizes=True, reads=frozenset({CHECKPOINT, GGUF}), runs_here=True,
)  # fmt: skip
