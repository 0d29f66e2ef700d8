import json
from typing import Any

import pytest

from kvplan.engines import ENGINES
from kvplan_kernels.layer_formats import parse_formats


def test_every_format_listed_can_be_asked_for(run: Any) -> None:
    body = json.loads(run("formats", "--json").out)
    names = [entry["name"] for entry in body["formats"]]
    own = {entry["name"]: entry["format"] for entry in body["formats"] if "kvplan" in entry["engines"]}
    assert body["schema"] == 1
    assert {name: parse_formats(name).name for name in own} == own
    for entry in body["formats"]:
        if entry["name"] not in own:
            assert ENGINES[entry["engines"][0]].has_format(entry["name"])
    assert len(set(names)) == len(names)
    assert {"bf16", "int8", "int4", "int2", "k8v4", "kivi-k4v4-g64-r128"} <= set(names)


def test_bytes_per_token_come_with_a_model(run: Any) -> None:
    plain = json.loads(run("formats", "--json").out)["formats"]
    sized = json.loads(run("formats", "demo", "--json").out)["formats"]
    assert all("bytes_per_token" not in entry for entry in plain)
    assert all(("bytes_per_token" in entry) != ("unsupported" in entry) for entry in sized)
    by_name = {entry["name"]: entry.get("bytes_per_token") for entry in sized}
    assert by_name["bf16"] > by_name["int8"] > by_name["int4"] > by_name["int2"]


def test_the_devices_with_a_kernel_are_named(run: Any) -> None:
    body = {entry["name"]: entry for entry in json.loads(run("formats", "--json").out)["formats"]}
    assert body["int8"]["fused"]["cpu"]
    assert not body["vllm:fp8_ds_mla"]["fused"]["cpu"]
    assert body["fp8_e4m3"]["fused"]["cpu"]
    assert body["fp8_e4m3"]["effective_bits"] == 8


def test_what_a_format_learns_first_is_named(run: Any) -> None:
    body = {entry["name"]: entry for entry in json.loads(run("formats", "--json").out)["formats"]}
    assert (body["unbias-int4"]["calibrated"], body["unbias-int4"]["learns"]) == (True, ["unbias"])
    assert (body["had-int4"]["calibrated"], body["had-int4"]["learns"]) == (False, [])
    assert body["unbias-int4"]["effective_bits"] == body["int4"]["effective_bits"]
    assert "by `kvplan calibrate`" in run("formats").out


def test_the_screen_names_bits_and_sources(run: Any) -> None:
    answer = run("formats")
    assert answer.status == 0
    assert "arXiv" in answer.out


def test_engines_that_store_the_same_bits_are_named(run: Any) -> None:
    body = {entry["name"]: entry for entry in json.loads(run("formats", "--json").out)["formats"]}
    assert "vllm" in body["fp8_e4m3"]["engines"]
    assert body["int8"]["engines"][0] == "kvplan"
    assert "lmdeploy" in body["int8"]["engines"]
    assert "vllm" not in body["int8"]["engines"]
    assert body["vllm:int8_per_token_head"]["effective_bits"] == 8.25


def test_formats_that_are_asked_for_are_all_that_is_shown(run: Any) -> None:
    body = json.loads(run("formats", "demo", "-f", "k8v4@0=bf16", "-f", "int8", "--json").out)["formats"]
    assert [entry["name"] for entry in body] == ["k8v4@0=bf16", "int8"]
    assert (body[0]["bits_k"], body[0]["bits_v"]) == (10, 7)
    rows = [line.split() for line in run("formats", "demo", "-f", "k8v4@0=bf16").out.splitlines()]
    assert ["k8v4@0=bf16", "10", "7", "8.88"] in [row[:4] for row in rows]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["-f", "int4@0=bf16"], "format int4@0=bf16: its layers are those of a model; name the model"),
        (["demo", "-f", "int4@-5=bf16"], "format int4@-5=bf16: no layer -5 among the 4 that cache keys and values"),
    ],
)
def test_layers_that_are_not_known_are_refused(run: Any, arguments: list[str], says: str) -> None:
    answer = run("formats", *arguments)
    assert (answer.status, answer.out, answer.err) == (3, "", f"error: {says}\n")
