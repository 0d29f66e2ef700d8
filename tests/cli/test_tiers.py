"""Formats in tiers through every command that takes a format's name."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvplan.core.records import Cell, CellStatus, Profile
from kvplan.core.workloads import Prefill, Search
from kvplan.measure.cells import Setting, plan_cells
from kvplan.store.profiles import load_profile, save_profile
from kvplan_kernels import native

QUICK = ["--context", "256", "--documents", "2", "--trials", "0", "--threads", "1"]
TIERS = "tiers-w16-25-k8v4+50-k4v2"
WORKLOAD = f"""\
schema: 1
model: demo
memory: 20MiB
target: {{concurrency: 2}}
quality: {{max_perplexity_increase: 1000%}}
buckets:
  - {{name: chat, prompt: 90, generate: 40}}
search: {{formats: [bf16, {TIERS}], block_size: [32]}}
"""


def test_methods_in_tiers_are_sized_with_what_they_drop(run: Any) -> None:
    methods = {
        "diffkv": "tiers-25-k8v4+50-k4v2", "h2o": "tiers-sum-20-16bit", "snapkv": "tiers-once-w32-25-16bit"
    }  # fmt: skip
    flags = [flag for name in methods for flag in ("-f", name)]
    body = json.loads(run("size", "demo", *flags, "--context", 1664, "--kv-memory", "10MiB", "--json").out)
    for (name, form), result in zip(methods.items(), body["results"], strict=True):
        assert result["format"] == form
        assert result["logical"]["bytes_per_sequence"] <= result["allocated"]["bytes_per_sequence"]
        capacity, each = result["capacity"], result["allocated"]["bytes_per_sequence"]
        assert capacity["max_concurrency"] == (10 << 20) // each
        assert any(f"{form} drops " in note for note in result["notes"]), name
    assert any("a prompt of the whole context" in note for note in body["results"][2]["notes"])
    # 64 + 400 of K8V4, 800 of K4V2, in 2 heads of 64 channels and 4 layers, with two scales, two minima and notes
    heads, token = 4 * 2, {"k8v4": 96 + 8 + 8, "k4v2": 48 + 8 + 8}
    assert body["results"][0]["logical"]["bytes_per_sequence"] == heads * (464 * token["k8v4"] + 800 * token["k4v2"])


def test_they_are_listed_with_their_mean_bits(run: Any) -> None:
    body = {entry["name"]: entry for entry in json.loads(run("formats", "--json").out)["formats"]}
    notes = 64 / 256  # bits of an element at head size 128
    assert (body["diffkv"]["bits_k"], body["diffkv"]["bits_v"]) == (4, 2)
    assert body["diffkv"]["effective_bits"] == 0.25 * (6.25 + notes) + 0.5 * (3.25 + notes)
    assert body["h2o"]["effective_bits"] == pytest.approx(0.2 * (16 + notes))
    assert body["snapkv"]["effective_bits"] == 4
    sized = json.loads(run("formats", "demo", "-f", "diffkv", "--json").out)["formats"]
    assert sized[0]["bytes_per_token"] == 4 * 2 * (0.25 * (96 + 16) + 0.5 * (48 + 16))
    assert "tiers-[sum-|once-]" in run("formats").out


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["size", "demo", "-f", "tiers-60-int8+50-int4"], 3, "shares of 110 percent; 100 at most"),
        (["size", "demo", "-f", "tiers-20-nuq3"], 3, "nuq3 cannot be a tier's format"),
        (["size", "demo", "-f", "tiers-20-static-int4"], 3, "static codes want scales"),
        (["size", "demo", "-f", "tiers-20-scaled-fp8_e4m3"], 3, "what it learns is of a layer's heads together"),
        (["size", "demo", "-f", "diffkv", "--tp", "2"], 3, "one device"),
        (["size", "demo", "-f", "diffkv", "--engine", "vllm"], 3, "vllm has no cache format"),
        (["formats", "-f", "tiers-20-int8-r64"], 3, "leave -r and -s out"),
        (["formats", "-f", "tiers-int8"], 3, "tier 'int8'; write tiers-"),
        (["quality", "demo", "-f", "tiers-20-kivi-k4v4-g32", *QUICK], 3, "a tier replaces them one by one"),
        (["quality", "demo", "-f", "tiers-w9999-20-16bit", *QUICK], 2, "the window 9999"),
        (["profile", "demo", "-o", "P.json", "-f", "tiers-w0-20-int8"], 3, "the window is 1 or more"),
        (["calibrate", "demo", "-f", "diffkv"], 2, "learns nothing"),
    ],
)
def test_what_they_cannot_be_is_one_line(run: Any, arguments: list[str], status: int, says: str) -> None:
    answer = run(*arguments)
    assert (answer.status, answer.out) == (status, "")
    assert says in answer.err
    assert answer.err.count("\n") == 1


def test_quality_runs_them_and_a_cache_that_drops_loses_more(run: Any) -> None:
    names = ["tiers-w64-100-16bit", "tiers-w64-50-16bit", "tiers-w64-10-16bit"]
    flags = [flag for name in names for flag in ("-f", name)]
    body = json.loads(run("quality", "demo", *flags, *QUICK, "--json").out)
    assert [result["format"] for result in body["results"]] == [name.replace("w64-", "") for name in names]
    whole, half, tenth = (result["bounds"]["kl"]["estimate"] for result in body["results"])
    assert whole < 0.01 * half
    assert half < tenth


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    path = tmp_path / "W.yaml"
    path.write_text(WORKLOAD)
    return path


def test_a_profile_scores_them_and_says_why_no_time_is_theirs(run: Any, workload: Path, tmp_path: Path) -> None:
    output = tmp_path / "P.json"
    kernel = "reference" if native.missing() else "cpu"
    answer = run(
        "profile", "demo", "-w", workload, "-o", output, "-f", TIERS, "--kernel", kernel, "--quick", "--threads", 1
    )
    profile = load_profile(output)
    (cell,) = profile.cells
    assert answer.status == 3, "nothing was timed"
    assert cell.status is CellStatus.UNSUPPORTED
    assert cell.reason.startswith(f"{TIERS}: tokens are put into tiers by torch")
    assert [quality.key.format for quality in profile.quality] == [TIERS]
    assert profile.quality[0].documents[0].kl > 0

    # 2 sequences of 130 tokens: 16 + 28 in two blocks of K8V4, 57 in two of K4V2; 4 layers of 2 heads
    blocks = 2 * 32 * 8 * (96 + 8 + 8) + 2 * 32 * 8 * (48 + 8 + 8)
    assert cell.figures["allocated_bytes_per_sequence"].value == blocks
    assert cell.figures["cache_bytes"].value == 2 * blocks

    plan = run("recommend", workload, "-p", output)
    assert plan.status == 0
    assert TIERS in plan.out
    body = json.loads(run("recommend", workload, "-p", output, "--json").out)
    (option,) = [option for option in body["options"] if option["format"] == TIERS]
    assert sum(t["bytes"] for t in option["memory"]["terms"] if t["name"].startswith(("pages", "scores"))) == 2 * blocks


@pytest.fixture
def mixed(make: Any) -> Profile:
    """A made-up profile of formats that were timed and one in tiers that was not."""
    asked = make.workload(search=Search(formats=("bf16", "k8v4", "int2"), block_tokens=(64,)))
    profile: Profile = make.profile(asked)
    setting = Setting(device_uuid="cpu-1", threads=2, kernel="cpu/portable", prefill=Prefill.EXACT, cache_bytes=1 << 40)
    cells: tuple[Cell, ...] = plan_cells(
        make.workload(), make.model(), setting, formats=(TIERS,), block_tokens=(64,)
    ).settled
    assert len(cells) == 3
    return replace(profile, cells=(*profile.cells, *cells), quality=(*profile.quality, make.quality(TIERS)))


@pytest.fixture
def asked(tmp_path: Path) -> Path:
    path = tmp_path / "asked.yaml"
    path.write_text(f"""\
schema: 1
model: made-up
memory: 115MiB
target: {{concurrency: 32}}
quality: {{max_perplexity_increase: 5%}}
buckets:
  - {{name: chat, prompt: 1024, generate: 128, share: 70%}}
  - {{name: long, prompt: 1800, generate: 128, share: 30%}}
search: {{formats: [bf16, k8v4, {TIERS}, int2], block_size: [64]}}
""")
    return path


def test_a_plan_picks_them_for_memory_and_starts_their_runtime(
    run: Any, asked: Path, mixed: Profile, tmp_path: Path
) -> None:
    save_profile(mixed, tmp_path / "mixed.json")
    answer = run("recommend", asked, "-p", tmp_path / "mixed.json")
    assert answer.status == 0, answer.out
    assert "quantize K to 4 bits and V to 2 on average" in " ".join(answer.out.split())
    assert f'TieredRuntime(loaded, parse_formats("{TIERS}"), block_tokens=64, blocks=(' in answer.out


def test_a_time_that_is_never_measured_is_not_asked_for(run: Any, asked: Path, mixed: Profile, tmp_path: Path) -> None:
    save_profile(mixed, tmp_path / "mixed.json")
    timed = asked.read_text().replace("concurrency: 32", "concurrency: 32, tpot_ms: {p95: 50}")
    asked.write_text(timed)
    answer = run("recommend", asked, "-p", tmp_path / "mixed.json")
    text = " ".join(answer.out.split())
    assert answer.status == 3
    assert "TPOT p95: tokens are put into tiers by torch" in text
    assert "Measure it" not in text

    asked.write_text(timed.replace("5%", "1000%"))
    answer = run("recommend", asked, "-p", tmp_path / "mixed.json")
    assert answer.status == 0, answer.out
    assert "quantize to 2 bits" in answer.out, "what cannot be measured blocks no pick"

    asked.write_text(timed)
    assert "Measure it" in run("recommend", asked, "-p", _without(mixed, tmp_path)).out, "quality can be"


def _without(profile: Profile, folder: Path) -> Path:
    path = folder / "unscored.json"
    save_profile(replace(profile, quality=tuple(q for q in profile.quality if q.key.format != TIERS)), path)
    return path


@pytest.mark.parametrize(
    ("limit", "status"),
    [
        ("max_bytes_per_sequence: 1MiB", 0),
        ("max_bytes_per_sequence: 200KiB", 1),
        ("min_sessions: 10", 0),
        ("min_sessions: 2000", 1),
        ("max_tpot_ms: {p95: 50}", 3),
        ("quality: {max_kl: 0.02}", 0),
        ("quality: {max_kl: 0.00001}", 1),
    ],
)
def test_a_budget_limits_their_bytes_and_quality(
    run: Any, mixed: Profile, tmp_path: Path, limit: str, status: int
) -> None:
    path, budget = tmp_path / "mixed.json", tmp_path / "b.yaml"
    save_profile(mixed, path)
    memory = "memory: 100MiB\n" if "sessions" in limit else ""
    budget.write_text(f"schema: 1\n{memory}formats:\n  {TIERS}: {{{limit}}}\n")
    answer = run("check", path, "--budget", budget)
    assert answer.status == status, answer.out
    assert run("check", path, "--baseline", path).status == 0
