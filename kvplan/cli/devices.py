"""`kvplan devices`: what measurements can be taken on here."""

import sys

import typer


def register(app: typer.Typer) -> None:
    """Add the command to *app*."""
    app.command("devices")(devices_command)


def devices_command(as_json: bool = typer.Option(False, "--json", help="Print JSON.")) -> None:
    """List the devices of this machine that kvplan measures on."""
    from kvplan.measure.device import DEVICES, open_device
    from kvplan.units import format_bytes

    found = [(name, open_device(name)) for name in DEVICES]
    if as_json:
        from kvplan.report.json import dump

        devices = [
            {"device": name, "info": device.info, "available_bytes": device.available_bytes()} for name, device in found
        ]
        sys.stdout.write(dump({"devices": devices}) + "\n")
        return
    from kvplan.report.console import open_console
    from kvplan.report.table import plain_table

    table = plain_table(
        [("device", False), ("name", False), ("cores", True), ("memory", True), ("available", True), ("cache", True)]
    )
    for name, device in found:
        info = device.info
        table.add_row(
            name, info.name, str(info.cores), format_bytes(info.memory_bytes),
            format_bytes(device.available_bytes()), format_bytes(info.last_level_cache_bytes),
        )  # fmt: skip
    open_console().print(table)
