"""Keys and values that are rotated before they are stored: attention stays what it was, and codes lose less."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplan_kernels.append.reference import append
from kvplan_kernels.cache import AttentionOptions, Batch, LayerCache
from kvplan_kernels.cases import Case, Data, QueryType
from kvplan_kernels.decode.reference import attend, decode
from kvplan_kernels.dequantize.reference import dequantize
from kvplan_kernels.format import kernel_refusal, parse
from kvplan_kernels.inputs import Inputs, make_inputs
from kvplan_kernels.layout import order_of
from kvplan_kernels.native import loader
from kvplan_kernels.native.rotation import rotate as compiled
from kvplan_kernels.ops import OPS
from kvplan_kernels.rotation import block_sizes, butterflies, hadamard, multiply
from kvplan_kernels.transforms import transforming_append

HEAD_DIMS = st.sampled_from(range(32, 257, 8))
FORMATS = ("had-int8", "had-k4v4-g64-r20-s4", "had-kivi-k4v2-g32-r32", "had-fp8_e4m3")


@given(head_dim=HEAD_DIMS)
@settings(deadline=None)
def test_the_rotation_is_orthogonal_and_its_own_inverse(head_dim: int) -> None:
    matrix = hadamard(head_dim).double()
    assert sum(block_sizes(head_dim)) == head_dim
    assert torch.equal(matrix, matrix.T)
    torch.testing.assert_close(matrix @ matrix, torch.eye(head_dim, dtype=torch.float64), atol=1e-6, rtol=0)


def test_sizes_that_are_no_power_of_two_are_rotated_in_blocks() -> None:
    matrix = hadamard(80)
    assert bool((matrix[:64, 64:] == 0).all())
    assert torch.equal(matrix[:64, :64].abs(), torch.full((64, 64), 0.125))
    assert torch.equal(matrix[64:, 64:].abs(), torch.full((16, 16), 0.25))


@given(head_dim=HEAD_DIMS, seed=st.integers(0, 2**16))
@settings(max_examples=25, deadline=None)
def test_attention_of_rotated_tensors_is_attention(head_dim: int, seed: int) -> None:
    noise = torch.Generator().manual_seed(seed)
    query = torch.randn(3, 4, head_dim, generator=noise)
    key, value = (torch.randn(2, 50, head_dim, generator=noise) for _ in range(2))
    options, positions = AttentionOptions(scale=head_dim**-0.5), torch.tensor([47, 48, 49])
    plain, received, lse = attend(query, key, value, positions, options)
    turned, turned_received, turned_lse = attend(*(butterflies(t) for t in (query, key, value)), positions, options)
    torch.testing.assert_close(butterflies(turned), plain, atol=1e-4, rtol=0)
    torch.testing.assert_close(turned_received, received, atol=1e-4, rtol=0)
    torch.testing.assert_close(turned_lse, lse, atol=1e-4, rtol=0)


def test_formats_without_rotation_take_tensors_as_they_are() -> None:
    def handed(cache: LayerCache, _: Batch, *new: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return new

    called = transforming_append(butterflies)(handed)
    values, short = torch.randn(3, 2, 64), torch.randn(3, 2, 32)
    inputs = {name: make_inputs(case(name)) for name in ("int8", "had-int8")}
    plain, rotated = (made.cache for made in inputs.values())
    batch, counts = inputs["int8"].empty, torch.tensor([3], dtype=torch.int32)
    assert called(plain, batch, values, values, counts)[0] is values
    assert torch.equal(called(rotated, batch, values, values, counts)[0], butterflies(values))
    assert called(rotated, batch, short, values, counts)[0] is short  # for the operation to refuse


def case(name: str, data: Data = Data.NORMAL) -> Case:
    return Case(format=name, lengths=(150, 5, 64), head_dim=64, query_type=QueryType.FP32, data=data, queries=2)


def filled(name: str, data: Data = Data.NORMAL, kernel: str = "reference") -> Inputs:
    inputs = make_inputs(case(name, data), order_of(kernel))
    inputs.fill()
    return inputs


@given(head_dim=HEAD_DIMS, seed=st.integers(0, 2**16))
@settings(max_examples=25, deadline=None)
def test_the_compiled_rotation_is_the_definition_bit_for_bit(head_dim: int, seed: int) -> None:
    values = torch.randn(3, 2, head_dim, generator=torch.Generator().manual_seed(seed)) * 100
    if loader.missing() is None:
        assert torch.equal(compiled(values), butterflies(values))
    torch.testing.assert_close(multiply(values), butterflies(values), atol=1e-3, rtol=1e-5)


@pytest.mark.parametrize("name", [name for name in FORMATS if kernel_refusal("cpu", parse(name)) is None])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_append_leaves_the_same_bytes(
    name: str, head_dim: int, variants: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = replace(case(name, Data.OUTLIERS), head_dim=head_dim)
    caches = {variant: make_inputs(asked).cache for variant in variants}
    inputs = make_inputs(asked)
    for batch, key, value, counts in inputs.appends():
        poisoned = append(inputs.cache, batch, key, value, counts)
        for variant, cache in caches.items():
            monkeypatch.setenv(loader.VARIANT_ENVIRONMENT, variant)
            assert OPS["append"].implementations["cpu"].call(cache, batch, key, value, counts) == poisoned
            for part in ("pages", "ring", "sinks"):
                assert torch.equal(getattr(cache, part), getattr(inputs.cache, part)), (variant, part)


@pytest.mark.parametrize("name", [name for name in FORMATS if kernel_refusal("cpu", parse(name)) is None])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_decode_agrees(name: str, head_dim: int, variants: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_inputs(replace(case(name), head_dim=head_dim, gqa_ratio=3, received=True))
    inputs.fill()
    given = inputs.cache, inputs.batch, inputs.query, inputs.options
    definition = decode(*given, received=True)
    for variant in variants:
        monkeypatch.setenv(loader.VARIANT_ENVIRONMENT, variant)
        found = OPS["decode"].implementations["cpu"].call(*given, received=True)
        torch.testing.assert_close(found.output, definition.output, atol=2e-3, rtol=0, msg=variant)
        torch.testing.assert_close(found.received, definition.received, atol=2e-3, rtol=0, msg=variant)


@pytest.mark.parametrize(
    ("kernel", "name"),
    [(kernel, name) for kernel in ("cpu", "triton") for name in FORMATS if kernel_refusal(kernel, parse(name)) is None],
)
def test_every_implementation_rotates_alike(kernel: str, name: str) -> None:
    implementations = {op: OPS[op].implementations[kernel] for op in OPS}
    reason = implementations["decode"].unsupported(case(name))
    if reason is not None:
        pytest.skip(reason)
    inputs = filled(name, kernel=kernel)
    definition = decode(inputs.cache, inputs.batch, inputs.query, inputs.options)
    found = implementations["decode"].call(inputs.cache, inputs.batch, inputs.query, inputs.options)
    torch.testing.assert_close(found.output, definition.output, atol=2e-2, rtol=0)
    dense = zip(
        implementations["dequantize"].call(inputs.cache, inputs.batch),
        dequantize(inputs.cache, inputs.batch),
        strict=True,
    )
    for one, other in dense:
        torch.testing.assert_close(one.float(), other.float(), atol=2e-2, rtol=2e-2)


def errors(name: str, data: Data) -> tuple[float, float]:
    """Return the norms of what storing does to K and V."""
    inputs = filled(name, data)
    key, value = dequantize(inputs.cache, inputs.batch)
    found = []
    for row, held, stored in ((0, inputs.key, key), (0, inputs.value, value)):
        length = int(inputs.batch.lengths[row])
        exact = held[:length].to(torch.bfloat16).float().transpose(0, 1)
        found.append(float((stored[row, :, :length].float() - exact).norm()))
    return found[0], found[1]


def test_what_is_read_back_is_what_was_stored() -> None:
    key, value = errors("had-int8", Data.NORMAL)
    plain = errors("int8", Data.NORMAL)
    assert key < 2 * plain[0]
    assert value < 2 * plain[1]


def test_outlier_channels_cost_per_token_codes_less_when_rotated() -> None:
    """As QuaRot (arXiv 2404.00456, section 4) and ggml-org/llama.cpp#21038 found of real models."""
    plain, rotated = errors("int4", Data.OUTLIERS), errors("had-int4", Data.OUTLIERS)
    assert rotated[0] < 0.7 * plain[0]
    assert rotated[1] < plain[1]


def test_a_nan_poisons_the_groups_of_its_token_alone() -> None:
    inputs = filled("had-int4")
    before = dequantize(inputs.cache, inputs.batch)
    key = torch.randn(1, 2, 64)
    key[0, 1, 3] = torch.nan
    one = Batch(
        block_tables=inputs.batch.block_tables[1:2], slots=inputs.batch.slots[1:2], lengths=inputs.batch.lengths[1:2]
    )
    counts = torch.ones(1, dtype=torch.int32)
    assert append(inputs.cache, one, key, torch.randn(1, 2, 64), counts) == 1
    after = dequantize(inputs.cache, inputs.batch)
    for held, now in zip(before, after, strict=True):
        assert torch.equal(held, now)
    assert bool(dequantize(inputs.cache, one.after(counts))[0][0, 1, -1].isnan().all())
