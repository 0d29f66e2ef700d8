"""`kvplan doctor`: whether this machine has what measuring needs."""

import sys

import typer

from kvplan.errors import ExitStatus


def register(app: typer.Typer) -> None:
    """Add the command to *app*."""
    app.command("doctor")(doctor_command)


def doctor_command(as_json: bool = typer.Option(False, "--json", help="Print JSON.")) -> None:
    """Check packages, kernels, memory and what disturbs measuring on this machine.

    Exit status: 0 all that is needed is there; 3 something is missing.
    """
    from kvplan.measure.checks import run_checks

    checks = run_checks()
    if as_json:
        from kvplan.report.json import dump

        sys.stdout.write(dump({"checks": checks}) + "\n")
    else:
        width = max(len(check.name) for check in checks)
        for check in checks:
            mark = "ok" if check.good else "MISSING" if check.needed else "note"
            sys.stdout.write(f"{mark:<8}{check.name:<{width}}  {check.found}\n")
    missing = any(check.needed and not check.good for check in checks)
    raise typer.Exit(ExitStatus.UNSUPPORTED if missing else ExitStatus.DONE)
