"""How keys and values are stored: each of them, residual, sinks, transform, and the names of formats.

Standard library only. A name that `parse` accepts and the name of the format it returns give the same format.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, TypeAlias

from kvplan_kernels.methods import METHODS
from kvplan_kernels.tensor_format import (
    BOOST_BITS,
    EIGHTHS,
    KEY_VALUE_BITS,
    LLAMA_CPP,
    STORED,
    TOKEN_GROUPS,
    Axis,
    Code,
    Fit,
    Number,
    TensorFormat,
)

__all__ = [
    "BOOSTED_EIGHTHS_MAX",
    "KEY_VALUE_BITS",
    "OUTLIERS_MAX",
    "TOKEN_GROUPS",
    "Axis",
    "CacheFormat",
    "Code",
    "CodeTable",
    "Fit",
    "FloatType",
    "Flush",
    "Lesson",
    "Number",
    "ResidualRule",
    "TensorFormat",
    "Transform",
    "UnsupportedError",
    "check_kernel",
    "kernel_refusal",
    "parse",
]


class UnsupportedError(ValueError):
    """A format, layout or call that no kernel here takes; the message is the reason and the mend."""


class FloatType(StrEnum):
    """The 16-bit types in which unquantized keys and values are held."""

    BF16 = "bf16"
    FP16 = "fp16"


class Transform(StrEnum):
    """What is done to keys and values before they are stored, in the order in which names have them.

    Attention stays what it was: `folding` and `rotation` say how queries and outputs make up for each.
    """

    PREROPE = "prerope"
    """Keys are stored as they were before the model's rotary embedding, which `rope` undoes and applies again."""
    UNBIAS = "unbias"
    """A constant of each channel is taken from the keys: softmax does not see it."""
    SMOOTH = "smooth"
    """Channels of the keys are divided by the root of their size: QServe's SmoothAttention, arXiv 2405.04532."""
    ORDER = "order"
    """Channels of like size stand side by side and share a group: SKVQ, arXiv 2405.06219."""
    SCALED_TENSOR = "scaled-tensor"
    """K and V are divided by a number each, so that what was seen of a layer just fits the codes."""
    SCALED_CHANNEL = "scaled-channel"
    """Each channel's usual range fits the codes, that of keys less its middle: KVQuant, arXiv 2401.18079."""
    SCALED = "scaled"
    """The same with numbers for each KV head."""
    HADAMARD = "had"
    """An orthogonal matrix a head, as `rotation` defines it."""

    @property
    def calibrated(self) -> bool:
        """Whether it has numbers that are learned from a model's keys and values."""
        return self not in (Transform.HADAMARD, Transform.PREROPE)


_SCALES: Final = (Transform.SCALED_TENSOR, Transform.SCALED_CHANNEL, Transform.SCALED)


class CodeTable(StrEnum):
    """What codes stand for, where that is learned from the model."""

    LEVELS = "levels"
    """The levels that lose least of what is stored, each element weighed by what the model's loss makes of its error:
    KVQuant's nuq, arXiv 2401.18079, section 3.3."""


Lesson: TypeAlias = Transform | CodeTable
"""What a format learns."""


class ResidualRule(StrEnum):
    """When tokens leave the 16-bit residual: by whole groups for K and V alike, or as KIVI's authors do."""

    GROUP = "group"
    KIVI_PAPER = "kivi-paper"


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
        outliers: Elements of largest magnitude of each quantized token and head, of K and of V, that lie beside its
            codes: what the codes hold is cut at the magnitude that follows, and these add what was cut off.
        rule: When tokens leave the residual.
        float_type: The 16-bit type of an unquantized format; None where the model's own type is taken.
        transforms: What is done to keys and values before they are stored; each once, in the order of `Transform`.
    """

    key: TensorFormat
    value: TensorFormat
    residual_tokens: int = 0
    sink_tokens: int = 0
    outliers: int = 0
    rule: ResidualRule = ResidualRule.GROUP
    float_type: FloatType | None = None
    transforms: tuple[Transform, ...] = ()

    @property
    def calibrated(self) -> tuple[Lesson, ...]:
        """What is learned from the model."""
        transforms = tuple(transform for transform in self.transforms if transform.calibrated)
        learned = self.key.learned or self.value.learned
        return (*transforms, CodeTable.LEVELS) if learned else transforms

    def recipe(self, lesson: Lesson) -> tuple[str, ...]:
        """Return what *lesson* depends on by name, itself among it.

        Formats with the same recipe learn the same. A scale is learned from what is stored in the end, and levels from
        that with the way in which it is coded.

        >>> parse("unbias-smooth-had-int4").recipe(Transform.SMOOTH)
        (<Transform.UNBIAS: 'unbias'>, <Transform.SMOOTH: 'smooth'>)
        >>> parse("had-nuq3/int4-r64").recipe(CodeTable.LEVELS)
        (<Transform.HADAMARD: 'had'>, 'nuq3/int4')
        """
        if isinstance(lesson, CodeTable):
            return (*self.transforms, _stored_name(self) + (f"-o{self.outliers}" if self.outliers else ""))
        if lesson in _SCALES:
            return self.transforms
        return self.transforms[: self.transforms.index(lesson) + 1]

    @property
    def quantized(self) -> bool:
        """Whether anything is stored in fewer than 16 bits."""
        return self.key.quantized or self.value.quantized

    @property
    def parts(self) -> tuple["CacheFormat", ...]:
        """The formats of a model's layers, each once: this one, where `layer_formats.LayerFormats` has several."""
        return (self,)

    def of_layers(self, count: int) -> tuple["CacheFormat", ...]:
        """Return the format of each of a model's *count* layers: this one."""
        return (self,) * count

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
_ALIASES: Final = {f"int{bits}": f"k{bits}v{bits}" for bits in KEY_VALUE_BITS} | {
    "kivi-paper": "kivi-paper-k2v2-g32-r128",  # KIVI's published settings: arXiv 2402.02750
}
_BESIDE: Final = r"(?:-b(?P<boosted>[0-9]{1,3}))?(?:-o(?P<outliers>[0-9]{1,3}))?"
_KEPT: Final = _BESIDE + r"(?:-r(?P<residual>[0-9]{1,7}))?(?:-s(?P<sinks>[0-9]{1,7}))?"
_NUMBERS: Final = "|".join(Number)
_GROUPED: Final = rf"(?:-g(?P<group>[0-9]{{1,4}}))?(?:-m(?P<number>{_NUMBERS}))?(?:-c(?P<clip>[1-9][0-9]))?"
_GRAMMAR: Final = re.compile(
    r"(?P<fit>sym-)?(?P<family>kivi-paper-|kivi-)?k(?P<key>[0-9]{1,3})v(?P<value>[0-9]{1,3})" + _GROUPED + _KEPT
)
_SYMMETRIC: Final = "sym-"
_WHOLE_PERCENT: Final = 100
OUTLIERS_MAX: Final = 16
"""Of a token and head, of K and of V."""
BOOSTED_EIGHTHS_MAX: Final = 4
"""Of the channels of K: with more than half of them boosted, more bits for all are as good."""
_TENSOR: Final = re.compile(rf"(?P<fit>{_SYMMETRIC})?int(?P<bits>[0-9]{{1,3}})" + _GROUPED)
_PAIR: Final = re.compile(r"(?P<key>[\w-]+?)(?:/(?P<value>[\w-]+?))?" + _KEPT)
TIERS: Final = "tiers-"
"""How names of formats in tiers begin: `tier_formats`."""
_LLAMA_CPP: Final = "llama.cpp:"
_LATER: Final = "vllm:"
_TRANSFORMED: Final = tuple(f"{transform}-" for transform in Transform)
_PREFIXES: Final = "[prerope-][unbias-][smooth-][order-][scaled-[tensor-|channel-]][had-]"
_CODES: Final = (
    f"int8, int4, int2, {', '.join(STORED)} or [sym-][kivi-]k<bits>v<bits>[-g<group>][-b<eighths>][-o<outliers>]"
    "[-r<residual>][-s<sinks>]"
)
_HINT: Final = f"use bf16, fp16, {_CODES}, or {_PREFIXES} before one of the last"


def parse(name: str) -> CacheFormat:
    """Return the format that *name* stands for.

    Raises:
        UnsupportedError: The name is unknown, or no kernel here stores such a format.

    >>> parse("kivi-k4v2-g64-r128").key.axis, parse("llama.cpp:q8_0/q4_0").value.bits
    (<Axis.CHANNEL: 'channel'>, 4)
    """
    if name in METHODS:
        name = METHODS[name].format
    if name in _UNQUANTIZED:
        return _UNQUANTIZED[name]
    _check_alone(name)
    if name.startswith(_TRANSFORMED):
        return _transformed(name)
    head, dash, tail = name.partition("-")
    expanded = _ALIASES.get(name) or (_ALIASES[head] + dash + tail if head in _ALIASES else name)
    if match := _GRAMMAR.fullmatch(expanded):
        return _build(name, match)
    stored = LLAMA_CPP if name.startswith(_LLAMA_CPP) else STORED
    if pair := _PAIR.fullmatch(name.removeprefix(_LLAMA_CPP)):
        key = _tensor(name, pair["key"], stored)
        value = key if pair["value"] is None else _tensor(name, pair["value"], stored)
        if key is not None and value is not None:
            return _with_kept(name, pair, key, value)
    if name.startswith(_LLAMA_CPP):
        raise UnsupportedError(f"format {name!r}: llama.cpp stores K and V as {', '.join(LLAMA_CPP)}, or two of them")
    if name.startswith(_LATER):
        raise UnsupportedError(f"format {name!r} has no kernel here; {_HINT}")
    raise UnsupportedError(f"unknown format {name!r}; {_HINT}")


def _check_alone(name: str) -> None:
    """Refuse a name of several formats."""
    if "@" in name:
        raise UnsupportedError(f"format {name!r} is of a model's layers, and this is of one; name one of its formats")
    if name.startswith(TIERS):
        raise UnsupportedError(f"format {name!r} is of tokens in tiers, and this is of all; name one of its formats")


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
    if Transform.SCALED_CHANNEL in scales and len({Transform.ORDER, Transform.HADAMARD} & set(form.transforms)):
        return "a scale of each channel is of one that stays where and what it is; leave order and had out"
    grouped = any(tensor.axis is Axis.TOKEN and tensor.group_size is not None for tensor in tensors)
    if Transform.ORDER in form.transforms and not grouped:
        return "an order of channels helps where some of them share a scale, as in order-int4-g32"
    return None


def _with_kept(name: str, match: re.Match[str], key: TensorFormat, value: TensorFormat) -> CacheFormat:
    """Return the format of *key* and *value* with the boosts, outliers, residual and sinks that a name gives."""
    outliers, boosted = int(match["outliers"] or 0), int(match["boosted"] or 0)
    if outliers > OUTLIERS_MAX:
        raise UnsupportedError(f"format {name!r}: {outliers} outliers of a token; up to {OUTLIERS_MAX}, as in -o2")
    if outliers and any(tensor in LLAMA_CPP.values() or tensor.fit is Fit.NORM for tensor in (key, value)):
        raise UnsupportedError(
            f"format {name!r}: outliers are kept beside codes that must reach the largest element; leave -o{outliers} "
            "out, or take an int format"
        )
    if boosted and (reason := _boost_refusal(key, boosted)) is not None:
        raise UnsupportedError(f"format {name!r}: {reason}")
    return CacheFormat(
        key=replace(key, boosted_eighths=boosted),
        value=value,
        outliers=outliers,
        residual_tokens=int(match["residual"] or 0),
        sink_tokens=int(match["sinks"] or 0),
    )


def _boost_refusal(key: TensorFormat, eighths: int) -> str | None:
    """Return why *eighths* of the channels of K cannot be boosted, or None."""
    if key.axis is not Axis.CHANNEL:
        return (
            "a channel of K has more bits where it has a scale of its own; "
            f"leave -b{eighths} out, or take a kivi format, as kivi-k2v2-g128-b{eighths}"
        )
    if eighths > BOOSTED_EIGHTHS_MAX:
        return f"{eighths} of {EIGHTHS} channels boosted; up to {BOOSTED_EIGHTHS_MAX}, as in -b1"
    if key.bits + BOOST_BITS > max(KEY_VALUE_BITS):
        return f"K has {key.bits} bits, and a boosted channel {BOOST_BITS} more; leave -b{eighths} out"
    return None


def _tensor(name: str, part: str, stored: Mapping[str, TensorFormat]) -> TensorFormat | None:
    """Return how K or V is stored that is called *part* in *name*, or None."""
    match = _TENSOR.fullmatch(part)
    if part in stored or match is None or stored is LLAMA_CPP:
        return stored.get(part)
    return _grouped(name, match, "K or V", int(match["bits"]), Axis.TOKEN)


def _grouped(name: str, match: re.Match[str], label: str, bits: int, axis: Axis) -> TensorFormat:
    """Return how K or V is stored in *bits* with the group and the numbers that a name gives."""
    group = int(match["group"]) if match["group"] else None
    fit = Fit.ABSMAX if match["fit"] else Fit.RANGE
    if bits not in KEY_VALUE_BITS:
        raise UnsupportedError(f"format {name!r}: {label} has {bits} bits; 8, 6, 5, 4, 3, 2 and 1 have kernels")
    if fit is Fit.ABSMAX and bits == 1:
        raise UnsupportedError(
            f"format {name!r}: {label} has 1 bit, of which neither level would be 0; leave {_SYMMETRIC} out"
        )
    if group is not None and group not in TOKEN_GROUPS:
        raise UnsupportedError(f"format {name!r}: group size {group}; 16, 32, 64, 128 or none (the whole head)")
    if match["number"] == Number.E8M0:
        raise UnsupportedError(
            f"format {name!r}: a power of two is no minimum and a coarse scale; mxfp4 is made for it"
        )
    return TensorFormat(
        bits=bits,
        axis=axis,
        group_size=group,
        fit=fit,
        number=Number(match["number"] or Number.FP16),
        clip_percent=int(match["clip"] or 100),
    )


def _build(name: str, match: re.Match[str]) -> CacheFormat:
    family = match["family"]
    key = _grouped(name, match, "K", int(match["key"]), Axis.CHANNEL if family else Axis.TOKEN)
    value = _grouped(name, match, "V", int(match["value"]), Axis.TOKEN)
    form = _with_kept(name, match, key, value)
    group, residual = key.group_size, form.residual_tokens
    if family and group is None:
        raise UnsupportedError(f"format {name!r}: KIVI needs a group size, as in {name}-g64")
    paper = family == "kivi-paper-"
    if paper and (residual == 0 or group is None or residual % group):
        raise UnsupportedError(f"format {name!r}: kivi-paper needs a residual that is a multiple of the group size")
    return replace(form, rule=ResidualRule.KIVI_PAPER) if paper else form


def _format_name(form: CacheFormat) -> str:
    if form.float_type is not None:
        return str(form.float_type)
    if form.transforms:
        return "-".join([*form.transforms, replace(form, transforms=()).name])
    name = _stored_name(form)
    name += f"-o{form.outliers}" if form.outliers else ""
    name += f"-r{form.residual_tokens}" if form.residual_tokens else ""
    name += f"-s{form.sink_tokens}" if form.sink_tokens else ""
    return {expanded: alias for alias, expanded in _ALIASES.items()}.get(name, name)


def _stored_name(form: CacheFormat) -> str:
    """Return the part of a name that says how codes are stored."""
    key, value = form.key, form.value
    if replace(key, bits=8, axis=Axis.TOKEN, boosted_eighths=0) != replace(value, bits=8) or _own_name(key) is not None:
        names = list(dict.fromkeys((_tensor_name(key), _tensor_name(value))))
        prefix = _LLAMA_CPP if key in LLAMA_CPP.values() else ""
        return prefix + "/".join(names)
    family = ""
    if key.axis is Axis.CHANNEL:
        family = "kivi-paper-" if form.rule is ResidualRule.KIVI_PAPER else "kivi-"
    boosts = f"-b{key.boosted_eighths}" if key.boosted_eighths else ""
    return f"{_fit_name(key)}{family}k{key.bits}v{value.bits}{_group_name(key)}{boosts}"


def _own_name(tensor: TensorFormat) -> str | None:
    return next((name for name, found in (STORED | LLAMA_CPP).items() if found == tensor), None)


def _tensor_name(tensor: TensorFormat) -> str:
    return _own_name(tensor) or f"{_fit_name(tensor)}int{tensor.bits}{_group_name(tensor)}"


def _fit_name(tensor: TensorFormat) -> str:
    return _SYMMETRIC if tensor.fit is Fit.ABSMAX else ""


def _group_name(tensor: TensorFormat) -> str:
    group = f"-g{tensor.group_size}" if tensor.group_size else ""
    number = f"-m{tensor.number}" if tensor.number is not Number.FP16 else ""
    return group + number + (f"-c{tensor.clip_percent}" if tensor.clip_percent != _WHOLE_PERCENT else "")


_KERNEL_TAKES: Final[Mapping[str, Callable[[TensorFormat], bool]]] = {}
"""Whether an implementation has kernels for how a tensor is stored, where it does not take them all."""


def kernel_refusal(kernel: str, form: CacheFormat) -> str | None:
    """Return why no kernel of the implementation *kernel* takes *form*, or None.

    >>> kernel_refusal("cpu", parse("fp8_e4m3")) is None
    True
    """
    takes = _KERNEL_TAKES.get(kernel)
    if takes is None or all(takes(tensor) for tensor in (form.key, form.value) if tensor.quantized):
        return None
    return f"format {form} has no {kernel.upper()} kernel; the reference takes it"


def check_kernel(kernel: str, form: CacheFormat) -> None:
    """Refuse a format that no kernel of the implementation *kernel* takes.

    Raises:
        UnsupportedError: The implementation has no kernel for *form*.
    """
    if (reason := kernel_refusal(kernel, form)) is not None:
        raise UnsupportedError(reason)
