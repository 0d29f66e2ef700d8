"""How keys and values are stored: bits, grouping, residual, sinks, and the names of formats.

Standard library only. A name that `parse` accepts and the name of the format it returns give the same format.
"""

import re
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

KEY_VALUE_BITS: Final = (8, 4, 2)
TOKEN_GROUPS: Final = (32, 64, 128)
METADATA_ITEM_BITS: Final = 16
"""Of each number that a group has beside its codes, an fp16."""


class UnsupportedError(ValueError):
    """A format, layout or call that no kernel here takes; the message is the reason and the mend."""


class Axis(StrEnum):
    """Which elements share a scale: channels of one token, or tokens of one channel."""

    TOKEN = "token"  # noqa: S105 - of text, not of access
    CHANNEL = "channel"


class Code(StrEnum):
    """What a code of fewer than 16 bits stands for."""

    INTEGER = "integer"
    """code * scale + minimum of its group."""
    E4M3 = "e4m3"
    """The float itself: OCP E4M3 "fn", to +-448, NaN and no infinities (OFP8 specification 1.0)."""

    @property
    def metadata(self) -> tuple[str, ...]:
        """The fp16 numbers of each group, by the names of their sections in `layout`."""
        return _METADATA[self]


_METADATA: Final[dict[Code, tuple[str, ...]]] = {Code.INTEGER: ("scale", "min"), Code.E4M3: ()}
E4M3_MAX: Final = 448.0
_MOST: Final = {Code.E4M3: E4M3_MAX}
"""The largest number that a code stands for, where groups have no scale."""


class FloatType(StrEnum):
    """The 16-bit types in which unquantized keys and values are held."""

    BF16 = "bf16"
    FP16 = "fp16"


class Transform(StrEnum):
    """What is done to keys and values before they are stored, in the order in which names have them.

    Attention stays what it was: `folding` and `rotation` say how queries and outputs make up for each.
    """

    UNBIAS = "unbias"
    """A constant of each channel is taken from the keys: softmax does not see it."""
    SMOOTH = "smooth"
    """Channels of the keys are divided by the root of their size: QServe's SmoothAttention, arXiv 2405.04532."""
    ORDER = "order"
    """Channels of like size stand side by side and share a group: SKVQ, arXiv 2405.06219."""
    SCALED_TENSOR = "scaled-tensor"
    """K and V are divided by a number each, so that what was seen of a layer just fits the codes."""
    SCALED = "scaled"
    """The same with numbers for each KV head."""
    HADAMARD = "had"
    """An orthogonal matrix a head, as `rotation` defines it."""

    @property
    def calibrated(self) -> bool:
        """Whether it has numbers that are learned from a model's keys and values."""
        return self is not Transform.HADAMARD


_SCALES: Final = (Transform.SCALED_TENSOR, Transform.SCALED)


class ResidualRule(StrEnum):
    """When tokens leave the 16-bit residual: by whole groups for K and V alike, or as KIVI's authors do."""

    GROUP = "group"
    KIVI_PAPER = "kivi-paper"


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorFormat:
    """How one of K and V is stored.

    Attributes:
        bits: Bits of one element's code; 16 stores the value itself.
        axis: Per token (channels share a scale) or per channel (tokens do).
        group_size: Elements that share one scale and one minimum; None is the whole head. A group that holds what its
            codes cannot is poisoned as a whole, also where it has neither.
        code: What the codes stand for.
    """

    bits: int
    axis: Axis = Axis.TOKEN
    group_size: int | None = None
    code: Code = Code.INTEGER

    @property
    def quantized(self) -> bool:
        """Whether elements are codes and not 16-bit values."""
        return self.bits < 16

    @property
    def most(self) -> float | None:
        """The largest number that a code stands for; None where groups have a scale of their own, or no codes."""
        return _MOST.get(self.code) if self.quantized else None

    @property
    def metadata(self) -> tuple[str, ...]:
        """The fp16 numbers of each group, none where values are stored."""
        return self.code.metadata if self.quantized else ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Flush:
    """When one tensor's 16-bit tokens are quantized: *quantum* at a time, once *keep* + *quantum* are held."""

    keep_tokens: int
    quantum_tokens: int

    @property
    def held_tokens_max(self) -> int:
        """The most 16-bit tokens held after an append.

        >>> Flush(keep_tokens=128, quantum_tokens=64).held_tokens_max
        191
        """
        return self.keep_tokens + self.quantum_tokens - 1

    def quantized_tokens(self, tokens: int) -> int:
        """Return how many of *tokens*, the oldest, are quantized.

        >>> Flush(keep_tokens=128, quantum_tokens=64).quantized_tokens(200)
        64
        """
        return max(0, tokens - self.keep_tokens) // self.quantum_tokens * self.quantum_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheFormat:
    """How a layer's keys and values are stored.

    Attributes:
        key: How K is stored.
        value: How V is stored.
        residual_tokens: Newest tokens kept in 16 bits (R).
        sink_tokens: First tokens kept in 16 bits (S).
        rule: When tokens leave the residual.
        float_type: The 16-bit type of an unquantized format; None where the model's own type is taken.
        transforms: What is done to keys and values before they are stored; each once, in the order of `Transform`.
    """

    key: TensorFormat
    value: TensorFormat
    residual_tokens: int = 0
    sink_tokens: int = 0
    rule: ResidualRule = ResidualRule.GROUP
    float_type: FloatType | None = None
    transforms: tuple[Transform, ...] = ()

    @property
    def calibrated(self) -> tuple[Transform, ...]:
        """The transforms whose numbers are learned from the model."""
        return tuple(transform for transform in self.transforms if transform.calibrated)

    def recipe(self, transform: Transform) -> tuple[Transform, ...]:
        """Return the transforms that what *transform* learns depends on, itself among them.

        Formats with the same recipe learn the same. A scale is learned from what is stored in the end.

        >>> parse("unbias-smooth-had-int4").recipe(Transform.SMOOTH)
        (<Transform.UNBIAS: 'unbias'>, <Transform.SMOOTH: 'smooth'>)
        """
        if transform in _SCALES:
            return self.transforms
        return self.transforms[: self.transforms.index(transform) + 1]

    @property
    def quantized(self) -> bool:
        """Whether anything is stored in fewer than 16 bits."""
        return self.key.quantized or self.value.quantized

    @property
    def key_flush(self) -> Flush:
        """When keys leave the residual."""
        if self.rule is ResidualRule.KIVI_PAPER:
            return Flush(keep_tokens=0, quantum_tokens=self.residual_tokens)
        return Flush(keep_tokens=self.residual_tokens, quantum_tokens=self._quantum)

    @property
    def value_flush(self) -> Flush:
        """When values leave the residual."""
        if self.rule is ResidualRule.KIVI_PAPER:
            return Flush(keep_tokens=self.residual_tokens, quantum_tokens=1)
        return Flush(keep_tokens=self.residual_tokens, quantum_tokens=self._quantum)

    @property
    def _quantum(self) -> int:
        if self.key.axis is Axis.CHANNEL and self.key.group_size is not None:
            return self.key.group_size
        return 1

    @property
    def name(self) -> str:
        """The format's canonical name.

        >>> parse("k8v8").name
        'int8'
        """
        return _format_name(self)

    def __str__(self) -> str:
        """Return the name."""
        return self.name


def _unquantized(float_type: FloatType) -> CacheFormat:
    whole = TensorFormat(bits=16)
    return CacheFormat(key=whole, value=whole, float_type=float_type)


_UNQUANTIZED: Final = {str(t): _unquantized(t) for t in FloatType}
_ALIASES: Final = {
    "int8": "k8v8",
    "int4": "k4v4",
    "int2": "k2v2",
    "kivi-paper": "kivi-paper-k2v2-g32-r128",  # KIVI's published settings: arXiv 2402.02750
}
_KEPT: Final = r"(?:-r(?P<residual>\d+))?(?:-s(?P<sinks>\d+))?"
_GRAMMAR: Final = re.compile(r"(?P<family>kivi-paper-|kivi-)?k(?P<key>\d+)v(?P<value>\d+)(?:-g(?P<group>\d+))?" + _KEPT)
_FLOATS: Final = {"fp8_e4m3": TensorFormat(bits=8, code=Code.E4M3)}
"""How K and V alike are stored, by the name that says it."""
_FLOAT_GRAMMAR: Final = re.compile(f"(?P<stored>{'|'.join(_FLOATS)}){_KEPT}")
_TRANSFORMED: Final = tuple(f"{transform}-" for transform in Transform)
_LATER: Final = ("fp8", "nvfp4", "llama.cpp:", "vllm:")
_PREFIXES: Final = "[unbias-][smooth-][order-][scaled-][had-]"
_CODES: Final = "int8, int4, int2, fp8_e4m3 or [kivi-]k<bits>v<bits>[-g<group>][-r<residual>][-s<sinks>]"
_HINT: Final = f"use bf16, fp16, {_CODES}, or {_PREFIXES} before one of the last"


def parse(name: str) -> CacheFormat:
    """Return the format that *name* stands for.

    Raises:
        UnsupportedError: The name is unknown, or no kernel here stores such a format.

    >>> parse("kivi-k4v2-g64-r128").key
    TensorFormat(bits=4, axis=<Axis.CHANNEL: 'channel'>, group_size=64, code=<Code.INTEGER: 'integer'>)
    """
    if name in _UNQUANTIZED:
        return _UNQUANTIZED[name]
    if name.startswith(_TRANSFORMED):
        return _transformed(name)
    if floats := _FLOAT_GRAMMAR.fullmatch(name):
        stored = _FLOATS[floats["stored"]]
        residual, sinks = _kept_tokens(floats)
        return CacheFormat(key=stored, value=stored, residual_tokens=residual, sink_tokens=sinks)
    head, dash, tail = name.partition("-")
    expanded = _ALIASES.get(name) or (_ALIASES[head] + dash + tail if head in _ALIASES else name)
    match = _GRAMMAR.fullmatch(expanded)
    if match is None:
        if name.startswith(_LATER):
            raise UnsupportedError(f"format {name!r} has no kernel here; {_HINT}")
        raise UnsupportedError(f"unknown format {name!r}; {_HINT}")
    return _build(name, match)


def _transformed(name: str) -> CacheFormat:
    """Return the format of a name that begins with a transform."""
    inner, transforms = name, []
    for transform in Transform:
        if inner.startswith(f"{transform}-"):
            transforms.append(transform)
            inner = inner.removeprefix(f"{transform}-")
    if inner.startswith(_TRANSFORMED):
        raise UnsupportedError(f"format {name!r}: transforms stand once each, in the order {_PREFIXES}")
    if inner in _UNQUANTIZED:
        raise UnsupportedError(f"format {name!r}: a transform helps codes, and 16 bits have none; {_HINT}")
    try:
        form = replace(parse(inner), transforms=tuple(transforms))
    except UnsupportedError as error:
        raise UnsupportedError(str(error).replace(repr(inner), repr(name))) from error
    if (reason := _transform_refusal(form)) is not None:
        raise UnsupportedError(f"format {name!r}: {reason}")
    return form


def _transform_refusal(form: CacheFormat) -> str | None:
    """Return why a transform of *form* would change nothing or contradict another, or None."""
    tensors = (form.key, form.value)
    scales = [transform for transform in form.transforms if transform in _SCALES]
    if len(scales) > 1:
        return f"{scales[0]} and {scales[1]} are one scale too many"
    if scales and all(tensor.most is None for tensor in tensors):
        return f"{scales[0]} is for codes without a scale of their own, as in {scales[0]}-fp8_e4m3"
    grouped = any(tensor.axis is Axis.TOKEN and tensor.group_size is not None for tensor in tensors)
    if Transform.ORDER in form.transforms and not grouped:
        return "an order of channels helps where some of them share a scale, as in order-int4-g32"
    return None


def _kept_tokens(match: re.Match[str]) -> tuple[int, int]:
    """Return the tokens of residual and sinks that a name gives."""
    return int(match["residual"] or 0), int(match["sinks"] or 0)


def _build(name: str, match: re.Match[str]) -> CacheFormat:
    key_bits, value_bits = int(match["key"]), int(match["value"])
    group = int(match["group"]) if match["group"] else None
    residual, sinks = _kept_tokens(match)
    for label, bits in (("K", key_bits), ("V", value_bits)):
        if bits not in KEY_VALUE_BITS:
            raise UnsupportedError(f"format {name!r}: {label} has {bits} bits; 8, 4 and 2 have kernels")
    if group is not None and group not in TOKEN_GROUPS:
        raise UnsupportedError(f"format {name!r}: group size {group}; 32, 64, 128 or none (the whole head)")
    family = match["family"]
    if family and group is None:
        raise UnsupportedError(f"format {name!r}: KIVI needs a group size, as in {name}-g64")
    paper = family == "kivi-paper-"
    if paper and (residual == 0 or group is None or residual % group):
        raise UnsupportedError(f"format {name!r}: kivi-paper needs a residual that is a multiple of the group size")
    return CacheFormat(
        key=TensorFormat(bits=key_bits, axis=Axis.CHANNEL if family else Axis.TOKEN, group_size=group),
        value=TensorFormat(bits=value_bits, group_size=group),
        residual_tokens=residual,
        sink_tokens=sinks,
        rule=ResidualRule.KIVI_PAPER if paper else ResidualRule.GROUP,
    )


def _format_name(form: CacheFormat) -> str:
    if form.float_type is not None:
        return str(form.float_type)
    if form.transforms:
        return "-".join([*form.transforms, replace(form, transforms=()).name])
    name = _stored_name(form)
    name += f"-r{form.residual_tokens}" if form.residual_tokens else ""
    name += f"-s{form.sink_tokens}" if form.sink_tokens else ""
    return {expanded: alias for alias, expanded in _ALIASES.items()}.get(name, name)


def _stored_name(form: CacheFormat) -> str:
    """Return the part of a name that says how codes are stored."""
    for name, tensor in _FLOATS.items():
        if form.key == form.value == tensor:
            return name
    family = ""
    if form.key.axis is Axis.CHANNEL:
        family = "kivi-paper-" if form.rule is ResidualRule.KIVI_PAPER else "kivi-"
    group = f"-g{form.value.group_size}" if form.value.group_size else ""
    return f"{family}k{form.key.bits}v{form.value.bits}{group}"


_KERNEL_CODES: Final = {"cpu": (Code.INTEGER,)}
"""The codes that the kernels of one implementation read, where it does not read all of them."""


def kernel_refusal(kernel: str, form: CacheFormat) -> str | None:
    """Return why no kernel of the implementation *kernel* takes *form*, or None.

    >>> kernel_refusal("cpu", parse("fp8_e4m3"))
    'format fp8_e4m3 has no CPU kernel; the Triton kernels and the reference take it'
    """
    codes = _KERNEL_CODES.get(kernel, tuple(Code))
    if all(tensor.code in codes for tensor in (form.key, form.value) if tensor.quantized):
        return None
    return f"format {form} has no {kernel.upper()} kernel; the Triton kernels and the reference take it"


def check_kernel(kernel: str, form: CacheFormat) -> None:
    """Refuse a format that no kernel of the implementation *kernel* takes.

    Raises:
        UnsupportedError: The implementation has no kernel for *form*.
    """
    if (reason := kernel_refusal(kernel, form)) is not None:
        raise UnsupportedError(reason)
