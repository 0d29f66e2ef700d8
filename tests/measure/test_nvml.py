"""The real binding over a stand-in for NVIDIA's library: loader, structures and errors are the real ones."""

import ctypes
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvplan.measure.nvml import GpuState, Reading, clock_events, open_nvml

pynvml = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")

SOURCE = Path(__file__).with_name("fake_nvml.c")
FIRST = "GPU-00000000-0000-0000-0000-000000000000"
SECOND = "GPU-11111111-1111-1111-1111-111111111111"
PART = "MIG-22222222-2222-2222-2222-222222222222"
NOWHERE = 2**22 + 1
"""Above Linux' largest process id."""
MEMORY = {"memory_total_bytes", "memory_used_bytes", "memory_free_bytes", "memory_reserved_bytes"}

Load = Callable[[Path], ctypes.CDLL]


def build(folder: Path, *flags: str) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        reason = "no C compiler"
        assert "KVPLAN_REQUIRE_NATIVE" not in os.environ, reason
        pytest.skip(reason)
    target = folder / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", *flags, "-o", str(target), str(SOURCE)], check=True)
    return target


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("nvml"), "-Wall", "-Wextra", "-Werror")


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    """Lets the binding's own loader find a library of the right name in another place."""

    def point(path: Path) -> ctypes.CDLL:
        monkeypatch.setattr(pynvml, "CDLL", lambda name: ctypes.CDLL(str(path.parent / name)))
        monkeypatch.setattr(pynvml, "nvmlLib", None)
        monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
        monkeypatch.setattr(pynvml.NVMLError, "_errcode_to_string", dict(pynvml.NVMLError._errcode_to_string))
        return ctypes.CDLL(str(path)) if path.exists() else ctypes.CDLL(None)

    return point


@pytest.fixture
def fake(library: Path, load: Load) -> ctypes.CDLL:
    return load(library)


def found(uuid: str = FIRST) -> GpuState:
    with open_nvml() as nvml:
        return nvml.find(uuid)


def own_memory(monkeypatch: pytest.MonkeyPatch, *processes: tuple[int, int]) -> Reading:
    monkeypatch.setenv("FAKE_NVML_PROCESSES", ",".join(f"{pid}:{count}" for pid, count in processes))
    return found().readings["own_memory_bytes"]


def test_a_gpu_is_read_in_bytes_watts_and_hertz(fake: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_NVML_PROCESSES", f"{os.getpid()}:4096")
    state = found()

    assert (state.uuid, state.reason) == (FIRST, "")
    assert {name: (reading.value, reading.unit) for name, reading in state.readings.items()} == {
        "uuid": (FIRST, ""),
        "name": ("Fake H200", ""),
        "memory_total_bytes": (1_000_000, "B"),
        "memory_used_bytes": (pytest.approx(200_000, rel=0.01), "B"),
        "memory_free_bytes": (pytest.approx(799_000, rel=0.01), "B"),
        "memory_reserved_bytes": (1_000, "B"),
        "own_memory_bytes": (4096, "B"),
        "power_w": (312.5, "W"),
        "sm_clock_hz": (1.98e9, "Hz"),
        "memory_clock_hz": (3.201e9, "Hz"),
        "throttle": ((), ""),
        "ecc": ("on", ""),
        "uncorrected_errors": (0, "errors"),
        "mig": ("off", ""),
        "driver_version": ("580.65.06", ""),
        "cuda_driver_version": ("12.9", ""),
    }
    assert not any(reading.reason for reading in state.readings.values())


def test_memory_is_of_one_moment_and_leaves_the_drivers_own_out_of_what_is_used(fake: ctypes.CDLL) -> None:
    readings = found().readings
    used, free, reserved = (readings[f"memory_{part}_bytes"].number or 0 for part in ("used", "free", "reserved"))

    assert used + free + reserved == 1_000_000
    assert 200_000 <= used < 201_000
    assert reserved == 1_000


def test_memory_of_a_structure_that_the_driver_does_not_know_is_absent(
    fake: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pynvml, "nvmlMemory_v2", 0x03000028)

    assert (
        found().readings["memory_free_bytes"].reason == "this NVIDIA driver does not know the version of the question"
    )


def test_the_gpu_asked_for_is_the_one_read_whatever_cuda_shows(
    fake: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")

    state = found(SECOND)

    assert (state.uuid, state.readings["name"].value) == (SECOND, "Fake A100")
    assert [state.readings[name].value for name in ("ecc", "mig", "uncorrected_errors")] == ["off", "on", 2]


@pytest.mark.parametrize("uuid", [FIRST, SECOND, PART])
def test_a_uuid_is_found_without_its_prefix_too(fake: ctypes.CDLL, uuid: str) -> None:
    assert found(uuid.partition("-")[2]).uuid == uuid


@pytest.mark.parametrize("uuid", ["GPU-3", "MIG-3", "3", ""])
def test_a_uuid_that_nvml_does_not_know_says_so_in_every_figure(fake: ctypes.CDLL, uuid: str) -> None:
    state = found(uuid)

    assert state.uuid == uuid
    assert state.reason == "NVML finds no such device"
    assert {(r.value, r.reason) for r in state.readings.values()} == {(None, "NVML finds no such device")}


def test_absent_figures_keep_their_units(fake: ctypes.CDLL) -> None:
    units = {name: reading.unit for name, reading in found().readings.items()}

    assert {name: reading.unit for name, reading in found("GPU-3").readings.items()} == units


def test_a_part_has_its_own_memory_and_shares_the_clocks_and_errors_of_its_gpu(fake: ctypes.CDLL) -> None:
    part, whole = found(PART).readings, found(SECOND).readings

    assert (part["uuid"].value, part["memory_total_bytes"].value) == (PART, 70_000)
    shared = ("sm_clock_hz", "memory_clock_hz", "throttle", "ecc", "uncorrected_errors", "mig")
    assert [part[name] for name in shared] == [whole[name] for name in shared]


def test_the_power_of_a_whole_gpu_is_not_taken_for_that_of_its_part(fake: ctypes.CDLL) -> None:
    assert found(PART).readings["power_w"] == Reading(None, "W", "not supported by this device")


def test_gpus_are_listed_with_their_parts_behind_them(fake: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with open_nvml() as nvml:
        listed = [gpu.uuid for gpu in nvml.gpus()]

    assert listed == [FIRST, SECOND, PART]


def test_a_gpu_that_cannot_be_opened_is_listed_with_the_reason_among_the_others(
    fake: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_NVML_ERRORS", f"nvmlDeviceGetHandleByIndex_v2@{FIRST}=15")
    with open_nvml() as nvml:
        lost, *others = nvml.gpus()

    assert "the GPU is lost" in lost.reason
    assert lost.readings["power_w"].reason == lost.reason
    assert [gpu.uuid for gpu in others] == [SECOND, PART]


@pytest.mark.parametrize(
    ("function", "listed"),
    [
        ("nvmlDeviceGetCount_v2", [("", True)]),
        ("nvmlDeviceGetMaxMigDeviceCount", [(FIRST, False), (SECOND, False)]),
        ("nvmlDeviceGetMigDeviceHandleByIndex", [(FIRST, False), (SECOND, False), *[("", True)] * 7]),
    ],
)
def test_a_list_that_nvml_does_not_give_raises_nothing(
    fake: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, function: str, listed: list[tuple[str, bool]]
) -> None:
    monkeypatch.setenv("FAKE_NVML_ERRORS", f"{function}=4")
    with open_nvml() as nvml:
        assert [(gpu.uuid, gpu.reason == "no permission to read it") for gpu in nvml.gpus()] == listed


@pytest.mark.parametrize(
    ("function", "names"),
    [
        ("nvmlDeviceGetName", {"name"}),
        ("nvmlDeviceGetMemoryInfo_v2", MEMORY),
        ("nvmlDeviceGetComputeRunningProcesses_v3", {"own_memory_bytes"}),
        ("nvmlDeviceGetPowerUsage", {"power_w"}),
        ("nvmlDeviceGetClockInfo", {"sm_clock_hz", "memory_clock_hz"}),
        ("nvmlDeviceGetCurrentClocksEventReasons", {"throttle"}),
        ("nvmlDeviceGetEccMode", {"ecc"}),
        ("nvmlDeviceGetTotalEccErrors", {"uncorrected_errors"}),
        ("nvmlDeviceGetMigMode", {"mig"}),
        ("nvmlSystemGetDriverVersion", {"driver_version"}),
        ("nvmlSystemGetCudaDriverVersion_v2", {"cuda_driver_version"}),
    ],
)
def test_a_figure_that_is_not_supported_is_absent_alone(
    fake: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, function: str, names: set[str]
) -> None:
    monkeypatch.setenv("FAKE_NVML_PROCESSES", f"{os.getpid()}:4096")
    monkeypatch.setenv("FAKE_NVML_ERRORS", f"{function}=3")

    absent = {name: reading for name, reading in found().readings.items() if reading.value is None}

    assert absent.keys() == names
    assert {reading.reason for reading in absent.values()} == {"not supported by this device"}


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("NVML_ERROR_INVALID_ARGUMENT", "NVML refuses the question for this device"),
        ("NVML_ERROR_NOT_SUPPORTED", "not supported by this device"),
        ("NVML_ERROR_NO_PERMISSION", "no permission to read it"),
        ("NVML_ERROR_DRIVER_NOT_LOADED", "the NVIDIA driver is not loaded"),
        ("NVML_ERROR_GPU_IS_LOST", "the GPU is lost: it fell off the bus or is inaccessible"),
        ("NVML_ERROR_RESET_REQUIRED", "the GPU needs a reset"),
        ("NVML_ERROR_TIMEOUT", "NVML error 10: Timeout"),
        ("NVML_ERROR_UNKNOWN", "NVML error 999: Unknown Error"),
        (42, "NVML error 42: an error of tomorrow"),
    ],
)
def test_a_figure_is_absent_with_nvmls_reason(
    fake: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, code: str | int, reason: str
) -> None:
    number = getattr(pynvml, code) if isinstance(code, str) else code
    monkeypatch.setenv("FAKE_NVML_ERRORS", f"nvmlDeviceGetPowerUsage={number}")

    assert found().readings["power_w"] == Reading(None, "W", reason)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("NVML_ERROR_DRIVER_NOT_LOADED", "the NVIDIA driver is not loaded"),
        (
            "NVML_ERROR_LIB_RM_VERSION_MISMATCH",
            "the NVIDIA driver and its library libnvidia-ml.so.1 are of different versions; restart the machine",
        ),
        ("NVML_ERROR_LIBRARY_NOT_FOUND", "NVIDIA's library libnvidia-ml.so.1 is not installed"),
        ("NVML_ERROR_NO_PERMISSION", "no permission to read it"),
        ("NVML_ERROR_UNKNOWN", "NVML error 999: Unknown Error"),
        (42, "NVML error 42: an error of tomorrow"),
    ],
)
def test_a_library_that_does_not_start_is_one_reason(
    fake: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, code: str | int, reason: str
) -> None:
    number = getattr(pynvml, code) if isinstance(code, str) else code
    monkeypatch.setenv("FAKE_NVML_ERRORS", f"nvmlInitWithFlags={number}")

    with open_nvml() as nvml:
        assert (nvml.reason, nvml.gpus()) == (reason, [])
        state = nvml.find(FIRST)

    assert (state.uuid, state.reason) == (FIRST, reason)
    assert {(reading.value, reading.reason) for reading in state.readings.values()} == {(None, reason)}


def test_a_machine_without_the_library_is_one_reason(load: Load, tmp_path: Path) -> None:
    load(tmp_path / "libnvidia-ml.so.1")

    with open_nvml() as nvml:
        assert nvml.reason == "NVIDIA's library libnvidia-ml.so.1 is not installed"
        assert nvml.gpus() == []


def test_an_installation_without_the_binding_is_one_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)

    with open_nvml() as nvml:
        assert "nvidia-ml-py is not installed" in nvml.reason
        assert nvml.find(FIRST).reason == nvml.reason


def test_a_driver_older_than_a_question_leaves_that_figure_absent(load: Load, tmp_path: Path) -> None:
    load(build(tmp_path, "-DnvmlDeviceGetCurrentClocksEventReasons=renamed"))

    readings = found().readings

    assert readings["throttle"] == Reading(None, "", "this NVIDIA driver cannot be asked for it")
    assert readings["power_w"].number == 312.5


def test_a_gpu_lost_after_it_was_found_keeps_the_name_it_was_asked_by(
    fake: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_NVML_ERRORS", "nvmlDeviceGetUUID=15")

    state = found(PART)

    assert state.uuid == PART
    assert "the GPU is lost" in state.readings["sm_clock_hz"].reason


def test_a_name_that_is_no_text_is_absent(fake: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_NVML_NAME", os.fsdecode(b"\xff"))

    assert found().readings["name"] == Reading(None, "", "NVML's answer is no text")


def test_own_memory_is_the_sum_over_own_entries_alone(fake: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    own = os.getpid()

    assert own_memory(monkeypatch, (own, 5), (os.getppid(), 100), (own, 7)).number == 12


@pytest.mark.parametrize("foreign", [0, NOWHERE])
def test_process_ids_of_another_system_are_not_matched_with_own(
    fake: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, foreign: int
) -> None:
    reading = own_memory(monkeypatch, (foreign, 100), (os.getpid(), 5))

    assert reading.value is None
    assert "ids that are not of this system" in reading.reason


def test_own_memory_is_absent_where_nvml_lists_only_others(fake: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    for processes in ([], [(os.getppid(), 100)]):
        reading = own_memory(monkeypatch, *processes)

        assert reading.value is None
        assert "not among those" in reading.reason


def test_own_memory_is_absent_where_nvml_lists_the_process_without_it(
    fake: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = own_memory(monkeypatch, (os.getpid(), 5), (os.getpid(), -1))

    assert reading == Reading(None, "B", "NVML lists this process without its memory")


@pytest.mark.parametrize(
    ("bits", "words"),
    [
        (0, ()),
        (1, ("idle",)),
        (0x4 | 0x40, ("software power cap", "hardware thermal slowdown")),
        (0x8 | 0x1000, ("hardware slowdown", "unknown 0x1000")),
    ],
)
def test_clock_events_are_said_in_words(
    fake: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, bits: int, words: tuple[str, ...]
) -> None:
    monkeypatch.setenv("FAKE_NVML_EVENTS", hex(bits))

    assert found().readings["throttle"].value == words


def test_every_clock_event_that_the_binding_knows_has_a_word() -> None:
    assert not any("unknown" in word for word in clock_events(pynvml.nvmlClocksThrottleReasonAll))


def test_nvml_is_stopped_whatever_happens_in_between(fake: ctypes.CDLL) -> None:
    def interrupted() -> None:
        with open_nvml():
            assert fake.fake_started() == 1
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()

    assert fake.fake_started() == 0


def test_figures_asked_for_after_nvml_was_stopped_are_absent(fake: ctypes.CDLL) -> None:
    with open_nvml() as nvml:
        pass

    assert nvml.find(FIRST).reason == "NVML is not started"


def test_a_stop_that_fails_is_not_told(fake: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as failing:
        failing.setenv("FAKE_NVML_ERRORS", "nvmlShutdown=999")
        assert found().reason == ""
    pynvml.nvmlShutdown()


def test_the_command_lists_gpus_that_the_systems_own_loader_finds(library: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvplan", "devices", "--json"],
        env={**os.environ, "LD_LIBRARY_PATH": str(library.parent), "FAKE_NVML_EVENTS": "4"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip

    found = json.loads(done.stdout)
    assert [gpu["uuid"] for gpu in found["gpus"]] == [FIRST, SECOND, PART]
    assert found["gpus"][0]["readings"]["power_w"] == {"value": 312.5, "unit": "W", "reason": ""}
    assert found["gpus"][0]["readings"]["throttle"]["value"] == ["software power cap"]
    assert found["gpus"][2]["readings"]["power_w"]["value"] is None
