"""What of the kernels only a device can show."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from kvplan_kernels.append.gpu import append
from kvplan_kernels.cache import AttentionOptions, Batch, LayerCache
from kvplan_kernels.decode.gpu import decode
from kvplan_kernels.decode.reference import decode as defined_decode
from kvplan_kernels.format import parse
from kvplan_kernels.layout import KVLayout, Order
from kvplan_kernels.rows import plane_shifts

DEVICE = "cuda"
OPTIONS = AttentionOptions(scale=128**-0.5)
CLOSE = {"rtol": 0.0, "atol": 0.02}
HALVES = 1024


def layout(name: str, kv_heads: int = 2) -> KVLayout:
    return KVLayout(format=parse(name), kv_heads=kv_heads, head_dim=128, block_tokens=128, order=Order.ROWS)


def batch(blocks: list[int], tokens: int) -> Batch:
    table = torch.tensor([blocks], dtype=torch.int32)
    one = torch.ones(1, dtype=torch.int32)
    return Batch(block_tables=table, slots=0 * one, lengths=tokens * one).to(DEVICE)


def filled(cache: LayerCache, blocks: list[int], tokens: int) -> Batch:
    generator = torch.Generator().manual_seed(4)
    shape = (tokens, cache.layout.kv_heads, 128)
    key, value = (torch.randn(shape, generator=generator).bfloat16().to(DEVICE) for _ in range(2))
    before = batch(blocks, 0)
    counts = torch.full((1,), tokens, dtype=torch.int32, device=DEVICE)
    append(cache, before, key, value, counts)
    return before.after(counts)


def on_host(cache: LayerCache) -> LayerCache:
    return LayerCache(layout=cache.layout, pages=cache.pages.cpu(), ring=cache.ring.cpu(), sinks=cache.sinks.cpu())


def query() -> torch.Tensor:
    return torch.randn(1, 1, 8, 128, generator=torch.Generator().manual_seed(6)).bfloat16()


@pytest.mark.parametrize("name", ["bf16", "int8", "int4", "kivi-k4v2-g64-r128-s4"])
def test_a_graph_captured_once_serves_any_length(name: str) -> None:
    cache = LayerCache.allocate(layout(name), blocks=8, slots=1, device=DEVICE)
    held = filled(cache, list(range(8)), 1000)
    asked = query().to(DEVICE)
    decode(cache, held, asked, OPTIONS)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = decode(cache, held, asked, OPTIONS).output

    for tokens in (1000, 513, 70, 1):
        held.lengths.fill_(tokens)
        graph.replay()
        defined = defined_decode(on_host(cache), held.to("cpu"), query(), OPTIONS).output
        if tokens == 1000:  # shorter lengths read what the residual held of later tokens
            torch.testing.assert_close(found.cpu(), defined, **CLOSE)
        torch.testing.assert_close(found, decode(cache, held, asked, OPTIONS).output, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["bf16", "int4"])
def test_pages_beyond_four_gib_are_where_they_should_be(name: str) -> None:
    form = layout(name, kv_heads=8)
    last = 5 * 2**30 // form.page_bytes
    cache = LayerCache.allocate(form, blocks=last + 1, slots=1, device=DEVICE)
    near = LayerCache.allocate(form, blocks=3, slots=1, device=DEVICE)
    asked = torch.randn(1, 1, 32, 128, generator=torch.Generator().manual_seed(6)).bfloat16().to(DEVICE)

    far = decode(cache, filled(cache, [last, last - 1, last - 7], 300), asked, OPTIONS).output

    assert torch.equal(far, decode(near, filled(near, [0, 1, 2], 300), asked, OPTIONS).output)


@pytest.mark.parametrize(("bits", "shift"), [(b, s) for b in (8, 4, 2) for row in plane_shifts(b) for s in row])
def test_both_ways_to_unpack_are_equal_for_every_word_on_the_device(bits: int, shift: int) -> None:
    words = torch.arange(65536, dtype=torch.int32, device=DEVICE).to(torch.uint16)
    # Each word stands beside one of all ones as well: nothing may leak from the upper half of a register.
    beside = torch.stack([words.to(torch.int32), torch.full_like(words, 0).to(torch.int32) + 0xFFFF], dim=1)
    both = torch.cat([words, beside.flatten().to(torch.uint16)])
    plain, asm = (torch.empty(both.numel(), dtype=torch.float32, device=DEVICE) for _ in range(2))

    for floats, with_asm in ((plain, False), (asm, True)):
        kernels().unpack_all[(both.numel() // HALVES,)](
            both, floats, SHIFT=shift, BITS=bits, ASM=with_asm, COUNT=HALVES
        )

    assert torch.equal(plain, asm)


def kernels() -> Any:
    path = Path(__file__).with_name("unpack_kernels.py")
    spec = importlib.util.spec_from_file_location("unpack_kernels", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
