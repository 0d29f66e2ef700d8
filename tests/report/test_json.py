import json
from dataclasses import dataclass
from typing import Any

import pytest

from kvplan.core.allocation import Setup
from kvplan.core.assessments import Measurements
from kvplan.core.compare import compare_profiles
from kvplan.core.formats import format_facts
from kvplan.core.planner import make_plan
from kvplan.core.sizes import CacheSize, size_allocation
from kvplan.core.specs import Evidence
from kvplan.engines.kvplan import allocate
from kvplan.report.json import comparison_json, formats_json, plain, plan_json, sizes_json


@dataclass
class Thing:
    evidence: Evidence
    values: tuple[float, ...]


def test_what_json_cannot_hold_becomes_null() -> None:
    assert plain(Thing(Evidence.EXACT, (1.0, float("nan"), float("inf")))) == {
        "evidence": "exact", "values": [1.0, None, None],
    }  # fmt: skip


def test_a_plan_names_its_pick_and_every_term(make: Any) -> None:
    workload, profile = make.workload(memory_bytes=150 << 20), make.profile()
    known = Measurements(cells=profile.cells, quality=profile.quality, device=profile.device)
    body = json.loads(plan_json(make_plan(workload, make.model(), known)))
    assert body["schema"] == 1
    assert body["outcome"] == "quantize"
    assert body["pick"] == {"format": "int8", "block_tokens": 64, "blocks": 724, "slots": 33}
    memory = body["options"][1]["memory"]
    assert sum(term["bytes"] for term in memory["terms"]) == memory["need_bytes"] <= memory["limit_bytes"]
    assert {verdict["status"] for verdict in body["options"][0]["verdicts"]} == {"over", "fits"}


def sized(make: Any, form: str, tokens: int, pool_bytes: int | None = None) -> CacheSize:
    allocation = allocate(make.model(), form, Setup(context_tokens=tokens))
    return size_allocation("m", form, "kvplan", allocation, pool_bytes)


@pytest.mark.parametrize(
    ("form", "growth", "fixed"),
    [("bf16", 4 * 2 * 2 * 2 * 64, 0), ("int4", 4 * 2 * 2 * (32 + 4), 0), ("int2", 4 * 2 * 2 * (16 + 4), 0)],
)
def test_sizes_have_the_keys_and_figures_of_arithmetic(make: Any, form: str, growth: int, fixed: int) -> None:
    (body,) = json.loads(sizes_json([sized(make, form, 4096, 1 << 30)]))["results"]
    assert body["logical"] == {
        "bytes_per_sequence": growth * 4096, "growth_bytes_per_token": growth, "fixed_bytes_per_sequence": fixed,
    }  # fmt: skip
    assert body["allocated"]["bytes_per_sequence"] == growth * 4096
    assert body["allocated"]["groups"] == [{"layers": 4, "block_tokens": 64, "bytes_per_block": growth * 16}]
    assert body["capacity"]["max_concurrency"] == (1 << 30) // (growth * 4096)
    assert body["capacity"]["tokens"] == body["capacity"]["blocks"] * 64
    assert (body["evidence"], body["tp"], body["pp"], body["engine"]) == ("exact", 1, 1, "kvplan")


def test_a_residual_grows_in_16_bits_first_and_then_in_the_format(make: Any) -> None:
    def logical(tokens: int) -> tuple[float, float]:
        size = sized(make, "kivi-k4v4-g64-r128", tokens).logical
        return size.growth_bytes_per_token, size.fixed_bytes_per_sequence

    def allocated(tokens: int) -> float:
        return sized(make, "kivi-k4v4-g64-r128", tokens).allocated.growth_bytes_per_token

    assert allocated(100) == 0
    assert allocated(4096) == 4 * 2 * 2 * (32 + 4)
    assert logical(100) == (4 * 2 * 2 * 128, 0)
    growth, fixed = logical(4096)
    assert growth == 4 * 2 * 2 * (32 + 4)
    assert fixed >= 128 * 4 * 2 * 2 * (128 - 36)


def test_formats_say_bits_with_their_metadata(make: Any) -> None:
    facts = [format_facts(name) for name in ("bf16", "int4", "kivi-k2v2-g64-r128")]
    body = json.loads(formats_json(facts))["formats"]
    assert [entry["effective_bits"] for entry in body] == [16, 4.25, 2.5]
    assert all(entry["fused"] == {"cpu": True, "cuda": True} for entry in body)
    assert "bytes_per_token" not in body[0]
    with_model = json.loads(formats_json([format_facts("int4", make.model())]))["formats"][0]
    assert with_model["bytes_per_token"] == 4 * 2 * 2 * 36


def test_a_comparison_carries_its_status(make: Any) -> None:
    body = json.loads(comparison_json(compare_profiles(make.profile(), make.profile())))
    assert body["status"] == 0
    assert {figure["standing"] for figure in body["figures"]} == {"held"}
