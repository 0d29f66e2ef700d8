import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from kvplan.core.assessments import Measurements
from kvplan.core.planner import make_plan
from kvplan.core.plans import Plan
from kvplan.core.workloads import Bucket, QualityBudget, Search, Target, Workload
from kvplan.report.plan import print_plan
from kvplan.report.table import printable

WORKLOAD = Workload(
    model="made-up", target=Target(concurrency=32),
    buckets=(Bucket(name="long", prompt_tokens=1800, generate_tokens=128),),
)  # fmt: skip


def screen(plan: Plan, *, explain: bool = False, width: int = 80, **terminal: Any) -> str:
    stream = io.StringIO()
    print_plan(Console(file=stream, width=width, **terminal), plan, WORKLOAD, path="w.yaml", explain=explain)
    return stream.getvalue()


def planned(make: Any, **changes: Any) -> Plan:
    workload = make.workload(**changes)
    profile = make.profile(workload)
    known = Measurements(cells=profile.cells, quality=profile.quality, device=profile.device)
    return make_plan(workload, make.model(), known)


def test_the_pick_is_marked_and_named_in_the_call_that_starts_it(make: Any) -> None:
    text = screen(planned(make, memory_bytes=150 << 20))
    assert [line.split()[1] for line in text.splitlines() if line.startswith(">")] == ["int8"]
    assert 'Runtime(loaded, parse("int8"), block_tokens=64, blocks=724, slots=33)' in text


@pytest.mark.parametrize("blocks", [(64,), (64, 128)])
def test_nothing_is_wider_than_80_columns(make: Any, blocks: tuple[int, ...]) -> None:
    budget = QualityBudget(max_perplexity_increase=0.01, max_kl=0.02, max_top1_flips=0.02)
    search = Search(formats=("bf16", "int8", "kivi-k4v4-g64-r128", "int2"), block_tokens=blocks)
    text = screen(planned(make, memory_bytes=150 << 20, quality=budget, search=search), explain=True)
    assert max(len(line) for line in text.splitlines() if "Runtime(" not in line) <= 80
    assert "…" not in text


def test_colour_is_left_out_where_no_terminal_asks_for_it(make: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    text = screen(planned(make, memory_bytes=150 << 20), force_terminal=True)
    assert "\x1b[3" not in text
    assert "\x1b" not in screen(planned(make, memory_bytes=150 << 20))


def test_a_predicted_time_is_marked_and_its_error_named(make: Any) -> None:
    workload = make.workload(memory_bytes=1 << 30)
    profile = make.profile(workload)
    asked = replace(workload, target=Target(concurrency=24, tpot_ms={95: 50.0}))
    known = Measurements(cells=profile.cells, quality=profile.quality, device=profile.device)
    text = screen(make_plan(asked, make.model(), known))
    assert "~" in text
    assert "predicted" in text


def test_missing_measurements_come_with_the_command_that_takes_them(make: Any) -> None:
    workload = make.workload(memory_bytes=1 << 30)
    text = screen(make_plan(workload, make.model(), Measurements()))
    assert "kvplan profile made-up -w w.yaml -f bf16 -f int8" in text


def test_explain_adds_terms_and_verdicts(make: Any) -> None:
    plan = planned(make, memory_bytes=150 << 20)
    short, long = screen(plan), screen(plan, explain=True)
    assert long.startswith(short)
    assert "block tables" in long
    assert "block tables" not in short


def test_text_that_a_terminal_would_obey_is_taken_out() -> None:
    assert printable("a\x1b[2Jb\u202ec") == "a?[2Jb?c"
