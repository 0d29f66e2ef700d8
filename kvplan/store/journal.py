"""The journal beside a profile: every finished record at once on disk, so that a killed run loses only its last.

One record a line: {"crc32": ..., "kind": "header" | "cell" | "quality", "record": {...}}, the checksum over kind and
the record's bytes. The header is a profile without cells and quality: what a resumed run needs to finish the profile.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import TracebackType
from typing import Final, Self, TypeVar
from zlib import crc32

import msgspec

from kvplan.core.records import Cell, CellKey, CellStatus, Profile, Quality, QualityKey
from kvplan.core.setups import versions_difference
from kvplan.errors import InputError, MissingPartError
from kvplan.store.encoding import decode, encode
from kvplan.store.files import file_error, read_file, sync_folder
from kvplan.store.profiles import SCHEMA, check_records

Record = Profile | Cell | Quality
Key = TypeVar("Key", CellKey, QualityKey)
Kept = TypeVar("Kept", Cell, Quality)

_KINDS: Final[dict[str, type[Record]]] = {"header": Profile, "cell": Cell, "quality": Quality}
_ASKED: Final = frozenset({"format", "block_tokens", "loads", "prefill", "cold", "chunk_tokens"})
"""Key fields that say what was asked for; the others say on what it was measured."""
_LINE_START: Final = b'{"crc32":'
"""What every journal begins with; nothing else is appended to or cut."""
EFFORT: Final = "effort"
"""What a profile's `how` calls the samples taken in a repeat: measurements of different efforts are not mixed."""
_SHOWN_LENGTH_MAX: Final = 40
_SHOWN_DIGEST_LENGTH: Final = 12
"""What tells two digests apart in a message."""


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    crc32: int
    kind: str
    record: msgspec.Raw


def journal_path(profile_path: Path | str) -> Path:
    """Return where the journal of *profile_path* lies.

    >>> journal_path("out/P.json").name
    'P.jsonl'
    """
    path = Path(profile_path)
    return path.with_suffix(".jsonl") if path.suffix == ".json" else path.with_name(path.name + ".jsonl")


@dataclass(kw_only=True, slots=True)
class JournalContents:
    """What a journal holds; of two records with one key the later.

    Records stand after the header of the run that wrote them. A header of another setup makes those before it void.

    Attributes:
        header: The latest header; None where there is none.
        problems: Lines that were dropped, each with its number and the reason.
        sound_bytes: Where the next line goes: the end of the last line that is whole.
    """

    header: Profile | None = None
    cells: dict[CellKey, Cell] = field(default_factory=dict)
    quality: dict[QualityKey, Quality] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    sound_bytes: int = 0

    def add(self, record: Record) -> None:
        """Take *record* in."""
        if isinstance(record, Profile):
            if self.header is None or setup_change(self.header, record):
                self.drop()
            self.header = record
        elif isinstance(record, Cell):
            self.cells[record.key] = record
        else:
            self.quality[record.key] = record

    def drop(self) -> None:
        """Forget the cells and quality results so far."""
        self.cells.clear()
        self.quality.clear()

    def profile(self) -> Profile:
        """Return the profile that the records make up.

        Raises:
            InputError: There is no header.
        """
        if self.header is None:
            raise InputError("the journal has no header, so its records say nothing of their device or model")
        return replace(self.header, cells=tuple(self.cells.values()), quality=tuple(self.quality.values()))


def read_journal(path: Path | str) -> JournalContents:
    """Return what the journal *path* holds; lines that are torn or corrupt are dropped and named.

    Raises:
        InputError: It cannot be read at all.
    """
    path = Path(path)
    return _contents(path, read_file(path))


def _contents(path: Path, data: bytes) -> JournalContents:
    contents = JournalContents(sound_bytes=data.rfind(b"\n") + 1)
    *lines, tail = data.split(b"\n")
    for number, line in enumerate(lines, start=1):
        try:
            contents.add(_read_line(path, line))
        except InputError as error:
            contents.problems.append(f"{path}:{number}: corrupt, so its record is dropped: {error.message}")
    if tail:
        contents.problems.append(f"{path}:{len(lines) + 1}: torn, as by a killed run, so its record is dropped")
    return contents


def _read_line(path: Path, data: bytes) -> Record:
    line = decode(path, data, _Line, what="journal line")
    if line.kind not in _KINDS:
        raise InputError(f"unknown kind {line.kind!r}")
    if crc32(line.kind.encode() + bytes(line.record)) != line.crc32:
        raise InputError("its checksum differs")
    record = decode(path, line.record, _KINDS[line.kind], what=line.kind)
    if isinstance(record, Profile) and record.schema != SCHEMA:
        raise InputError(f"schema {record.schema}; this kvplan reads {SCHEMA}")
    cells, quality = (record,) if isinstance(record, Cell) else (), (record,) if isinstance(record, Quality) else ()
    check_records(path, cells, quality)
    return record


def _write_line(record: Record) -> bytes:
    kind = next(name for name, kept in _KINDS.items() if isinstance(record, kept))
    data = encode(record)
    return b'%s%d,"kind":"%s","record":%s}\n' % (_LINE_START, crc32(kind.encode() + data), kind.encode(), data)


class Journal:
    """A journal open for appending, by one process at a time.

    Attributes:
        contents: What it held when it was opened.
    """

    def __init__(self, path: Path | str, *, keep: bool = True) -> None:
        """Open or create the journal and lock it.

        Args:
            path: The file; a torn last line is cut off.
            keep: Whether to go on after what it holds; false starts it anew.

        Raises:
            InputError: Another process writes it, or it cannot be written.
            MissingPartError: The system has no file locks.
        """
        self._path = Path(path)
        try:
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise file_error(self._path, error, "write") from error
        try:
            self._lock()
            data = read_file(self._path)
            if not data.startswith(_LINE_START[: len(data)]):
                raise InputError("exists and is no journal", where=str(self._path), hint="give another -o")
            self.contents = _contents(self._path, data if keep else b"")
            self._start()
        except BaseException:
            os.close(self._descriptor)
            raise

    def _lock(self) -> None:
        try:
            import fcntl
        except ImportError as error:
            raise MissingPartError("journals need file locks, which this system lacks") from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            mend = "wait for it, or give another -o"
            raise InputError("another kvplan is writing this journal", where=str(self._path), hint=mend) from error
        except OSError as error:
            raise file_error(self._path, error, "lock") from error

    def _start(self) -> None:
        try:
            os.ftruncate(self._descriptor, self.contents.sound_bytes)
            self._end = os.lseek(self._descriptor, 0, os.SEEK_END)
            sync_folder(self._path.parent)
        except OSError as error:
            raise file_error(self._path, error, "write") from error

    def append(self, record: Record) -> None:
        """Write *record* and return once it is on disk.

        Raises:
            InputError: It cannot be written; the journal then ends as it did before.
            ValueError: A figure is NaN or infinite, or a header holds cells.
        """
        if isinstance(record, Profile) and (record.cells or record.quality):
            raise ValueError("a journal's header is a profile without cells and quality")
        line = _write_line(record)
        try:
            self._write(line)
            os.fsync(self._descriptor)
        except OSError as error:
            os.ftruncate(self._descriptor, self._end)
            os.lseek(self._descriptor, self._end, os.SEEK_SET)
            raise file_error(self._path, error, "write") from error
        self._end += len(line)

    def _write(self, line: bytes) -> None:
        rest = memoryview(line)
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]

    def close(self) -> None:
        """Let go of the journal and its lock."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class Refusal:
    """A record that a resumed run does not take, and why."""

    label: str
    reason: str


def setup_change(old: Profile, new: Profile) -> str:
    """Return what keeps records of *old*'s run out of *new*'s, in words; empty where nothing does."""
    before, now = old.how.get(EFFORT, "unknown"), new.how.get(EFFORT, "unknown")
    if before != now:
        return f"{EFFORT} {before} is now {now}"
    return versions_difference(new, old, "it was measured with")


def drop_other_setup(contents: JournalContents, header: Profile) -> list[Refusal]:
    """Empty *contents* of what was measured with another setup than *header* says; return what it held."""
    change = setup_change(contents.header, header) if contents.header else "the journal has lost its header"
    if not change:
        return []
    labels = [key.label for key in contents.cells] + [f"{key.format} quality" for key in contents.quality]
    contents.drop()
    contents.header = None
    return [Refusal(label, change) for label in labels]


def resume_cells(found: Mapping[CellKey, Cell], wanted: Iterable[CellKey]) -> tuple[dict[CellKey, Cell], list[Refusal]]:
    """Return the cells that answer *wanted*, and those refused with the reason.

    A cell that was disturbed or failed is measured again; one out of memory or unsupported stands.
    """
    matching, refused = _resume(found, wanted)
    again = [key for key, cell in matching.items() if cell.status in (CellStatus.DISTURBED, CellStatus.FAILED)]
    refused += [Refusal(key.label, f"was {matching[key].status}, so it is measured again") for key in again]
    return {key: cell for key, cell in matching.items() if key not in again}, refused


def resume_quality(
    found: Mapping[QualityKey, Quality], wanted: Iterable[QualityKey]
) -> tuple[dict[QualityKey, Quality], list[Refusal]]:
    """Return the quality results that answer *wanted*, and those refused with the reason."""
    return _resume(found, wanted)


def _resume(found: Mapping[Key, Kept], wanted: Iterable[Key]) -> tuple[dict[Key, Kept], list[Refusal]]:
    asked: dict[tuple[object, ...], Key] = {}
    exact: set[Key] = set()
    for key in wanted:
        exact.add(key)
        asked[_asked(key)] = key
    matching = {key: record for key, record in found.items() if key in exact}
    refused = [_refusal(key, asked.get(_asked(key))) for key in found if key not in exact]
    return matching, refused


def _asked(key: CellKey | QualityKey) -> tuple[object, ...]:
    return tuple(getattr(key, part.name) for part in fields(key) if part.name in _ASKED)


def _refusal(key: CellKey | QualityKey, wanted: CellKey | QualityKey | None) -> Refusal:
    label = key.label if isinstance(key, CellKey) else f"{key.format}/b{key.block_tokens} quality"
    if wanted is None:
        return Refusal(label, "is not among what is asked for")
    pairs = {part.name: (getattr(key, part.name), getattr(wanted, part.name)) for part in fields(key)}
    differing = [f"{name} {_short(old)} is now {_short(new)}" for name, (old, new) in pairs.items() if old != new]
    return Refusal(label, ", ".join(differing))


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= _SHOWN_LENGTH_MAX else text[:_SHOWN_DIGEST_LENGTH] + "..."
