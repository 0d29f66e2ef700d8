"""The screen of `size`."""

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape

from kvplan.core.sizes import CacheSize
from kvplan.engines.kvplan import KVPLAN
from kvplan.report.table import plain_table, say
from kvplan.units import format_bytes


def print_sizes(console: Console, results: Sequence[CacheSize], *, predicted: bool = False) -> None:
    """Print the answers of `kvplan size`; *predicted* says that the pool is what predicted activations leave."""
    heads = [("model", False), ("format", False), ("context", True), ("a sequence", True), ("a token", True)]
    pooled = any(size.capacity for size in results)
    heads += [("sequences", True), ("tokens", True), ("longest", True)] if pooled else []
    table = plain_table(heads)
    table.columns[0].no_wrap, table.columns[0].overflow = False, "fold"
    for size in results:
        counted = size.allocated or size.logical
        row = [
            escape(size.model), escape(size.format), str(size.context_tokens),
            format_bytes(counted.bytes_per_sequence, digits=2),
            format_bytes(counted.growth_bytes_per_token, digits=2),
        ]  # fmt: skip
        if size.capacity:
            row += [str(size.capacity.max_concurrency), str(size.capacity.tokens), str(size.capacity.max_context)]
        table.add_row(*row)
    console.print(table)
    if any(size.allocated for size in results):
        say(console, f"exact, as {KVPLAN.allocator} allocates: whole blocks, full residuals, sinks")
    for model, reason in dict.fromkeys((size.model, size.reason) for size in results if not size.allocated):
        say(console, f"exact (logical) for {model}: no engine here allocates it yet, because {reason}")
    if predicted:
        say(console, "sequences: in what weights (exact) and one prefill chunk (predicted) leave of --memory")
