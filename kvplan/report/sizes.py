"""The screen of `size`."""

from collections.abc import Sequence
from pathlib import PurePath
from typing import Final

from rich.console import Console
from rich.markup import escape

from kvplan.core.sizes import CacheSize
from kvplan.engines import find_engine
from kvplan.engines.limits import release
from kvplan.report.table import plain_table, say
from kvplan.units import format_bytes, format_count

_LABEL_MAX: Final = 24


def print_sizes(console: Console, results: Sequence[CacheSize], *, terms: bool = False) -> None:
    """Print the answers of `kvplan size`, with what lies between geometry and allocation where *terms*."""
    _print_table(console, results)
    for allocator in dict.fromkeys(_allocator(size) for size in results if size.allocated):
        say(console, f"bytes exact, of one rank, as {allocator} allocates")
    for size in results:
        if terms and size.allocated:
            _print_terms(console, size, named=len(results) > 1)
    _print_refusals(console, results)
    _print_pool(console, [size for size in results if size.pool][:1])
    for note in dict.fromkeys(note for size in results for note in size.notes):
        say(console, f"note: {note}")


def _print_refusals(console: Console, results: Sequence[CacheSize]) -> None:
    for size in results:
        if size.logical and not size.allocated:
            reason = f"kvplan's runtime does not hold it, because {size.reason}"
            say(console, f"exact (logical) for {size.model}: {reason}")
        elif not size.logical:
            say(console, f"not counted: {size.model} with {size.engine} in {size.format}: {size.reason}")


def _print_pool(console: Console, results: Sequence[CacheSize]) -> None:
    for size in results:
        for term in size.pool:
            say(console, f"{term.name}: {format_bytes(term.bytes, digits=2)}, {term.evidence}, {term.formula}")
        if not any(term.name == "beside tensors" for term in size.pool):
            say(console, "not in there: what a process takes beside tensors, and graphs: a log tells (--measured)")


def _label(model: str) -> str:
    """Return a short name of *model*: of a path, the file, or the folder of a config.json."""
    path = PurePath(model)
    if len(model) <= _LABEL_MAX or not path.name:
        return model
    return path.parent.name if path.name == "config.json" and path.parent.name else path.name


def _allocator(size: CacheSize) -> str:
    engine = find_engine(size.engine)
    version = engine.limits.counted(size.setup.version)
    return f"{engine.title} {release(version)}" if version else engine.allocator


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
        if counted is None:
            continue
        row = [
            escape(_label(size.model)), *([size.engine] if engines else []), escape(size.format),
            str(size.context_tokens),
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
    geometry = size.logical.bytes_per_sequence if size.logical else 0
    parts = [f"geometry {format_bytes(geometry, digits=2)}"]
    parts += [f"{term.name} {format_bytes(term.bytes, digits=2)}" for term in size.terms]
    say(console, label + " + ".join(parts))
    for term in size.beside:
        say(console, f"{label}{term.name}: {format_bytes(term.bytes, digits=2)} beside the sequences, {term.formula}")
