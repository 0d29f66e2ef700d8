"""Samples of calls: warmed up, repeated inside where a call is short, interleaved, every sample kept."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Final

from kvplan.measure.device import Device

Call = Callable[[], object]

INNER_MAX: Final = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How often calls are timed.

    Attributes:
        samples: Samples of each call.
        warmups: Calls before the first sample; the last of them says how long a call takes.
        sample_s_min: A call shorter than this is repeated inside a sample until the sample is this long.
        budget_s: Once this much time is spent, no round starts beyond the third.
    """

    samples: int
    warmups: int = 2
    sample_s_min: float = 5e-4
    budget_s: float | None = None


ROUNDS_MIN: Final = 3


def time_once(device: Device, call: Call) -> float:
    """Return the seconds that one call takes."""
    device.synchronize()
    start = device.now()
    call()
    device.synchronize()
    return device.now() - start


def sample_interleaved(device: Device, calls: Mapping[str, Call], sampling: Sampling) -> dict[str, tuple[float, ...]]:
    """Return seconds per call of each of *calls*, one sample of every call a round.

    Every round has the same order: then a whole round lies between two samples of a call, and what the one left in the
    processor's cache is gone at the other. A drift of the machine falls on all calls alike.
    """
    inner = {name: _warm_up(device, call, sampling) for name, call in calls.items()}
    found: dict[str, list[float]] = {name: [] for name in calls}
    start = device.now()
    for number in range(sampling.samples):
        spent = device.now() - start
        if number >= ROUNDS_MIN and sampling.budget_s is not None and spent > sampling.budget_s:
            break
        for name, call in calls.items():
            found[name].append(_sample(device, call, inner[name]))
    return {name: tuple(samples) for name, samples in found.items()}


def _warm_up(device: Device, call: Call, sampling: Sampling) -> int:
    last = 0.0
    for _ in range(sampling.warmups):
        last = time_once(device, call)
    if last <= 0.0:
        return 1
    return min(INNER_MAX, max(1, ceil(sampling.sample_s_min / last)))


def _sample(device: Device, call: Call, inner: int) -> float:
    def repeat() -> None:
        for _ in range(inner):
            call()

    return time_once(device, repeat if inner > 1 else call) / inner
