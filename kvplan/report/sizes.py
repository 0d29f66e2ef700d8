"""The screen of `size`."""

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape

from kvplan.core.sizes import CacheSize
from kvplan.engines import find_engine
from kvplan.report.table import plain_table, say
from kvplan.units import format_bytes, format_count


def print_sizes(console: Console, results: Sequence[CacheSize], *, terms: bool = False) -> None:
    """Print the answers of `kvplan size`, with what lies between geometry and allocation where *terms*."""
    _print_table(console, results)
    for allocator in dict.fromkeys(_allocator(size) for size in results if size.allocated):
        say(console, f"exact, of one rank, as {allocator} allocates")
    for size in results:
        if terms and size.allocated:
            _print_terms(console, size, named=len(results) > 1)
    for model, reason in dict.fromkeys((size.model, size.reason) for size in results if not size.allocated):
        say(console, f"exact (logical) for {model}: kvplan's runtime does not hold it, because {reason}")
    for size in results[:1]:
        for term in size.pool:
            say(console, f"{term.name}: {format_bytes(term.bytes, digits=2)}, {term.evidence}, {term.formula}")
        if size.pool and not any(term.name == "beside tensors" for term in size.pool):
            say(
                console,
                "not in there: what the process takes beside tensors, and graphs; a run's log tells (--measured)",
            )
    for note in dict.fromkeys(note for size in results for note in size.notes):
        say(console, f"note: {note}")


def _allocator(size: CacheSize) -> str:
    engine = find_engine(size.engine)
    version = ".".join(map(str, size.setup.version or ()))
    return f"{engine.title} {version}" if version else engine.allocator


def _print_table(console: Console, results: Sequence[CacheSize]) -> None:
    engines = len({size.engine for size in results}) > 1
    heads = [("model", False), *([("engine", False)] if engines else []), ("format", False), ("context", True)]
    heads += [("a sequence", True), ("a token", True)]
    pooled = any(size.capacity for size in results)
    heads += [("sequences", True), ("tokens", True), ("longest", True)] if pooled else []
    table = plain_table(heads)
    table.columns[0].no_wrap, table.columns[0].overflow = False, "fold"
    for size in results:
        counted = size.allocated or size.logical
        row = [
            escape(size.model), *([size.engine] if engines else []), escape(size.format), str(size.context_tokens),
            format_bytes(counted.bytes_per_sequence, digits=2),
            format_bytes(counted.growth_bytes_per_token, digits=2),
        ]  # fmt: skip
        if size.capacity:
            capacity = size.capacity
            row += [format_count(capacity.max_concurrency), str(capacity.tokens), str(capacity.max_context)]
        table.add_row(*row)
    console.print(table)


def _print_terms(console: Console, size: CacheSize, *, named: bool) -> None:
    label = f"{size.model} {size.engine} {size.format}: " if named else ""
    parts = [f"geometry {format_bytes(size.logical.bytes_per_sequence, digits=2)}"]
    parts += [f"{term.name} {format_bytes(term.bytes, digits=2)}" for term in size.terms]
    say(console, label + " + ".join(parts))
