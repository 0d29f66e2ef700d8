"""Profile files: what `kvplan profile` measured, in JSON with one cell a line."""

from dataclasses import fields
from pathlib import Path
from typing import Final

from msgspec import Raw

from kvplan.core.figures import FIGURES
from kvplan.core.records import Cell, CellKey, Figure, Profile, Quality, QualityKey
from kvplan.errors import InputError
from kvplan.store.encoding import decode, encode
from kvplan.store.files import read_file, write_atomically
from kvplan_kernels.format import UnsupportedError
from kvplan_kernels.layer_formats import parse_formats

SCHEMA: Final = 1
_FIELDS: Final = tuple(field.name for field in fields(Profile))
_A_LINE_EACH: Final = ("cells", "quality")


def save_profile(profile: Profile, path: Path | str, *, overwrite: bool = True) -> None:
    """Write *profile* to *path*, whole or not at all.

    Raises:
        InputError: It cannot be written, or exists and *overwrite* is false.
        ValueError: A figure is NaN or infinite.
    """
    parts = (b'"%s":%s' % (name.encode(), _part(name, getattr(profile, name))) for name in _FIELDS)
    write_atomically(Path(path), b"{" + b",\n".join(parts) + b"}\n", overwrite=overwrite)


def _part(name: str, value: object) -> bytes:
    if name in _A_LINE_EACH and isinstance(value, tuple) and value:
        return b"[\n" + b",\n".join(map(encode, value)) + b"\n]"
    return encode(value)


def load_profile(path: Path | str) -> Profile:
    """Return the profile that *path* holds.

    Raises:
        InputError: It is no profile, is cut short, or was written by another version of the file's layout.
    """
    path = Path(path)
    data = read_file(path)
    head = decode(path, data, dict[str, Raw], what="profile")
    if "schema" not in head:
        raise InputError("is no profile: no schema", where=str(path), hint="`kvplan profile ... -o P.json` writes one")
    schema = decode(path, head["schema"], int, what="schema")
    if schema != SCHEMA:
        mend = "upgrade kvplan to read it" if schema > SCHEMA else "measure again"
        raise InputError(f"profile of schema {schema}; this kvplan reads {SCHEMA}", where=str(path), hint=mend)
    unknown = next((name for name in head if name not in _FIELDS), None)
    if unknown is not None:
        raise InputError(f"is no profile: unknown key {unknown!r}", where=str(path))
    profile = decode(path, data, Profile, what="profile")
    check_records(path, profile.cells, profile.quality)
    return profile


def check_records(path: Path, cells: tuple[Cell, ...], quality: tuple[Quality, ...]) -> None:
    """Refuse records, read from *path*, that no measurement leaves behind.

    Raises:
        InputError: An unknown format, an impossible size, a figure without value or reason.
    """
    sound: set[str] = set()
    for rank, cell in enumerate(cells):
        problem = _key_problem(cell.key, sound) or _cell_problem(cell)
        if problem:
            raise InputError(f"cells[{rank}]: {problem}", where=str(path))
    for rank, result in enumerate(quality):
        problem = _key_problem(result.key, sound)
        if problem:
            raise InputError(f"quality[{rank}]: {problem}", where=str(path))


def _key_problem(key: CellKey | QualityKey, sound: set[str]) -> str:
    if key.format not in sound:
        try:
            parse_formats(key.format)
        except (UnsupportedError, ValueError) as error:
            return str(error)
        sound.add(key.format)
    if key.block_tokens < 1:
        return f"block size {key.block_tokens}"
    if isinstance(key, CellKey):
        return _loads_problem(key)
    return "" if key.chunk_tokens >= 1 else f"chunks of {key.chunk_tokens} tokens"


def _loads_problem(key: CellKey) -> str:
    if not key.loads:
        return "no sequences"
    for load in key.loads:
        bucket = load.bucket
        if load.sequences < 1 or min(bucket.prompt_tokens, bucket.generate_tokens, bucket.shared_prefix_tokens) < 0:
            return f"bucket {bucket.name!r} has a count below zero or no sequences"
    return ""


def _cell_problem(cell: Cell) -> str:
    for name, figure in cell.figures.items():
        problem = figure_problem(name, figure)
        if problem:
            return problem
    return ""


def figure_problem(name: str, figure: Figure) -> str:
    """Return what no measurement leaves in a figure, or nothing."""
    spec = FIGURES.get(name)
    if spec is not None and spec.unit != figure.unit:
        return f"{name} is in {figure.unit!r}, not {spec.unit}"
    if figure.value is None and not figure.reason:
        return f"{name} has neither value nor reason"
    if not all(figure.repeats):
        return f"{name} has a repeat without samples"
    return ""
