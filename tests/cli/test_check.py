import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from kvplan.core.records import Figure, Profile
from kvplan.store.profiles import save_profile


@pytest.fixture
def second(tmp_path: Path, maker: Any) -> Path:
    path = tmp_path / "second.json"
    save_profile(maker(seed=2).profile(), path)
    return path


def made_worse(profile: Profile, what: str) -> Profile:
    cell, quality = profile.cells[-1], profile.quality[-1]
    figures = dict(cell.figures)
    if what == "capacity":
        figures["allocated_bytes_per_sequence"] = Figure.exact(
            "bytes", (cell.figures["allocated_bytes_per_sequence"].value or 0) + 64
        )
    elif what == "time":
        repeats = tuple(tuple(s * 1.25 for s in samples) for samples in figures["decode_fused_s"].repeats)
        figures["decode_fused_s"] = Figure.measured("s", repeats)
    else:
        quality = replace(quality, documents=tuple(replace(d, kl=d.kl * 1.25) for d in quality.documents))
    return replace(
        profile, cells=(*profile.cells[:-1], replace(cell, figures=figures)), quality=(*profile.quality[:-1], quality)
    )


def test_a_second_run_holds(run: Any, profile: Path, second: Path) -> None:
    answer = run("check", second, "--baseline", profile)
    assert answer.status == 0
    assert answer.out.rstrip().endswith("held.")


@pytest.mark.parametrize("what", ["capacity", "time", "quality"])
def test_each_kind_of_regression_fails_and_is_named(
    run: Any, profile: Path, tmp_path: Path, maker: Any, what: str
) -> None:
    worse = tmp_path / "worse.json"
    save_profile(made_worse(maker(seed=2).profile(), what), worse)
    answer = run("check", worse, "--baseline", profile)
    assert answer.status == 1
    assert "1 regressed" in answer.out
    assert answer.out.count("regressed") == 2


def test_reports_are_written_beside_the_screen(run: Any, profile: Path, second: Path, tmp_path: Path) -> None:
    junit, markdown = tmp_path / "j.xml", tmp_path / "m.md"
    answer = run("check", second, "--baseline", profile, "--junit", junit, "--markdown", markdown, "--json")
    cases = ET.parse(junit).findall("testsuite/testcase")  # noqa: S314
    assert len(cases) == len(json.loads(answer.out)["figures"])
    assert markdown.read_text().startswith("# kvplan check\n")


def test_reports_are_written_when_it_fails_too(run: Any, profile: Path, tmp_path: Path, make: Any) -> None:
    worse, junit = tmp_path / "worse.json", tmp_path / "j.xml"
    save_profile(made_worse(make.profile(), "capacity"), worse)
    assert run("check", worse, "--baseline", profile, "--junit", junit).status == 1
    assert ET.parse(junit).getroot().attrib["failures"] == "1"  # noqa: S314


def test_a_budget_is_held(run: Any, profile: Path, tmp_path: Path) -> None:
    budget = tmp_path / "b.yaml"
    budget.write_text("schema: 1\ndefault: {max_tpot_ms: {p95: 40}}\n")
    assert run("check", profile, "--budget", budget).status == 0
    budget.write_text("schema: 1\ndefault: {max_tpot_ms: {p95: 12}}\n")
    assert run("check", profile, "--budget", budget).status == 1


@pytest.mark.parametrize("options", [[], ["--baseline", "B", "--budget", "C"]])
def test_one_thing_to_hold_against_is_needed(run: Any, profile: Path, options: list[str]) -> None:
    answer = run("check", profile, *options)
    assert answer.status == 2
    assert "--baseline and --budget" in answer.err


@pytest.mark.parametrize("margin", ["0", "-5%", "much", "200%"])
def test_a_margin_that_is_none_is_refused(run: Any, profile: Path, margin: str) -> None:
    answer = run("check", profile, "--baseline", profile, f"--margin={margin}")
    assert answer.status == 2
    assert "Traceback" not in answer.err


def test_another_model_is_not_comparable(run: Any, profile: Path, tmp_path: Path, make: Any) -> None:
    other = tmp_path / "other.json"
    save_profile(make.profile(model=make.model(digest="e" * 64)), other)
    answer = run("check", other, "--baseline", profile)
    assert answer.status == 3
    assert "another model" in answer.out


def test_what_cannot_be_compared_for_one_reason_is_one_row(run: Any, profile: Path, tmp_path: Path, make: Any) -> None:
    other = tmp_path / "other.json"
    save_profile(make.profile(device=make.device(uuid="cpu-2", name="Other CPU")), other)
    answer = run("check", other, "--baseline", profile)
    assert answer.status == 3
    assert answer.out.count("Other CPU") == 1
    assert "20 cells" in answer.out


def test_a_report_that_cannot_be_written_is_one_line(run: Any, profile: Path, tmp_path: Path) -> None:
    answer = run("check", profile, "--baseline", profile, "--junit", tmp_path / "none" / "j.xml")
    assert answer.status == 2
    assert answer.err.count("\n") == 1


@pytest.mark.parametrize("option", ["--junit", "--markdown"])
def test_what_is_read_is_not_overwritten(run: Any, profile: Path, option: str) -> None:
    before = profile.read_bytes()
    answer = run("check", profile, "--baseline", profile, option, profile)
    assert answer.status == 2
    assert "is read and would be overwritten" in answer.err
    assert profile.read_bytes() == before
