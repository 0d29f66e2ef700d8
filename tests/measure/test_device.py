import platform
from pathlib import Path

import pytest

from kvplan.errors import ExitStatus, InputError, KvplanError, MissingPartError
from kvplan.measure.device import CpuDevice, FakeDevice, Usage, last_level_cache_bytes, parse_usage
from kvplan.measure.devices import open_device
from kvplan.measure.environment import STEAL_WEIGHT, TOLERANCE, Watch, disturbance


def usage(total: float, busy: float = 0, steal: float = 0, own: float = 0) -> Usage:
    return Usage(total_s=total, busy_s=busy, steal_s=steal, own_s=own)


def test_guest_time_is_not_counted_twice() -> None:
    found = parse_usage("cpu  100 10 20 300 40 5 6 7 90 9", 10, own_s=1.5)

    assert found == Usage(total_s=48.8, busy_s=14.1, steal_s=0.7, own_s=1.5)


def test_the_largest_cache_is_the_last_level(tmp_path: Path) -> None:
    for index, size in enumerate(("48K", "32K", "2048K", "30M")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(size + "\n")

    assert last_level_cache_bytes(tmp_path) == 30 * 2**20


def test_an_unknown_cache_is_zero(tmp_path: Path) -> None:
    assert last_level_cache_bytes(tmp_path / "none") == 0


def test_two_openings_are_one_device() -> None:
    first, second = CpuDevice("a"), CpuDevice("b")

    assert first.info.uuid == second.info.uuid
    assert first.info.uuid.startswith("cpu-")
    assert second.info.kernel_variant == "b"


def test_the_processor_is_described() -> None:
    device = CpuDevice()

    assert device.info.cores >= 1
    assert 0 < device.available_bytes() <= device.info.memory_bytes
    assert 0 < device.resident_bytes() <= device.memory().figures["process_peak_bytes"] + 2**20


def test_the_device_of_auto_is_the_processor() -> None:
    assert open_device("auto").info == open_device("cpu").info


def test_a_device_goes_by_its_own_name_too() -> None:
    assert open_device(CpuDevice().info.name).info == CpuDevice().info


@pytest.mark.parametrize(
    ("name", "kind", "status"),
    [
        ("cuda", MissingPartError, ExitStatus.UNSUPPORTED),
        ("cuda:x", MissingPartError, ExitStatus.UNSUPPORTED),
        ("cpu:7", InputError, ExitStatus.BAD_INPUT),
        ("tpu", InputError, ExitStatus.BAD_INPUT),
    ],
)
def test_other_devices_are_refused(name: str, kind: type[KvplanError], status: ExitStatus) -> None:
    with pytest.raises(kind) as caught:
        open_device(name)

    assert caught.value.status is status


def test_other_systems_are_told_where_measuring_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Darwin")

    with pytest.raises(MissingPartError, match="Darwin"):
        CpuDevice()


def test_what_others_took_is_told_apart_from_own_work() -> None:
    device = FakeDevice(usages=[usage(100, busy=50, own=40), usage(200, busy=130, steal=1, own=100)], hz=2e9)

    conditions = Watch(device).conditions()

    assert conditions.foreign_cpu_share == pytest.approx(0.2)
    assert conditions.steal_share == pytest.approx(0.01)
    assert conditions.clock_hz == (2e9, 2e9)


def test_own_work_alone_disturbs_nothing() -> None:
    device = FakeDevice(usages=[usage(0), usage(10, busy=5.04, own=5.06)])

    assert disturbance(Watch(device).conditions()) == ""


@pytest.mark.parametrize(
    ("foreign", "steal", "said"),
    [
        (TOLERANCE * 1.5, 0, "other processes took 15%"),
        (0, 2 * TOLERANCE / STEAL_WEIGHT, "the hypervisor took 4%"),
        (TOLERANCE, TOLERANCE / STEAL_WEIGHT, ""),
    ],
)
def test_a_disturbance_is_named_with_its_share(foreign: float, steal: float, said: str) -> None:
    device = FakeDevice(usages=[usage(0), usage(1000, busy=1000 * foreign, steal=1000 * steal)])

    found = disturbance(Watch(device).conditions())

    assert found.startswith(said) if said else found == ""
