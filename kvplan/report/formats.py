"""The screen of `formats`."""

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape

from kvplan.core.formats import FormatFacts
from kvplan.report.table import plain_table, say
from kvplan.units import format_bytes


def print_formats(console: Console, facts: Sequence[FormatFacts]) -> None:
    """Print the list of formats."""
    heads = [
        ("format", False),
        ("K", True),
        ("V", True),
        ("bits in all", True),
        ("fused on", False),
        ("engines", False),
    ]
    per_model = any(fact.bytes_per_token is not None for fact in facts)
    table = plain_table([*heads, *([("a token", True)] if per_model else []), ("source", False)])
    for column in table.columns:
        column.no_wrap = column.header not in ("engines", "source")
    for fact in facts:
        fused = ", ".join(device for device, there in fact.fused.items() if there) or "-"
        grown = [] if not per_model else [format_bytes(fact.bytes_per_token) if fact.bytes_per_token else "-"]
        bits = "-" if fact.unsupported else f"{fact.effective_bits:.2f}"
        table.add_row(
            escape(fact.name),
            f"{fact.bits_k:.4g}",
            f"{fact.bits_v:.4g}",
            bits,
            fused,
            ", ".join(fact.engines),
            *grown,
            escape(fact.summary or fact.source),
        )
    console.print(table)
    learning = ", ".join(fact.name for fact in facts if fact.learns)
    say(console, f"Learned from the model first, by `kvplan calibrate`: {learning}.")
    names = "[kivi-]k<bits>v<bits>[-g<group>][-r<residual>][-s<sinks>] with 8, 4 or 2 bits"
    before = "unbias-, smooth-, order-, scaled- and had-, in this order"
    say(console, f"Further names: {names}, fp8_e4m3[-r<residual>][-s<sinks>], after any of {before}.")
    say(console, "Where layers differ: <format>@<layers>=<format>, as int4@0,1,-2,-1=bf16.")
