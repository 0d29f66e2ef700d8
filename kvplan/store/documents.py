"""YAML files read key by key, so that every complaint has a file, a line, the value and the mend."""

import re
from collections.abc import Callable, Collection, Sequence
from difflib import get_close_matches
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

from kvplan.errors import InputError
from kvplan.store.files import read_text
from kvplan.units import parse_bytes, parse_share

if TYPE_CHECKING:
    from yaml.nodes import Node

T = TypeVar("T")

_FILE_BYTES_MAX: Final = 2**20
_DEPTH_MAX: Final = 12
_ALIASES_MAX: Final = 64
_SIZE_MAX: Final = 2**53
"""Bytes up to here are whole numbers in floating point."""
_QUANTITY_LENGTH_MAX: Final = 32
_SHOWN_LENGTH_MAX: Final = 60
_INTEGER: Final = re.compile(r"-?(?:0|[1-9][0-9]*)")
_NUMBER: Final = re.compile(r"-?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_PERCENTILE: Final = re.compile(r"p([0-9]+(?:\.[0-9]+)?)")
_CORE_TAGS: Final = "tag:yaml.org,2002:"


def nearest(word: str, known: Collection[str]) -> str:
    """Return the mend for an unknown *word*: the nearest known one, else all of them."""
    close = get_close_matches(word, known, n=1, cutoff=0.6)
    return f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"


class Value:
    """One value of a YAML file, and where it stands.

    Attributes:
        name: The key that it is the value of.
        line: Counted from 1.
    """

    def __init__(self, path: Path, name: str, node: "Node", line: int | None = None) -> None:
        """Take *node*, which stands on *line* where that is not where it starts: a key's value is on the key's."""
        self._path = path
        self._node: Any = node
        self.name = name
        self.line = node.start_mark.line + 1 if line is None else line

    @property
    def where(self) -> str:
        """File and line."""
        return f"{self._path}:{self.line}"

    def refuse(self, message: str, hint: str = "") -> NoReturn:
        """Raise an InputError that says where the value stands and what it is the value of."""
        named = f"{self.name}: {message}" if self.name else message
        raise InputError(named, where=self.where, hint=hint)

    def _shown(self) -> str:
        value = self._node.value
        if not isinstance(value, str):
            return "a list" if self._node.id == "sequence" else "a mapping"
        return repr(value if len(value) <= _SHOWN_LENGTH_MAX else value[:_SHOWN_LENGTH_MAX] + "...")

    def _scalar(self, wanted: str) -> str:
        value = self._node.value
        if not isinstance(value, str):
            self.refuse(f"{self._shown()} where {wanted} belongs")
        if self._node.tag == _CORE_TAGS + "null":
            self.refuse("has no value", f"give {wanted} or leave the key out")
        return value

    def _quantity(self, wanted: str) -> str:
        text = self._scalar(wanted)
        if len(text) > _QUANTITY_LENGTH_MAX:
            self.refuse(f"{self._shown()} is not {wanted}")
        return text

    def text(self) -> str:
        """Return a line of printable text."""
        text = self._scalar("a name")
        if not text.strip() or not text.isprintable():
            self.refuse(f"{self._shown()} is no name", "use printable characters on one line")
        return text

    def choice(self, options: Collection[str]) -> str:
        """Return one of *options*."""
        text = self._scalar("one of " + ", ".join(options))
        if text not in options:
            self.refuse(f"unknown value {self._shown()}", nearest(text, options))
        return text

    def flag(self) -> bool:
        """Return true or false."""
        text = self._scalar("true or false")
        if text not in ("true", "false"):
            self.refuse(f"{self._shown()} is neither", "write true or false")
        return text == "true"

    def integer(self, minimum: int, maximum: int) -> int:
        """Return a whole number within bounds."""
        text = self._quantity("a whole number")
        if _INTEGER.fullmatch(text) is None:
            self.refuse(f"{self._shown()} is no whole number", "write digits only, as in 1024")
        number = int(text)
        if not minimum <= number <= maximum:
            self.refuse(f"{number} is out of range", f"give {minimum} to {maximum}")
        return number

    def number(self, *, above: float | None = None, minimum: float | None = None, maximum: float = 1e15) -> float:
        """Return a number within bounds; *above* is exclusive."""
        text = self._quantity("a number")
        if _NUMBER.fullmatch(text) is None or not isfinite(float(text)):
            self.refuse(f"{self._shown()} is no number", "write it without a unit, as in 50 or 0.02")
        number = float(text)
        if (above is not None and number <= above) or (minimum is not None and number < minimum) or number > maximum:
            low = f"above {above:g}" if above is not None else f"{minimum or 0:g} or more"
            self.refuse(f"{text} is out of range", f"give {low}, up to {maximum:g}")
        return number

    def share(self, *, maximum: float = 1.0, positive: bool = False) -> float:
        """Return a share as a fraction: 70% and 0.7 alike."""
        text = self._quantity("a share")
        plain = _NUMBER.fullmatch(text) is not None
        try:
            share = float(text) if plain else parse_share(text)
        except InputError as error:
            self.refuse(error.message, error.hint)
        if plain and share == 1:
            self.refuse(f"{text} could be 1% or 100%", "write it with the percent sign")
        if share < 0 or (positive and share == 0) or share > maximum:
            meant = f"; {text}% is written with the percent sign" if plain and maximum < share <= 100 else ""
            self.refuse(f"{text} is out of range{meant}", f"give {'above ' if positive else ''}0% to {maximum:.0%}")
        return share

    def size(self) -> int:
        """Return a number of bytes."""
        text = self._quantity("a size")
        try:
            count = parse_bytes(text)
        except InputError as error:
            self.refuse(error.message, error.hint)
        if count > _SIZE_MAX:
            self.refuse(f"{text} is more than there is")
        return count

    def items(self) -> "list[Value]":
        """Return the values of a list that is not empty."""
        if self._node.id != "sequence":
            self.refuse(f"{self._shown()} where a list belongs", "write [a, b]")
        if not self._node.value:
            self.refuse("is an empty list", "name at least one, or leave the key out")
        return [Value(self._path, self.name, node) for node in self._node.value]

    def entries(self) -> "list[tuple[str, Value]]":
        """Return the keys and values of a mapping, each key once."""
        if self._node.id != "mapping":
            self.refuse(f"{self._shown() if self._node.value else 'nothing'} where a mapping of keys to values belongs")
        found: dict[str, Value] = {}
        for key_node, node in self._node.value:
            key = Value(self._path, self.name, key_node)
            name = key._scalar("a key")
            if not name.isprintable():
                key.refuse(f"unknown key {key._shown()}")
            if name in found:
                key.refuse(f"{name!r} is given twice", f"the first is on line {found[name].line}")
            found[name] = Value(self._path, name, node, key.line)
        return list(found.items())

    def section(self, keys: Sequence[str]) -> "Section":
        """Return a mapping that has no keys but *keys*."""
        entries = self.entries()
        for name, value in entries:
            if name not in keys:
                shown = name if len(name) <= _SHOWN_LENGTH_MAX else name[:_SHOWN_LENGTH_MAX] + "..."
                raise InputError(f"unknown key {shown!r}{self._inside()}", where=value.where, hint=nearest(name, keys))
        return Section(self, dict(entries))

    def _inside(self) -> str:
        return f" in {self.name}" if self.name else ""

    def percentiles(self) -> dict[int, float]:
        """Return times by percentile: {p95: 50} is {95: 50.0}."""
        hint = "write it as {p95: 50}, in milliseconds"
        if self._node.id != "mapping":
            self.refuse(f"{self._shown()} has no percentile", hint)
        found: dict[int, float] = {}
        for name, value in self.entries():
            match = _PERCENTILE.fullmatch(name)
            if match is None or len(name) > _QUANTITY_LENGTH_MAX:
                raise InputError(f"{self.name}: {name[:_SHOWN_LENGTH_MAX]!r} is no percentile", where=value.where,
                                 hint=hint)  # fmt: skip
            if not match[1].isdigit() or not 1 <= int(match[1]) <= 99:
                raise InputError(f"{self.name}: percentile {match[1]} is out of range", where=value.where,
                                 hint="use a whole one, p1 to p99")  # fmt: skip
            if int(match[1]) in found:
                raise InputError(f"{self.name}: percentile {int(match[1])} is given twice", where=value.where)
            found[int(match[1])] = value.number(above=0)
        return found


class Section:
    """The mapping of one value: `need` what must be there, `read` what may."""

    def __init__(self, value: Value, entries: dict[str, Value]) -> None:
        self.value = value
        self._entries = entries

    def need(self, key: str, reader: Callable[[Value], T]) -> T:
        """Return what *reader* makes of the value of *key*; InputError where there is none."""
        if key not in self._entries:
            inside = f" in {self.value.name}" if self.value.name else ""
            raise InputError(f"no {key}{inside}", where=self.value.where, hint=f"add {key}:")
        return reader(self._entries[key])

    def read(self, key: str, reader: Callable[[Value], T], default: T) -> T:
        """Return what *reader* makes of the value of *key*, or *default*."""
        return reader(self._entries[key]) if key in self._entries else default

    def named(self, key: str) -> Value:
        """Return the value of *key*, else the section itself: where to point a complaint."""
        return self._entries.get(key, self.value)


def open_document(path: Path, keys: Sequence[str], schema: int = 1) -> Section:
    """Return the mapping that the YAML file *path* holds; its `schema` must be *schema*."""
    text = read_text(path, limit_bytes=_FILE_BYTES_MAX)
    node = _compose(path, text)
    if node is None:
        raise InputError("is empty", where=str(path), hint=f"it must hold {', '.join(keys[:3])}, ...")
    if node.id != "mapping":
        raise InputError("is no mapping of keys to values", where=f"{path}:{node.start_mark.line + 1}")
    section = Value(path, "", node).section(keys)
    if section.named("schema") is section.value:
        raise InputError("no schema", where=section.value.where, hint=f"add schema: {schema}")
    found = section.need("schema", lambda value: value.integer(0, 10**6))
    if found != schema:
        section.named("schema").refuse(f"version {found}; this kvplan reads {schema}", "get the kvplan that wrote it")
    return section


def _compose(path: Path, text: str) -> Any:
    import yaml

    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        _bound(path, yaml.parse(text, loader))
        node: Any = yaml.compose(text, loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        problem = error.problem or error.context or "cannot be read"
        raise InputError(f"is no YAML: {problem}", where=where, hint="mind quotes, brackets and indents") from error
    except yaml.YAMLError as error:
        line = text.count("\n", 0, getattr(error, "position", 0)) + 1
        reason = getattr(error, "reason", "cannot be read")
        raise InputError(f"is no YAML: {reason}", where=f"{path}:{line}") from error
    return node


def _bound(path: Path, events: Any) -> None:
    """Refuse what no workload needs and what makes readers slow or deep: nesting, many aliases, tags of other types."""
    from yaml.events import AliasEvent, CollectionEndEvent, CollectionStartEvent, NodeEvent

    depth = aliases = 0
    for event in events:
        depth += isinstance(event, CollectionStartEvent) - isinstance(event, CollectionEndEvent)
        aliases += isinstance(event, AliasEvent)
        where = f"{path}:{event.start_mark.line + 1}"
        if depth > _DEPTH_MAX:
            raise InputError(f"is nested more than {_DEPTH_MAX} deep", where=where)
        if aliases > _ALIASES_MAX:
            raise InputError(f"has more than {_ALIASES_MAX} aliases", where=where)
        tag = getattr(event, "tag", None) if isinstance(event, NodeEvent) else None
        if tag not in (None, "!"):
            raise InputError(f"has the tag {str(tag)[:_SHOWN_LENGTH_MAX]!r}", where=where, hint="leave tags out")
