"""The screen of `explain`."""

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape

from kvplan.engines import find_engine
from kvplan.engines.logs import Finding, LogFacts, Verdict
from kvplan.report.table import plain_table, say
from kvplan.units import format_bytes

_STYLES = {Verdict.UNEXPLAINED: "bold red", Verdict.MISLEADS: "yellow", Verdict.NOT_CHECKED: "dim"}


def print_explanation(console: Console, facts: LogFacts, findings: Sequence[Finding], *, model: str) -> None:
    """Print the verdict, each figure with what it was computed to be, and what only the run could tell."""
    say(console, _sentence(findings), style="bold")
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


def _sentence(findings: Sequence[Finding]) -> str:
    unexplained = [finding.what for finding in findings if finding.verdict is Verdict.UNEXPLAINED]
    checked = [finding for finding in findings if finding.verdict is not Verdict.NOT_CHECKED]
    if unexplained:
        return f"Not explained: {', '.join(dict.fromkeys(unexplained))}."
    if not checked:
        return "No figure could be checked."
    misleading = dict.fromkeys(finding.what for finding in findings if finding.verdict is Verdict.MISLEADS)
    seeming = f" Not what they seem: {', '.join(misleading)}." if misleading else ""
    return f"All {len(checked)} figures that could be checked are explained.{seeming}"


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
