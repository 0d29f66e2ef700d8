import json
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from kvplan.cli import main
from kvplan.errors import ExitStatus
from kvplan.measure.device import CpuDevice
from kvplan.measure.nvml import GpuState, Reading

READINGS = {
    "name": Reading("Fake [H200]"),
    "memory_free_bytes": Reading(3 * 2**29, "B"),
    "power_w": Reading(None, "W", "not supported by this device"),
    "sm_clock_hz": Reading(1.98e9, "Hz"),
    "throttle": Reading(("software power cap", "sync boost")),
    "uncorrected_errors": Reading(2, "errors"),
}


@dataclass
class FakeNvml:
    reason: str = ""
    found: list[GpuState] = field(default_factory=list)

    def gpus(self) -> list[GpuState]:
        return self.found


def install(monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml) -> None:
    @contextmanager
    def opened() -> Generator[FakeNvml, None, None]:
        yield nvml

    monkeypatch.setattr("kvplan.measure.nvml.open_nvml", opened)


def test_the_processor_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["devices"]) == ExitStatus.DONE

    out = capsys.readouterr().out
    assert "cpu" in out
    assert CpuDevice().info.name[:12] in out


def test_the_json_has_what_a_profile_says_of_a_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["devices", "--json"]) == ExitStatus.DONE

    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == 1
    assert found["devices"][0]["info"]["uuid"] == CpuDevice().info.uuid


def test_other_systems_are_unsupported(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.system", lambda: "Darwin")

    assert main(["devices"]) == ExitStatus.UNSUPPORTED
    assert "profile on Linux" in capsys.readouterr().err


def test_figures_of_a_gpu_are_listed_with_their_units(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, FakeNvml(found=[GpuState(uuid="GPU-1", readings=READINGS)]))

    assert main(["devices"]) == ExitStatus.DONE

    shown = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert shown[-6:] == [
        "name Fake [H200]",
        "memory_free_bytes 1.5 GiB",
        "power_w absent: not supported by this device",
        "sm_clock_hz 1980 MHz",
        "throttle software power cap, sync boost",
        "uncorrected_errors 2 errors",
    ]


def test_a_gpu_that_cannot_be_opened_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, FakeNvml(found=[GpuState(uuid="GPU-1", readings=READINGS, reason="the GPU is lost")]))

    assert main(["devices"]) == ExitStatus.DONE

    out = capsys.readouterr().out
    assert "NVIDIA GPU GPU-1: the GPU is lost" in out
    assert "power_w" not in out


def test_a_machine_without_a_gpu_is_told_why(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, FakeNvml(reason="the NVIDIA driver is not loaded"))

    assert main(["devices"]) == ExitStatus.DONE
    assert "no NVIDIA GPU: the NVIDIA driver is not loaded" in capsys.readouterr().out

    assert main(["devices", "--json"]) == ExitStatus.DONE
    found = json.loads(capsys.readouterr().out)
    assert (found["gpus"], found["gpus_reason"]) == ([], "the NVIDIA driver is not loaded")
