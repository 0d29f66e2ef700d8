import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvplan.core.records import CellKey, CellStatus, Conditions, Profile
from kvplan.core.specs import DeviceKind, ModelSpec
from kvplan.core.workloads import Prefill, Workload
from kvplan.errors import DoesNotFitError, ExitStatus, InputError, KvplanError
from kvplan.measure import session
from kvplan.measure.device import FakeDevice
from kvplan.measure.jobs import QUICK_EFFORT, Refused
from kvplan.measure.launch import WorkerDiedError
from kvplan.measure.session import KERNEL_16BIT, ROTATION, Request, Session
from kvplan.runtime.ops import Kernel
from kvplan.store.journal import Journal, read_journal

QUIET = Conditions(load_average=1, steal_share=0.0, foreign_cpu_share=0.01)
NOISY = Conditions(load_average=1, steal_share=0.0, foreign_cpu_share=0.5)


class Notes:
    """A progress that remembers."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.steps: list[tuple[int, int, float | None]] = []

    def __enter__(self) -> "Notes":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def note(self, text: str) -> None:
        self.notes.append(text)

    def at(self, done: int, total: int, label: str, left_s: float | None) -> None:
        self.steps.append((done, total, left_s))

    def share(self, label: str, share: float) -> None:
        pass


Run = Callable[..., Profile]


@pytest.fixture
def notes() -> Notes:
    return Notes()


@pytest.fixture
def request_(spec: ModelSpec, workload: Workload) -> Request:
    return Request(
        model="tiny", spec=spec, workload=workload, formats=("bf16", "int8"), block_tokens=(32,),
        kernel=Kernel.CPU, kernel_name="cpu/x", threads=1, prefill=Prefill.EXACT, repeats=2, retries=2,
    )  # fmt: skip


@pytest.fixture
def run(worker: Any, request_: Request, notes: Notes, tmp_path: Path) -> Run:
    def go(*, keep: bool = False, device: FakeDevice | None = None, **changes: Any) -> Profile:
        with Journal(tmp_path / "P.jsonl", keep=keep) as journal:
            asked = replace(request_, **changes)
            return Session(device or FakeDevice(), asked, journal, notes, worker.launch).run()

    return go


def test_repeats_are_the_outer_loop_and_each_is_one_process(worker: Any, run: Run) -> None:
    profile = run()

    mix, chat, long = "chatx6+longx2", "chatx6", "longx2"
    order = [f"{form}/b32/{loads}" for loads in (mix, chat, long) for form in ("bf16", "int8")]
    assert worker.ran == [order, order]
    assert [cell.key.label for cell in profile.cells] == order
    assert profile.cells[0].figures["tpot_s"].repeats == ((2.0,), (4.0,))


def test_the_profile_says_how_it_was_measured(run: Run) -> None:
    profile = run()

    assert profile.how[KERNEL_16BIT] == "cpu/x"
    assert profile.how[ROTATION] == "4.0 MiB"
    assert profile.base_figures["read_bandwidth_bytes_per_s"].repeats == ((1e9, 2e9), (1e9, 2e9))
    assert profile.device.uuid == "fake-0"


def test_a_rotation_cut_short_by_memory_is_said(run: Run) -> None:
    device = FakeDevice()
    device.info = replace(device.info, last_level_cache_bytes=2**30)

    assert run(device=device).how[ROTATION] == "4.0 MiB, as memory allows (4.0 GiB wanted)"


def test_a_disturbed_repeat_is_measured_again_until_it_is_not(worker: Any, run: Run) -> None:
    worker.script = lambda process, key: NOISY if process == 1 and key.label == "int8/b32/chatx6" else QUIET

    profile = run(repeats=1)

    assert worker.ran[1:] == [["int8/b32/chatx6"]]
    assert {cell.status for cell in profile.cells} == {CellStatus.OK}
    again = next(cell for cell in profile.cells if cell.key.label == "int8/b32/chatx6")
    assert again.figures["tpot_s"].repeats == ((4.0,),)


def test_a_cell_that_stays_disturbed_is_marked_and_keeps_its_best_attempt(worker: Any, run: Run) -> None:
    def script(process: int, key: CellKey) -> Conditions:
        return replace(NOISY, foreign_cpu_share=0.2 if process == 2 else 0.5)

    worker.script = script

    profile = run(repeats=1)

    assert len(worker.ran) == 3
    assert {cell.status for cell in profile.cells} == {CellStatus.DISTURBED}
    assert profile.cells[0].figures["tpot_s"].repeats == ((4.0,),)


def test_a_user_may_tolerate_more(worker: Any, run: Run) -> None:
    worker.script = lambda process, key: NOISY

    profile = run(repeats=1, tolerance=0.6)

    assert len(worker.ran) == 1
    assert {cell.status for cell in profile.cells} == {CellStatus.OK}
    assert profile.how["tolerance"].startswith("60%")
    assert profile.cells[0].conditions[0].foreign_cpu_share == 0.5


def test_a_crash_is_pinned_on_its_cell_and_the_rest_goes_on(worker: Any, run: Run, notes: Notes) -> None:
    crashes: list[int] = []

    def script(process: int, key: CellKey) -> Conditions:
        if key.label == "int8/b32/chatx6":
            crashes.append(process)
            raise WorkerDiedError(1, "ValueError: broken")
        return QUIET

    worker.script = script

    profile = run()

    found = {cell.key.label: cell for cell in profile.cells}
    assert found.pop("int8/b32/chatx6").reason == "ValueError: broken"
    assert {cell.status for cell in found.values()} == {CellStatus.OK}
    assert all(len(cell.figures["tpot_s"].repeats) == 2 for cell in found.values())
    assert len(crashes) == 2, "once among others, once alone, and in no later repeat"
    assert any("one by one" in note for note in notes.notes)


def test_a_process_killed_by_the_system_is_out_of_memory(worker: Any, run: Run) -> None:
    def script(process: int, key: CellKey) -> Conditions:
        if key.label == "bf16/b32/longx2":
            raise WorkerDiedError(-signal.SIGKILL, "")
        return QUIET

    worker.script = script

    profile = run(repeats=1)

    found = {cell.key.label: cell for cell in profile.cells}
    assert found["bf16/b32/longx2"].status is CellStatus.OUT_OF_MEMORY
    assert found["int8/b32/longx2"].status is CellStatus.OK


def test_what_was_killed_on_a_gpu_is_not_measured_on_it(worker: Any, run: Run) -> None:
    def script(process: int, key: CellKey) -> Conditions:
        raise WorkerDiedError(-signal.SIGKILL, "")

    class Silent(FakeDevice):
        def available_bytes(self) -> int:
            raise AssertionError("asked in the session's own process")

    worker.script, device = script, Silent()
    device.info = replace(device.info, kind=DeviceKind.CUDA)

    assert {cell.reason for cell in run(repeats=1, device=device).cells} == {
        "the system ended it (SIGKILL), as it does when memory runs out"
    }


@pytest.mark.parametrize(
    ("asked", "kind", "limit_s"),
    [(None, DeviceKind.CPU, 21600), (None, DeviceKind.CUDA, 1800), (90, DeviceKind.CUDA, 90)],
)
def test_the_limit_is_the_users_or_the_devices(
    worker: Any, run: Run, asked: float | None, kind: DeviceKind, limit_s: float
) -> None:
    device = FakeDevice()
    device.info = replace(device.info, kind=kind)

    run(repeats=1, device=device, cell_timeout_s=asked)

    assert worker.limits_s == [limit_s]


def test_a_segmentation_fault_is_named(worker: Any, run: Run) -> None:
    def script(process: int, key: CellKey) -> Conditions:
        raise WorkerDiedError(-signal.SIGSEGV, "")

    worker.script = script

    assert {cell.reason for cell in run(repeats=1).cells} == {"the measuring process was ended by SIGSEGV"}


def test_a_kill_loses_the_running_group_only_and_resume_goes_on(
    worker: Any, run: Run, notes: Notes, tmp_path: Path
) -> None:
    def interrupted(process: int, key: CellKey) -> Conditions:
        if process == 2 and key.label == "int8/b32/chatx6":
            raise KeyboardInterrupt
        return QUIET

    worker.script = interrupted
    with pytest.raises(KeyboardInterrupt):
        run()
    kept = read_journal(tmp_path / "P.jsonl").cells
    assert sorted(len(cell.conditions) for cell in kept.values()) == [1, 1, 1, 1, 2, 2]

    worker.script = lambda process, key: QUIET
    worker.ran.clear()
    profile = run(keep=True)

    assert worker.ran == [["bf16/b32/chatx6", "int8/b32/chatx6", "bf16/b32/longx2", "int8/b32/longx2"]]
    assert all(len(cell.figures["tpot_s"].repeats) == 2 for cell in profile.cells)
    assert "resumed: 6 of 6 cells" in notes.notes


def test_what_was_measured_on_something_else_is_refused_by_name(worker: Any, run: Run, notes: Notes) -> None:
    run(repeats=1)
    worker.ran.clear()

    run(keep=True, repeats=1, threads=2)

    assert len(worker.ran[0]) == 6
    refusals = [note for note in notes.notes if note.startswith("not resumed")]
    assert len(refusals) == 1
    assert refusals[0].startswith("not resumed, threads 1 is now 2: ")
    assert "bf16/b32/chatx6" in refusals[0]


@pytest.mark.parametrize("change", ["versions", "effort"])
def test_other_versions_and_other_efforts_are_not_mixed(
    worker: Any, run: Run, notes: Notes, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    run(repeats=1)
    worker.ran.clear()

    if change == "versions":
        monkeypatch.setattr(session, "versions", lambda: {"torch": "1.0"})
        run(keep=True, repeats=1)
    else:
        run(keep=True, repeats=1, effort=QUICK_EFFORT)

    assert len(worker.ran[0]) == 6
    said = next(note for note in notes.notes if note.startswith("not resumed"))
    assert ("another version: " if change == "versions" else "effort full is now quick") in said


def test_a_change_of_effort_that_was_interrupted_leaves_nothing_of_the_old_one(
    worker: Any, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(process: int, key: CellKey) -> Conditions:
        if len(worker.ran) > 1 and key.label == "int8/b32/chatx6":
            raise KeyboardInterrupt
        return QUIET

    run(repeats=1)
    worker.script = interrupted
    with pytest.raises(KeyboardInterrupt):
        run(keep=True, repeats=1, effort=QUICK_EFFORT)
    worker.script = lambda process, key: QUIET
    worker.ran.clear()
    run(keep=True, repeats=1, effort=QUICK_EFFORT)

    assert worker.ran == [["bf16/b32/chatx6", "int8/b32/chatx6", "bf16/b32/longx2", "int8/b32/longx2"]]


def test_a_finished_journal_measures_nothing_again(worker: Any, run: Run) -> None:
    first = run()
    worker.ran.clear()

    second = run(keep=True)

    assert worker.ran == []
    assert second.cells == first.cells
    assert second.how == first.how
    assert second.base_figures == first.base_figures


def test_cells_settled_by_arithmetic_are_in_the_profile(worker: Any, run: Run) -> None:
    profile = run(formats=("bf16", "kivi-k4v4-g64"), repeats=1)

    refused = [cell for cell in profile.cells if cell.status is CellStatus.UNSUPPORTED]
    assert len(refused) == 3
    assert all("use block size 64" in cell.reason for cell in refused)


def test_what_the_process_says_to_the_user_reaches_the_user(worker: Any, run: Run) -> None:
    worker.first = (Refused(error="DoesNotFitError", message="too large", hint="take a smaller one"),)

    with pytest.raises(DoesNotFitError) as caught:
        run()

    assert caught.value.status is ExitStatus.NOT_MET
    assert str(caught.value) == "too large; take a smaller one"


def test_a_process_that_never_starts_is_no_fault_of_a_cell(worker: Any, run: Run) -> None:
    def dead(process: int, key: CellKey) -> Conditions:
        raise WorkerDiedError(1, "ImportError: no torch")

    worker.first, worker.script = (), dead

    with pytest.raises(KvplanError, match="ImportError: no torch"):
        run()


def test_a_second_session_on_the_same_journal_is_refused(run: Run, tmp_path: Path) -> None:
    with Journal(tmp_path / "P.jsonl"), pytest.raises(InputError, match="another kvplan"):
        run()


def test_the_time_left_shrinks_to_nothing(worker: Any, run: Run, notes: Notes) -> None:
    device = FakeDevice()

    def script(process: int, key: CellKey) -> Conditions:
        device.pass_time(10)
        return QUIET

    worker.script = script

    run(device=device)

    assert notes.steps[0] == (0, 12, None)
    assert notes.steps[1] == (2, 12, 100.0)
    assert notes.steps[-1][0] == notes.steps[-1][1] == 12
