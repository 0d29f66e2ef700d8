"""Attention over several caches, merged by the sizes of their softmaxes, is that over all their tokens."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplan_kernels.append.reference import append
from kvplan_kernels.cache import AttentionOptions, Batch, LayerCache
from kvplan_kernels.decode import reference
from kvplan_kernels.decode.merging import merge
from kvplan_kernels.decode.result import DecodeResult
from kvplan_kernels.format import parse
from kvplan_kernels.layout import KVLayout
from kvplan_kernels.native import loader
from kvplan_kernels.ops import OPS
from kvplan_kernels.rotation import butterflies
from kvplan_kernels.sequence import sequences

HEADS, RATIO, DIM, BLOCK = 2, 3, 32, 32


def cache_of(name: str, key: torch.Tensor, value: torch.Tensor) -> tuple[LayerCache, Batch]:
    """Return a cache of *key* and *value*, [tokens, heads, dim], of one sequence."""
    tokens = key.shape[0]
    layout = KVLayout(format=parse(name), kv_heads=HEADS, head_dim=DIM, block_tokens=BLOCK)
    cache = LayerCache.allocate(layout, blocks=max(1, layout.blocks(tokens)), slots=1)
    batch = Batch(
        block_tables=torch.arange(cache.pages.shape[0], dtype=torch.int32)[None],
        slots=torch.zeros(1, dtype=torch.int32),
        lengths=torch.zeros(1, dtype=torch.int32),
    )
    counts = torch.tensor([tokens], dtype=torch.int32)
    append(cache, batch, key, value, counts)
    return cache, batch.after(counts)


@given(
    sizes=st.lists(st.integers(0, 90), min_size=1, max_size=4),
    names=st.lists(st.sampled_from(("bf16", "int8", "k4v2", "had-int4", "int8-r20")), min_size=4, max_size=4),
    softcap=st.sampled_from((None, 2.5)),
    sinks=st.booleans(),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=25, deadline=None)
def test_merged_attention_is_that_over_the_union(
    sizes: list[int], names: list[str], softcap: float | None, sinks: bool, seed: int
) -> None:
    noise = torch.Generator().manual_seed(seed)
    query = torch.randn(1, 1, HEADS * RATIO, DIM, generator=noise)
    options = AttentionOptions(scale=0.4, softcap=softcap)
    logits = torch.randn(HEADS * RATIO, generator=noise) if sinks else None
    results, keys, values = [], [], []
    for part, (size, name) in enumerate(zip(sizes, names, strict=False)):
        key, value = (3 * torch.randn(size, HEADS, DIM, generator=noise) for _ in range(2))
        cache, batch = cache_of(name, key, value)
        given = logits if part == 0 else None
        results.append(reference.decode(cache, batch, query, options, sink_logits=given, received=True, lse=True))
        held = sequences(cache, batch)[0]
        turned = "had" in name  # what is stored is rotated, and so is not a part of the union
        keys.append(rotated(held.dense("k"), turned))
        values.append(rotated(held.dense("v"), turned))
    whole = torch.tensor([sum(sizes)])
    merged = merge(results)
    output, received, lse = reference.attend(
        query[0].double(), torch.cat(keys, 1).double(), torch.cat(values, 1).double(), whole, options, logits
    )
    torch.testing.assert_close(merged.output[0].double(), output, atol=2e-5, rtol=0)
    torch.testing.assert_close(merged.lse[0].double(), lse, atol=2e-5, rtol=0)
    shared = [result.received[0] * share[0, 0, :, None] for result, share in zip(results, merged.shares, strict=True)]
    torch.testing.assert_close(torch.cat(shared, 1), received.float(), atol=2e-5, rtol=0)


def rotated(values: torch.Tensor, turned: bool) -> torch.Tensor:
    return butterflies(values) if turned else values


def test_what_sees_nothing_gives_nothing() -> None:
    nothing = DecodeResult(output=torch.zeros(1, 1, 2, 32), lse=torch.full((1, 1, 2), -torch.inf))
    merged = merge([nothing, nothing])
    assert not merged.output.any()
    assert not merged.shares.any()
    assert (merged.lse == -torch.inf).all()


def test_results_without_a_size_are_refused() -> None:
    with pytest.raises(ValueError, match="lse"):
        merge([DecodeResult(output=torch.zeros(1, 1, 2, 32))])


@pytest.mark.parametrize(
    "name",
    ["int8", "k8v4", "k4v2", "int2", "k3v2-g32", "nvfp4", "llama.cpp:q5_0", "bf16", "int1", "int4-o1", "int2-g32-o3"],
)
@pytest.mark.parametrize("kernel", ["reference", "cpu"])
def test_a_token_is_replaced_and_its_neighbours_stay(name: str, kernel: str) -> None:
    """What tiers do: an append in the midst of what is held."""
    if kernel == "cpu" and loader.missing():
        pytest.skip(str(loader.missing()))
    noise = torch.Generator().manual_seed(2)
    key, value, other, another = (torch.randn(70, HEADS, DIM, generator=noise) for _ in range(4))
    replaced = [0, 13, 31, 32, 50, 69]
    cache, batch = cache_of(name, key, value)
    for place in replaced:
        there = Batch(
            block_tables=batch.block_tables, slots=batch.slots, lengths=torch.tensor([place], dtype=torch.int32)
        )
        one = torch.ones(1, dtype=torch.int32)
        OPS["append"].implementations[kernel].call(cache, there, other[place][None], another[place][None], one)
    key[replaced], value[replaced] = other[replaced], another[replaced]
    whole, _ = cache_of(name, key, value)
    assert torch.equal(cache.pages, whole.pages)
