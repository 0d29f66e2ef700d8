"""The screen at the end of `profile`: one line a cell, with what differs from 16 bits."""

from typing import Final

from rich.console import Console
from rich.markup import escape

from kvplan.core.records import Cell, CellStatus, Profile
from kvplan.report.table import plain_table
from kvplan.units import format_bytes, format_seconds

_ABSENT: Final = "-"
_SHOWN_CELLS: Final = 3
_COLUMNS: Final = (
    ("format", False), ("block", True), ("sequences", False), ("KV", True), ("TPOT", True), ("of 16-bit", True),
    ("attention", True), ("of 16-bit", True), ("TTFT", True),
)  # fmt: skip


def print_profile(console: Console, profile: Profile, output: str) -> None:
    """Print a profile's cells, those that came to nothing with the reason, and where the file is."""
    table = plain_table(_COLUMNS)
    for cell in profile.cells:
        if cell.figures.get("tpot_s") or cell.figures.get("decode_fused_s"):
            table.add_row(*map(escape, _row(cell)))
    console.print(table)
    for (status, reason), cells in _ended_otherwise(profile).items():
        shown = ", ".join(cell.key.label for cell in cells[:_SHOWN_CELLS])
        more = f" and {len(cells) - _SHOWN_CELLS} more" if len(cells) > _SHOWN_CELLS else ""
        mend = "; fewer --threads or a quieter machine would help" if status is CellStatus.DISTURBED else ""
        text = f"{status}: {reason}: {shown}{more}{mend}"
        console.print(text, markup=False, highlight=False)
    scored = f", quality of {len(profile.quality)} formats" if profile.quality else ""
    text = f"{output}: {len(profile.cells)} cells{scored}; {profile.device.name}, {profile.how.get('kernel', '')}"
    console.print(text, markup=False, highlight=False)


def _ended_otherwise(profile: Profile) -> dict[tuple[CellStatus, str], list[Cell]]:
    """Return the cells that are not ok, those with one reason together."""
    found: dict[tuple[CellStatus, str], list[Cell]] = {}
    for cell in profile.cells:
        if cell.status is not CellStatus.OK:
            found.setdefault((cell.status, cell.reason), []).append(cell)
    return found


def _row(cell: Cell) -> tuple[str, ...]:
    loads = cell.key.loads
    name = loads[0].bucket.name if len(loads) == 1 else "mix"
    sequences = f"{name} x{sum(load.sequences for load in loads)}"
    cache = _value(cell, "cache_bytes")
    return (
        cell.key.format,
        str(cell.key.block_tokens),
        sequences,
        _ABSENT if cache is None else format_bytes(cache),
        _time(cell, "tpot_s"),
        _ratio(cell, "tpot_s", "tpot_16bit_s"),
        _time(cell, "decode_fused_s"),
        _ratio(cell, "decode_fused_s", "decode_16bit_s"),
        _time(cell, "ttft_s"),
    )


def _value(cell: Cell, name: str) -> float | None:
    figure = cell.figures.get(name)
    return None if figure is None else figure.value


def _time(cell: Cell, name: str) -> str:
    seconds = _value(cell, name)
    return _ABSENT if seconds is None else format_seconds(seconds)


def _ratio(cell: Cell, name: str, reference: str) -> str:
    seconds, base = _value(cell, name), _value(cell, reference)
    return _ABSENT if not seconds or not base else f"{seconds / base:.2f}x"
