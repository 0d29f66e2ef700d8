"""The command line: one thin module a command, and the one place where errors become exit statuses."""

import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from typing import Final

import typer

from kvplan import __version__
from kvplan.errors import ExitStatus, KvplanError

COMMANDS: Final = (
    "profile",
    "recommend",
    "check",
    "size",
    "explain",
    "quality",
    "calibrate",
    "formats",
    "devices",
    "doctor",
    "kernels",
)
"""Modules of this package, in the order of the help; each has `register(app)` and imports nothing heavy at the top."""


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvplan {__version__}")
        raise typer.Exit


def build_app() -> typer.Typer:
    """Return the application with every command."""
    app = typer.Typer(
        name="kvplan",
        help="Measure what a quantized KV cache saves and costs on your model, device and traffic, and pick a setting.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        add_completion=False,
        rich_markup_mode=None,  # plain help: importing rich for it takes a third of the start
    )

    @app.callback()
    def root(
        version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
    ) -> None:
        """Measure what a quantized KV cache saves and costs on your model, device and traffic, and pick a setting."""

    for name in COMMANDS:
        import_module(f"kvplan.cli.{name}").register(app)
    return app


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    try:
        build_app()(list(argv) if argv is not None else None)
    except KvplanError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.status
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; everything finished is kept\n")
        return ExitStatus.INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()
        return ExitStatus.DONE
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else ExitStatus.DONE
    except Exception as error:
        return _tell(error)
    return ExitStatus.DONE


def _tell(error: Exception) -> ExitStatus:
    """Tell a user in one line that memory or a GPU does not suffice; of everything else show where it happened."""
    from kvplan.measure.faults import user_error

    known = user_error(error)
    if known is None:
        traceback.print_exception(error)
        return ExitStatus.BUG
    sys.stderr.write(f"error: {known}\n")
    return known.status
