"""The screen of `kernels inspect`."""

from collections.abc import Sequence
from typing import Final

from rich.console import Console
from rich.markup import escape

from kvplan.measure.inspection import Inspected, PredictedCall
from kvplan.report.table import plain_table, say
from kvplan.units import format_seconds

_ABSENT: Final = "-"
_HEADS: Final = (
    ("format", False), ("arch", False), ("kernel", False), ("tile", True), ("regs", True), ("spills", True),
    ("warps", True), ("instr", True), ("i2f", True), ("load", True), ("at least", True),
)  # fmt: skip
_SHORT: Final = {
    "decode_split": "split", "decode_merge": "merge", "decode_received": "received", "append_pages": "pages",
    "append_rest": "rest", "dequantize_tokens": "dense",
    "fold_words": "read",
}  # fmt: skip


def print_inspected(console: Console, kernels: Sequence[Inspected], calls: Sequence[PredictedCall]) -> None:
    """Print one row a kernel, then what is unsupported or could not be counted, then the time of each call."""
    table = plain_table(list(_HEADS))
    # A kernel that two operations launch alike stands there once.
    for row in dict.fromkeys(_row(kernel) for kernel in kernels if not kernel.unsupported):
        table.add_row(*map(escape, row))
    console.print(table)
    for reason, where in _reasons(kernels).items():
        say(console, f"{reason}: {', '.join(where)}")
    say(
        console,
        "tile: tokens/warps; warps: of a multiprocessor's; instr: lanes' instructions for an element of K or V, i2f: "
        "conversions of integers to floats, load: the widest, of the main loop where there is one",
    )
    if calls:
        _print_calls(console, calls)


def _print_calls(console: Console, calls: Sequence[PredictedCall]) -> None:
    shape = calls[0].shape
    console.print()
    table = plain_table([("call", False), ("format", False), ("GPU", False), ("launches", True), ("at least", True)])
    for call in calls:
        table.add_row(call.op, escape(call.format), call.device, str(call.launches), format_seconds(call.seconds))
    console.print(table)
    say(
        console,
        f"at least: predicted for {shape.batch} x {shape.tokens:,} tokens, {shape.kv_heads} KV heads: the longest of "
        "reading memory, issuing, multiplying and launching at the makers' figures; not held against a device",
    )


def _reasons(kernels: Sequence[Inspected]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for kernel in kernels:
        if reason := kernel.unsupported or kernel.note:
            where = f"{kernel.format} on {kernel.arch}" if kernel.unsupported or not kernel.kernel else _name(kernel)
            found.setdefault(reason, [])
            if where not in found[reason]:
                found[reason].append(where)
    return found


def _name(kernel: Inspected) -> str:
    return f"{_SHORT.get(kernel.kernel, kernel.kernel)} {kernel.tensor.upper()}".strip()


def _row(kernel: Inspected) -> tuple[str, ...]:
    tile = _ABSENT if kernel.tile_tokens is None else str(kernel.tile_tokens)
    return (
        kernel.format, kernel.arch, _name(kernel), f"{tile}/{kernel.warps}", _number(kernel.registers),
        _number(kernel.spills), _ABSENT if kernel.occupancy is None else f"{100 * kernel.occupancy:.0f}%",
        _ABSENT if kernel.instructions_per_element is None else f"{kernel.instructions_per_element:.2f}",
        _number(kernel.int_to_float), _ABSENT if kernel.load_bytes is None else f"{kernel.load_bytes} B",
        " ".join(f"{format_seconds(made.seconds)} {made.bound}" for made in kernel.predicted[:1]) or _ABSENT,
    )  # fmt: skip


def _number(value: int | None) -> str:
    return _ABSENT if value is None else str(value)
