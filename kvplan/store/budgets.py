"""Budget files for `kvplan check --budget`: YAML in, a checked `Budget` out."""

from functools import partial
from pathlib import Path
from typing import Final

from kvplan.core.budget import Budget, Limits
from kvplan.errors import InputError
from kvplan.store.documents import Value, open_document
from kvplan.store.workloads import read_quality
from kvplan_kernels.format import UnsupportedError
from kvplan_kernels.layer_formats import parse_formats

_KEYS: Final = ("schema", "memory", "memory_utilization", "default", "formats")
_LIMIT_KEYS: Final = ("max_bytes_per_sequence", "min_sessions", "max_decode_ratio", "max_tpot_ms", "quality")


def load_budget(path: Path | str) -> Budget:
    """Return the budget that the YAML file *path* describes.

    Raises:
        InputError: The file or a value in it cannot be taken; the message has the line and the mend.
    """
    section = open_document(Path(path), _KEYS)
    default = section.read("default", lambda value: _read_limits(value, Limits()), Limits())
    budget = Budget(
        default=default,
        formats=section.read("formats", lambda value: _read_formats(value, default), {}),
        memory_bytes=section.read("memory", Value.size, None),
        memory_utilization=section.read("memory_utilization", partial(Value.share, positive=True), 0.9),
    )
    everyone = (budget.default, *budget.formats.values())
    if all(limits == Limits() for limits in everyone):
        section.value.refuse("it limits nothing", f"give default: or formats: with any of {', '.join(_LIMIT_KEYS)}")
    if budget.memory_bytes is None and any(limits.min_sessions is not None for limits in everyone):
        raise InputError("min_sessions without memory", where=section.value.where, hint="add memory: 24GiB")
    return budget


def _read_formats(value: Value, default: Limits) -> dict[str, Limits]:
    found: dict[str, Limits] = {}
    for name, entry in value.entries():
        try:
            canonical = parse_formats(name).name
        except (UnsupportedError, ValueError) as error:
            message, _, hint = str(error).partition("; ")
            entry.refuse(message, hint)
        if canonical in found:
            entry.refuse(f"{canonical} has limits already", "merge the two")
        found[canonical] = _read_limits(entry, default)
    return found


def _read_limits(value: Value, default: Limits) -> Limits:
    section = value.section(_LIMIT_KEYS)
    positive = partial(Value.number, above=0)
    return Limits(
        max_bytes_per_sequence=section.read("max_bytes_per_sequence", Value.size, default.max_bytes_per_sequence),
        min_sessions=section.read(
            "min_sessions", partial(Value.integer, minimum=1, maximum=10**6), default.min_sessions
        ),
        max_decode_ratio=section.read("max_decode_ratio", positive, default.max_decode_ratio),
        max_tpot_ms=section.read("max_tpot_ms", Value.percentiles, default.max_tpot_ms),
        quality=section.read("quality", lambda value: read_quality(value, default.quality), default.quality),
    )
