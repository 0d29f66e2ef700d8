"""The measuring path on a device: its clock, its memory, how cells end, and a whole profile."""

import json
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest
import torch

from kvplan.cli import main
from kvplan.core.records import CellStatus
from kvplan.core.specs import DeviceKind
from kvplan.errors import NotRecordedError
from kvplan.measure.bandwidth import COPY, READ, bandwidths
from kvplan.measure.devices import open_device
from kvplan.measure.nvml import open_nvml
from kvplan.measure.worker import outcome
from kvplan.store.profiles import load_profile


def test_the_device_is_the_one_that_nvml_knows_by_its_uuid() -> None:
    info = open_device("cuda").info

    with open_nvml() as nvml:
        assert nvml.find(info.uuid).reason == ""
    assert info.kind is DeviceKind.CUDA
    assert info.last_level_cache_bytes > 0


def test_events_agree_with_the_hosts_clock_on_a_long_call() -> None:
    device = open_device("cuda")
    matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)

    def work() -> None:
        for _ in range(40):
            matrix @ matrix

    device.time(work)
    start = device.now()
    seconds = device.time(work)
    assert seconds == pytest.approx(device.now() - start, rel=0.1)
    replay = device.repeated(lambda: matrix @ matrix, 40)
    assert device.time(replay) == pytest.approx(seconds, rel=0.2)


def test_a_copy_moves_bytes_at_about_the_rate_of_reading() -> None:
    found = bandwidths(open_device("cuda"), threads=1, buffer_bytes=2**30)

    assert min(found[READ]) > 1e11
    assert 0.5 * median(found[READ]) < median(found[COPY]) < 1.1 * median(found[READ])


def test_after_a_call_that_cannot_be_recorded_the_next_ones_can() -> None:
    device = open_device("cuda")
    number, stream = torch.ones(1, device="cuda"), torch.cuda.current_stream()

    with pytest.raises(NotRecordedError):
        device.repeated(lambda: number.item(), 1)

    assert torch.cuda.current_stream() == stream
    device.start_cell()
    for _ in range(2):  # each graph is gone before the next is recorded
        device.repeated(lambda: number.add_(1), 3)()
    torch.cuda.synchronize()
    assert float(number) == 1 + 2 * 2 * 3  # recorded calls run at the replays: once untimed, once asked for


def test_a_first_replay_takes_no_longer_than_later_ones() -> None:
    device = open_device("cuda")
    numbers = torch.ones(2**20, device="cuda")
    replay = device.repeated(lambda: numbers.add_(1), 20)

    times = [device.time(replay) for _ in range(9)]

    assert times[0] < 2 * median(times)


def test_the_allocator_and_nvml_explain_the_memory_together() -> None:
    device = open_device("cuda")
    held = torch.zeros(2**30, dtype=torch.uint8, device="cuda")

    memory = device.memory()

    assert memory.figures["allocator_peak_bytes"] >= held.nbytes
    assert memory.figures["allocator_reserved_bytes"] >= held.nbytes
    whole = memory.figures.get("own_device_bytes", memory.figures["device_used_bytes"])
    assert memory.figures["outside_allocator_bytes"] == whole - memory.figures["allocator_reserved_bytes"] > 0


def test_memory_that_runs_out_ends_a_cell_and_leaves_the_device_usable() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**45, dtype=torch.uint8, device="cuda")

    assert outcome(caught.value) is CellStatus.OUT_OF_MEMORY
    assert float(torch.ones(3, device="cuda").sum()) == 3


def test_the_demo_model_is_profiled_and_checked_against_itself(tmp_path: Path) -> None:
    workload = Path(__file__).parents[2] / "profiles/kvplan_profiles/workloads/demo.yaml"
    out = tmp_path / "profile.json"

    assert main(["profile", "demo", "-w", str(workload), "--device", "cuda", "--quick", "-o", str(out)]) == 0

    profile = load_profile(out)
    assert profile.device.kind is DeviceKind.CUDA
    assert {cell.key.kernel.partition("/")[0] for cell in profile.cells} == {"triton"}
    assert all(cell.status in (CellStatus.OK, CellStatus.DISTURBED) for cell in profile.cells)
    assert main(["check", str(out), "--baseline", str(out)]) == 0


def test_the_kernels_are_timed_beside_torch() -> None:
    command = [sys.executable, "-m", "kvplan", "kernels", "bench", "decode", "--device", "cuda", "--batch", "16"]
    done = subprocess.run([*command, "--tokens", "16384", "--json"], capture_output=True, text=True, check=True)

    found = json.loads(done.stdout)
    cells = {(cell["impl"], cell["format"]): cell["median_s"] for cell in found["cells"]}
    print(json.dumps(found, indent=1))  # noqa: T201 - what a device measured, for whoever runs this
    assert cells["kvplan", "int4"] < cells["kvplan", "bf16"]
