"""The cases on which kernels are held to their reference and timed: one list for both."""

from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from itertools import product
from typing import Final, cast

from kvplan_kernels.covering import Row, pairwise_rows
from kvplan_kernels.format import Axis, CacheFormat, FloatType, UnsupportedError, parse
from kvplan_kernels.layout import KVLayout, Order


class Tables(StrEnum):
    """How pages are handed out."""

    ORDERED = "ordered"
    SHUFFLED = "shuffled"
    SHARED = "shared"
    """Shuffled, and sequences that begin alike hold the same pages."""


class Data(StrEnum):
    """What keys, values and queries look like."""

    NORMAL = "normal"
    OFFSET = "offset"
    """Each channel of K has a mean many deviations from 0, V a common one."""
    OUTLIERS = "outliers"
    """Three channels of K and one of V are 30 times the others."""
    FLAT = "flat"
    """Scores hardly differ: the output is the mean of V."""
    SPREAD = "spread"
    """Scores differ by tens: few tokens receive all attention."""
    NEGATIVE = "negative"
    """All scores are hundreds below 0."""
    DENORMAL = "denormal"
    """Keys and values are under the least normal number of bf16."""
    EXTREME = "extreme"
    """Nearly all codes and operands are the largest there are: what sums may overflow."""
    TIES = "ties"
    """Half of the elements lie halfway between two codes."""


class QueryType(StrEnum):
    """The type of queries, and of keys and values before they are stored."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One situation of an operation.

    Attributes:
        format: The format's name.
        kv_heads: KV heads.
        gqa_ratio: Query heads of each KV head.
        head_dim: Head size.
        block_tokens: Tokens of a page.
        lengths: Tokens held by each sequence.
        queries: Query tokens of each sequence.
        window: Sliding window, None for none.
        softcap: Softcap, None for none.
        sink_logits: Whether heads have a logit without a value.
        positions: Whether queries stand elsewhere than at the sequence's end.
        received: Whether the received attention is asked for.
        tables: How pages are handed out.
        float_type: The cache's 16-bit type.
        query_type: The type of the tensors handed in.
        data: What they hold.
        threads: Threads of the implementations that have them.
        speed: Whether it is a case that is timed, too large for each test run.
    """

    format: str
    kv_heads: int = 2
    gqa_ratio: int = 4
    head_dim: int = 64
    block_tokens: int = 64
    lengths: tuple[int, ...]
    queries: int = 1
    window: int | None = None
    softcap: float | None = None
    sink_logits: bool = False
    positions: bool = False
    received: bool = False
    tables: Tables = Tables.SHUFFLED
    float_type: FloatType = FloatType.BF16
    query_type: QueryType = QueryType.BF16
    data: Data = Data.NORMAL
    threads: int = 1
    speed: bool = False

    def layout(self, order: Order = Order.LANES) -> KVLayout:
        """Return the layout; UnsupportedError where there is none."""
        return KVLayout(
            format=parse(self.format),
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            block_tokens=self.block_tokens,
            float_type=self.float_type,
            order=order,
        )

    def unsupported(self) -> str | None:
        """Return why no implementation takes the case, or None."""
        try:
            self.layout()
        except UnsupportedError as error:
            return str(error)
        return None

    def __str__(self) -> str:
        """Return the case's name in a test run."""
        lengths = ",".join(map(str, self.lengths))
        parts = [self.format, f"h{self.kv_heads}x{self.gqa_ratio}", f"d{self.head_dim}", f"b{self.block_tokens}"]
        parts += [f"n{lengths}", f"q{self.queries}", str(self.query_type), str(self.data), str(self.tables)]
        parts += [f"w{self.window}"] if self.window else []
        parts += [f"cap{self.softcap}"] if self.softcap else []
        parts += [name for name in ("sink_logits", "positions", "received") if getattr(self, name)]
        return "-".join([*parts, str(self.float_type), f"t{self.threads}"])


_FLOATS: Final = "fp8_e4m3"
_BITS: Final = (8, 4, 2)
_GROUPS: Final = (32, 64, 128)
"""Of the formats whose every combination is a case; the others are `STORED_NAMES`."""
STORED_NAMES: Final = (
    "int1", "int3-g32", "int6-g128", "k3v5", "k6v1-g16", "k8v4-g16", "sym-k8v8-mfp32", "sym-k4v3-g32", "sym-k2v5-mbf16",
    "k2v2-g64-me4m3", "k5v6-g128-mfp32", "nvfp4", "mxfp4", "nvfp4/mxfp4", "fp4_e2m1", "lloyd4", "lloyd3/int4", "lloyd2",
    "llama.cpp:q8_0", "llama.cpp:q5_1", "llama.cpp:q5_0", "llama.cpp:q4_1", "llama.cpp:q4_0", "llama.cpp:iq4_nl",
    "llama.cpp:q8_0/iq4_nl", "fp8_e5m2", "fp8_e5m2/int3-g16", "fp8_e4m3/sym-int4-g64", "kivi-k3v3-g32", "kivi-k1v5-g16",
    "sym-kivi-k4v6-g64-mfp32", "nuq4/nuq3", "k4v3-g64-c80", "k4v2-g32-o2",
    "sym-int4-c95", "nuq2/int4-g32", "static-int8/static-int4", "static-nuq3/nuq4-o1", "kivi-k2v2-g32-o1",
    "fp8_e4m3/int4-o3", "kivi-k2v2-g32-b1", "kivi-k2v4-g64-b2", "kivi-k3v2-g16-mfp32-b3", "kivi-k1v2-g32-b4",
    "sym-kivi-k2v2-g64-mbf16-b2-o1",
)  # fmt: skip
"""Ways to store in which every plane, map, fit and number occurs."""
_FAMILIES: Final = ("", "kivi-", "kivi-paper-", "whole")
_LENGTHS: Final = ("one", "block", "residual", "sinks", "ragged", "ragged", "long", "long", "crowd")
_PARAMETERS: Final[dict[str, tuple[object, ...]]] = {  # A value that stands here twice is taken twice as often.
    "family": _FAMILIES,
    "key_bits": _BITS,
    "value_bits": _BITS,
    "group": (None, *_GROUPS),
    "block_tokens": (16, 32, 48, 64, 128, 160, 256),
    "residual": (0, 1, 20, 64, 128, 200),
    "sinks": (0, 1, 4, 16, 21),
    "head_dim": tuple(range(32, 257, 8)),
    "gqa_ratio": tuple(range(1, 17)),
    "kv_heads": (1, 2, 3),
    "queries": (1, 2, 3, 4, 5, 8, 13, 16, 17, 31, 32),
    "lengths": _LENGTHS,
    "window": (None, None, None, None, 1, 17, 64, 150),
    "softcap": (None, None, 2.5),
    "sink_logits": (False, True),
    "positions": (False, True),
    "received": (False, True),
    "tables": tuple(Tables),
    "float_type": tuple(FloatType),
    "query_type": tuple(QueryType),
    "data": (Data.NORMAL, Data.NORMAL, *Data),
    "threads": (1, 2, 3),
}


_FLOAT_PARAMETERS: Final = _PARAMETERS | {
    "family": (_FLOATS,),
    "key_bits": (8,),
    "value_bits": (8,),
    "group": (None,),
    "block_tokens": (16, 48, 256),
    "residual": (0, 1, 128),
    "sinks": (0, 4),
    "head_dim": (32, 40, 80, 128, 200, 256),
    "gqa_ratio": (1, 4, 5, 16),
    "queries": (1, 3, 17, 32),
}
"""Fewer values: what codes are changes neither where tokens lie nor who sees them."""


_STORED_PARAMETERS: Final = _FLOAT_PARAMETERS | {
    "family": STORED_NAMES,
    "block_tokens": (64, 128),
    "residual": (0, 1, 40),
    "sinks": (0, 5),
    "head_dim": (40, 128, 200),
    "gqa_ratio": (1, 4, 5),
    "queries": (1, 2, 7),
    "lengths": ("block", "ragged", "long"),
    "window": (None, None, 64),
    "data": (Data.NORMAL, Data.OUTLIERS, Data.TIES),
    "tables": (Tables.SHUFFLED, Tables.SHARED),
    "query_type": (QueryType.BF16, QueryType.FP32),
    "threads": (1, 2),
}


def _format_name(row: Row) -> str:
    """Return the name of the format of a row, which may be none that exists."""
    if row["family"] == "whole":
        return str(row["float_type"])
    name = f"{row['family']}"
    if name not in (_FLOATS, *STORED_NAMES):
        name += f"k{row['key_bits']}v{row['value_bits']}" + (f"-g{row['group']}" if row["group"] else "")
    return f"{name}-r{row['residual']}-s{row['sinks']}"


def _fits(family: object, group: object, block: object, residual: object, sinks: object) -> bool:
    """Return whether a format takes the rest; None for what is open yet, as a group of 0 is no group."""
    if family == "whole":
        return not residual and not sinks
    if family in ("", _FLOATS, *STORED_NAMES):
        return True
    if group == 0 or (group and block and int(cast(int, block)) % int(cast(int, group))):
        return False
    if family == "kivi-" or residual is None:
        return True
    return residual != 0 and (not group or int(cast(int, residual)) % int(cast(int, group)) == 0)


def _allowed(row: Row) -> bool:
    families = (row["family"],) if "family" in row else _FAMILIES
    groups = (row["group"] or 0,) if "group" in row else (0, *_GROUPS)
    return any(
        _fits(family, group, row.get("block_tokens"), row.get("residual"), row.get("sinks"))
        for family, group in product(families, groups)
        if family != "kivi-paper-" or "residual" in row or group
    )


def _lengths(pattern: object, form: CacheFormat, block: int) -> tuple[int, ...]:
    group = (form.key.group_size or 1) if form.key.axis is Axis.CHANNEL else 1
    sinks = form.sink_tokens
    held = sinks + form.residual_tokens
    return {
        "one": (1,),
        "block": (held + block - 1, held + block, held + block + 1),
        "residual": (max(1, held), held + 1, held + group - 1, held + group),
        "sinks": (max(1, sinks - 1), max(1, sinks), sinks + 1),
        "ragged": (2, held + 2 * block + 5, 0, held // 2 + 1),
        "long": (held + 4 * block + 37,),
        "crowd": tuple(row * (5 * (held + block) // 13) % (held + block) for row in range(1, 15)),
    }[str(pattern)]


def _covering_case(row: Row) -> Case:
    name = _format_name(row)
    row = {k: v for k, v in row.items() if k not in ("family", "key_bits", "value_bits", "group", "residual", "sinks")}
    row["lengths"] = _lengths(row["lengths"], parse(name), cast(int, row["block_tokens"]))
    return Case(format=name, **row)  # type: ignore[arg-type]  # a row's values are those of _PARAMETERS


@cache
def covering_cases() -> tuple[Case, ...]:
    """Return cases in which every two values of two parameters meet, and every format with every group size."""
    formats = product(_FAMILIES[:3], _BITS, _BITS, (None, *_GROUPS))
    names = ("family", "key_bits", "value_bits", "group")
    seeds: list[Row] = [dict(zip(names, row, strict=True)) for row in formats if row[3] or not row[0]]
    return tuple(_covering_case(row) for row in pairwise_rows(_PARAMETERS, _allowed, seeds))


@cache
def float_code_cases() -> tuple[Case, ...]:
    """Return cases of codes that are floats, in which every two of fewer values of two parameters meet."""
    return tuple(_covering_case(row) for row in pairwise_rows(_FLOAT_PARAMETERS, _allowed, ()))


@cache
def stored_cases() -> tuple[Case, ...]:
    """Return cases of the other ways to store, in which every two of few values of two parameters meet."""
    return tuple(_covering_case(row) for row in pairwise_rows(_STORED_PARAMETERS, _allowed, ()))


_LONG: Final = Case(format="bf16", kv_heads=1, gqa_ratio=3, lengths=(40_011,), threads=2, received=True)
_SPEED: Final = Case(format="bf16", kv_heads=8, head_dim=128, lengths=(32_768,), speed=True)
SPEED_FORMATS: Final = ("bf16", "int8", "int4", "int2", "kivi-k4v4-g64-r128", "kivi-k2v2-g64-r128")


def long_cases() -> tuple[Case, ...]:
    """Return cases of tens of thousands of tokens, with scores that differ much and hardly."""
    formats = (
        "bf16", "int8", "int4", "k2v2-g32-r64-s4", "kivi-k4v2-g64-r128", "kivi-k2v2-g32", "kivi-paper", "fp8_e4m3",
    )  # fmt: skip
    data = (Data.NORMAL, Data.FLAT, Data.SPREAD, Data.OFFSET)
    return tuple(
        replace(_LONG, format=name, data=kind, threads=1 + index % 2, queries=1 + 3 * (index % 3 == 2))
        for index, (name, kind) in enumerate(product(formats, data))
    )


def hard_cases() -> tuple[Case, ...]:
    """Return cases that strain 16-bit operands: few large channels among many small ones, and the largest sums."""
    formats = ("int8", "k8v8-g32", "k8v8-g128", "kivi-k8v8-g32", "kivi-k8v8-g128", "kivi-k4v4-g64", "fp8_e4m3")
    case = Case(format="int8", block_tokens=128, queries=4, lengths=(256, 2048))
    return tuple(
        replace(case, format=name, head_dim=dim, data=data)
        for name, dim, data in product(formats, (128, 256), (Data.OUTLIERS, Data.EXTREME))
    )


def speed_cases() -> tuple[Case, ...]:
    """Return the cases that are timed: one sequence of 32,768 tokens, 32 query heads, 8 KV heads, head size 128."""
    return tuple(replace(_SPEED, format=name) for name in SPEED_FORMATS)


def all_cases() -> tuple[Case, ...]:
    """Return all cases, each once."""
    return tuple(
        dict.fromkeys(
            (*covering_cases(), *float_code_cases(), *stored_cases(), *long_cases(), *hard_cases(), *speed_cases())
        )
    )
