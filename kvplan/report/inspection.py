"""The screen of `kernels inspect`."""

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape

from kvplan.measure.inspection import Inspected
from kvplan.report.table import plain_table, say
from kvplan.units import format_bytes

_ABSENT = "-"


def print_inspected(console: Console, kernels: Sequence[Inspected]) -> None:
    """Print one row a kernel and architecture, then what is unsupported or could not be counted, with the reason."""
    heads = [("format", False), ("arch", False), ("tile", True), ("regs", True), ("spills", True), ("shared", True)]
    heads += [("warps", True), ("instr", True), ("int2float", True), ("load", True), ("of bandwidth", True)]
    table = plain_table(heads)
    for kernel in kernels:
        if not kernel.unsupported:
            table.add_row(*map(escape, _row(kernel)))
    console.print(table)
    for reason, where in _reasons(kernels).items():
        say(console, f"{reason}: {', '.join(where)}")
    say(
        console, "tile: tokens/warps; warps: of a multiprocessor's; instr: lanes' instructions for an element of K or V"
    )
    devices = dict.fromkeys(kernel.predicted.device for kernel in kernels if kernel.predicted)
    if devices:
        what = "at most: every clock issues or every clock reads, figures of the makers"
        say(console, f"of bandwidth: predicted, {what} ({', '.join(devices)}); not held against a device")


def _reasons(kernels: Sequence[Inspected]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for kernel in kernels:
        if reason := kernel.unsupported or kernel.note:
            found.setdefault(reason, []).append(f"{kernel.format} on {kernel.arch}")
    return found


def _row(kernel: Inspected) -> tuple[str, ...]:
    predicted = kernel.predicted
    return (
        kernel.format, kernel.arch, f"{kernel.tile_tokens}/{kernel.warps}", _number(kernel.registers),
        _number(kernel.spills), _ABSENT if kernel.shared_bytes is None else format_bytes(kernel.shared_bytes),
        _ABSENT if kernel.occupancy is None else f"{100 * kernel.occupancy:.0f}%",
        _ABSENT if kernel.instructions_per_element is None else f"{kernel.instructions_per_element:.2f}",
        _number(kernel.int_to_float), _ABSENT if kernel.load_bytes is None else f"{kernel.load_bytes} B",
        _ABSENT if predicted is None else f"{100 * predicted.read_bandwidth_share:.0f}% {predicted.bound}",
    )  # fmt: skip


def _number(value: int | None) -> str:
    return _ABSENT if value is None else str(value)
