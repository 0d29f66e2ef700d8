"""Pages are counted, shared, copied and given back."""

from collections.abc import Iterable
from types import SimpleNamespace

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplan.core.layouts import ModelLayout, lay_out
from kvplan.core.specs import LayerKind, LayerSpec, ModelSpec
from kvplan.errors import DoesNotFitError
from kvplan.runtime.pool import CachedSequence, CachePool
from kvplan_kernels.layer_formats import parse_formats

FORMATS = ["bf16", "int8", "k8v4-g32", "kivi-k4v2-g32-r64", "kivi-paper-k2v2-g32-r64", "int4-r16-s4"]
BY_LAYER = ["int4@0=bf16", "kivi-k4v2-g32-r64@-1=int8-s4"]


def spec(head_dims: Iterable[int] = (64, 32)) -> ModelSpec:
    return ModelSpec(
        name="tiny",
        digest="0" * 64,
        architecture="TinyForCausalLM",
        layers=tuple(LayerSpec(kind=LayerKind.FULL, kv_heads=2, head_dim=head_dim) for head_dim in head_dims),
        query_heads=4,
        hidden_size=64,
        vocab_size=10,
        context_tokens=512,
    )


def pool(form: str, blocks: int = 16, slots: int = 4) -> CachePool:
    return CachePool(spec(), parse_formats(form), block_tokens=32, blocks=blocks, slots=slots)


def laid_out(form: str) -> ModelLayout:
    return lay_out(spec(), parse_formats(form), 32)


def filled(pages: CachePool, tokens: int) -> CachedSequence:
    sequence = pages.open()
    pages.grow(sequence, tokens)
    sequence.length = tokens
    return sequence


@pytest.mark.parametrize("form", [*FORMATS, *BY_LAYER])
def test_bytes_are_those_of_the_layout_and_of_the_tensors(form: str) -> None:
    pages = pool(form, blocks=7, slots=3)
    tensors = [tensor for cache in pages.caches for tensor in (cache.pages, cache.ring, cache.sinks)]

    assert pages.nbytes == laid_out(form).pool_bytes(blocks=7, slots=3)
    assert pages.nbytes == sum(tensor.untyped_storage().nbytes() for tensor in tensors)


@pytest.mark.parametrize("form", [*FORMATS, *BY_LAYER])
def test_a_pool_of_exactly_one_sequence_has_the_bytes_of_that_sequence(form: str) -> None:
    blocks = laid_out(form).blocks(200)
    pages = pool(form, blocks=blocks, slots=1)
    filled(pages, 200)

    assert pages.free_blocks == 0
    assert pages.nbytes == laid_out(form).sequence_bytes(200)


def test_a_shared_prefix_takes_its_full_pages_once() -> None:
    pages = pool("int8")
    parent = filled(pages, 100)  # three full pages and one begun
    twins = pages.fork(parent, 2)

    assert [twin.blocks[:3] for twin in twins] == [parent.blocks[:3]] * 2
    assert len({parent.blocks[3], twins[0].blocks[3], twins[1].blocks[3]}) == 3
    assert pages.free_blocks == 16 - 4 - 2


def test_a_page_whose_values_are_unfinished_is_not_shared() -> None:
    pages = pool("kivi-paper-k2v2-g32-r64")
    parent = filled(pages, 128)  # K of 128 tokens lies in pages, V of 64

    assert pages.fork(parent, 1)[0].blocks[:2] == parent.blocks[:2]
    assert set(pages.fork(parent, 1)[0].blocks[2:]).isdisjoint(parent.blocks)


def test_copies_hold_equal_bytes_in_pages_of_their_own() -> None:
    pages = pool("int4-r16-s4")
    parent = filled(pages, 100)
    for cache in pages.caches:
        for tensor in (cache.pages, cache.ring, cache.sinks):
            tensor.copy_(torch.randint(0, 256, tensor.shape, dtype=torch.uint8))
    twin = pages.fork(parent, 1, copy=True)[0]

    assert set(twin.blocks).isdisjoint(parent.blocks)
    for cache in pages.caches:
        assert torch.equal(cache.pages[parent.blocks], cache.pages[twin.blocks])
        assert torch.equal(cache.ring[parent.slot], cache.ring[twin.slot])
        assert torch.equal(cache.sinks[parent.slot], cache.sinks[twin.slot])


def test_a_shared_page_is_free_only_after_its_last_holder() -> None:
    pages = pool("int8")
    parent = filled(pages, 64)
    twin = pages.fork(parent, 1)[0]
    pages.free(parent)
    assert pages.free_blocks == 14
    pages.free(twin)

    assert pages.free_blocks == 16


def test_block_tables_list_each_sequence_s_pages() -> None:
    pages = pool("int8")
    sequences = [filled(pages, 40), filled(pages, 90)]
    batch = pages.batch(sequences)

    assert batch.lengths.tolist() == [40, 90]
    for row, sequence in enumerate(sequences):
        assert batch.block_tables[row, : len(sequence.blocks)].tolist() == sequence.blocks


@pytest.mark.parametrize("copy", [False, True])
def test_a_fork_that_does_not_fit_changes_nothing(copy: bool) -> None:
    pages = pool("int8", blocks=4)
    parent = filled(pages, 100)
    with pytest.raises(DoesNotFitError, match="0 of 4 are free"):
        pages.fork(parent, 2, copy=copy)

    assert pages.free_blocks == 0
    assert len(parent.blocks) == 4


def test_a_pool_beyond_the_memory_is_refused_before_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=100_000))
    with pytest.raises(DoesNotFitError, match=r"the int8 cache of 1000 blocks .* needs about 12.\d MiB, 97.7 KiB"):
        pool("int8", blocks=1000)


def test_more_sequences_than_slots_are_refused() -> None:
    pages = pool("int8", slots=2)
    parent = filled(pages, 10)
    with pytest.raises(DoesNotFitError, match="2 more sequences: the cache has room for 1"):
        pages.fork(parent, 2)
    filled(pages, 10)
    with pytest.raises(DoesNotFitError, match="all 2 sequences"):
        pages.open()


@settings(max_examples=60, deadline=None)
@given(data=st.data(), form=st.sampled_from([*FORMATS, *BY_LAYER]))
def test_whatever_happens_no_page_is_lost_or_held_twice(data: st.DataObject, form: str) -> None:
    pages, held, layout = pool(form, blocks=24, slots=5), list[CachedSequence](), laid_out(form)
    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["open", "grow", "fork", "free"]))
        try:
            if action == "open":
                held.append(filled(pages, data.draw(st.integers(0, 150))))
            elif held:
                chosen = data.draw(st.sampled_from(held))
                if action == "grow":
                    tokens = data.draw(st.integers(1, 80))
                    pages.grow(chosen, tokens)
                    chosen.length += tokens
                elif action == "fork":
                    held += pages.fork(chosen, data.draw(st.integers(1, 2)), copy=data.draw(st.booleans()))
                else:
                    held.remove(chosen)
                    pages.free(chosen)
        except DoesNotFitError:
            break
        taken = {block for sequence in held for block in sequence.blocks}
        assert len(taken) + pages.free_blocks == 24
        assert all(len(sequence.blocks) == layout.blocks(sequence.length) for sequence in held)
    for sequence in held:
        pages.free(sequence)
