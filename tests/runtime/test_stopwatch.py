from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvplan.runtime import stopwatch
from kvplan.runtime.stopwatch import Stopwatch


def test_stretches_add_up_and_what_lies_between_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 1.0, 5.0, 7.5])
    monkeypatch.setattr(stopwatch, "perf_counter", lambda: next(times))
    watch = Stopwatch("cpu")
    for _ in range(2):
        with watch.running():
            pass

    assert watch.seconds() == 3.5


def test_on_a_gpu_the_device_is_asked_once_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    clock_ms = iter([0.0, 2.0, 10.0, 13.0])

    def event(*, enable_timing: bool) -> Any:
        made = SimpleNamespace(at=0.0)
        made.record = lambda: setattr(made, "at", next(clock_ms))
        made.elapsed_time = lambda end: end.at - made.at
        return made

    class Device:
        def __init__(self, name: str) -> None:
            assert name == "cuda:1"

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(torch, "cuda", SimpleNamespace(Event=event, device=Device))
    watch = Stopwatch("cuda:1")
    for _ in range(2):
        with watch.running():
            pass

    assert watch.seconds() == pytest.approx(0.005)
