"""A setting as a line for a shell and as the files that engines read, quoted as each of them has to be."""

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Final

Value = str | int | float | bool | Mapping[str, str | int | float | bool]
_PLAIN: Final = re.compile(r"[A-Za-z/][\w./+-]*", re.ASCII)
_YAML_WORDS: Final = frozenset({"true", "false", "yes", "no", "on", "off", "null", "y", "n"})
"""What YAML 1.1 reads as no text."""
_NOT_IN_INI: Final = re.compile(r"[;#\]\r\n]|^\s|\s$")
"""Ends a value or a section of llama.cpp's presets, which have no quotes (ggml-org/llama.cpp common/preset.cpp)."""


def shell_line(words: Sequence[str], values: Mapping[str, object], flags: Sequence[str] = ()) -> str:
    """Return a command of *words*, then *values* as `--name value`, then *flags*, as one line for a POSIX shell.

    >>> shell_line(["serve", "my model"], {"tp": 2}, ["--quiet"])
    "serve 'my model' --tp 2 --quiet"
    """
    named = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    return " ".join(_quoted(word) for word in [*words, *named, *flags])


def _quoted(word: str) -> str:
    """Return *word* quoted for a shell, which still has to put the home folder where it begins with one."""
    home = "~/" if word.startswith("~/") and len(word) > len("~/") else ""
    return home + shlex.quote(word.removeprefix(home))


def yaml_text(values: Mapping[str, Value], indent: str = "") -> str:
    """Return *values* as YAML in their order; names are plain words.

    >>> yaml_text({"model": "my model"}).strip()
    'model: "my model"'
    """
    return "".join(
        f"{indent}{name}:\n{yaml_text(value, indent + '  ')}"
        if isinstance(value, Mapping)
        else f"{indent}{name}: {_yaml_word(value)}\n"
        for name, value in values.items()
    )


def _yaml_word(value: str | float) -> str:
    """Return a scalar; text that is no plain word stands in double quotes, with what is not printable escaped."""
    if not isinstance(value, str):
        return str(value).lower()
    if _PLAIN.fullmatch(value) and value.lower() not in _YAML_WORDS:
        return value
    return f'"{"".join(_escaped(character) for character in value)}"'


def _escaped(character: str) -> str:
    if character in '\\"':
        return "\\" + character
    return character if character.isprintable() else f"\\U{ord(character):08x}"


def ini_text(section: str, values: Mapping[str, object]) -> str:
    """Return a section of llama.cpp's presets; empty where a word cannot stand in one."""
    if any(_NOT_IN_INI.search(str(word)) for word in (section, *values.values())):
        return ""
    return "\n".join([f"[{section}]", *(f"{name} = {value}" for name, value in values.items())]) + "\n"
