"""Transforms that are learned: attention at 16 bits stays what it was, and every implementation does them alike."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvplan_kernels.cache import AttentionOptions, LayerCache
from kvplan_kernels.cases import Case, Data, QueryType
from kvplan_kernels.decode.reference import attend, decode
from kvplan_kernels.dequantize.reference import dequantize
from kvplan_kernels.folding import fold_of
from kvplan_kernels.format import CacheFormat, FloatType, UnsupportedError, kernel_refusal, parse
from kvplan_kernels.inputs import make_inputs
from kvplan_kernels.layout import order_of
from kvplan_kernels.learning import learn
from kvplan_kernels.ops import OPS
from kvplan_kernels.parameters import LayerParameters, check_learned, learned_names, neutral
from kvplan_kernels.quantize import dequantize_codes, quantize

FORMATS = (
    "unbias-int4",
    "smooth-int4",
    "order-k4v4-g32",
    "scaled-fp8_e4m3",
    "scaled-tensor-fp8_e4m3",
    "unbias-smooth-order-had-k4v4-g32-r20-s4",
    "unbias-smooth-order-kivi-k4v2-g32-r32",
    "unbias-scaled-had-fp8_e4m3-r16-s2",
    "scaled-channel-static-nuq3/nuq4-r20-s2",
    "smooth-scaled-channel-fp8_e4m3",
    "unbias-had-nuq3/static-int8",
)
BEFORE_ROPE = (
    "prerope-int4",
    "prerope-kivi-k2v2-g32-b2-r20",
    "prerope-scaled-channel-static-nuq3/nuq3-o1-s1",
    "prerope-unbias-smooth-order-had-k4v4-g32-r20-s4",
    "prerope-fp8_e4m3/int3-g32-r16",
)
HEAD_DIMS = st.sampled_from((32, 40, 64, 80, 128))


def tensors(head_dim: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return a query [3, 6, head_dim], and keys and values [50, 2, head_dim] of channels of very different sizes."""
    noise = torch.Generator().manual_seed(seed)
    query = torch.randn(3, 6, head_dim, generator=noise)
    key, value = (torch.randn(50, 2, head_dim, generator=noise) for _ in range(2))
    spread = torch.exp2(torch.randint(-3, 4, (2, head_dim), generator=noise))
    offset = 5 * torch.randn(2, head_dim, generator=noise)
    return query, key * spread + offset, value * spread


@pytest.mark.parametrize("name", FORMATS)
@given(head_dim=HEAD_DIMS, seed=st.integers(0, 2**16))
@settings(max_examples=10, deadline=None)
def test_attention_at_16_bits_is_unchanged(name: str, head_dim: int, seed: int) -> None:
    form = parse(name)
    query, key, value = tensors(head_dim, seed)
    fold = fold_of(form, learn(form, key, value))
    options, positions = AttentionOptions(scale=head_dim**-0.5), torch.tensor([47, 48, 49])

    def attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        by_head = (tensor.double().transpose(0, 1) for tensor in (k, v))
        return attend(q.double(), *by_head, positions, options)[:2]

    plain, received = attention(query, key, value)
    grouped = query.unflatten(1, (2, 3)).transpose(1, 2)
    asked = fold.key.asked(grouped).transpose(1, 2).flatten(1, 2)
    stored = fold.key.stored(key), fold.value.stored(value)
    turned, turned_received = attention(asked, *stored)
    read = fold.value.read(turned.float().unflatten(1, (2, 3)).transpose(1, 2)).transpose(1, 2).flatten(1, 2)
    size = float(plain.abs().max())
    torch.testing.assert_close(read.double(), plain, atol=1e-4 * size, rtol=0)
    torch.testing.assert_close(turned_received, received, atol=1e-4, rtol=0)
    for side, values in ((fold.key, key), (fold.value, value)):
        torch.testing.assert_close(side.read(side.stored(values)), values, atol=1e-4, rtol=1e-5)


HELD = (
    "unbias-int4-r200",
    "smooth-int4-r200",
    "order-k4v4-g32-r180-s20",
    "unbias-smooth-order-had-k4v4-g32-r200",
    "prerope-int4-r180-s20",
    "prerope-unbias-smooth-order-had-k4v4-g32-r200",
)


@pytest.mark.parametrize("kernel", ["reference", "cpu"])
@pytest.mark.parametrize("name", HELD)
@pytest.mark.parametrize("head_dim", [40, 64])
def test_tokens_that_are_held_in_16_bits_give_the_attention_of_16_bits(name: str, head_dim: int, kernel: str) -> None:
    """Residual and sinks hold what is transformed as well, so that one decode serves all parts of a cache."""
    asked = case(
        name,
        head_dim=head_dim,
        gqa_ratio=3,
        float_type=FloatType.FP16,
        queries=3,
        data=Data.NORMAL,
        lengths=(150, 5, 64),
    )
    if (reason := OPS["decode"].implementations[kernel].unsupported(asked)) is not None:
        pytest.skip(reason)
    inputs = make_inputs(asked, order_of(kernel))
    inputs.fill(OPS["append"].implementations[kernel].call)
    decoded = OPS["decode"].implementations[kernel].call
    found = decoded(inputs.cache, inputs.batch, inputs.query, inputs.options, lse=True)
    for row, length in enumerate(inputs.batch.lengths.tolist()):
        key, value = (tensor[:length].transpose(0, 1) for tensor in (inputs.key, inputs.value))
        positions = torch.arange(length - 3, length)
        output, _, lse = attend(inputs.query[row], key, value, positions, inputs.options)
        torch.testing.assert_close(found.output[row], output, atol=2e-2, rtol=0)
        torch.testing.assert_close(found.lse[row], lse, atol=2e-2, rtol=0)


def case(name: str, **changes: object) -> Case:
    plain = Case(
        format=name, lengths=(150, 5, 64), head_dim=64, query_type=QueryType.FP32, data=Data.OUTLIERS, queries=2
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def supported(kernel: str) -> list[str]:
    return [name for name in (*FORMATS, *BEFORE_ROPE) if kernel_refusal(kernel, parse(name)) is None]


@pytest.mark.parametrize("name", supported("cpu"))
def test_append_leaves_the_same_bytes(name: str, variants: tuple[str, ...]) -> None:
    inputs, twin = (make_inputs(case(name, gqa_ratio=3)) for _ in range(2))
    for batch, key, value, counts in inputs.appends():
        poisoned = [
            OPS["append"].implementations[kernel].call(made.cache, batch, key, value, counts)
            for kernel, made in (("reference", inputs), ("cpu", twin))
        ]
        assert poisoned[0] == poisoned[1]
    for part in ("pages", "ring", "sinks"):
        assert torch.equal(getattr(twin.cache, part), getattr(inputs.cache, part)), part


@pytest.mark.parametrize(
    ("kernel", "name", "lengths"),
    [
        *(("cpu", name, (150, 5, 64)) for name in supported("cpu")),
        ("triton", "unbias-smooth-order-k4v4-g32-r8-s4", (40,)),  # in Triton's interpreter a second a tile
        ("triton", "prerope-unbias-smooth-order-had-k4v4-g32-r4-s4", (40,)),
        ("triton", "prerope-kivi-k2v2-g32-b2-r4", (40,)),
        ("triton", "prerope-scaled-channel-static-int4-o1-s1", (37,)),
    ],
)
@pytest.mark.filterwarnings("ignore:overflow encountered")  # lanes that Triton masks hold what past owners left
def test_every_implementation_transforms_alike(kernel: str, name: str, lengths: tuple[int, ...]) -> None:
    implementations = {op: OPS[op].implementations[kernel] for op in OPS}
    asked = case(name, gqa_ratio=3, data=Data.NORMAL, received=True, lengths=lengths, block_tokens=32)
    if (reason := implementations["decode"].unsupported(asked)) is not None:
        pytest.skip(reason)
    inputs = make_inputs(asked, order_of(kernel))
    inputs.fill(implementations["append"].call)
    defined = make_inputs(asked)
    defined.fill()
    told = {"received": True, "lse": True}
    expected = decode(defined.cache, defined.batch, defined.query, defined.options, **told)
    found = implementations["decode"].call(inputs.cache, inputs.batch, inputs.query, inputs.options, **told)
    torch.testing.assert_close(found.output, expected.output, atol=2e-2, rtol=0)
    torch.testing.assert_close(found.received, expected.received, atol=2e-2, rtol=0)
    torch.testing.assert_close(found.lse, expected.lse, atol=2e-2, rtol=0)
    dense = implementations["dequantize"].call(inputs.cache, inputs.batch)
    for one, other in zip(dense, dequantize(defined.cache, defined.batch), strict=True):
        torch.testing.assert_close(one.float(), other.float(), atol=2e-2, rtol=2e-2)


def key_error(name: str, data: Data) -> float:
    """Return the norm of what storing does to the first sequence's keys."""
    inputs = make_inputs(case(name, data=data))
    inputs.fill()
    stored = dequantize(inputs.cache, inputs.batch)[0][0].float()
    return float((stored - inputs.key.transpose(0, 1)).norm())


def test_what_is_read_back_is_closer_to_what_was_stored() -> None:
    """A constant taken out, channels smoothed or sorted: each leaves the codes of a group less to span."""
    assert key_error("unbias-int4", Data.OFFSET) < 0.3 * key_error("int4", Data.OFFSET)
    assert key_error("smooth-int4", Data.OUTLIERS) < 0.5 * key_error("int4", Data.OUTLIERS)


def test_channels_in_order_keep_what_the_small_ones_hold() -> None:
    """Every other channel is large: in place they are in each group, and in order they are in groups of their own."""
    form = parse("order-int4-g32")
    value = torch.randn(100, 2, 64, generator=torch.Generator().manual_seed(1))
    value[..., ::2] *= 30
    side = fold_of(form, learn(form, value, value)).value

    in_order = side.read(coded_and_read(side.stored(value), form))
    errors = [float((found - value)[..., 1::2].norm()) for found in (in_order, coded_and_read(value, form))]
    assert errors[0] < 0.1 * errors[1]


def coded_and_read(value: Tensor, form: CacheFormat) -> Tensor:
    coded = quantize(value.transpose(0, 1), form.value)
    return dequantize_codes(coded.codes, coded.metadata, form.value).transpose(0, 1)


def test_a_calibrated_float_format_reaches_what_an_uncalibrated_one_cuts_off() -> None:
    key = 3000 * torch.randn(40, 2, 64, generator=torch.Generator().manual_seed(1))
    form = parse("scaled-fp8_e4m3")
    stored = fold_of(form, learn(form, key, key)).key.stored(key)
    torch.testing.assert_close(stored.abs().amax((0, 2)), torch.full((2,), 448.0))
    even = parse("scaled-tensor-fp8_e4m3")
    learned = learn(even, key * torch.tensor([1.0, 0.1])[:, None], key)
    assert torch.equal(learned["k_largest"], key[:, 0].abs().max().expand(2))


def test_what_is_learned_is_what_the_papers_say() -> None:
    query, key, value = tensors(64, 3)
    assert query.shape[1] == 6
    torch.testing.assert_close(learn(parse("unbias-int4"), key, value)["k_offset"], key.mean(0))
    divisor = learn(parse("smooth-int4"), key, value)["k_divisor"]
    assert torch.equal(divisor[:, :32], divisor[:, 32:])
    torch.testing.assert_close(divisor[:, :32], key.abs().amax(0).unflatten(-1, (2, 32)).amax(1).sqrt())
    order = learn(parse("order-int4-g32"), key, value)["v_order"]
    sizes = value.abs().amax(0).gather(-1, order)
    assert bool((sizes.diff(dim=-1) >= 0).all())


def test_transforms_learn_from_what_those_before_them_leave() -> None:
    _, key, value = tensors(64, 3)
    both = learn(parse("unbias-smooth-int4"), key, value)
    left = key - key.mean(0)
    torch.testing.assert_close(both["k_divisor"], learn(parse("smooth-int4"), left, value)["k_divisor"])
    rotated = learn(parse("scaled-had-fp8_e4m3"), key, value)
    assert not torch.equal(rotated["k_largest"], learn(parse("scaled-fp8_e4m3"), key, value)["k_largest"])


def test_channels_that_were_never_used_are_left_as_they_are() -> None:
    nothing = torch.zeros(4, 2, 64)
    for name in FORMATS:
        form = parse(name)
        learned = learn(form, nothing, nothing)
        for side in (fold_of(form, learned).key, fold_of(form, learned).value):
            assert bool(side.stored(nothing).eq(0).all())
        for tensor in learned_names(form):
            check_learned(tensor, learned[tensor], 2, 64)


@pytest.mark.parametrize("name", ["unbias-int4", "scaled-channel-static-int8"])
@pytest.mark.parametrize("changes", [{"softcap": 2.5}, {"sink_logits": True}])
def test_a_constant_is_refused_where_softmax_would_see_it(name: str, changes: dict[str, object]) -> None:
    inputs = make_inputs(case(name, **changes))
    inputs.fill()
    with pytest.raises(UnsupportedError, match=f"{name} takes a constant"):
        decode(inputs.cache, inputs.batch, inputs.query, inputs.options, sink_logits=inputs.sink_logits)


def test_a_cache_without_what_its_format_learns_is_refused() -> None:
    inputs = make_inputs(case("unbias-int4"))
    bare = LayerCache(
        layout=inputs.cache.layout, pages=inputs.cache.pages, ring=inputs.cache.ring, sinks=inputs.cache.sinks
    )
    batch, key, value, counts = inputs.appends()[0]
    with pytest.raises(UnsupportedError, match="k_offset"):
        OPS["append"].reference(bare, batch, key, value, counts)
    with pytest.raises(UnsupportedError, match="k_offset"):
        decode(bare, batch, inputs.query, inputs.options)


@pytest.mark.parametrize("name", FORMATS)
def test_neutral_numbers_change_nothing(name: str) -> None:
    query, key, value = tensors(64, 5)
    layout = case(name).layout()
    fold = fold_of(layout.format, neutral(layout))
    assert torch.equal(fold.key.stored(key), key)
    assert torch.equal(fold.value.stored(value), value)
    assert torch.equal(fold.key.asked(query[:, :2]), query[:, :2])


@pytest.mark.parametrize(
    ("name", "tensor", "reason"),
    [
        ("k_offset", torch.zeros(2, 32), r"k_offset: float32 \[2, 64\] is needed, got float32 \[2, 32\]"),
        ("k_offset", torch.full((2, 64), torch.inf), "not finite"),
        ("k_divisor", torch.zeros(2, 64), "not above 0"),
        ("k_order", torch.zeros(2, 64, dtype=torch.int64), "not every channel"),
        ("v_largest", torch.zeros(2, 64), r"float32 \[2\] is needed"),
    ],
)
def test_numbers_that_no_model_taught_are_refused(name: str, tensor: Tensor, reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        check_learned(name, tensor, 2, 64)
    assert LayerParameters({name: tensor}).to("cpu")[name] is tensor
