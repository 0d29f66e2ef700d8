"""Write the reference pages from the code, and refresh the output shown after `<!-- run: ... -->` comments.

`python docs/generate.py` writes, `python docs/generate.py --check` fails where a page is stale. Only commands whose
output is exact arithmetic stand behind such a comment; measured output is quoted with the command that made it.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import typer

from kvplan.cli import build_app
from kvplan.core.figures import FIGURES
from kvplan.core.packing import EngineFormat
from kvplan.engines import ENGINES
from kvplan.errors import ExitStatus
from kvplan.store.architectures import ARCHITECTURES, GGUF_MODEL_TYPES
from kvplan.store.attention import PLAIN
from kvplan.store.weights import WEIGHTS

ROOT: Final = Path(__file__).parents[1]
REFERENCE: Final = ROOT / "docs" / "reference"
_RUN: Final = re.compile(r"(<!-- run: (?P<command>kvplan [^\n]+?) -->\n\n?```[a-z]*\n)(?P<output>.*?)(```)", re.DOTALL)
_NOTE: Final = "<!-- Written by docs/generate.py; do not edit. -->\n"
_MODELS: Final = """`kvplan size` counts the cache of every model type below from its config.json, without its weights.
`profile`, `recommend` and `quality` run those whose layers keep K and V heads of one size, full or in a window.
A type that is not here, or a config key that shapes the cache and that the type is not known to read, is an error that
names it: status 3. Of GGUF files these architectures are read: {gguf}.
[The memory model](../explanation/memory-model.md) says what is counted.
The bytes of the weights are predicted from the config too, but for {unweighed}.
"""
STATUS_MEANING: Final = {
    ExitStatus.DONE: "done; a cell out of memory or unsupported is a result",
    ExitStatus.NOT_MET: "target not met, a regression, or a cell that failed",
    ExitStatus.BAD_INPUT: "bad input or usage; one line says what and where",
    ExitStatus.UNSUPPORTED: "unsupported, not comparable or undecided",
    ExitStatus.MISMATCH: "a measured figure disagrees with the predicted one",
    ExitStatus.BUG: "a bug, with its traceback",
    ExitStatus.INTERRUPTED: "interrupted; everything finished is kept",
}


def command_line() -> str:
    """Return the page of commands and options."""
    root = typer.main.get_command(build_app())
    parts = [_NOTE, "# Command line\n", f"{root.help}\n"]
    for name, command in _commands(root, "kvplan"):
        parts.append(_command(name, command))
    parts.append("## Exit status\n\n| status | meaning |\n|--:|---|")
    parts += [f"| {status.value} | {STATUS_MEANING[status]} |" for status in ExitStatus]
    return "\n".join(parts) + "\n"


def _commands(group: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, f"{prefix} {name}")
        else:
            yield f"{prefix} {name}", command


def _command(name: str, command: Any) -> str:
    shown = [parameter for parameter in command.params if not getattr(parameter, "hidden", False)]
    arguments = [parameter for parameter in shown if parameter.param_type_name == "argument"]
    options = [parameter for parameter in shown if parameter.param_type_name == "option" and parameter.name != "help"]
    usage = " ".join([name, *(_argument(a) for a in arguments), *(["[OPTIONS]"] if options else [])])
    lines = [f"## `{name}`\n", f"{_plain(command.help)}\n", f"    {usage}\n"]
    if options:
        lines.append("| option | meaning | default |\n|---|---|---|")
        lines += [_option(parameter) for parameter in options]
        lines.append("")
    return "\n".join(lines)


def _argument(parameter: Any) -> str:
    name = str(parameter.metavar or parameter.name).upper().strip("[]").removesuffix("...")
    name += "..." if parameter.nargs == -1 else ""
    return name if parameter.required else f"[{name}]"


def _option(parameter: Any) -> str:
    names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
    default = parameter.default
    shown = "" if default in (None, False, (), []) or callable(default) else f"`{_default(default)}`"
    return f"| {names} | {_plain(parameter.help).replace('|', '/')} | {shown} |"


def _default(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _plain(text: str | None) -> str:
    return " ".join((text or "").split())


def figures() -> str:
    """Return the page of figures."""
    rows = [
        f"| `{spec.name}` | {spec.unit} | {spec.kind} | {spec.meaning} | {_code(spec.reference)} |"
        for spec in FIGURES.values()
    ]
    head = "| figure | unit | compared as | meaning | divided by |\n|---|---|---|---|---|"
    return "\n".join([_NOTE, "# Figures of a profile\n", head, *rows]) + "\n"


def _code(name: str | None) -> str:
    return f"`{name}`" if name else ""


def models() -> str:
    """Return the page of the model types whose cache is counted."""
    families: dict[str, list[str]] = {}
    for name, row in ARCHITECTURES.items():
        families.setdefault(_family((row.cache or PLAIN).layers.__doc__), []).append(f"`{name}`")
    rows = [f"| {meaning} | {', '.join(sorted(names))} |" for meaning, names in sorted(families.items())]
    text = _MODELS.format(
        gguf=", ".join(f"`{name}`" for name in sorted(GGUF_MODEL_TYPES)),
        unweighed=", ".join(f"`{name}`" for name in sorted(set(ARCHITECTURES) - set(WEIGHTS))),
    )
    return "\n".join([_NOTE, "# Models\n", text, "| layers | `model_type` |\n|---|---|", *rows]) + "\n"


_ENGINES: Final = """What each engine caches in, by the value of its own flag: `kvplan size` and `recommend` name it so.
Bits are of an element of a head of 128, scales counted. A format is refused on a device that lacks what it needs.
[Engines](../explanation/engines.md) says how each allocates.
"""


_ENGINE_HEAD: Final = (
    "| format | also | K | V | bits | needs | stands for it | source |\n|---|---|--:|--:|--:|---|---|---|"
)


def engines() -> str:
    """Return the page of engines and their formats."""
    parts = [_NOTE, "# Engines\n", _ENGINES]
    for engine in ENGINES.values():
        rules = f", by the rules of {engine.rules}" if engine.rules else ""
        parts.append(f"## {engine.title}\n\n`--engine {engine.name}`{rules}.\n")
        if not engine.formats:
            parts.append("Any [format](formats.md) that has kernels here.\n")
            continue
        parts.append(
            "| format | also | K | V | bits | needs | stands for it | source |\n|---|---|--:|--:|--:|---|---|---|"
        )
        parts += [_engine_format(form) for form in engine.formats]
        parts.append("")
    return "\n".join(parts) + "\n"


def _engine_format(form: EngineFormat) -> str:
    also = ", ".join(f"`{name}`" for name in form.aliases)
    needs = f"compute capability {form.capability / 10}: {form.why}" if form.capability else ""
    stands = _code(form.same_as or form.like) + (" (nearest)" if form.like else "")
    since = f"since {form.since}; " if form.since else ""
    bits = f"{form.key.bits} | {form.value.bits} | {form.effective_bits(128):.2f}"
    return f"| `{form.name}` | {also} | {bits} | {needs} | {stands} | {since}{form.source} |"


def _family(docstring: str | None) -> str:
    """Return what a reader returns, from the first sentence of its docstring."""
    sentence = (docstring or "").split("\n")[0].rstrip(".")
    return sentence.removeprefix("Return ").removeprefix("the ")


def refreshed(text: str) -> str:
    """Return a page with the output of its exact commands as they print now."""
    return _RUN.sub(lambda match: match[1] + _output(match["command"]) + match[4], text)


def _output(command: str) -> str:
    environment = os.environ | {"COLUMNS": "110", "NO_COLOR": "1", "TERM": "dumb"}
    words = [sys.executable, "-m", *shlex.split(command)]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, cwd=ROOT, check=False)
    if done.returncode not in (ExitStatus.DONE, ExitStatus.NOT_MET, ExitStatus.UNSUPPORTED):
        raise SystemExit(f"{command}: status {done.returncode}\n{done.stderr}")
    return "\n".join(line.rstrip() for line in done.stdout.strip("\n").splitlines()) + "\n"


def main() -> int:
    """Write the pages, or with --check say which are stale."""
    wanted = {
        REFERENCE / "cli.md": command_line(),
        REFERENCE / "figures.md": figures(),
        REFERENCE / "models.md": models(),
        REFERENCE / "engines.md": engines(),
    }
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        if page not in wanted and page.exists():
            wanted[page] = refreshed(page.read_text())
    stale = [page for page, text in wanted.items() if not page.exists() or page.read_text() != text]
    if "--check" in sys.argv:
        for page in stale:
            sys.stderr.write(f"{page.relative_to(ROOT)} is stale: run `make docs`\n")
        return 1 if stale else 0
    for page in stale:
        page.write_text(wanted[page])
    return 0


if __name__ == "__main__":
    sys.exit(main())
