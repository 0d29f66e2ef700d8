"""`kvplan explain`: what an engine's start-up log says of its cache, computed anew."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import typer

from kvplan.errors import ExitStatus, InputError, KvplanError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvplan.core.specs import ModelSpec
    from kvplan.engines.logs import Finding, LogFacts

_LOG_BYTES_MAX: Final = 2**28
_OPENING_BYTES: Final = 2**16


def register(app: typer.Typer) -> None:
    """Add the command to *app*."""
    app.command("explain")(explain_command)


def explain_command(
    log: Path = typer.Argument(..., metavar="LOG", help="Start-up log of an engine."),
    model: str | None = typer.Option(
        None, help="The model that was served. Default: the one the log names, where it is here.", show_default=False
    ),
    engine: str | None = typer.Option(
        None, help="Engine that printed the log. Default: the one it reads like.", show_default=False
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Compute each figure of a start-up log anew, and name the term that makes a difference.

    Ends with 4 where a figure does not follow from the model and the setting, with 3 where the model
    is not known or no figure of the log could be held against it, and with 0 where all that could follow.
    """
    from kvplan.engines import explain_log

    facts = load_facts(log, engine)
    spec = _model(facts, model)
    findings = explain_log(facts, spec)
    if as_json:
        from kvplan.report.json import explanation_json

        sys.stdout.write(explanation_json(facts, findings) + "\n")
    else:
        from kvplan.report.console import open_console
        from kvplan.report.explanation import print_explanation

        print_explanation(open_console(), facts, findings, model=spec.name if spec else "")
    raise typer.Exit(_status(findings, known=spec is not None))


def load_facts(log: Path, engine: str | None = None) -> "LogFacts":
    """Return what the file *log* says.

    Raises:
        InputError: It cannot be read, or has no figures about a cache.
    """
    from kvplan.engines import read_log
    from kvplan.store.files import read_file

    data = read_file(log, limit_bytes=_LOG_BYTES_MAX)
    if b"\0" in data[:_OPENING_BYTES]:
        raise InputError("is no text", where=str(log), hint="give the start-up log of an engine")
    text = data.decode("utf-8", "replace")
    facts = read_log(text, engine)
    if facts is None or not facts.figures:
        hint = facts.hint if facts else f"give the start-up log of {_printing()} or Ollama"
        raise InputError("has no figures about a KV cache", where=str(log), hint=hint)
    return facts


def _printing() -> str:
    from kvplan.engines import ENGINES

    return ", ".join(engine.title for engine in ENGINES.values() if engine.logs)


def _model(facts: "LogFacts", name: str | None) -> "ModelSpec | None":
    """Return the model that was named; else the one that the log names, where it is on this machine."""
    from kvplan.store.models import load_model_spec

    if name is not None:
        return replace(load_model_spec(name, runtime=False, weights=False), name=name)
    if not facts.model:
        return None
    try:
        return replace(load_model_spec(facts.model, runtime=False, weights=False), name=facts.model)
    except KvplanError:
        return None


def _status(findings: "Sequence[Finding]", *, known: bool) -> ExitStatus:
    from kvplan.engines.logs import Verdict, held_against_model

    verdicts = {finding.verdict for finding in findings}
    if Verdict.UNEXPLAINED in verdicts:
        return ExitStatus.MISMATCH
    decided = held_against_model(findings) if known else bool(verdicts) and Verdict.NOT_CHECKED not in verdicts
    return ExitStatus.DONE if decided else ExitStatus.UNSUPPORTED
