"""The whole way through real processes: a shell script stands in for ncu, and runs the probe as ncu does."""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import monotonic

import msgspec
import pytest
import torch

from kvplan.errors import UnsupportedFormatError
from kvplan.measure import traffic_probe
from kvplan.measure.bench import DecodeCase
from kvplan.measure.ncu import METRICS, KernelTraffic
from kvplan.measure.traffic import TrafficCase, measure_traffic
from kvplan.runtime.ops import Kernel

CASE = TrafficCase(
    case=DecodeCase(batch=2, query_heads=4, kv_heads=2, head_dim=32, tokens=80), format="int8", block_tokens=32,
    kernel=Kernel.REFERENCE, device="cpu",
)  # fmt: skip
FAKE = """\
#!/bin/sh
for word in "$@"; do printf '%s\\n' "$word"; done > {folder}/arguments
while [ "$1" != {python} ]; do
    case "$1" in
        --log-file) log=$2 ;;
        --metrics) metrics=$2 ;;
    esac
    shift
done
if [ -e {folder}/hang ]; then sleep 600 & echo $! > {folder}/child; wait; fi
if [ -e {folder}/run ]; then "$@"; status=$?; else status=0; fi
if [ $status != 0 ]; then
    echo "==ERROR== The application returned an error code ($status)." > "$log"
    exit $status
fi
[ -e {folder}/text ] && cp {folder}/text "$log"
[ -e "{folder}/$metrics" ] && cp "{folder}/$metrics" "$log"
exit $(cat {folder}/status)
"""
TABLE = """\
==PROF== Connected to process 4711 (/usr/bin/python3.11)
==PROF== Profiling "_decode_split" - 0: 0%....50%....100% - 1 pass
==PROF== Profiling "_decode_merge" - 1: 0%....50%....100% - 1 pass
==PROF== Disconnected from process 4711
"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC",\
"{read}","{written}"
"","","","","","","","","","","","byte","byte"
"0","4711","python3.11","127.0.0.1","_decode_split","1","7","(128, 1, 1)","(8, 64, 1)","0","9.0","11,264","128"
"1","4711","python3.11","127.0.0.1","_decode_merge","1","7","(128, 1, 1)","(8, 1, 1)","0","9.0","96","32"
"""
PERMISSION = """\
==PROF== Connected to process 9012 (/usr/bin/python3.11)
==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters on the target \
device 0. For instructions on enabling permissions and to get more information see \
https://developer.nvidia.com/ERR_NVGPUCTRPERM
==WARNING== No kernels were profiled.
"""
BUSY = """\
==ERROR== Profiling failed because a driver resource was unavailable. Ensure that no other tool (like DCGM) is \
concurrently collecting profiling data.
==ERROR== The application returned an error code (9).
"""
NO_METRIC = "==ERROR== Failed to find metric regex:^dram__bytes_read\\.sum(\\.|$)\n"
Fake = Callable[..., Path]


def table(names: tuple[str, str] = METRICS[0]) -> str:
    return TABLE.format(read=names[0], written=names[1])


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Puts an ncu on PATH that writes what it is told to, and returns the folder that holds what it was called with."""

    def put(status: int = 0, **files: str) -> Path:
        folder = tmp_path / "ncu"
        folder.mkdir()
        script = folder / "ncu"
        script.write_text(FAKE.format(folder=folder, python=sys.executable))
        script.chmod(0o755)
        (folder / "status").write_text(str(status))
        for name, text in files.items():
            (folder / name).write_text(text)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        return folder

    return put


def test_the_bytes_of_one_call_stand_beside_those_counted(fake: Fake) -> None:
    folder = fake(text=table(), run="")

    traffic = measure_traffic(CASE)

    assert traffic.reason == ""
    assert (traffic.read_bytes, traffic.written_bytes) == (11360, 160)
    assert traffic.by_kernel["_decode_merge"] == KernelTraffic(launches=1, read_bytes=96, written_bytes=32)
    assert traffic.counted_bytes == 2 * 80 * 2 * (2 * 32 + 2 * 4), "tokens of K and V, 8 bits and two halves a token"
    words = (folder / "arguments").read_text().splitlines()
    assert words[words.index("--metrics") + 1] == "dram__bytes_read.sum,dram__bytes_write.sum"
    assert words[words.index("--profile-from-start") + 1] == "off"
    assert words[-4:-1] == [sys.executable, "-m", "kvplan.measure.traffic_probe"]
    assert msgspec.json.decode(words[-1], type=TrafficCase) == CASE


def test_where_ncu_lies_may_be_said(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fake(text=table())
    monkeypatch.setenv("PATH", "/usr/bin:/bin")

    assert measure_traffic(CASE).reason.startswith("ncu is not found; install NVIDIA Nsight Compute")
    assert measure_traffic(CASE, ncu=str(folder / "ncu")).read_bytes == 11360


def test_later_gpus_are_asked_by_their_own_names(fake: Fake) -> None:
    fake(**{",".join(METRICS[0]): NO_METRIC, ",".join(METRICS[1]): table(METRICS[1])})

    assert measure_traffic(CASE).read_bytes == 11360


@pytest.mark.parametrize(
    ("status", "text", "said"),
    [
        (1, PERMISSION, "NVreg_RestrictProfilingToAdminUsers=0"),
        (0, PERMISSION, "NVreg_RestrictProfilingToAdminUsers=0"),
        (9, BUSY, "another profiler holds the GPU's counters"),
        (
            11,
            "==ERROR== Cuda driver is not compatible with Nsight Compute.\n",
            "driver is too old for this ncu",
        ),
        (1, NO_METRIC, "no counter of DRAM bytes for this GPU"),
        (0, "==WARNING== No kernels were profiled.\n", "the call ran no kernel on a GPU"),
        (0, "", "ncu wrote no table"),
        (3, "", "it ended with status 3"),
        (1, table(), "the probe failed under ncu: it ended with status 1"),
        (0, table().replace('"96"', '"n/a"'), "dram__bytes_read.sum of _decode_merge is 'n/a'"),
    ],
)
def test_without_an_answer_the_figure_is_absent_with_its_reason(fake: Fake, status: int, text: str, said: str) -> None:
    fake(status, text=text)

    traffic = measure_traffic(CASE)

    assert said in traffic.reason
    assert "\n" not in traffic.reason
    assert (traffic.read_bytes, traffic.written_bytes, traffic.by_kernel) == (None, None, {})
    assert traffic.counted_bytes > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_probe_says_so(fake: Fake) -> None:
    fake(text=table(), run="")

    reason = measure_traffic(replace(CASE, kernel=Kernel.CPU, device="cuda:0")).reason

    assert (
        reason == "the probe failed under ncu: the cpu kernels run on the processor, not on cuda:0; use --kernel triton"
    )


def test_an_ncu_that_hangs_is_ended_with_what_it_started(fake: Fake) -> None:
    folder, start = fake(hang=""), monotonic()

    traffic = measure_traffic(CASE, limit_s=1.0)

    assert traffic.reason == "ncu gave no answer within 1 s and was ended"
    assert monotonic() - start < 30
    child = Path("/proc") / (folder / "child").read_text().strip() / "stat"
    assert not child.exists() or child.read_text().rpartition(")")[2].split()[0] == "Z"


def test_an_ncu_that_cannot_be_run_is_a_reason(tmp_path: Path) -> None:
    script = tmp_path / "ncu"
    script.write_text("#!/no/such/shell\n")
    script.chmod(0o755)

    assert measure_traffic(CASE, ncu=str(script)).reason == f"{script} does not start: No such file or directory"


def test_a_format_that_no_kernel_takes_is_refused_before_anything_starts() -> None:
    with pytest.raises(UnsupportedFormatError, match="use block size 64"):
        measure_traffic(replace(CASE, format="kivi-k4v4-g64"))


def test_the_profiler_is_on_for_the_second_call_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    decode = traffic_probe.PagedBed.decode

    class Profile:
        def __enter__(self) -> None:
            events.append("on")

        def __exit__(self, *_: object) -> None:
            events.append("off")

    def called(*args: object) -> object:
        events.append("call")
        return decode(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(traffic_probe.PagedBed, "decode", called)
    monkeypatch.setattr(traffic_probe, "_profiled", lambda device: Profile())
    monkeypatch.setattr(sys, "argv", ["probe", msgspec.json.encode(CASE).decode()])

    assert traffic_probe.main() == 0
    assert events == ["call", "on", "call", "off"]


def test_on_a_gpu_that_is_cudas_own_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: events.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: events.append("stop"))

    with traffic_probe._profiled("cuda:1"):
        events.append("call")

    assert events == ["start", "call", "stop"]


@pytest.mark.parametrize("words", [[], ["{"], [json.dumps({"format": "int8"})]])
def test_a_probe_without_a_case_ends_with_one_line(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["probe", *words])

    assert traffic_probe.main() == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
