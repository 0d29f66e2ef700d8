"""How long a device spends on some parts of a call, told once the whole call is done."""

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch


class Stopwatch:
    """Adds up stretches of a call on *device*, as torch names it, without waiting for it in between."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._host_s = 0.0
        self._stretches: list[tuple[Any, Any]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count what is started inside."""
        if not self._device.startswith("cuda"):
            started = perf_counter()
            yield
            self._host_s += perf_counter() - started
            return
        cuda: Any = torch.cuda
        with cuda.device(self._device):
            start, end = (cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            yield
            end.record()
        self._stretches.append((start, end))

    def seconds(self) -> float:
        """Return the sum; the device must be done with all of it."""
        return self._host_s + sum(float(start.elapsed_time(end)) for start, end in self._stretches) / 1e3
