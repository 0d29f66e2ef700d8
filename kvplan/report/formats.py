"""The screen of `formats`."""

from collections.abc import Sequence
from typing import Final

from rich.console import Console
from rich.markup import escape

from kvplan.core.formats import FORMATS, FormatFacts, is_by_layer
from kvplan.report.table import plain_table, say
from kvplan.units import format_bytes

FURTHER_NAMES: Final = (
    (
        "Further names: [sym-][kivi-]k<bits>v<bits>[-g<group>][-m<number>][-c<percent>][-b<eighths>][-o<outliers>]"
        "[-r<residual>][-s<sinks>] with 1 to 6 bits or 8."
    ),
    "Where K and V are stored in two ways: <K>/<V>, as fp8_e4m3/int4-g32 or llama.cpp:q8_0/q4_0.",
    (
        "Before any of them prerope-, unbias-, smooth-, order-, scaled-, scaled-tensor- or scaled-channel-, and had-, "
        "in this order."
    ),
    "Where layers differ: <format>@<layers>=<format>, as int4@0,1,-2,-1=bf16.",
    "Where tokens differ by what they received: tiers-[sum-|once-][w<window>-]<percent>-<format>[+<percent>-<format>].",
)


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
    if learning:
        say(console, f"Learned from the model first, by `kvplan calibrate`: {learning}.")
    unseen = ", ".join(name for name in FORMATS if is_by_layer(name) and name not in {fact.name for fact in facts})
    if unseen:
        say(console, f"By layer, so shown for a MODEL that has enough of them: {unseen}.")
    for line in FURTHER_NAMES:
        say(console, line)
