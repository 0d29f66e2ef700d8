"""`kvplan devices`: what measurements can be taken on here."""

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from kvplan.measure.nvml import GpuState, Reading


def register(app: typer.Typer) -> None:
    """Add the command to *app*."""
    app.command("devices")(devices_command)


def devices_command(as_json: bool = typer.Option(False, "--json", help="Print JSON.")) -> None:
    """List the devices of this machine that kvplan measures on."""
    from kvplan.measure.devices import all_devices
    from kvplan.measure.nvml import open_nvml
    from kvplan.units import format_bytes

    listed = list(all_devices())
    found = [(name, device) for name, device in listed if not isinstance(device, str)]
    absent = {name: reason for name, reason in listed if isinstance(reason, str)}
    with open_nvml() as nvml:
        gpus, gpus_reason = nvml.gpus(), nvml.reason
    if as_json:
        from kvplan.report.json import dump

        devices = [
            {"device": name, "info": device.info, "available_bytes": device.available_bytes()} for name, device in found
        ]
        found_all = {"devices": devices, "absent": absent, "gpus": gpus, "gpus_reason": gpus_reason}
        sys.stdout.write(dump(found_all) + "\n")
        return
    from kvplan.report.console import open_console
    from kvplan.report.table import plain_table, say

    table = plain_table(
        [("device", False), ("name", False), ("cores", True), ("memory", True), ("available", True), ("cache", True)]
    )
    for name, device in found:
        info = device.info
        table.add_row(
            name, info.name, str(info.cores), format_bytes(info.memory_bytes),
            format_bytes(device.available_bytes()), format_bytes(info.last_level_cache_bytes),
        )  # fmt: skip
    console = open_console()
    console.print(table)
    for kind, reason in absent.items():
        console.print()
        say(console, f"not measured on {kind}: {reason}")
    if not gpus:
        console.print()
        say(console, f"no NVIDIA GPU{': ' + gpus_reason if gpus_reason else ''}")
    for gpu in gpus:
        for line in _gpu_lines(gpu):
            say(console, line, wrap=False)


def _gpu_lines(gpu: "GpuState") -> Iterator[str]:
    yield ""
    if gpu.reason:
        yield f"NVIDIA GPU {gpu.uuid}: {gpu.reason}"
        return
    width = max(len(name) for name in gpu.readings)
    for name, reading in gpu.readings.items():
        yield f"{name:<{width}}  {_shown(reading)}"


def _shown(reading: "Reading") -> str:
    from kvplan.units import format_bytes

    value, number = reading.value, reading.number
    if value is None:
        return f"absent: {reading.reason}"
    if isinstance(value, tuple):
        return ", ".join(value) or "none"
    if number is None:
        return str(value)
    if reading.unit == "B":
        return format_bytes(number)
    return f"{number / 1e6:.0f} MHz" if reading.unit == "Hz" else f"{number:g} {reading.unit}"
