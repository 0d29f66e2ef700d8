"""The table of devices: which there are here, and which one a name means."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from kvplan.errors import InputError, MissingPartError, UnsupportedFormatError
from kvplan.measure.cuda import CudaDevice, cuda_count, cuda_missing
from kvplan.measure.device import CpuDevice, Device

AUTO: Final = "auto"


@dataclass(frozen=True, slots=True)
class Kind:
    """Devices of one kind.

    Attributes:
        count: Returns how many there are.
        missing: Returns why there is none, or None.
        open: Makes one by its number, told the kernel variant that is chosen on it.
    """

    count: Callable[[], int]
    missing: Callable[[], str | None]
    open: Callable[[int, str], Device]


KINDS: Final = {
    "cuda": Kind(count=cuda_count, missing=cuda_missing, open=CudaDevice),
    "cpu": Kind(count=lambda: 1, missing=lambda: None, open=lambda _, variant: CpuDevice(variant)),
}
"""By name, the one that `auto` prefers first."""


def all_devices() -> Iterator[tuple[str, Device | str]]:
    """Yield the name of each device and itself, or why nothing can be measured on it."""
    for kind, row in KINDS.items():
        if reason := row.missing():
            yield kind, reason
        for number in range(row.count()):
            name = kind if row.count() == 1 else f"{kind}:{number}"
            try:
                yield name, row.open(number, "")
            except UnsupportedFormatError as error:
                yield name, error.message


def open_device(name: str, kernel_variant: str = "") -> Device:
    """Return the device called *name*.

    Args:
        name: auto, a kind and number as `kvplan devices` has them (cuda, cuda:1, cpu), a UUID, or the model's name.
        kernel_variant: The kernel path chosen on it, for the record.

    Raises:
        MissingPartError: There is no device of the kind, with the reason.
        InputError: No such device.
    """
    if name == AUTO:
        name = next(found for found, device in all_devices() if not isinstance(device, str))
    kind, colon, number = name.partition(":")
    if kind in KINDS:
        return _open(KINDS[kind], name, number if colon else "0", kernel_variant)
    for found, device in all_devices():
        if not isinstance(device, str) and name in (device.info.name, device.info.uuid):
            return open_device(found, kernel_variant)
    raise InputError(f"no device {name!r}", hint=f"use auto, {', '.join(KINDS)} or what `kvplan devices` lists")


def _open(row: Kind, name: str, number: str, kernel_variant: str) -> Device:
    if reason := row.missing():
        raise MissingPartError(f"device {name}: {reason}", hint="use --device cpu, or see `kvplan devices`")
    if not number.isdecimal() or int(number) >= row.count():
        raise InputError(f"no device {name!r}: there are {row.count()} of the kind", hint="see `kvplan devices`")
    try:
        return row.open(int(number), kernel_variant)
    except RuntimeError as error:
        line = str(error).strip().partition("\n")[0]
        raise MissingPartError(f"device {name}: {line}", hint="see `kvplan devices`") from error
