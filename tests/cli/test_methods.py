"""Methods by name, and their bits as their sources have them."""

import json
from typing import Any

import pytest

from kvplan.core.formats import FORMATS, format_facts, is_by_layer
from kvplan_kernels.layer_formats import parse_formats
from kvplan_kernels.methods import METHODS


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_its_format_and_the_format_prints_its_own_name(name: str) -> None:
    form = parse_formats(name)
    assert form == parse_formats(METHODS[name].format)
    assert parse_formats(form.name) == form
    assert form.name not in METHODS


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("kivi-2", 3.0), ("kivi-4", 5.0), ("flexgen-4", 4.5), ("atom-4", 4.25), ("quarot-4", 4.25), ("qserve-4", 4.25),
        ("skvq-2", 2.5), ("diffkv-high", 6.25), ("diffkv-low", 3.25), ("vllm:int8_per_token_head", 8.25),
        ("nvfp4", 4.5), ("mxfp4", 4.25), ("fp4_e2m1", 4.5), ("lloyd4", 4.125), ("lloyd4/int4", (4.125 + 4.25) / 2),
        ("lloyd3/int4", (3.125 + 4.25) / 2), ("fp8_e4m3/int4", (8 + 4.25) / 2), ("int3-g32", 4.0), ("int3-g64", 3.5),
        ("llama.cpp:q8_0", 8.5), ("llama.cpp:q5_1", 6.0), ("llama.cpp:q5_0", 5.5), ("llama.cpp:q4_1", 5.0),
        ("llama.cpp:q4_0", 4.5), ("llama.cpp:iq4_nl", 4.5), ("k4v4-g32-mfp32", 6.0), ("k2v2-g32-me4m3", 2.5),
        ("kivi-k2v2-g128", 2.25), ("kitty", 2.25 + (2 / 8 + 1 / 128) / 2), ("kitty-pro", 2.25 + 2 / 8 + 1 / 128),
    ],
)  # fmt: skip
def test_bits_at_head_size_128_are_those_of_the_source(name: str, bits: float) -> None:
    assert format_facts(name).effective_bits == bits


def test_every_method_is_listed_and_those_of_a_models_layers_where_it_has_them(run: Any) -> None:
    plain = {entry["name"] for entry in json.loads(run("formats", "--json").out)["formats"]}
    sized = {entry["name"]: entry for entry in json.loads(run("formats", "demo", "--json").out)["formats"]}
    by_layer = {name for name in METHODS if is_by_layer(name)}
    assert METHODS.keys() - plain == METHODS.keys() - sized.keys() == by_layer  # the demo model has four layers
    assert all(name in run("formats", "demo").out for name in by_layer)
    assert sized["flexgen-4"]["format"] == "k4v4-g64"
    assert sized["flexgen-4"]["bytes_per_token"] == sized["k4v4-g64"]["bytes_per_token"]
    assert FORMATS.keys() >= METHODS.keys()
