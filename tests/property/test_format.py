import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan_kernels.format import (
    BOOSTED_EIGHTHS_MAX,
    KEY_VALUE_BITS,
    TOKEN_GROUPS,
    Axis,
    CacheFormat,
    CodeTable,
    Fit,
    Flush,
    Number,
    ResidualRule,
    TensorFormat,
    Transform,
    UnsupportedError,
    parse,
)
from kvplan_kernels.tensor_format import LLAMA_CPP, STORED

NUMBERS = st.sampled_from([number for number in Number if number is not Number.E8M0])


@st.composite
def formats(draw: st.DrawFn) -> CacheFormat:
    rule = draw(st.sampled_from(ResidualRule))
    axis = Axis.CHANNEL if rule is ResidualRule.KIVI_PAPER else draw(st.sampled_from(Axis))
    groups = TOKEN_GROUPS if axis is Axis.CHANNEL else (*TOKEN_GROUPS, None)
    group, fit, number = draw(st.sampled_from(groups)), draw(st.sampled_from((Fit.RANGE, Fit.ABSMAX))), draw(NUMBERS)
    clip = draw(st.integers(10, 100))
    bits = st.sampled_from(KEY_VALUE_BITS[: -1 if fit is Fit.ABSMAX else None])
    residual = draw(st.integers(0, 300))
    if rule is ResidualRule.KIVI_PAPER:
        residual = (group or 0) * draw(st.integers(1, 4))
    key_bits = draw(bits)
    eighths = draw(st.integers(0, BOOSTED_EIGHTHS_MAX)) if axis is Axis.CHANNEL and key_bits <= 6 else 0
    return CacheFormat(
        key=TensorFormat(
            bits=key_bits,
            axis=axis,
            group_size=group,
            fit=fit,
            number=number,
            clip_percent=clip,
            boosted_eighths=eighths,
        ),
        value=TensorFormat(bits=draw(bits), group_size=group, fit=fit, number=number, clip_percent=clip),
        residual_tokens=residual,
        sink_tokens=draw(st.integers(0, 40)),
        outliers=draw(st.sampled_from((0, 0, 1, 16))),
        rule=rule,
    )


@st.composite
def pairs(draw: st.DrawFn) -> CacheFormat:
    """K and V that are stored in ways of their own, or of the same engine."""
    whole = formats().filter(lambda form: form.key.axis is Axis.TOKEN).map(lambda form: form.key)
    tensors = draw(
        st.sampled_from((st.sampled_from(list(STORED.values())) | whole, st.sampled_from(list(LLAMA_CPP.values()))))
    )
    residual, sinks = draw(st.integers(0, 300)), draw(st.integers(0, 40))
    return CacheFormat(key=draw(tensors), value=draw(tensors), residual_tokens=residual, sink_tokens=sinks)


@st.composite
def transformed(draw: st.DrawFn) -> CacheFormat:
    form = draw(formats() | pairs())
    chosen = draw(st.sets(st.sampled_from(Transform)))
    return replace(form, transforms=tuple(transform for transform in Transform if transform in chosen))


@given(transformed())
def test_transforms_are_named_in_order_or_refused(form: CacheFormat) -> None:
    found = parsed_or_reason(form.name)
    scales = {Transform.SCALED, Transform.SCALED_TENSOR, Transform.SCALED_CHANNEL} & set(form.transforms)
    grouped = any(tensor.axis is Axis.TOKEN and tensor.group_size for tensor in (form.key, form.value))
    fixed = form.key.most is not None or form.value.most is not None
    refused = len(scales) > 1 or (scales and not fixed) or (Transform.ORDER in form.transforms and not grouped)
    moved = {Transform.ORDER, Transform.HADAMARD} & set(form.transforms)
    refused = refused or (Transform.SCALED_CHANNEL in scales and moved)
    assert isinstance(found, str) if refused else found == form
    learned = {CodeTable.LEVELS} if form.key.learned or form.value.learned else set()
    assert set(form.calibrated) == set(form.transforms) - {Transform.HADAMARD, Transform.PREROPE} | learned


@given(formats() | pairs())
def test_a_printed_name_gives_the_format_back(form: CacheFormat) -> None:
    assert parse(form.name) == form
    assert parse(str(form)).name == form.name


def parsed_or_reason(name: str) -> CacheFormat | str:
    try:
        return parse(name)
    except UnsupportedError as error:
        return str(error)


@given(st.sampled_from(("", "kivi-", "kivi-paper-")), st.tuples(*[st.integers(0, 140)] * 5))
def test_a_name_is_refused_or_means_what_it_says(family: str, numbers: tuple[int, ...]) -> None:
    key, value, group, residual, sinks = numbers
    name = f"{family}k{key}v{value}-g{group}-r{residual}-s{sinks}"
    form = parsed_or_reason(name)
    if isinstance(form, str):
        assert name in form
        return
    assert (form.key.bits, form.value.bits, form.value.group_size) == (key, value, group)
    assert (form.residual_tokens, form.sink_tokens) == (residual, sinks)
    assert parse(form.name) == form


@given(st.text(max_size=20) | st.from_regex(r"fp8_e4m3(-[rsg][0-9]{0,3}){0,3}", fullmatch=True))
def test_any_other_text_is_refused_in_one_line(name: str) -> None:
    form = parsed_or_reason(name)
    assert "\n" not in form if isinstance(form, str) else re.fullmatch(r"[a-z0-9_./:-]+", form.name)


@pytest.mark.parametrize(
    ("name", "canonical"),
    [
        ("bf16", "bf16"),
        ("fp16", "fp16"),
        ("k8v8", "int8"),
        ("int4", "int4"),
        ("k2v2", "int2"),
        ("int8-r64", "k8v8-r64"),
        ("int4-g64-s4", "k4v4-g64-s4"),
        ("k4v4-g64-r0", "k4v4-g64"),
        ("kivi-paper-k2v2-g32-r128", "kivi-paper"),
        ("fp8_e4m3-r0-s0", "fp8_e4m3"),
        ("fp8_e4m3-r128-s4", "fp8_e4m3-r128-s4"),
        ("had-k4v4", "had-int4"),
        ("had-kivi-k2v2-g64-r128-s4", "had-kivi-k2v2-g64-r128-s4"),
        ("had-fp8_e4m3-r64", "had-fp8_e4m3-r64"),
        ("int3-g32", "k3v3-g32"),
        ("sym-int8-mfp32", "sym-k8v8-mfp32"),
        ("int8/int4", "k8v4"),
        ("int8-g64/int8-g64-r4", "k8v8-g64-r4"),
        ("sym-int8/int4", "sym-int8/int4"),
        ("fp8_e4m3/fp8_e4m3", "fp8_e4m3"),
        ("fp8_e4m3/int4-g32-r8", "fp8_e4m3/int4-g32-r8"),
        ("llama.cpp:q8_0/q4_0-s4", "llama.cpp:q8_0/q4_0-s4"),
        ("llama.cpp:q4_0/q4_0", "llama.cpp:q4_0"),
        ("kivi-paper-k2v2-g32-r128-s4", "kivi-paper-k2v2-g32-r128-s4"),
    ],
)
def test_names_have_one_canonical_form(name: str, canonical: str) -> None:
    assert parse(name).name == canonical


@pytest.mark.parametrize(
    "name",
    [
        "int7",
        pytest.param("int4-r" + "9" * 5000, id="endless"),
        "k٤v4",
        "k4",
        "k7v4",
        "sym-int1",
        "k4v4-me8m0",
        "k4v4-g8",
        "llama.cpp:q8_0/int4",
        "llama.cpp:q6_k",
        "llama.cpp:fp8_e4m3",
        "q8_0",
        "nvfp4-g16",
        "fp8_e4m3/",
        "/int4",
        "int4/kivi-k4v4-g64",
        "int4/bf16",
        "kivi-k4v4",
        "k4v4-s4-r2",
        "had-k7v4",
        "had-bf16",
        "had-had-int4",
        "had-unbias-int4",
        "smooth-unbias-int4",
        "unbias-bf16",
        "order-int4",
        "order-fp8_e4m3",
        "scaled-int4",
        "scaled-tensor-scaled-fp8_e4m3",
        "unbias-",
        "unbias",
        "kivi-had-k4v4-g64",
        "kivi-paper-k2v2-g64-r32",
        "kivi-paper-k2v2-g64",
        "k4v4 ",
        "K4V4",
        "k4v4-r-1",
        "fp8",
        "fp8_e4m3-g64",
        "fp8_e4m3-s4-r128",
        "kivi-fp8_e4m3",
    ],
)
def test_what_has_no_kernel_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedError):
        parse(name)


def test_a_block_that_llama_cpp_has_not_is_refused_with_those_it_has() -> None:
    with pytest.raises(UnsupportedError, match=r"llama\.cpp stores K and V as q8_0, q5_1, q5_0, q4_1, q4_0, iq4_nl"):
        parse("llama.cpp:q8_0/int4")


def test_what_codes_stand_for_says_which_numbers_a_group_has() -> None:
    assert parse("int8").key.metadata == ("scale", "min")
    assert parse("fp8_e4m3").key.metadata == parse("bf16").key.metadata == ()
    assert parse("fp8_e4m3").quantized


@given(st.integers(0, 300), st.integers(1, 128), st.integers(0, 2000))
def test_a_flush_keeps_the_newest_tokens_and_takes_whole_quanta(keep: int, quantum: int, tokens: int) -> None:
    flush = Flush(keep_tokens=keep, quantum_tokens=quantum)
    quantized = flush.quantized_tokens(tokens)
    assert quantized % quantum == 0
    assert min(tokens, keep) <= tokens - quantized <= flush.held_tokens_max
    assert quantized <= flush.quantized_tokens(tokens + 1)


@given(st.integers(0, 2000))
def test_a_group_leaves_the_residual_when_r_and_g_tokens_are_held(tokens: int) -> None:
    form = parse("kivi-k4v2-g64-r100")
    held = tokens - form.key_flush.quantized_tokens(tokens)
    assert form.key_flush == form.value_flush
    assert held == tokens if tokens < 164 else 100 <= held <= 163


@given(st.integers(0, 2000))
def test_per_token_formats_keep_exactly_r_tokens(tokens: int) -> None:
    form = parse("k4v2-g64-r100")
    for flush in (form.key_flush, form.value_flush):
        assert tokens - flush.quantized_tokens(tokens) == min(tokens, 100)


@given(st.integers(0, 2000))
def test_kivis_own_rule_empties_the_keys_and_slides_the_values(tokens: int) -> None:
    form = parse("kivi-paper-k2v2-g32-r96")
    assert tokens - form.key_flush.quantized_tokens(tokens) == tokens % 96
    assert tokens - form.value_flush.quantized_tokens(tokens) == min(tokens, 96)
