"""`kvplan check`: a CI gate over two profiles, or over one and a budget."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from kvplan.errors import InputError

if TYPE_CHECKING:
    from kvplan.core.comparisons import Comparison


def register(app: typer.Typer) -> None:
    """Add the command to *app*."""
    app.command("check")(check_command)


def check_command(
    current: Path = typer.Argument(..., help="Profile to judge."),
    baseline: Path | None = typer.Option(None, help="Profile to compare with.", show_default=False),
    budget: Path | None = typer.Option(None, help="Budget YAML to hold it against.", show_default=False),
    margin: str | None = typer.Option(
        None, help="Part by which a time may rise. Default: 10% on a CPU, 5% on a GPU.", show_default=False
    ),
    junit: Path | None = typer.Option(None, help="Write JUnit XML here.", show_default=False),
    markdown: Path | None = typer.Option(None, help="Write Markdown here.", show_default=False),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Fail when a profile is worse than a baseline or over a budget, in bytes, time or quality.

    Exit status: 0 everything held; 1 a figure has regressed or a cell failed; 3 some could not be told.
    """
    _check_outputs([path for path in (current, baseline, budget) if path], [path for path in (junit, markdown) if path])
    comparison = _compare(current, baseline, budget, _margin(margin))
    _write(comparison, junit, markdown)
    if as_json:
        from kvplan.report.json import comparison_json

        sys.stdout.write(comparison_json(comparison) + "\n")
    else:
        from kvplan.report.comparison import print_comparison
        from kvplan.report.console import open_console

        print_comparison(open_console(), comparison)
    raise typer.Exit(comparison.status)


def _check_outputs(read: list[Path], written: list[Path]) -> None:
    for path in written:
        if any(path.exists() and path.samefile(other) for other in read if other.exists()):
            raise InputError("is read and would be overwritten", where=str(path), hint="name another file")


def _margin(text: str | None) -> float | None:
    if text is None:
        return None
    from kvplan.units import parse_share

    try:
        margin = parse_share(text)
    except InputError as error:
        raise InputError(error.message, where="--margin", hint="write it as 10%") from error
    if not 0 < margin < 1:
        raise InputError(f"{text!r} is no margin", where="--margin", hint="write it as 10%")
    return margin


def _compare(current: Path, baseline: Path | None, budget: Path | None, margin: float | None) -> "Comparison":
    from kvplan.store.profiles import load_profile

    if (baseline is None) == (budget is None):
        what = "two things to hold a profile against" if baseline else "nothing to hold the profile against"
        raise InputError(what, hint="give one of --baseline and --budget")
    profile = load_profile(current)
    if baseline is not None:
        from kvplan.core.compare import compare_profiles

        comparison = compare_profiles(profile, load_profile(baseline), margin)
    else:
        from kvplan.core.compare_budget import compare_budget
        from kvplan.store.budgets import load_budget

        assert budget is not None
        comparison = compare_budget(profile, load_budget(budget), margin)
    if not comparison.verdicts:
        raise InputError(f"{baseline or budget} says nothing of what {current} measured")
    return comparison


def _write(comparison: "Comparison", junit: Path | None, markdown: Path | None) -> None:
    from kvplan.report.junit import comparison_junit
    from kvplan.report.markdown import comparison_markdown
    from kvplan.store.files import write_atomically

    if junit is not None:
        write_atomically(junit, comparison_junit(comparison).encode())
    if markdown is not None:
        write_atomically(markdown, comparison_markdown(comparison).encode())
