"""Whole screens: a change in what the user reads shows in the files beside this one."""

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvplan.core.assessments import Measurements
from kvplan.core.planner import make_plan
from kvplan.core.plans import Plan
from kvplan.core.workloads import Bucket, QualityBudget, Target, Workload
from kvplan.report.json import plan_json
from kvplan.report.plan import print_plan

WORKLOAD = Workload(
    model="made-up", target=Target(concurrency=32),
    buckets=(Bucket(name="long", prompt_tokens=1800, generate_tokens=128),),
)  # fmt: skip
FOLDER = Path(__file__).parent / "expected"
TARGETS: dict[str, dict[str, Any]] = {
    "keep": {"memory_bytes": 1 << 30},
    "quantize": {"memory_bytes": 150 << 20},
    "tight": {"memory_bytes": 120 << 20, "quality": QualityBudget(max_perplexity_increase=0.01, max_kl=0.01)},
    "nothing": {"memory_bytes": 100 << 20, "target": Target(concurrency=32)},
    "unmeasured": {"memory_bytes": 1 << 30},
}


def planned(make: Any, name: str) -> Plan:
    workload = make.workload(**TARGETS[name])
    profile = make.profile(workload)
    known = Measurements(cells=profile.cells, quality=profile.quality, device=profile.device)
    return make_plan(workload, make.model(), Measurements() if name == "unmeasured" else known)


def screen(plan: Plan) -> str:
    stream = io.StringIO()
    console = Console(file=stream, width=80)
    print_plan(console, plan, WORKLOAD, path="w.yaml", explain=True)
    return "".join(line.rstrip() + "\n" for line in stream.getvalue().splitlines())


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize(("write", "suffix"), [(screen, "txt"), (lambda plan: plan_json(plan) + "\n", "json")])
def test_the_same_profile_gives_the_same_text(make: Any, name: str, write: Callable[[Plan], str], suffix: str) -> None:
    path, text = FOLDER / f"recommend_{name}.{suffix}", write(planned(make, name))
    if os.environ.get("KVPLAN_UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")
