"""The screen of `kernels bench decode`."""

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from kvplan.measure.bench import DecodeBench, DecodeCell
from kvplan.measure.held import HeldCalls
from kvplan.measure.rivals import TORCH_FOLDED
from kvplan.measure.traffic import Traffic
from kvplan.report.table import plain_table, say
from kvplan.units import format_bytes, format_seconds


def print_bench(
    console: Console, bench: DecodeBench, *, held: HeldCalls | None = None, traffic: Mapping[str, Traffic] | None = None
) -> None:
    """Print the times, then the predictions and the DRAM traffic that were asked for."""
    console.print(_times(bench))
    cold = format_bytes(bench.cold_bytes)
    short = "" if bench.cold_bytes >= bench.cold_bytes_wanted else f", {format_bytes(bench.cold_bytes_wanted)} wanted"
    console.print(
        f"{bench.kernel}; read bandwidth {bench.read_bandwidth_bytes_per_s / 1e9:.1f} GB/s; buffers rotated over "
        f"{cold}{short}", highlight=False,
    )  # fmt: skip
    for name, reason in bench.not_compared.items():
        say(console, f"not compared with {name}: {reason}")
    if held is not None:
        _print_held(console, held)
    if traffic is not None:
        _print_traffic(console, traffic)


def _times(bench: DecodeBench) -> Table:
    table = plain_table(
        [("kernel", False), ("format", False), ("time", True), ("GB/s", True), ("of read", True),
         ("vs folded SDPA", True), ("vs best 16-bit", True)]
    )  # fmt: skip
    folded = next(cell.median_s for cell in bench.cells if cell.impl == TORCH_FOLDED)
    for cell in bench.cells:
        table.add_row(*_row(cell, bench, folded))
    return table


def _row(cell: DecodeCell, bench: DecodeBench, folded_s: float) -> tuple[str, ...]:
    rate = cell.bytes / cell.median_s
    return (
        cell.impl,
        cell.format,
        format_seconds(cell.median_s),
        f"{rate / 1e9:.1f}",
        f"{rate / bench.read_bandwidth_bytes_per_s:.0%}",
        f"{folded_s / cell.median_s:.2f}x",
        f"{bench.best_16bit_s() / cell.median_s:.2f}x",
    )


def _print_held(console: Console, held: HeldCalls) -> None:
    console.print()
    if held.reason:
        say(console, f"not held against a prediction: {held.reason}")
        return
    table = plain_table([("format", False), ("at least", True), ("measured", True), ("of the least", True)])
    for call in held.calls:
        times = (format_seconds(call.predicted_s), format_seconds(call.measured_s))
        table.add_row(call.format, *times, f"{call.ratio:.2f}x")
    console.print(table)
    devices = ", ".join(dict.fromkeys(call.device for call in held.calls))
    say(console, f"at least: predicted from the compiled kernels and the maker's figures ({devices})")


def _print_traffic(console: Console, traffic: Mapping[str, Traffic]) -> None:
    console.print()
    table = plain_table([("format", False), ("counted", True), ("DRAM read", True), ("of it", True), ("written", True)])
    known = {name: one for name, one in traffic.items() if one.read_bytes is not None}
    for name, one in known.items():
        read, written = one.read_bytes or 0, one.written_bytes or 0
        table.add_row(
            name, format_bytes(one.counted_bytes), format_bytes(read), f"{read / one.counted_bytes:.2f}x",
            format_bytes(written),
        )  # fmt: skip
    if known:
        console.print(table)
        say(console, "counted: what a call has to read, by the layout; DRAM: by the GPU's own counters (ncu)")
    reasons = dict.fromkeys(one.reason for one in traffic.values() if one.reason)
    for reason in reasons:
        say(console, f"DRAM traffic not known: {reason}")
