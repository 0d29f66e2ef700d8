from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplan.errors import DoesNotFitError
from kvplan.measure.beds import DenseBed, Group, PagedBed, copies_needed, fitting_copies, synthetic
from kvplan.runtime.ops import load_ops
from kvplan_kernels.cache import AttentionOptions
from kvplan_kernels.format import parse
from kvplan_kernels.layout import KVLayout

GROUPS = (Group(sequences=2, tokens=150), Group(sequences=1, tokens=37))
OPTIONS = AttentionOptions(scale=32**-0.5)


def layout(name: str) -> KVLayout:
    return KVLayout(format=parse(name), kv_heads=2, head_dim=32, block_tokens=32)


def query(sequences: int = 3) -> torch.Tensor:
    return torch.randn(sequences, 1, 6, 32, generator=torch.Generator().manual_seed(5))


def exact(tokens: int, asked: torch.Tensor) -> torch.Tensor:
    key, value = (tensor.float().transpose(0, 1) for tensor in synthetic(layout("bf16"), tokens))
    scores = asked.view(2, 3, 32) @ key.transpose(1, 2) * OPTIONS.scale
    return (scores.softmax(-1) @ value).flatten(0, 1)


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 500), st.integers(1, 20)), min_size=1, max_size=8),
    cold=st.integers(0, 3_000),
)
def test_the_cold_bytes_are_read_before_any_byte_is_read_again(sizes: list[tuple[int, int]], cold: int) -> None:
    layer_bytes, reads = [size for size, _ in sizes], [count for _, count in sizes]

    copies = copies_needed(layer_bytes, reads, cold)

    trace = []
    counters = [0] * len(sizes)
    for _ in range(2 + max(-(-number // count) for number, count in zip(copies, reads, strict=True))):
        for bed, count in enumerate(reads):
            for _ in range(count):
                trace.append((bed, counters[bed] % copies[bed]))
                counters[bed] += 1
    last: dict[tuple[int, int], int] = {}
    total = 0
    for item in trace:
        size = layer_bytes[item[0]]
        if item in last:
            assert total - last[item] >= cold
        last[item] = total
        total += size


def test_copies_shrink_to_the_memory_there_is_and_say_so() -> None:
    whole, rotated = fitting_copies([10, 20], [1, 1], 300, 10_000)
    fewer, less = fitting_copies([10, 20], [1, 1], 300, 100)

    assert rotated == 300
    assert whole == [10, 10]
    assert 10 * fewer[0] + 20 * fewer[1] <= 100
    assert less < 300


def test_layers_that_do_not_fit_once_are_refused() -> None:
    with pytest.raises(DoesNotFitError, match="one layer"):
        fitting_copies([60, 60], [1, 1], 300, 100)


@pytest.mark.parametrize("name", ["bf16", "int8", "int8-r64-s4"])
def test_every_replicated_sequence_holds_the_same_tokens(name: str) -> None:
    bed = PagedBed(layout(name), GROUPS, load_ops("reference"), copies=2)
    asked = query(1).expand(3, -1, -1, -1).contiguous()

    first = bed.decode(asked, OPTIONS)
    second = bed.decode(asked, OPTIONS)

    assert torch.equal(first, second)
    assert torch.equal(first[0], first[1])
    assert (first[0, 0] - exact(150, asked[0, 0])).norm() < 0.03 * first[0, 0].norm()
    assert (first[2, 0] - exact(37, asked[2, 0])).norm() < 0.03 * first[2, 0].norm()


def test_pages_lie_in_shuffled_order() -> None:
    bed = PagedBed(layout("int8"), (Group(sequences=8, tokens=160),), load_ops("reference"), copies=1)

    pages = bed.batch.block_tables.flatten().tolist()

    assert sorted(pages) == list(range(40))
    assert pages != sorted(pages)


def test_a_bed_takes_its_copies_in_turn() -> None:
    bed = PagedBed(layout("int8"), GROUPS, load_ops("reference"), copies=3)

    taken = [bed.next_cache().pages.data_ptr() for _ in range(6)]

    assert len(set(taken)) == 3
    assert taken[:3] == taken[3:]


def test_a_bed_has_the_bytes_that_its_layout_says() -> None:
    for name in ("bf16", "kivi-k4v4-g32-r64-s4"):
        form = layout(name)
        bed = PagedBed(form, GROUPS, load_ops("reference"), copies=1)

        assert bed.nbytes == sum(group.sequences * form.sequence_bytes(group.tokens) for group in GROUPS)


def test_torch_attends_to_the_same_tokens() -> None:
    bed = DenseBed(layout("bf16"), GROUPS, copies=2)
    asked = query(3)

    for key, value in bed.next_tensors():
        assert key.shape == value.shape
    bed.decode_folded(asked, OPTIONS)

    key, value = bed.next_tensors()[0]
    expected = synthetic(layout("bf16"), 150)
    assert torch.equal(key[1].transpose(0, 1), expected[0])
    assert torch.equal(value[0].transpose(0, 1), expected[1])


def test_appending_goes_through_every_length_up_to_the_full_one() -> None:
    seen: list[list[int]] = []
    ops = load_ops("reference")
    bed = PagedBed(layout("int8"), GROUPS, ops, copies=1)
    bed._ops = replace(ops, append_counting=lambda cache, batch, *_, most: seen.append(batch.lengths.tolist()))
    token = torch.zeros(3, 2, 32)

    for back in (2, 1):
        bed.append_call(token, token, back=back)()

    assert seen == [[148, 148, 35], [149, 149, 36]]
