"""Samples of calls: warmed up, repeated inside where a call is short, interleaved, every sample kept."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Final

from kvplan.measure.device import Device, repeat

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
        repeated: Whether a device may repeat the call by itself, without the host; a model's step takes the host.
    """

    samples: int
    warmups: int = 2
    sample_s_min: float = 5e-4
    budget_s: float | None = None
    repeated: bool = True


ROUNDS_MIN: Final = 3


def sample_interleaved(
    device: Device, calls: Mapping[str, Call], sampling: Sampling, rotations: Mapping[str, int] | None = None
) -> dict[str, tuple[float, ...]]:
    """Return seconds per call of each of *calls*, one sample of every call a round.

    Every round has the same order: then a whole round lies between two samples of a call, and what the one left in the
    processor's cache is gone at the other. A drift of the machine falls on all calls alike.

    Args:
        device: What the calls run on.
        calls: By name.
        sampling: How often.
        rotations: Calls after which a bed's copies were all read, by name; 1 where it is not there.
    """
    samplers = {name: _sampler(device, call, sampling, (rotations or {}).get(name, 1)) for name, call in calls.items()}
    found: dict[str, list[float]] = {name: [] for name in calls}
    start = device.now()
    for number in range(sampling.samples):
        spent = device.now() - start
        if number >= ROUNDS_MIN and sampling.budget_s is not None and spent > sampling.budget_s:
            break
        for name, sampler in samplers.items():
            found[name].append(device.time(sampler.call) / sampler.times)
    return {name: tuple(samples) for name, samples in found.items()}


@dataclass(frozen=True, slots=True)
class _Sampler:
    """What one sample times: a call that stands for *times* of the call asked about."""

    call: Call
    times: int


def _sampler(device: Device, call: Call, sampling: Sampling, rotation: int) -> _Sampler:
    last = 0.0
    for _ in range(sampling.warmups):
        last = device.time(call)
    if not sampling.repeated:
        return _Sampler(call, 1)
    if not device.records:
        times = _fill(sampling, last)
        return _Sampler(device.repeated(call, times), times)
    # Launched from the host a call takes longer than recorded: what fills a sample is told by the recorded one.
    once = device.repeated(call, rotation)
    rounds = _fill(sampling, device.time(once))
    return _Sampler(repeat(once, rounds), rounds * rotation)


def _fill(sampling: Sampling, seconds: float) -> int:
    """Return how many calls of *seconds* fill a sample."""
    return 1 if seconds <= 0.0 else min(INNER_MAX, max(1, ceil(sampling.sample_s_min / seconds)))
