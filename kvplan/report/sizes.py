"""The screen of `size`."""

from collections.abc import Sequence
from pathlib import PurePath
from typing import Final

from rich.console import Console
from rich.markup import escape

from kvplan.core.sizes import CacheSize
from kvplan.core.specs import Evidence
from kvplan.engines import find_engine
from kvplan.engines.limits import release
from kvplan.report.table import plain_table, say
from kvplan.units import format_bytes, format_count

_LABEL_MAX: Final = 24
_NAMED_MAX: Final = 2
"""More models are counted, not named."""


def print_sizes(console: Console, results: Sequence[CacheSize], *, terms: bool = False) -> None:
    """Print the answers of `kvplan size`, with what lies between geometry and allocation where *terms*."""
    _print_table(console, results)
    for allocator in dict.fromkeys(_allocator(size) for size in results if size.allocated):
        say(console, f"bytes exact, of one rank, as {allocator} allocates")
    for size in results:
        if terms and size.allocated:
            _print_terms(console, size, named=len(results) > 1)
    _print_refusals(console, results)
    pools = list({(size.model, size.engine): size for size in results if size.pool}.values())
    if len(pools) == 1:
        _print_pool(console, pools[0])
    for size in pools if len(pools) > 1 else []:
        parts = " - ".join(f"{term.name} {format_bytes(term.bytes, digits=2)}" for term in size.pool[:-1])
        rest = f"pool {format_bytes(size.pool[-1].bytes, digits=2)}, {size.pool[-1].evidence}"
        say(console, f"{_label(size.model)} {size.engine}: {parts} = {rest}")
    if any(not _is_measured(size) for size in pools):
        say(console, "not in there: what a process takes beside tensors, and graphs: a log tells (--measured)")
    _print_notes(console, results)


def _is_measured(size: CacheSize) -> bool:
    """Whether a run told what a process takes beside tensors, or what all took together."""
    return any(term.name == "beside tensors" or term.evidence is Evidence.MEASURED for term in size.pool)


def _print_notes(console: Console, results: Sequence[CacheSize]) -> None:
    """Print each note once, with whose it is where that is not all."""
    counted = [size for size in results if size.allocated]
    for note in dict.fromkeys(note for size in counted for note in size.notes):
        owner = _owner([size for size in counted if note in size.notes], counted)
        say(console, f"note: {owner}: {note}" if owner else f"note: {note}")


def _owner(having: Sequence[CacheSize], all_: Sequence[CacheSize]) -> str:
    """Return whose a note is: an engine's with all models, some models', or nothing where it is everyone's."""
    if len(having) == len(all_):
        return ""
    engines = dict.fromkeys(size.engine for size in having)
    models = dict.fromkeys(_label(size.model) for size in having)
    of_engines = [size for size in all_ if size.engine in engines]
    if len(having) == len(of_engines):
        return ", ".join(engines)
    named = ", ".join(models) if len(models) <= _NAMED_MAX else f"{len(models)} of the models"
    return named if len({size.engine for size in all_}) == 1 else f"{named} with {', '.join(engines)}"


def _print_refusals(console: Console, results: Sequence[CacheSize]) -> None:
    for size in results:
        if size.logical and not size.allocated:
            reason = f"kvplan's runtime does not hold it, because {size.reason}"
            say(console, f"exact (logical) for {size.model}: {reason}")
        elif not size.logical:
            say(console, f"not counted: {size.model} with {size.engine} in {size.format}: {size.reason}")


def _print_pool(console: Console, size: CacheSize) -> None:
    for term in size.pool:
        say(console, f"{term.name}: {format_bytes(term.bytes, digits=2)}, {term.evidence}, {term.formula}")


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
