"""Texts as Nsight Compute's manual and users' logs have them: Console Output, `--csv --page raw`, and its errors."""

import csv
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan.measure.ncu import METRICS, KernelTraffic, explain, parse

NAMES = ("ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream", "Block Size", "Grid Size",
         "Device", "CC")  # fmt: skip
SPLIT, MERGE = "_decode_split", "_decode_merge"


def table(
    rows: list[tuple[str, str, str]], units: tuple[str, str] = ("byte", "byte"), metrics: tuple[str, str] = METRICS[0]
) -> str:
    file = io.StringIO()
    writer = csv.writer(file, quoting=csv.QUOTE_ALL, lineterminator="\n")
    writer.writerow([*NAMES, *metrics])
    writer.writerow([""] * len(NAMES) + list(units))
    for number, (kernel, read, written) in enumerate(rows):
        launch = [str(number), "4711", "python3.11", "127.0.0.1", kernel, "1", "7", "(128, 1, 1)", "(8, 64, 1)", "0",
                  "9.0"]  # fmt: skip
        writer.writerow([*launch, read, written])
    return file.getvalue()


BEFORE = """\
==WARNING== Note: Running with unmodified GPU clocks. If not controlled otherwise, profiling results may be \
inconsistent.
==PROF== Connected to process 4711 (/usr/bin/python3.11)
==PROF== Profiling "_decode_split" - 0: 0%....50%....100% - 1 pass
==PROF== Profiling "_decode_merge" - 1: 0%....50%....100% - 1 pass
==PROF== Disconnected from process 4711
"""


def test_launches_are_summed_by_kernel() -> None:
    rows = [(SPLIT, "71,303,168", "4,096"), (MERGE, "262144", "16384"), (SPLIT, "1,000", "0")]

    assert parse(BEFORE + table(rows)).by_kernel == {
        SPLIT: KernelTraffic(launches=2, read_bytes=71304168, written_bytes=4096),
        MERGE: KernelTraffic(launches=1, read_bytes=262144, written_bytes=16384),
    }


@pytest.mark.parametrize(
    ("value", "unit", "count"),
    [
        ("512", "byte", 512), ("71.303168", "Mbyte", 71303168), ("1,024.5", "Kbyte", 1024500),
        ("1.5", "Gbyte", 15 * 10**8),
        ("0", "byte", 0), ("2.5e+02", "byte", 250),
    ],
)  # fmt: skip
def test_scaled_units_are_bytes(value: str, unit: str, count: int) -> None:
    found = parse(table([(SPLIT, value, "0")], (unit, "byte")))

    assert found.by_kernel[SPLIT] == KernelTraffic(1, count, 0)


def test_later_gpus_name_their_counters_otherwise() -> None:
    assert parse(table([(SPLIT, "7", "8")], metrics=METRICS[1])).by_kernel[SPLIT] == KernelTraffic(1, 7, 8)


def test_a_kernel_with_commas_and_quotes_in_its_name_is_one_kernel() -> None:
    name = 'void at::fill<float, "x">(int, float*)'

    assert list(parse(table([(name, "1", "2")])).by_kernel) == [name]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (table([(SPLIT, "n/a", "1")]), "dram__bytes_read.sum of _decode_split is 'n/a' byte"),
        (table([(SPLIT, "1", "9,00")]), "dram__bytes_write.sum of _decode_split is '9,00' byte"),
        (table([(SPLIT, "1", "-1")]), "is '-1' byte"),
        (table([(SPLIT, "1", "1")], ("%", "byte")), "is '1' %"),
        (table([(SPLIT, "1", "1")]).replace('"byte"', '""'), "is '1'"),
        (table([(SPLIT, "1", "1")]).replace("_write", "_wrote"), "no columns dram__bytes_read.sum"),
        (table([(SPLIT, "1", "1")]).replace(',"1"\n', "\n"), "12 columns under 13 names"),
        (table([(SPLIT, "1", "1"), (MERGE, "1", "")]), "dram__bytes_write.sum of _decode_merge is '' byte"),
        (table([(SPLIT, "9" * 400, "1")]), "dram__bytes_read.sum of _decode_split is '999"),
        ('"1","2"\n', "2 columns under 0 names"),
        (f'"{"x" * 200_000}"\n', "field larger than field limit"),
    ],
)
def test_a_table_with_anything_but_bytes_is_refused_as_a_whole(text: str, said: str) -> None:
    found = parse(text)

    assert not found.by_kernel
    assert found.reason.startswith("ncu's table cannot be read: ")
    assert said in found.reason


PERMISSION = """\
==PROF== Connected to process 9012 (/usr/bin/python3.11)
==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters on the target \
device 0. For instructions on enabling permissions and to get more information see \
https://developer.nvidia.com/ERR_NVGPUCTRPERM
==PROF== Disconnected from process 9012
==WARNING== No kernels were profiled.
"""
BUSY = """\
==PROF== Connected to process 7508 (/usr/bin/python3.11)

==ERROR== An error was reported by the driver

==ERROR== Profiling failed because a driver resource was unavailable. Ensure that no other tool (like DCGM) is \
concurrently collecting profiling data. See https://docs.nvidia.com/nsight-compute/ProfilingGuide/index.html#faq for \
more details.
==ERROR== Failed to profile "_decode_split" in process 7508
==PROF== Trying to shutdown target application
==ERROR== The application returned an error code (9).
==ERROR== An error occurred while trying to profile.
==WARNING== No kernels were profiled.
"""
OLD_DRIVER = """\
==ERROR== An error was reported by the driver:
==ERROR== Cuda driver is not compatible with Nsight Compute.
==PROF== Connected to process 2305223 (/usr/bin/python3.11)
==ERROR== The application returned an error code (11).
"""
NO_LIBRARY = """\
==PROF== Connected to process 162 (/usr/bin/python3.11)

==ERROR== An error was reported by the counter measurement library:
==ERROR== Failed to initialize the profiler: LibraryNotLoaded. Check that a compatible driver library is loaded.
==PROF== Trying to shutdown target application
==ERROR== The application returned an error code (9).
"""
NO_DRIVER = """\
==ERROR== Nsight Compute failed to connect to the CUDA driver (stub libcuda.so[.1] on path?).
==ERROR== The application returned an error code (1).
==WARNING== No kernels were profiled.
"""
NO_METRIC = """\
==PROF== Connected to process 20101 (/usr/bin/python3.11)
==ERROR== Failed to find metric regex:^dram__bytes_read\\.sum(\\.|$)
"""
MIG = """\
==PROF== Connected to process 2119298 (/usr/bin/python3.11)
==WARNING== Unable to access the following 2 metrics: dram__bytes_read.sum, dram__bytes_write.sum. If profiling on a \
MIG instance, it is not possible to collect metrics from GPU units that are shared with other MIG instances.
==WARNING== No kernels were profiled.
"""
OTHER = """\
==PROF== Connected to process 12 (/usr/bin/python3.11)

==ERROR== An error was reported by the driver

==ERROR== Cannot lock GPU clock frequencies on MIG! Try locking the clocks externally.
==ERROR== Failed to profile "_decode_split" in process 12
==ERROR== The application returned an error code (9).
"""
NO_KERNELS = "==PROF== Connected to process 5 (/usr/bin/python3.11)\n==WARNING== No kernels were profiled.\n"
APPLICATION = "==ERROR== The application returned an error code (1).\n==WARNING== No kernels were profiled.\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (PERMISSION, "NVreg_RestrictProfilingToAdminUsers=0"),
        (BUSY, "another profiler holds the GPU's counters; stop it, or where DCGM runs `dcgmi profile --pause`"),
        (OLD_DRIVER, "the NVIDIA driver is too old for this ncu, or too new"),
        (NO_LIBRARY, "no counters that go with this NVIDIA driver"),
        (NO_DRIVER, "ncu cannot reach the NVIDIA driver"),
        (NO_METRIC, "no counter of DRAM bytes for this GPU"),
        (MIG, "a MIG instance shares them with others"),
        (OTHER, "ncu: Cannot lock GPU clock frequencies on MIG! Try locking the clocks externally."),
        (NO_KERNELS, "the call ran no kernel on a GPU"),
        ("", "ncu wrote no table"),
    ],
)
def test_why_nothing_was_counted_is_one_line(text: str, said: str) -> None:
    found = parse(text)

    assert not found.by_kernel
    assert said in found.reason
    assert "\n" not in found.reason


def test_what_only_the_program_knows_ncu_does_not_explain() -> None:
    assert explain(APPLICATION) == ""


def test_values_that_ncu_had_no_access_to_are_told_by_its_own_words() -> None:
    assert "MIG instance" in parse(MIG + table([(SPLIT, "n/a", "n/a")])).reason


def sound(text: str) -> None:
    found = parse(text)
    assert bool(found.by_kernel) != bool(found.reason)
    for kernel in found.by_kernel.values():
        assert kernel.launches > 0
        assert kernel.read_bytes >= 0
        assert kernel.written_bytes >= 0


@given(st.text())
def test_any_text_has_bytes_or_a_reason(text: str) -> None:
    sound(text)


@given(st.lists(st.lists(st.text(max_size=12), min_size=1, max_size=13), max_size=5))
def test_any_table_has_bytes_or_a_reason(rows: list[list[str]]) -> None:
    file = io.StringIO()
    csv.writer(file, quoting=csv.QUOTE_ALL).writerows(rows)
    sound(file.getvalue())
    sound(table([]) + file.getvalue())


@given(st.integers(0, 10**6), st.text(max_size=3), st.integers(0, 500))
def test_a_table_with_a_part_cut_out_or_put_in_has_bytes_or_a_reason(count: int, put: str, where: int) -> None:
    text = table([(SPLIT, f"{count:,}", "17"), (MERGE, "1", "2")])
    place = where % len(text)

    sound(text[:place])
    sound(text[:place] + put + text[place:])
    sound(text[:place] + text[place + 1 + len(put) :])


@given(st.lists(st.tuples(st.sampled_from([SPLIT, MERGE]), st.integers(0, 10**15), st.integers(0, 10**15)), min_size=1))
def test_nothing_is_lost_in_a_sum(launches: list[tuple[str, int, int]]) -> None:
    rows = [(name, f"{read:,}", str(written)) for name, read, written in launches]

    found = parse(BEFORE + table(rows)).by_kernel.values()

    assert sum(kernel.launches for kernel in found) == len(launches)
    assert sum(kernel.read_bytes for kernel in found) == sum(read for _, read, _ in launches)
    assert sum(kernel.written_bytes for kernel in found) == sum(written for _, _, written in launches)
