"""Chunks read what single tokens would have read."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvplan.runtime.chunks import chunk_sizes
from kvplan.runtime.ops import load_ops
from kvplan_kernels.cache import AttentionOptions, Batch, LayerCache
from kvplan_kernels.format import CacheFormat, parse
from kvplan_kernels.layer_formats import parse_formats
from kvplan_kernels.layout import KVLayout

KERNEL_ROUNDING = {"reference": 1e-6, "cpu": 1e-3}
"""The compiled kernel rounds probabilities to integers of a scale that depends on what a call reads."""

FORMATS = [
    "bf16",
    "int8",
    "int4-s4",
    "int8-r64",
    "k8v4-g64-r32-s2",
    "kivi-k4v4-g64-r128",
    "kivi-k2v2-g32",
    "kivi-k4v4-g128-s3",
    "kivi-paper-k2v2-g32-r64",
]


def quantized(form: CacheFormat, held: int) -> tuple[int, int]:
    paged = max(0, held - form.sink_tokens)
    return form.key_flush.quantized_tokens(paged), form.value_flush.quantized_tokens(paged)


def seen_in_16_bits(form: CacheFormat, held: int, appended: int) -> tuple[int, int]:
    """Returns how many tokens of K and V a query at *held* - 1 sees in 16 bits, once *appended* are in the cache."""
    key, value = quantized(form, appended)
    paged = max(0, held - form.sink_tokens)
    return max(0, paged - key), max(0, paged - value)


@given(
    name=st.sampled_from([*FORMATS, "bf16@0=int8-r64", "kivi-k4v4-g64-r128@0=kivi-k2v2-g32@-1=int8"]),
    start=st.integers(0, 400),
    tokens=st.integers(1, 300),
    limit=st.integers(1, 32),
)
def test_every_query_of_a_chunk_sees_as_many_16_bit_tokens_as_alone(
    name: str, start: int, tokens: int, limit: int
) -> None:
    sizes = chunk_sizes(parse_formats(name), start, tokens, limit)
    assert sum(sizes) == tokens
    assert max(sizes) <= limit
    for form in (part for part in parse_formats(name).parts if part.quantized):
        at = start
        for size in sizes:
            for held in range(at + 1, at + size + 1):
                assert seen_in_16_bits(form, held, at + size) == seen_in_16_bits(form, held, held)
            at += size


@pytest.mark.parametrize(("name", "sizes"), [("int8", [32, 8]), ("bf16", [32, 8]), ("int8-r4", [1] * 40)])
def test_only_formats_that_flush_single_tokens_from_a_residual_go_token_by_token(name: str, sizes: list[int]) -> None:
    assert chunk_sizes(parse(name), 200, 40, 32) == sizes


def test_a_prompt_may_let_single_tokens_leave_early_but_never_groups() -> None:
    assert chunk_sizes(parse("int8-r64"), 200, 40, 32, single=False) == [32, 8]
    assert chunk_sizes(parse("kivi-k4v4-g64-r128"), 180, 40, 32, single=False) == [11, 29]


@pytest.mark.parametrize("kernel", ["reference", "cpu"])
@pytest.mark.parametrize("name", FORMATS)
def test_chunks_leave_the_bytes_and_give_the_attention_of_single_tokens(name: str, kernel: str) -> None:
    ops, form, tokens, prompt = load_ops(kernel, 1), parse(name), 150, 40
    layout = KVLayout(format=form, kv_heads=2, head_dim=32, block_tokens=128)
    generator = torch.Generator().manual_seed(1)
    key, value, query = (torch.randn(prompt + tokens, heads, 32, generator=generator) for heads in (2, 2, 4))
    outputs, caches = [], []
    for sizes in ([1] * tokens, chunk_sizes(form, prompt, tokens, 32)):
        cache, parts = LayerCache.allocate(layout, blocks=2, slots=1), []
        ops.append(cache, batch(0), key[:prompt], value[:prompt], torch.tensor([prompt], dtype=torch.int32))
        at = prompt
        for size in sizes:
            counts = torch.tensor([size], dtype=torch.int32)
            ops.append(cache, batch(at), key[at : at + size], value[at : at + size], counts)
            at += size
            parts.append(
                ops.decode(cache, batch(at), query[None, at - size : at], AttentionOptions(scale=32**-0.5)).output[0]
            )
        outputs.append(torch.cat(parts))
        caches.append(cache)

    assert torch.equal(caches[0].pages, caches[1].pages)
    assert torch.equal(caches[0].ring, caches[1].ring)
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-4, atol=KERNEL_ROUNDING[kernel])


def batch(length: int) -> Batch:
    return Batch(
        block_tables=torch.tensor([[0, 1]], dtype=torch.int32),
        slots=torch.zeros(1, dtype=torch.int32),
        lengths=torch.tensor([length], dtype=torch.int32),
    )
