"""`kvplan calibrate` end to end on the demo model, and what takes its file."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvplan.store.models import load_model_spec
from kvplan.store.profiles import load_profile

FEW = ["--context", "128", "--documents", "1", "--threads", "1"]
SCORED = ["--context", "128", "--documents", "1", "--trials", "0", "--threads", "1"]
WORKLOAD = """schema: 1
model: demo
target: {concurrency: 1}
buckets: [{name: chat, prompt: 100, generate: 20, share: 100%}]
search: {formats: [bf16, unbias-int4], block_size: [64]}
"""


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_quality_takes_what_was_learned_in_this_folder(run: Any) -> None:
    refused = run("quality", "demo", "-f", "unbias-int4", *SCORED)
    assert refused.status == 2
    assert "run `kvplan calibrate demo -f unbias-int4`" in refused.err
    learned = run("calibrate", "demo", "-f", "unbias-int4", *FEW)
    assert learned.status == 0
    assert "k_offset" in learned.out
    assert "demo.calibration.safetensors: demo, 1 documents of 128 tokens, none of them scored" in learned.out
    found = json.loads(run("quality", "demo", "-f", "unbias-int4", "-f", "int4", "--json", *SCORED).out)
    assert [bool(result["key"]["calibration"]) for result in found["results"]] == [True, False]


def test_a_second_format_is_kept_beside_the_first(run: Any) -> None:
    run("calibrate", "demo", "-f", "unbias-int4", "-o", "c", *FEW)
    body = json.loads(run("calibrate", "demo", "-f", "unbias-smooth-int4", "-o", "c", "--json", *FEW).out)
    assert [entry["name"] for entry in body["learned"]] == ["unbias", "unbias-smooth"]
    body = json.loads(run("calibrate", "demo", "-f", "order-int4-g32", "-o", "c", "--json", *FEW).out)
    assert [entry["name"] for entry in body["learned"]] == ["order", "unbias", "unbias-smooth"]
    other = run("calibrate", "demo", "-f", "unbias-int4", "-o", "c", "--context", "64", "--documents", "1")
    assert (other.status, "c: was learned from other text; give --force" in other.err) == (2, True)
    forced = run("calibrate", "demo", "-f", "unbias-int4", "-o", "c", "--force", "--json", *FEW)
    assert [entry["name"] for entry in json.loads(forced.out)["learned"]] == ["unbias"]


@pytest.mark.parametrize(
    ("argv", "status", "line"),
    [
        (["demo", "-f", "int4"], 2, "format int4 learns nothing from a model"),
        (["demo", "-f", "unbias"], 3, "unknown format"),
        (["demo", "-f", "unbias-int4", "-o", "none/c"], 2, "none/c: lies in a folder that does not exist"),
        (["demo", "-f", "unbias-int4", "--data", "short.txt"], 2, "the text has"),
        (["demo", "-f", "unbias-int4", "-o", "short.txt", *FEW], 2, "short.txt: is no safetensors file"),
    ],
)
def test_what_cannot_be_learned_is_one_line(run: Any, argv: list[str], status: int, line: str) -> None:
    Path("short.txt").write_text("a", encoding="utf-8")
    answer = run("calibrate", *argv)
    assert (answer.status, answer.out) == (status, "")
    assert line in answer.err
    assert "Traceback" not in answer.err


ASKED = ("profile", "demo", "-w", "w.yaml", "-o", "p.json", "--quick", "--repeats", "1", "--threads", "1")


def test_profile_refuses_what_has_not_learned_before_it_measures(run: Any) -> None:
    Path("w.yaml").write_text(WORKLOAD, encoding="utf-8")
    refused = run(*ASKED)
    assert (refused.status, Path("p.jsonl").exists()) == (2, False)
    assert "run `kvplan calibrate demo -f unbias-int4`" in refused.err


@pytest.mark.slow
def test_profile_takes_it_too(run: Any) -> None:
    Path("w.yaml").write_text(WORKLOAD, encoding="utf-8")
    run("calibrate", "demo", "-f", "unbias-int4", "-o", "c", *FEW)
    done = run(*ASKED, "--calibration", "c", "--max-disturbance", "100%")
    assert done.status == 0, done.err
    profile = load_profile("p.json")
    assert {cell.key.format: str(cell.status) for cell in profile.cells} == {"bf16": "ok", "unbias-int4": "ok"}
    assert [bool(quality.key.calibration) for quality in profile.quality] == [False, True]
    assert profile.model.digest == load_model_spec("demo").digest
