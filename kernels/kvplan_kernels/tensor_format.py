"""How one of K and V is stored: code planes, what codes stand for, and what each group of them has beside.

Standard library only. Every code of fewer than 16 bits is a *level*, a whole number that a kernel multiplies, and every
group of codes has a scale and a minimum, stored or implied: value = level * scale + minimum. Floats of a byte are the
exception: each is its own value.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from itertools import pairwise
from typing import Final

PLANES: Final = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 8: (8,), 16: (16,)}
"""The bits of each code plane, low bits first, by bits of a code: no code straddles a word."""
KEY_VALUE_BITS: Final = (8, 6, 5, 4, 3, 2, 1)
TOKEN_GROUPS: Final = (16, 32, 64, 128)
BOOST_BITS: Final = 2
"""That a boosted channel has more."""
EIGHTHS: Final = 8
"""Head sizes are multiples of it."""

E4M3_MAX: Final = 448.0
E5M2_MAX: Final = 57344.0


class Axis(StrEnum):
    """Which elements share a scale: channels of one token, or tokens of one channel."""

    TOKEN = "token"  # noqa: S105 - of text, not of access
    CHANNEL = "channel"


class Code(StrEnum):
    """What a code of fewer than 16 bits stands for."""

    INTEGER = "integer"
    """Itself."""
    E2M1 = "e2m1"
    """A float of 4 bits: 0, 0.5, 1, 1.5, 2, 3, 4, 6, and their negatives (OCP Microscaling Formats 1.0, E2M1)."""
    IQ4_NL = "iq4_nl"
    """One of sixteen levels that lie denser around 0 (llama.cpp, `kvalues_iq4nl`)."""
    LLOYD_MAX = "lloyd-max"
    """One of the levels that lose least of a normal distribution (Max 1960, Quantizing for minimum distortion)."""
    LEARNED = "learned"
    """One of some levels that are learned from the model, for K and for V of each layer (`learned_levels`)."""
    E4M3 = "e4m3"
    """The float itself: OCP E4M3 "fn", to +-448, NaN and no infinities (OFP8 specification 1.0)."""
    E5M2 = "e5m2"
    """The float itself: OCP E5M2, to +-57344, the upper byte of an fp16 (OFP8 specification 1.0)."""

    @property
    def is_float(self) -> bool:
        """Whether a code is its own value, without scale and minimum."""
        return self in _FLOAT_MOST


_FLOAT_MOST: Final = {Code.E4M3: E4M3_MAX, Code.E5M2: E5M2_MAX}
"""The largest number that is stored, by floats that are their own values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Levels:
    """The levels of a map of codes.

    Attributes:
        table: The level of each code, 0 to 255.
        centre: The level that stands for 0 where a group has no minimum.
        unit: What one level is times the stored scale.
        ties_to_even: Whether a value halfway between two levels takes the even code; the higher level where not.
    """

    table: tuple[int, ...]
    centre: float
    unit: float = 1.0
    ties_to_even: bool = False

    @property
    def are_codes(self) -> bool:
        """Whether each code is its own level."""
        return self.table == tuple(range(len(self.table)))

    @property
    def steps(self) -> int:
        """How many levels lie between the least and the largest element of a group that has both as numbers."""
        return len(self.table) - 1 if self.are_codes else LEVEL_MOST

    @property
    def ranked(self) -> tuple[int, ...]:
        """One code of each level, the lowest level first.

        >>> levels(Code.E2M1, 4).ranked
        (15, 14, 13, 12, 11, 10, 9, 0, 1, 2, 3, 4, 5, 6, 7)
        """
        first = {level: code for code, level in reversed(list(enumerate(self.table)))}
        return tuple(first[level] for level in sorted(first))

    @property
    def middles(self) -> tuple[tuple[float, bool], ...]:
        """What lies halfway from each level to the next, from the centre, and whether that takes the lower of them."""
        return tuple(
            (
                (self.table[low] + self.table[high]) / 2 - self.centre,
                self.ties_to_even and low % 2 == 0 and high % 2 != 0,
            )
            for low, high in pairwise(self.ranked)
        )

    @property
    def extent(self) -> float:
        """The largest value that a scale of 1 reaches on both sides.

        >>> levels(Code.INTEGER, 8).extent, levels(Code.E2M1, 4).extent
        (127.0, 6.0)
        """
        return min(max(self.table) - self.centre, self.centre - min(self.table)) * self.unit


_LLOYD_MAX: Final = {
    2: (0.4528, 1.510),
    3: (0.2451, 0.7560, 1.344, 2.152),
    4: (0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733),
}
"""The positive outputs of the least distortion for a standard normal distribution: Max 1960, table I."""
_IQ4_NL: Final = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
LEVEL_MOST: Final = 255
"""A level is a byte."""


@cache
def levels(code: Code, bits: int) -> Levels:
    """Return the levels of *code*; KeyError where it has no such bits.

    >>> levels(Code.E2M1, 4).table
    (12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0)
    """
    if code is Code.E2M1:
        halves = (0, 1, 2, 3, 4, 6, 8, 12)
        table = tuple(12 + half for half in halves) + tuple(12 - half for half in halves)
        return Levels(table=table, centre=12, unit=0.5, ties_to_even=True)
    if code is Code.IQ4_NL:
        return Levels(table=tuple(127 + value for value in _IQ4_NL), centre=127)
    if code is Code.LLOYD_MAX:
        outputs = _LLOYD_MAX[bits]
        unit = 2 * outputs[-1] / LEVEL_MOST
        middle = LEVEL_MOST / 2
        signed = [-x for x in reversed(outputs)] + list(outputs)
        return Levels(table=tuple(round(middle + x / unit) for x in signed), centre=middle, unit=unit)
    if code is Code.INTEGER:
        return Levels(table=tuple(range(1 << bits)), centre=float(1 << bits - 1), ties_to_even=True)
    raise KeyError(code)


def learned_levels(table: Sequence[int], fit: "Fit") -> Levels:
    """Return the levels of codes that a model's layer has learned, *table* of them, ascending.

    They count from the least element of a group where that is stored, and from the middle of what is fixed where not.

    >>> learned_levels((0, 100, 155, 255), Fit.NONE).extent
    1.0
    """
    if fit is Fit.RANGE:
        return Levels(table=tuple(table), centre=0.0)
    return Levels(table=tuple(table), centre=LEVEL_MOST / 2, unit=2 / LEVEL_MOST)


class Number(StrEnum):
    """The type of what a group has beside its codes."""

    FP16 = "fp16"
    BF16 = "bf16"
    FP32 = "fp32"
    E4M3 = "e4m3"
    E8M0 = "e8m0"
    """A power of two: the exponent of an fp32 (OCP Microscaling Formats 1.0, E8M0)."""

    @property
    def bits(self) -> int:
        """Bits of one number."""
        return {Number.FP32: 32, Number.E4M3: 8, Number.E8M0: 8}.get(self, 16)


class Fit(StrEnum):
    """How a group's scale, minimum and codes are chosen; `fits` defines each."""

    RANGE = "range"
    """From the least element to the largest, both levels."""
    ABSMAX = "absmax"
    """The largest magnitude is the largest level; 0 is a level."""
    POWER = "power"
    """As absmax, by the power of two below."""
    NORM = "norm"
    """Elements over their root mean square; the scale then gives back the group's norm."""
    Q8_0 = "q8_0"
    Q5_0 = "q5_0"
    """llama.cpp's q5_0 and q4_0: the element of largest magnitude is the lowest level, whatever its sign."""
    Q5_1 = "q5_1"
    """llama.cpp's q5_1 and q4_1: from least to largest, by the reciprocal of the scale before it is rounded."""
    IQ4_NL = "iq4_nl"
    """llama.cpp's: codes by the largest magnitude, then the scale of the least squared error."""
    NONE = "none"
    """Nothing beside the codes: they are floats, or levels of which the outermost stand for 1 and -1."""

    @property
    def metadata(self) -> tuple[str, ...]:
        """The numbers of each group, by the names of their sections in `layout`."""
        if self is Fit.NONE:
            return ()
        return ("scale", "min") if self in (Fit.RANGE, Fit.Q5_1) else ("scale",)


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorFormat:
    """How one of K and V is stored.

    Attributes:
        bits: Bits of one element's code; 16 stores the value itself.
        axis: Per token (channels share a scale) or per channel (tokens do).
        group_size: Elements that share one scale and one minimum; None is the whole head. A group that holds what its
            codes cannot is poisoned as a whole, also where it has neither.
        code: What the codes stand for.
        fit: How a group is coded.
        number: The type of a group's scale and minimum.
        clip_percent: How much of a group's least and largest element the codes reach, by `Fit.RANGE` and `Fit.ABSMAX`:
            what lies beyond is cut off, and the rest has finer steps.
        boosted_eighths: Of eight channels that have a scale of their own, how many have `BOOST_BITS` more (`boosts`).
    """

    bits: int
    axis: Axis = Axis.TOKEN
    group_size: int | None = None
    code: Code = Code.INTEGER
    fit: Fit = Fit.RANGE
    number: Number = Number.FP16
    clip_percent: int = 100
    boosted_eighths: int = 0

    @property
    def quantized(self) -> bool:
        """Whether elements are codes and not 16-bit values."""
        return self.bits < 16

    @property
    def mean_bits(self) -> float:
        """The bits of a code, those that boosted channels have more included."""
        return self.bits + BOOST_BITS * self.boosted_eighths / EIGHTHS

    @property
    def boosted(self) -> "TensorFormat":
        """How the elements of a boosted channel are coded."""
        return replace(self, bits=self.bits + BOOST_BITS, boosted_eighths=0)

    def boosted_channels(self, head_dim: int) -> int:
        """Return how many of *head_dim* channels are boosted.

        >>> TensorFormat(bits=2, axis=Axis.CHANNEL, group_size=128, boosted_eighths=1).boosted_channels(128)
        16
        """
        return head_dim * self.boosted_eighths // EIGHTHS

    @property
    def most(self) -> float | None:
        """The largest number that is stored; None where a group's own scale reaches any, or there are no codes.

        >>> STORED["nvfp4"].most, STORED["static-int8"].most
        (2688.0, 1.0)
        """
        if not self.quantized or not (self.fit is Fit.NONE or self.number is Number.E4M3):
            return None
        if self.fit is Fit.ABSMAX:
            return E4M3_MAX * self.levels.extent
        return _FLOAT_MOST.get(self.code, 1.0) if self.fit is Fit.NONE else None

    @property
    def learned(self) -> bool:
        """Whether the levels of the codes are learned from the model."""
        return self.quantized and self.code is Code.LEARNED

    @property
    def metadata(self) -> tuple[str, ...]:
        """The numbers of each group, none where values are stored."""
        return self.fit.metadata if self.quantized else ()

    @property
    def group_bits(self) -> int:
        """Bits that a group has beside its codes."""
        return len(self.metadata) * self.number.bits

    @property
    def planes(self) -> tuple[int, ...]:
        """The bits of each code plane, low bits first."""
        return PLANES[self.bits]

    @property
    def levels(self) -> Levels:
        """The levels of the codes; KeyError where they are floats or values, or learned."""
        found = levels(self.code, self.bits)
        return replace(found, unit=found.unit / found.extent) if self.fit is Fit.NONE else found


def _float(code: Code) -> TensorFormat:
    return TensorFormat(bits=8, code=code, fit=Fit.NONE)


def _static(bits: int, code: Code) -> TensorFormat:
    return TensorFormat(bits=bits, code=code, fit=Fit.NONE)


def _block(bits: int, fit: Fit, code: Code = Code.INTEGER) -> TensorFormat:
    return TensorFormat(bits=bits, group_size=32, fit=fit, code=code)


STORED: Final = {
    "fp8_e4m3": _float(Code.E4M3),
    "fp8_e5m2": _float(Code.E5M2),
    "nvfp4": TensorFormat(bits=4, group_size=16, code=Code.E2M1, fit=Fit.ABSMAX, number=Number.E4M3),
    "mxfp4": TensorFormat(bits=4, group_size=32, code=Code.E2M1, fit=Fit.POWER, number=Number.E8M0),
    "fp4_e2m1": TensorFormat(bits=4, group_size=16, code=Code.E2M1, fit=Fit.POWER, number=Number.E8M0),
    "lloyd4": TensorFormat(bits=4, code=Code.LLOYD_MAX, fit=Fit.NORM),
    "lloyd3": TensorFormat(bits=3, code=Code.LLOYD_MAX, fit=Fit.NORM),
    "lloyd2": TensorFormat(bits=2, code=Code.LLOYD_MAX, fit=Fit.NORM),
    **{f"nuq{bits}": TensorFormat(bits=bits, code=Code.LEARNED) for bits in (4, 3, 2)},
    **{f"static-int{bits}": _static(bits, Code.INTEGER) for bits in (8, 4)},
    **{f"static-nuq{bits}": _static(bits, Code.LEARNED) for bits in (4, 3, 2)},
}
"""Ways to store a tensor that have a name of their own."""
LLAMA_CPP: Final = {
    "q8_0": _block(8, Fit.Q8_0),
    "q5_1": _block(5, Fit.Q5_1),
    "q5_0": _block(5, Fit.Q5_0),
    "q4_1": _block(4, Fit.Q5_1),
    "q4_0": _block(4, Fit.Q5_0),
    "iq4_nl": _block(4, Fit.IQ4_NL, Code.IQ4_NL),
}
"""llama.cpp's blocks of 32 channels, each a scale and codes.

The values are those of its reference functions (ggml-quants.c, quantize_row_*_ref), bit for bit; its vectorized
functions round halves of q8_0 otherwise.
"""
