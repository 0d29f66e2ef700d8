"""Records to JSON and back: strict on the way in, no number that JSON cannot hold on the way out."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from math import isfinite
from pathlib import Path
from typing import TypeVar

import msgspec

from kvplan.errors import InputError
from kvplan.store.files import json_error

T = TypeVar("T")


def encode(record: object) -> bytes:
    """Return *record*, a dataclass, as one line of JSON.

    Raises:
        ValueError: A figure is NaN or infinite; JSON has neither, and a measurement that gave one has failed.
    """
    data = msgspec.json.encode(record)
    if b"null" in data:  # what a number that is not finite turns into; only then is the slow search worth its time
        found = _not_finite(record, type(record).__name__)
        if found:
            raise ValueError(f"{found}; a figure that could not be had is absent with a reason")
    return data


def _not_finite(value: object, name: str) -> str:
    """Return what is not finite inside *value*, by name; empty where all is."""
    if isinstance(value, float):
        return "" if isfinite(value) else f"{name} is {value}"
    if isinstance(value, tuple):
        if value and isinstance(value[0], float) and all(map(isfinite, value)):
            return ""
        return next(filter(None, (_not_finite(item, f"{name}[{rank}]") for rank, item in enumerate(value))), "")
    if isinstance(value, dict):
        return next(filter(None, (_not_finite(item, f"{name}[{key!r}]") for key, item in value.items())), "")
    if is_dataclass(value):
        parts = (_not_finite(getattr(value, field.name), f"{name}.{field.name}") for field in fields(value))
        return next(filter(None, parts), "")
    return ""


def decode(path: Path, data: bytes | msgspec.Raw, wanted: type[T], *, what: str) -> T:
    """Return the *wanted* record that *data*, read from *path*, holds; InputError that it is no *what* otherwise."""
    try:
        with _no_collection():
            return msgspec.json.decode(data, type=wanted)
    except msgspec.ValidationError as error:
        raise InputError(f"is no {what}: {error}".replace("\n", " "), where=str(path)) from error
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise json_error(path, bytes(data), error) from error


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the cycle collector from walking a growing heap of records again and again: it triples the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
