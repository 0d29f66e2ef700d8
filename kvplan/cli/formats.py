"""`kvplan formats`: the formats there are kernels for."""

import sys

import typer


def register(app: typer.Typer) -> None:
    """Add the command to *app*."""
    app.command("formats")(formats_command)


def formats_command(
    model: str | None = typer.Argument(None, help="Model to give bytes per token for.", show_default=False),
    formats: list[str] = typer.Option(
        [], "-f", "--format", help="Format to show; may be repeated. Default: those with a name.", show_default=False
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """List formats with their bits, scales and minima counted, the devices with a fused kernel, and the engines."""
    from kvplan.core.formats import format_facts, listed_names
    from kvplan.engines.formats import engine_facts, with_engines

    spec = None
    if model is not None:
        from kvplan.store.models import load_model_spec

        spec = load_model_spec(model, runtime=False, weights=False)
    facts = [with_engines(format_facts(name, spec)) for name in dict.fromkeys(formats or listed_names(spec))]
    facts += [] if formats else engine_facts(spec)
    if as_json:
        from kvplan.report.json import formats_json

        sys.stdout.write(formats_json(facts) + "\n")
        return
    from kvplan.report.console import open_console
    from kvplan.report.formats import print_formats

    print_formats(open_console(), facts)
