"""Real processes that die, hang or meet what a GPU does to them; the session that runs them goes on."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import monotonic, sleep

import pytest

from kvplan.core.records import Cell, CellStatus
from kvplan.core.specs import ModelSpec
from kvplan.core.workloads import Prefill, Workload
from kvplan.errors import DoesNotFitError, KvplanError
from kvplan.measure import launch
from kvplan.measure.device import FakeDevice
from kvplan.measure.progress import LineProgress
from kvplan.measure.session import Request, Session
from kvplan.runtime.ops import Kernel
from kvplan.store.journal import Journal, read_journal

SHORT_S = 3.0
"""Long enough for a plain Python process to start on a busy machine."""
LONG_S = 120.0
Run = Callable[..., dict[str, Cell]]


@pytest.fixture
def run(spec: ModelSpec, workload: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a session of one group of cells, a format each, and returns what the journal has of every cell."""

    def go(
        worker: str, faults: dict[str, str], formats: tuple[str, ...], limit_s: float = LONG_S, buckets: int = 1
    ) -> dict[str, Cell]:
        monkeypatch.setattr(launch, "WORKER", worker)
        monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
        monkeypatch.setenv("KVPLAN_TEST_FAULTS", json.dumps(faults))
        monkeypatch.setenv("KVPLAN_TEST_CHILDREN", str(tmp_path / "children"))
        request = Request(
            model="tiny", spec=spec, workload=replace(workload, buckets=workload.buckets[:buckets]), formats=formats,
            block_tokens=(32,), kernel=Kernel.CPU, kernel_name="cpu/x", threads=1, prefill=Prefill.EXACT, repeats=1,
            cell_timeout_s=limit_s,
        )  # fmt: skip
        path = tmp_path / "P.jsonl"
        with Journal(path, keep=False) as journal:
            profile = Session(FakeDevice(), request, journal, LineProgress()).run()
        kept = {key.format: cell for key, cell in read_journal(path).cells.items()}
        assert {cell.key.format: cell.status for cell in profile.cells} == {name: kept[name].status for name in kept}
        return kept

    return go


def ends(pid: int) -> bool:
    """Tell whether a process is gone, or only waits to be reaped by whoever inherited it."""
    until = monotonic() + 10
    while monotonic() < until:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        sleep(0.05)
    return False


def test_a_hang_ends_its_cell_with_all_that_it_started_and_the_rest_goes_on(run: Run, tmp_path: Path) -> None:
    kept = run("raw_worker", {"int8": "hang"}, ("bf16", "int8", "int4"), SHORT_S)

    assert {name: cell.status for name, cell in kept.items()} == {
        "bf16": CellStatus.OK, "int8": CellStatus.FAILED, "int4": CellStatus.OK,
    }  # fmt: skip
    assert kept["int8"].reason.startswith("no answer within 3 s: the measuring process hung and was ended")
    children = [int(line) for line in (tmp_path / "children").read_text().split()]
    assert len(children) == 2, "once among others, once alone"
    assert all(ends(pid) for pid in children)


def test_the_limit_counts_from_the_last_message(run: Run) -> None:
    start = monotonic()

    kept = run("raw_worker", {"bf16": "slow"}, ("bf16",), SHORT_S, buckets=2)

    assert monotonic() - start > SHORT_S
    assert {cell.status for cell in kept.values()} == {CellStatus.OK}


def test_a_killed_and_an_aborted_process_end_their_cells_and_the_rest_goes_on(run: Run) -> None:
    kept = run("raw_worker", {"int8": "killed", "int4": "aborted"}, ("bf16", "int8", "int4", "int2"))

    assert {name: cell.status for name, cell in kept.items()} == {
        "bf16": CellStatus.OK, "int8": CellStatus.OUT_OF_MEMORY, "int4": CellStatus.FAILED, "int2": CellStatus.OK,
    }  # fmt: skip
    assert kept["int8"].reason.startswith("the system ended it (SIGKILL), as it does when memory runs out")
    assert kept["int4"].reason == (
        "the measuring process was ended by SIGABRT: CUDA error: uncorrectable ECC error encountered"
    )


def test_a_process_that_hangs_while_starting_is_an_error_that_names_the_option(run: Run) -> None:
    with pytest.raises(KvplanError, match=r"did not start: no answer within 1 s: .*--cell-timeout"):
        run("raw_worker", {"start": "hang"}, ("bf16",), 1.0)


@pytest.mark.parametrize("fault", ["hang", "aborted"])
def test_how_a_process_ends_that_has_said_all_concerns_nobody(run: Run, fault: str) -> None:
    start = monotonic()

    kept = run("raw_worker", {"end": fault}, ("bf16", "int8"))

    assert monotonic() - start < LONG_S / 2
    assert {cell.status for cell in kept.values()} == {CellStatus.OK}
    with pytest.raises(ChildProcessError):  # no process is left over
        os.waitpid(-1, os.WNOHANG)


TOLD = {
    "allocator": (
        CellStatus.OUT_OF_MEMORY,
        (
            "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 139.72 GiB of which "
            "10.10 GiB is free."
        ),
    ),
    "memory": (CellStatus.OUT_OF_MEMORY, "CUDA error: out of memory"),
    "resources": (CellStatus.UNSUPPORTED, "the kernel needs 300000 of shared memory, the GPU has 232448"),
    "illegal": (CellStatus.FAILED, "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"),
    "timeout": (CellStatus.FAILED, "torch.AcceleratorError: CUDA error: the launch timed out and was terminated"),
    "misaligned": (CellStatus.FAILED, "torch.AcceleratorError: CUDA error: misaligned address"),
    "assert": (CellStatus.FAILED, "torch.AcceleratorError: CUDA error: device-side assert triggered"),
    "lost": (CellStatus.FAILED, "RuntimeError: Triton Error [CUDA]: unspecified launch failure"),
}
OTHERS = ("int8", "int4", "int2", "k8v4", "fp16", "kivi-k4v4-g32-r32", "kivi-k2v2-g32-r32", "kivi-k4v2-g32-r32")


@pytest.mark.parametrize(
    "faults",
    [("allocator", "memory", "resources", "illegal"), pytest.param(tuple(TOLD), marks=pytest.mark.slow)],
    ids=["few", "all"],
)
def test_what_a_gpu_refuses_or_breaks_is_told_cell_by_cell(run: Run, faults: tuple[str, ...]) -> None:
    met = dict(zip(OTHERS, faults, strict=False))

    kept = run("faulty_worker", met, ("bf16", *met))

    assert {name: (cell.status, cell.reason) for name, cell in kept.items()} == {
        "bf16": (CellStatus.OK, ""), **{name: TOLD[fault] for name, fault in met.items()},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("fault", "kind", "text"),
    [
        ("allocator", DoesNotFitError, "tiny does not fit: CUDA out of memory. Tried to allocate 20.00 GiB."),
        ("lost", KvplanError, "the measuring process did not start: RuntimeError: Triton Error"),
    ],
)
def test_what_goes_wrong_while_loading_is_an_error(run: Run, fault: str, kind: type[KvplanError], text: str) -> None:
    with pytest.raises(kind) as caught:
        run("faulty_worker", {"start": fault}, ("bf16",))

    assert str(caught.value).startswith(text)
