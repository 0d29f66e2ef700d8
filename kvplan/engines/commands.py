"""A setting as a line for a shell and as the files that engines read, quoted as each of them has to be."""

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Final

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


def yaml_text(values: Mapping[str, Any]) -> str:
    """Return *values* as YAML in their order."""
    import yaml

    return yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True, width=1 << 30)


def ini_text(section: str, values: Mapping[str, object]) -> str:
    """Return a section of llama.cpp's presets; empty where a word cannot stand in one."""
    if any(_NOT_IN_INI.search(str(word)) for word in (section, *values.values())):
        return ""
    return "\n".join([f"[{section}]", *(f"{name} = {value}" for name, value in values.items())]) + "\n"
