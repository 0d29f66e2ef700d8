"""The screen of `explain`."""

from collections.abc import Sequence
from typing import Final

from rich.console import Console
from rich.markup import escape

from kvplan.engines import find_engine
from kvplan.engines.logs import Finding, LogFacts, Verdict, held_against_model
from kvplan.report.table import plain_table, say
from kvplan.units import format_bytes

_STYLES = {Verdict.UNEXPLAINED: "bold red", Verdict.MISLEADS: "yellow", Verdict.NOT_CHECKED: "dim"}
_WORDS: Final = {
    Verdict.UNEXPLAINED: ("does not follow", "do not follow"),
    Verdict.MISLEADS: ("is right and misleads", "are right and mislead"),
    Verdict.EXPLAINED: ("follows from what the log does not say", "follow from what the log does not say"),
    Verdict.AGREES: ("agrees", "agree"),
    Verdict.NOT_CHECKED: ("was not checked", "were not checked"),
}
"""Of one figure and of several."""


def print_explanation(console: Console, facts: LogFacts, findings: Sequence[Finding], *, model: str) -> None:
    """Print the verdict, each figure with what it was computed to be, and what only the run could tell."""
    say(console, _sentences(findings, known=bool(model)), style="bold")
    say(console, _subject(facts, model))
    table = plain_table([("line", True), ("figure", False), ("printed", True), ("computed", True), ("", False)])
    for finding in findings:
        style = _STYLES.get(finding.verdict, "")
        line = str(finding.line) if finding.line else ""
        cells = (line, escape(finding.what), escape(finding.printed), escape(finding.recomputed), finding.verdict)
        table.add_row(*cells, style=style)
    console.print(table)
    for finding in findings:
        if finding.reason:
            say(console, f"line {finding.line}, {finding.what}: {finding.reason}")
    _print_measured(console, facts)


def _sentences(findings: Sequence[Finding], *, known: bool) -> str:
    """Return what became of the figures, the worst first."""
    said = [] if held_against_model(findings) or not known else [_unheld(findings)]
    for verdict, (one, several) in _WORDS.items():
        names = [finding.what for finding in findings if finding.verdict is verdict]
        if names:
            count = f"1 figure {one}" if len(names) == 1 else f"{len(names)} figures {several}"
            listed = "" if verdict is Verdict.AGREES else f": {', '.join(dict.fromkeys(names))}"
            said.append(f"{count}{listed}.")
    return " ".join(said)


def _unheld(findings: Sequence[Finding]) -> str:
    why = (finding.reason for finding in findings if finding.needs_model and finding.reason)
    reason = next(why, "it has none that is computed from a model")
    return f"No figure of the log could be held against the model: {reason}."


def _subject(facts: LogFacts, model: str) -> str:
    title = find_engine(facts.engine).title
    setup = facts.setup
    parts = [f"{title} {facts.version}".strip(), model or f"{facts.model or 'model not named'} (geometry not known)"]
    parts += [f"cache in {facts.format}"] if facts.format else []
    parts += [f"{setup.context_tokens} tokens"] if setup.context_tokens else []
    parts += [f"tp {setup.tensor_parallel}"] if setup.tensor_parallel > 1 else []
    parts += [f"pp {setup.pipeline_parallel}"] if setup.pipeline_parallel > 1 else []
    return " | ".join(parts)


def _print_measured(console: Console, facts: LogFacts) -> None:
    run = facts.measured
    named = (
        ("usable", run.usable), ("weights", run.weights), ("activations", run.activations),
        ("beside tensors", run.context), ("graphs", run.graphs),
    )  # fmt: skip
    parts = [f"{name} {format_bytes(figure.value, digits=2)}" for name, figure in named if figure is not None]
    if parts:
        say(console, "measured by that run: " + ", ".join(parts))
