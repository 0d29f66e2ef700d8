"""Names of formats that differ by layer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan_kernels import layer_formats
from kvplan_kernels.format import CacheFormat, UnsupportedError, parse
from kvplan_kernels.layer_formats import (
    ModelFormat,
    by_layer,
    check_formats,
    formats_refusal,
    parse_formats,
)

NAMES = ("bf16", "int8", "int4-g64", "kivi-k4v2-g32-r32", "had-int4", "fp8_e4m3-r16-s4")
FORMS = st.sampled_from(NAMES).map(parse)
EXCEPTIONS = st.dictionaries(st.integers(-12, 12), FORMS, max_size=10)


@given(rest=FORMS, exceptions=EXCEPTIONS)
def test_a_printed_name_gives_the_format_back(rest: CacheFormat, exceptions: dict[int, CacheFormat]) -> None:
    form = by_layer(rest, exceptions)
    assert parse_formats(form.name) == form
    assert parse_formats(str(form)).name == form.name


@given(rest=FORMS, exceptions=EXCEPTIONS, count=st.integers(1, 14))
def test_every_layer_has_the_format_that_was_said_of_it(
    rest: CacheFormat, exceptions: dict[int, CacheFormat], count: int
) -> None:
    form = by_layer(rest, exceptions)
    said = {layer: stored for layer, stored in exceptions.items() if stored != rest}
    twice = any(layer >= 0 and said.get(layer - count, stored) != stored for layer, stored in said.items())
    found = tuple(said.get(n, said.get(n - count, rest)) for n in range(count))
    nothing = form.quantized and not any(stored.quantized for stored in found)
    if twice or nothing or any(not -count <= layer < count for layer in said):
        with pytest.raises(UnsupportedError):
            form.of_layers(count)
        return
    assert form.of_layers(count) == found


@given(name=st.sampled_from(NAMES), count=st.integers(0, 5))
def test_what_is_the_same_in_all_layers_is_a_format_of_a_layer(name: str, count: int) -> None:
    assert parse_formats(name) == parse(name)
    assert isinstance(parse_formats(f"{name}@0,-3--1={name}"), CacheFormat)
    assert parse(name).of_layers(count) == (parse(name),) * count
    assert parse(name).parts == (parse(name),)


@pytest.mark.parametrize(
    ("name", "canonical"),
    [
        ("int4@0,1,-2,-1=bf16", "int4@0,1,-2,-1=bf16"),
        ("int4@-1,1,-2,0=bf16", "int4@0,1,-2,-1=bf16"),
        ("kivi-k4v2-g32-r32@0=int8@5-7=int4", "kivi-k4v2-g32-r32@0=int8@5-7=int4"),
        ("kivi-k4v2-g32-r32@7,5,6=k4v4@0=k8v8", "kivi-k4v2-g32-r32@0=int8@5-7=int4"),
        ("k4v4@2=bf16@0-1=bf16", "int4@0-2=bf16"),
        ("int4@0-3,2=bf16", "int4@0-3=bf16"),
        ("int4@-4--2=bf16@-1=int8", "int4@-4--2=bf16@-1=int8"),
        ("int4@0,1=k4v4@5=bf16", "int4@5=bf16"),
        ("int4@007=bf16", "int4@7=bf16"),
        ("int4@0=bf16@1=int8@2=bf16", "int4@0,2=bf16@1=int8"),
        ("int4@3=llama.cpp:q8_0/q4_0", "int4@3=llama.cpp:q8_0/q4_0"),
    ],
)
def test_names_have_one_canonical_form(name: str, canonical: str) -> None:
    assert parse_formats(name).name == canonical


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("int4@0=bf16@0=int8", "two formats for layer 0; leave one"),
        ("int4@0=int4@0=int8", "two formats for layer 0"),
        ("int4@0-3=bf16@2-5=int8", "two formats for layer 2"),
        ("int4@0,1", "no format for layers '0,1'; .* in quotes in YAML"),
        ("int4@", "no format for layers ''"),
        ("int4@=bf16", "layers ''; write <format>@<layers>=<format>"),
        ("int4@0,,1=bf16", "layers ''"),
        ("int4@a=bf16", "layers 'a'"),
        ("int4@-0=bf16", "layers '-0'"),
        ("int4@3-1=bf16", "layers '3-1'; count upwards, and from one end"),
        ("int4@0--1=bf16", "layers '0--1'; count upwards, and from one end"),
        ("int4@-1-2=bf16", "layers '-1-2'; count upwards"),
        ("int4@0-99999=bf16", "layers '0-99999'; .* up to 9999"),
        ("@0=bf16", "one of its formats is missing"),
        ("int4@0=", "one of its formats is missing"),
        ("int4@0=int9", "int9"),
        ("int4@0=bf16=int8", "unknown format 'bf16=int8'"),
        ("int9@0=bf16", "int9"),
        ("", "unknown format ''"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_the_mend(name: str, says: str) -> None:
    with pytest.raises(UnsupportedError, match=says):
        parse_formats(name)


def parsed_or_reason(name: str) -> ModelFormat | str:
    try:
        return parse_formats(name)
    except UnsupportedError as error:
        return str(error)


@given(st.text(max_size=20) | st.from_regex(r"int4(@[0-9,-]{0,5}(=(bf16|int8)?)?){0,3}", fullmatch=True))
def test_any_other_text_is_refused_in_one_line(name: str) -> None:
    form = parsed_or_reason(name)
    if isinstance(form, str):
        assert len(form.splitlines()) == 1
    else:
        assert parse_formats(form.name) == form


@pytest.mark.parametrize(
    ("name", "count", "says"),
    [
        ("int4@8=bf16", 8, "no layer 8 among the 8 that cache keys and values"),
        ("int4@-9=bf16", 8, "no layer -9 among the 8"),
        ("int4@0,1,-2,-1=bf16", 4, "all of the 4 layers that cache keys and values are named in 16 bits"),
        ("int4@0=bf16@-1=int8", 1, "two formats for layer 0, which is -1 of 1 layers; leave one"),
    ],
)
def test_layers_that_a_model_does_not_have_are_refused(name: str, count: int, says: str) -> None:
    with pytest.raises(UnsupportedError, match=says):
        parse_formats(name).of_layers(count)


def test_a_layer_named_from_both_ends_with_one_format_is_one() -> None:
    assert [form.name for form in parse_formats("int4@0,1,-2,-1=int8").of_layers(3)] == ["int8"] * 3


def test_it_is_quantized_where_any_layer_is() -> None:
    assert parse_formats("bf16@3=int4").quantized
    assert parse_formats("int4@3=bf16").quantized
    assert not parse_formats("bf16@3=fp16").quantized


def test_a_kernel_takes_it_that_takes_every_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_formats, "kernel_refusal", lambda kernel, form: f"{kernel}: no {form}" * form.quantized)
    assert formats_refusal("cpu", parse_formats("bf16@0=fp16")) is None
    assert formats_refusal("cpu", parse_formats("bf16@0=int4")) == "cpu: no int4"
    assert formats_refusal("cpu", parse_formats("int8@0=bf16")) == "cpu: no int8"
    check_formats("cpu", parse_formats("bf16"))
    with pytest.raises(UnsupportedError, match="cpu: no int8"):
        check_formats("cpu", parse_formats("bf16@3=int8"))


def test_one_layer_has_no_format_by_layer() -> None:
    with pytest.raises(UnsupportedError, match="'int4@0=bf16' is of a model's layers, and this is of one"):
        parse("int4@0=bf16")
