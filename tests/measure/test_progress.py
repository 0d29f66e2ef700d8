import sys

import pytest

from kvplan.measure.progress import BarProgress, LineProgress, duration, open_progress


def test_lines_say_where_things_are_and_how_long_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    with LineProgress() as progress:
        progress.at(2, 9, "repeat 1: chat x3", None)
        progress.at(4, 9, "repeat 1: long x2", 130.0)
        progress.note("something happened")

    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "[2/9] repeat 1: chat x3",
        "[4/9] repeat 1: long x2, about 2 min left",
        "something happened",
    ]


def test_a_long_task_is_told_by_tenths(capsys: pytest.CaptureFixture[str]) -> None:
    progress = LineProgress()
    for percent in range(101):
        progress.share("quality", percent / 100)

    lines = capsys.readouterr().err.splitlines()
    assert 9 <= len(lines) <= 11
    assert lines[0] == "quality: 10%"


def test_a_second_long_task_starts_over(capsys: pytest.CaptureFixture[str]) -> None:
    progress = LineProgress()
    for share in (0.5, 1.0, 0.0, 0.5):
        progress.share("quality", share)

    assert len(capsys.readouterr().err.splitlines()) == 3


def test_a_bar_leaves_the_results_channel_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with BarProgress() as progress:
        progress.at(1, 2, "repeat 1: [chat]", 5.0)
        progress.note("not resumed: [red]bf16[/red]")
        progress.share("quality", 0.5)

    out, err = capsys.readouterr()
    assert out == ""
    assert "not resumed: [red]bf16[/red]" in err


def test_a_terminal_gets_a_bar_and_a_file_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert isinstance(open_progress(), BarProgress)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    assert isinstance(open_progress(), LineProgress)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "1 s"), (59.4, "59 s"), (89, "1 min"), (3599, "1 h 0 min"), (7260, "2 h 1 min")]
)
def test_times_left_are_rough(seconds: float, text: str) -> None:
    assert duration(seconds) == text
