"""The CUDA device without one: torch's names for it are stood in for, what is read and computed is the product's."""

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from threading import Event, current_thread, main_thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvplan.core.specs import DeviceKind
from kvplan.errors import InputError, MissingPartError, NotRecordedError, UnsupportedFormatError
from kvplan.measure import cuda, devices
from kvplan.measure.cuda import CudaDevice
from kvplan.measure.device import Readings
from kvplan.measure.devices import open_device
from kvplan.measure.environment import Watch, disturbance
from kvplan.measure.nvml import GpuState, Reading
from kvplan.measure.timing import Sampling, sample_interleaved

UUID = "8f6d8c9e-0c11-4f4b-9d2e-3b0a6f1d2c55"
READINGS = {
    "memory_used_bytes": Reading(9e9, "B"),
    "own_memory_bytes": Reading(5e9, "B"),
    "sm_clock_hz": Reading(1.5e9, "Hz"),
    "throttle": Reading(("software power cap",)),
    "power_w": Reading(412.5, "W"),
}


@dataclass
class FakeCuda:
    """What `torch.cuda` has, over a clock that tests move.

    A replayed graph takes what its calls took when recorded, and its first launch `upload_s` more. A launch costs the
    host `launch_s`: the device idles for it unless it has other work to go on with. A pool whose graphs are all gone is
    refused, and a recording that fails leaves its own stream current, as torch does.
    """

    clock_s: float = 0.0
    capability: tuple[int, int] = (9, 0)
    devices: int = 1
    recording: list[float] | None = None
    graphs: int = 0
    keepers: int = 0
    launches: int = 0
    current: str = ""
    pools: set[object] = field(default_factory=set)
    launch_s: float = 1e-5
    upload_s: float = 5e-4
    ahead_s: float = 0.0
    stream: str = "main"
    graphs_of: dict[object, "weakref.WeakSet[Any]"] = field(default_factory=dict)

    def run(self, seconds: float) -> None:
        self.launches += 1
        if self.recording is None:
            self.occupy(seconds)
        else:
            self.recording.append(seconds)

    def occupy(self, seconds: float) -> None:
        self.clock_s += max(0.0, self.launch_s - self.ahead_s) + seconds
        self.ahead_s = max(0.0, self.ahead_s - self.launch_s) + seconds

    def zero_(self) -> None:
        """Clear the buffer that `torch.empty` gave."""
        self.occupy(5e-5)

    def current_stream(self) -> str:
        return self.stream

    def set_stream(self, stream: str) -> None:
        self.stream = stream

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return self.devices

    def get_device_properties(self, number: int) -> Any:
        return SimpleNamespace(
            name="Fake H200", uuid=UUID, major=self.capability[0], minor=self.capability[1], multi_processor_count=132,
            total_memory=140 * 2**30, L2_cache_size=50 * 2**20,
        )  # fmt: skip

    def device(self, name: str) -> Any:
        self.current = name
        return nullcontext()

    def synchronize(self) -> None:
        self.ahead_s = 0.0

    def Event(self, *, enable_timing: bool) -> Any:  # noqa: N802 - torch's name
        assert enable_timing
        event = SimpleNamespace(at=None, synchronize=lambda: None)
        event.record = lambda: setattr(event, "at", self.clock_s)
        event.elapsed_time = lambda end: (end.at - event.at) * 1e3
        return event

    def CUDAGraph(self) -> Any:  # noqa: N802 - torch's name
        return FakeGraph(self)

    @contextmanager
    def graph(self, graph: "FakeGraph", pool: object = None) -> Iterator[None]:
        if pool is None:
            self.keepers += 1
        else:
            assert self.graphs_of[pool], "INTERNAL ASSERT FAILED: use_count > 0"
            self.pools.add(pool)
            self.graphs += 1
        graph.handle = pool or object()
        self.graphs_of.setdefault(graph.handle, weakref.WeakSet()).add(graph)
        self.recording, self.stream = graph.seconds, "recording"
        try:
            yield
        except BaseException:
            self.recording = None
            raise
        self.recording, self.stream = None, "main"

    def memory_reserved(self, name: str) -> int:
        return 4 * 10**9

    def memory_allocated(self, name: str) -> int:
        return 3 * 10**9

    def max_memory_allocated(self, name: str) -> int:
        return 35 * 10**8

    def mem_get_info(self, name: str) -> tuple[int, int]:
        return 100 * 10**9, 140 * 2**30

    def empty_cache(self) -> None:
        pass

    def reset_peak_memory_stats(self, name: str) -> None:
        pass


@dataclass(eq=False)
class FakeGraph:
    """One graph."""

    cuda: FakeCuda
    seconds: list[float] = field(default_factory=list)
    handle: object = None
    uploaded: bool = False

    def pool(self) -> object:
        return self.handle

    def replay(self) -> None:
        self.cuda.occupy(sum(self.seconds) + (0.0 if self.uploaded else self.cuda.upload_s))
        self.uploaded = True


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    found = FakeCuda()
    monkeypatch.setattr(torch, "cuda", found)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch, "zeros", lambda *_, device: found.run(0.0))
    monkeypatch.setattr(torch, "empty", lambda *_, dtype, device: found)
    return found


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> dict[str, Reading]:
    readings = dict(READINGS)

    @contextmanager
    def opened() -> Iterator[Any]:
        yield SimpleNamespace(reason="", find=lambda uuid: GpuState(uuid=f"GPU-{UUID}", readings=readings))

    monkeypatch.setattr(cuda, "open_nvml", opened)
    return readings


def test_the_gpu_is_described_by_its_own_figures_and_uuid(fake: FakeCuda) -> None:
    info = open_device("cuda").info

    assert (info.kind, info.uuid, info.kernel_variant) == (DeviceKind.CUDA, f"GPU-{UUID}", "sm_90")
    assert (info.cores, info.last_level_cache_bytes) == (132, 50 * 2**20)
    assert open_device("auto").info == info == open_device(f"GPU-{UUID}").info


def test_gpus_go_by_their_numbers(fake: FakeCuda) -> None:
    fake.devices = 2

    assert [name for name, _ in devices.all_devices()] == ["cuda:0", "cuda:1", "cpu"]
    assert open_device("cuda:1").torch_name == "cuda:1"
    with pytest.raises(InputError, match="there are 2"):
        open_device("cuda:2")


def test_a_gpu_that_is_too_old_is_refused_with_the_reason(fake: FakeCuda) -> None:
    fake.capability = (7, 5)

    with pytest.raises(UnsupportedFormatError, match=r"compute capability 7\.5"):
        open_device("cuda")
    assert open_device("auto").info.kind is DeviceKind.CPU
    assert [name for name, device in devices.all_devices() if not isinstance(device, str)] == ["cpu"]


def test_torch_without_cuda_is_the_reason_that_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)

    with pytest.raises(MissingPartError, match="built without CUDA"):
        open_device("cuda")
    assert open_device("auto").info.kind is DeviceKind.CPU


def test_times_are_those_between_the_events_of_the_device(fake: FakeCuda) -> None:
    device = CudaDevice()

    assert device.time(lambda: fake.run(0.002)) == pytest.approx(0.002)


def test_a_sample_replays_one_graph_of_whole_rotations(fake: FakeCuda) -> None:
    """The host is not in the time, and every copy is read once before any is read again."""
    device = CudaDevice()

    found = sample_interleaved(
        device, {"a": lambda: fake.run(1e-4), "b": lambda: fake.run(1e-2)}, Sampling(samples=6, warmups=1),
        {"a": 3, "b": 4},
    )  # fmt: skip

    assert found["a"] == pytest.approx((1e-4,) * 6)
    assert found["b"] == pytest.approx((1e-2,) * 6)
    assert fake.graphs == 2
    assert fake.launches == 1 + (1 + 3) + (1 + 4)  # the keeper; of each a warm-up, and a rotation recorded
    assert len(fake.pools) == fake.keepers == 1


def test_short_recorded_calls_fill_a_sample(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launched one by one they take ten times as long, and would seem to fill it at once."""
    fake.launch_s = 2e-4
    spans: list[float] = []
    time = CudaDevice.time

    def spy(self: CudaDevice, call: Any) -> float:
        spans.append(time(self, call))
        return spans[-1]

    monkeypatch.setattr(CudaDevice, "time", spy)
    sample_interleaved(CudaDevice(), {"a": lambda: fake.run(1e-5)}, Sampling(samples=1, warmups=1), {"a": 4})

    assert spans[-1] >= Sampling(samples=1).sample_s_min


def test_the_first_launch_of_a_graph_is_in_no_time(fake: FakeCuda) -> None:
    device = CudaDevice()

    assert device.time(device.repeated(lambda: fake.run(1e-4), 1)) == pytest.approx(1e-4)


def test_a_graph_can_be_recorded_after_all_others_are_gone(fake: FakeCuda) -> None:
    device = CudaDevice()
    for _ in range(2):
        device.repeated(lambda: fake.run(1e-4), 1)
        gc.collect()

    assert fake.graphs == 2


def test_a_cell_begins_with_a_pool_of_its_own(fake: FakeCuda) -> None:
    device = CudaDevice()
    for _ in range(2):
        device.start_cell()
        device.repeated(lambda: fake.run(1e-4), 1)

    assert len(fake.pools) == fake.keepers == 2


def test_what_cannot_be_recorded_is_told_in_one_line_and_the_next_call_is_recorded(fake: FakeCuda) -> None:
    device = CudaDevice()

    def waits() -> None:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nFor debugging ...")

    with pytest.raises(NotRecordedError, match=r"operation not permitted when stream is capturing$"):
        device.repeated(waits, 1)

    assert fake.stream == "main"
    device.repeated(lambda: fake.run(1e-4), 1)


def test_an_error_of_what_ran_before_is_not_taken_for_one_of_recording(fake: FakeCuda) -> None:
    def fails() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        CudaDevice().repeated(fails, 1)


def test_launched_steps_are_not_recorded(fake: FakeCuda) -> None:
    sample_interleaved(CudaDevice(), {"step": lambda: fake.run(1e-4)}, Sampling(samples=3, repeated=False))

    assert fake.graphs == 0


def test_what_lies_outside_the_allocator_is_nvmls_figure_less_what_is_reserved(
    fake: FakeCuda, nvml: dict[str, Reading]
) -> None:
    memory = CudaDevice().memory()

    assert memory.figures["own_device_bytes"] == 5e9
    assert memory.figures["outside_allocator_bytes"] == 1e9
    assert memory.figures["allocator_peak_bytes"] == 3.5e9
    assert memory.missing == {}


def test_in_a_container_the_difference_holds_other_processes_too(fake: FakeCuda, nvml: dict[str, Reading]) -> None:
    nvml["own_memory_bytes"] = Reading(None, "B", "processes of another system")

    memory = CudaDevice().memory()

    assert memory.figures["outside_allocator_bytes"] == 5e9
    assert memory.missing == {"own_device_bytes": "processes of another system"}


def test_without_nvml_its_figures_are_absent_with_its_reason(fake: FakeCuda, nvml: dict[str, Reading]) -> None:
    for name in READINGS:
        nvml[name] = Reading(None, "", "the driver is not loaded")

    memory = CudaDevice().memory()

    names = {"own_device_bytes", "device_used_bytes", "outside_allocator_bytes"}
    assert memory.missing == dict.fromkeys(names, "the driver is not loaded")
    assert CudaDevice().readings() == Readings()


@pytest.mark.parametrize(
    ("reasons", "said"),
    [
        (("software power cap", "idle"), ""),
        (("hardware thermal slowdown",), "the GPU held its clocks down (hardware thermal slowdown)"),
    ],
)
def test_clocks_held_down_by_heat_disturb_and_the_power_limit_does_not(
    fake: FakeCuda, nvml: dict[str, Reading], reasons: tuple[str, ...], said: str
) -> None:
    nvml["throttle"] = Reading(reasons)
    device = CudaDevice()

    conditions = Watch(device).conditions()

    assert conditions.throttle == reasons
    assert set(conditions.power_w) == {412.5}
    assert len(conditions.clock_hz) >= 2
    assert set(conditions.clock_hz) == {1.5e9}
    assert disturbance(replace(conditions, foreign_cpu_share=0.0, steal_share=0.0)) == said


def test_a_mig_device_goes_by_the_name_that_nvml_finds_it_under(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def opened() -> Iterator[Any]:
        yield SimpleNamespace(reason="", find=lambda uuid: GpuState(uuid=f"MIG-{uuid}", readings={}))

    monkeypatch.setattr(cuda, "open_nvml", opened)

    assert CudaDevice().info.uuid == f"MIG-{UUID}"


def test_what_holds_clocks_down_between_the_ends_is_seen(fake: FakeCuda, nvml: dict[str, Reading]) -> None:
    seen = Event()

    class Hot(CudaDevice):
        poll_s = 0.001

        def readings(self) -> Readings:
            if current_thread() is main_thread():
                return Readings()
            seen.set()
            return Readings(throttle=("hardware thermal slowdown",))

    with Watch(Hot()) as watch:
        assert seen.wait(5)
        conditions = watch.conditions()

    assert "hardware thermal slowdown" in disturbance(conditions)


def test_what_torch_holds_and_does_not_use_is_available(fake: FakeCuda) -> None:
    assert CudaDevice().available_bytes() == 101 * 10**9
