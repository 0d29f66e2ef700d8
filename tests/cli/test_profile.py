import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kvplan.cli import main
from kvplan.core.records import CellStatus, Figure, Profile
from kvplan.core.specs import Evidence
from kvplan.errors import DoesNotFitError, ExitStatus
from kvplan.measure import session
from kvplan.store.journal import Journal, read_journal
from kvplan.store.profiles import load_profile
from kvplan_kernels import format as format_module
from kvplan_kernels import native

WORKLOAD = """\
schema: 1
model: demo
target: {concurrency: 3}
buckets:
  - {name: chat, prompt: 90, generate: 20, share: 60%}
  - {name: long, prompt: 150, generate: 20, share: 40%}
search: {formats: [bf16, int8], block_size: [32]}
"""
REAL = ["--quick", "--repeats", "2", "--retries", "0", "--no-quality", "--threads", "1", "--max-disturbance", "100%"]


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    path = tmp_path / "W.yaml"
    path.write_text(WORKLOAD)
    return path


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "P.json"


@pytest.fixture
def arguments(workload: Path, output: Path) -> list[str]:
    return ["profile", "demo", "-w", str(workload), "-o", str(output), "--kernel", "reference"]


class FakeSession:
    """Gives the profile of a class attribute instead of measuring one."""

    profile: Profile
    requests: ClassVar[list[session.Request]]

    def __init__(self, device: object, request: session.Request, journal: Journal, progress: object) -> None:
        self.requests.append(request)

    def run(self) -> Profile:
        return self.profile


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, make: Any) -> type[FakeSession]:
    class Fresh(FakeSession):
        profile = make.profile()
        requests: ClassVar[list[session.Request]] = []

    monkeypatch.setattr(session, "Session", Fresh)
    return Fresh


@pytest.fixture
def start(arguments: list[str]) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Starts a real run; what still runs at the end of the test is ended."""
    started: list[subprocess.Popen[str]] = []

    def go(*more: str) -> "subprocess.Popen[str]":
        kernel = "reference" if native.missing() else "cpu"
        command = [sys.executable, "-m", "kvplan", *arguments, *REAL, "--kernel", kernel, *more]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield go
    for process in started:
        process.kill()
        process.communicate()


def wait_for(condition: Callable[[], bool], process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        assert time.monotonic() < deadline
        time.sleep(0.02)


def repeats(journal: Path) -> int:
    return sum(len(cell.conditions) for cell in read_journal(journal).cells.values()) if journal.exists() else 0


def children(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in path.read_text().split()]


@pytest.mark.alone
def test_interrupted_then_killed_then_resumed_everything_finished_is_kept(
    start: Callable[..., "subprocess.Popen[str]"], output: Path
) -> None:
    journal = output.with_suffix(".jsonl")

    first = start()
    wait_for(lambda: repeats(journal) >= 2, first)
    first.send_signal(signal.SIGINT)
    out, err = first.communicate(timeout=60)
    assert first.returncode == ExitStatus.INTERRUPTED
    assert "everything finished is kept" in err
    assert "Traceback" not in err
    assert not output.exists()
    kept = read_journal(journal).cells

    second = start("--resume")
    wait_for(lambda: repeats(journal) >= sum(len(cell.conditions) for cell in kept.values()) + 2, second)
    workers = children(second.pid)
    second.send_signal(signal.SIGKILL)
    second.communicate(timeout=60)
    assert not output.exists()
    contents = read_journal(journal)
    for key, cell in kept.items():
        assert contents.cells[key].conditions[: len(cell.conditions)] == cell.conditions
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{worker}").exists() for worker in workers):
        assert time.monotonic() < deadline, "the measuring process outlived its session"
        time.sleep(0.05)

    third = start("--resume", "--json")
    out, err = third.communicate(timeout=180)
    assert third.returncode == ExitStatus.DONE, err
    assert "resumed: " in err
    profile = load_profile(output)
    assert json.loads(out)["schema"] == 1
    assert len(profile.cells) == 6
    assert {cell.status for cell in profile.cells} == {CellStatus.OK}
    assert all(len(cell.figures["tpot_s"].repeats) == 2 for cell in profile.cells)
    for key, cell in contents.cells.items():
        found = next(other for other in profile.cells if other.key == key)
        assert found.figures["tpot_s"].repeats[: len(cell.conditions)] == cell.figures["tpot_s"].repeats


def test_the_screen_has_a_line_a_cell_and_names_the_file(
    capsys: pytest.CaptureFixture[str], arguments: list[str], output: Path, fake: type[FakeSession]
) -> None:
    assert main([*arguments, "--no-quality"]) == ExitStatus.DONE

    out = capsys.readouterr().out
    assert sum("mix x33" in line for line in out.splitlines()) == 5
    assert f"{output}: 15 cells" in out
    assert load_profile(output).cells == fake.profile.cells


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (CellStatus.FAILED, ExitStatus.NOT_MET),
        (CellStatus.OUT_OF_MEMORY, ExitStatus.DONE),
        (CellStatus.UNSUPPORTED, ExitStatus.DONE),
        (CellStatus.DISTURBED, ExitStatus.DONE),
    ],
)
def test_only_a_failed_cell_fails_the_command(
    capsys: pytest.CaptureFixture[str], arguments: list[str], fake: type[FakeSession], status: CellStatus,
    expected: ExitStatus,
) -> None:  # fmt: skip
    first, *rest = fake.profile.cells
    bad = replace(first, status=status, reason="the reason", figures={
        "tpot_s": Figure.absent("s", Evidence.MEASURED, "the reason")})  # fmt: skip
    fake.profile = replace(fake.profile, cells=(bad, *rest))

    assert main([*arguments, "--no-quality"]) == expected
    assert f"{status}: the reason: {first.key.label}" in capsys.readouterr().out


def test_options_reach_the_session(arguments: list[str], fake: type[FakeSession]) -> None:
    main([
        *arguments, "--no-quality", "-f", "int8", "-f", "k8v8", "--block-size", "64", "--threads", "1", "--quick",
        "--repeats", "4", "--prefill", "through_cache",
    ])  # fmt: skip

    request = fake.requests[0]
    assert request.formats == ("int8",)
    assert request.block_tokens == (64,)
    assert (request.threads, request.repeats, request.retries) == (1, 4, session.QUICK_RETRIES)
    assert request.prefill == "through_cache"
    assert request.effort.kernel_samples < session.FULL_EFFORT.kernel_samples


def test_without_a_workload_a_grid_is_measured(output: Path, fake: type[FakeSession]) -> None:
    main(["profile", "demo", "-o", str(output), "--kernel", "reference", "--no-quality"])

    assert [bucket.name for bucket in fake.requests[0].workload.buckets] == ["short", "middle", "long"]


def test_what_is_there_is_not_overwritten_unless_asked(
    capsys: pytest.CaptureFixture[str], arguments: list[str], output: Path, fake: type[FakeSession]
) -> None:
    output.write_text("mine")

    assert main(arguments) == ExitStatus.BAD_INPUT
    assert output.read_text() == "mine"
    assert "--force" in capsys.readouterr().err
    assert main([*arguments, "--force", "--no-quality"]) == ExitStatus.DONE
    assert load_profile(output).cells


def test_the_journal_of_an_interrupted_run_is_not_overwritten_either(
    capsys: pytest.CaptureFixture[str], arguments: list[str], output: Path
) -> None:
    with Journal(output.with_suffix(".jsonl")):
        pass

    assert main(arguments) == ExitStatus.BAD_INPUT
    assert "P.jsonl: exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "status", "said"),
    [
        (["--force", "--resume"], ExitStatus.BAD_INPUT, "give one of them"),
        (["-f", "int7"], ExitStatus.UNSUPPORTED, "--format"),
        (["-f", "transformers:quanto-int4"], ExitStatus.UNSUPPORTED, "`kvplan quality` scores it"),
        (["-f", "vllm:nvfp4"], ExitStatus.UNSUPPORTED, "`kvplan size` counts its bytes"),
        (["--device", "cuda"], ExitStatus.UNSUPPORTED, "--device cpu"),
        (["--device", "abacus"], ExitStatus.BAD_INPUT, "abacus"),
        (["--max-disturbance", "lots"], ExitStatus.BAD_INPUT, "lots"),
        (["--cell-timeout", "30"], ExitStatus.BAD_INPUT, "--cell-timeout: '30' is no length of time; write it as 90s"),
        (["--kernel", "magic"], ExitStatus.BAD_INPUT, "use cpu, triton, reference"),
        (["--prefill", "none"], ExitStatus.BAD_INPUT, "exact or through_cache"),
        (["-w", "no.yaml"], ExitStatus.BAD_INPUT, "no.yaml"),
        (["-o", "no/such/P.json"], ExitStatus.BAD_INPUT, "folder"),
    ],
)
def test_bad_input_is_one_line_and_leaves_no_file(
    capsys: pytest.CaptureFixture[str], arguments: list[str], output: Path, more: list[str], status: ExitStatus,
    said: str,
) -> None:  # fmt: skip
    assert main([*arguments, *more]) == status

    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert err.count("\n") == 1
    assert not output.exists()
    assert not output.with_suffix(".jsonl").exists()


def test_a_format_without_a_kernel_is_unsupported_and_leaves_the_reason(
    arguments: list[str], output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(format_module._KERNEL_TAKES, "cpu", lambda tensor: not tensor.code.is_float)
    assert main([*arguments, "-f", "fp8_e4m3", "--kernel", "cpu"]) == ExitStatus.UNSUPPORTED

    cells = load_profile(output).cells
    assert {cell.status for cell in cells} == {CellStatus.UNSUPPORTED}
    assert {cell.reason for cell in cells} == {"format fp8_e4m3 has no CPU kernel; the reference takes it"}


def test_a_model_that_is_not_there_is_bad_input(capsys: pytest.CaptureFixture[str], output: Path) -> None:
    assert main(["profile", "no/such-model", "-o", str(output), "--kernel", "reference"]) == ExitStatus.BAD_INPUT
    assert capsys.readouterr().err.count("\n") == 1


def test_a_run_that_measured_nothing_leaves_no_file(
    capsys: pytest.CaptureFixture[str], arguments: list[str], output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(_: object) -> object:
        raise DoesNotFitError("the model needs more memory than there is")

    monkeypatch.setattr(session.Session, "run", run)

    assert main(arguments) == ExitStatus.NOT_MET
    assert "more memory" in capsys.readouterr().err
    assert not output.exists()
    assert not output.with_suffix(".jsonl").exists()


def test_without_the_packages_the_command_says_what_to_install(
    capsys: pytest.CaptureFixture[str], arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvplan.measure.checks._PACKAGES", ("no_such_package",))

    assert main(arguments) == ExitStatus.UNSUPPORTED
    assert "pip install 'kvplan[profile]'" in capsys.readouterr().err


def test_quality_is_scored_into_the_profile_and_resumed(
    arguments: list[str], output: Path, fake: type[FakeSession], monkeypatch: pytest.MonkeyPatch, make: Any
) -> None:
    from kvplan.quality import scoring

    scored: list[list[str]] = []

    def score(loaded: Any, formats: list[str], options: scoring.QualityOptions, **_: object) -> list[object]:
        scored.append(list(formats))
        digest = scoring.prepare(loaded, options).digest
        return [
            replace(make.quality(name), key=replace(
                make.quality(name).key, model_digest=loaded.spec.digest, block_tokens=32, data_digest=digest,
                kernel="reference"))
            for name in formats
        ]  # fmt: skip

    monkeypatch.setattr(scoring, "score", score)

    assert main([*arguments, "--quick"]) == ExitStatus.DONE
    assert main([*arguments, "--quick", "--resume", "-f", "bf16", "-f", "int8", "-f", "int4"]) == ExitStatus.DONE

    assert scored == [["bf16", "int8"], ["int4"]]
    assert [result.key.format for result in load_profile(output).quality] == ["bf16", "int8", "int4"]


def test_layers_that_the_model_does_not_have_are_refused_before_anything_is_measured(
    arguments: list[str], output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "-f", "int4@0,4=bf16"]) == ExitStatus.UNSUPPORTED
    says = "--format: int4@0,4=bf16 on demo: no layer 4 among the 4 that cache keys and values"
    assert capsys.readouterr().err == f"error: {says}\n"
    assert not output.exists()


@pytest.mark.slow
@pytest.mark.alone
def test_a_format_by_layer_is_measured_like_any_other(
    start: Callable[..., "subprocess.Popen[str]"], output: Path
) -> None:
    process = start("-f", "k4v4@-1,0=bf16", "--repeats", "1")
    _, err = process.communicate(timeout=300)
    assert process.returncode == ExitStatus.DONE, err
    profile = load_profile(output)
    assert {cell.key.format for cell in profile.cells} == {"int4@0,-1=bf16"}
    assert {cell.status for cell in profile.cells} == {CellStatus.OK}
