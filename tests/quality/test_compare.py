"""The figures of a comparison, by hand."""

from collections.abc import Iterator
from math import log

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvplan.core.specs import LayerKind, LayerSpec, ModelSpec
from kvplan.quality.compare import score_documents, score_trials
from kvplan.quality.lane import FormatLane, reads_quantized
from kvplan.quality.lanes import Span
from kvplan.quality.passages import Passage
from kvplan_kernels.format import parse


def spec(*windows: int | None) -> ModelSpec:
    return ModelSpec(
        name="tiny", digest="0" * 64, architecture="TinyForCausalLM",
        layers=tuple(
            LayerSpec(kind=LayerKind.SLIDING if w else LayerKind.FULL, kv_heads=1, head_dim=32, window_tokens=w)
            for w in windows
        ),
        query_heads=1, hidden_size=32, vocab_size=2, context_tokens=512,
    )  # fmt: skip


def one_span(reference: list[list[float]], other: list[list[float]]) -> Iterator[Span]:
    """Yields one span of one passage, from probabilities [positions, vocabulary]."""
    logits = tuple(torch.tensor([rows]).log() for rows in (reference, other))
    yield Span(first_passage=0, start=0, logits=logits)


def test_likelihood_divergence_and_flips_by_hand() -> None:
    passage = Passage(prompt=(0, 0), fed=(0, 1), targets=(1, 0), scored=2)
    spans = one_span([[0.5, 0.5], [0.9, 0.1]], [[0.5, 0.5], [0.25, 0.75]])
    ((document,),) = score_documents(spans, [passage], [FormatLane(parse("int8"))], spec(None))

    assert document.nll_16bit == pytest.approx(-log(0.5) - log(0.9))
    assert document.nll == pytest.approx(-log(0.5) - log(0.25))
    assert document.kl_values == pytest.approx((0.0, 0.9 * log(0.9 / 0.25) + 0.1 * log(0.1 / 0.75)), abs=1e-6)
    assert document.kl == pytest.approx(sum(document.kl_values))
    assert document.flips == 1
    assert (document.positions, document.quantized_positions) == (2, 2)


def test_equal_logits_diverge_by_exactly_nothing() -> None:
    passage = Passage(prompt=(0,), fed=(0,), targets=(1,), scored=1)
    rows = torch.randn(1, 1, 1000)
    spans = iter([Span(first_passage=0, start=0, logits=(rows, rows))])
    ((document,),) = score_documents(spans, [passage], [FormatLane(parse("int8"))], spec(None))

    assert (document.kl, document.flips, document.nll - document.nll_16bit) == (0, 0, 0)


@pytest.mark.parametrize(
    ("likeliest", "hit"),
    [([0, 5, 6], True), ([9, 5, 6], True), ([0, 9, 6], False), ([0, 5, 9], False)],
)
def test_an_answer_is_found_if_all_its_tokens_and_only_they_are_right(likeliest: list[int], hit: bool) -> None:
    passage = Passage(prompt=(1,) * 7, fed=(2, 3, 5), targets=(3, 5, 6), scored=2)
    right = torch.nn.functional.one_hot(torch.tensor([[3, 5, 6]]), 10).float()
    other = torch.nn.functional.one_hot(torch.tensor([likeliest]), 10).float()
    ((trial,),) = score_trials(iter([Span(first_passage=0, start=0, logits=(right, other))]), [passage], 2)

    assert (trial.hit_16bit, trial.hit, trial.context_tokens) == (True, hit, 10)


def test_an_answer_that_spans_two_spans_is_looked_at_in_both() -> None:
    passage = Passage(prompt=(1,), fed=tuple([2] * 33), targets=(*[3] * 31, 4, 5), scored=2)
    right, wrong = torch.zeros(1, 32, 8), torch.zeros(1, 1, 8)
    right[..., 4] = 1
    spans = [
        Span(first_passage=0, start=0, logits=(right, right)),
        Span(first_passage=0, start=32, logits=(wrong, wrong)),
    ]
    assert not score_trials(iter(spans), [passage], 2)[0][0].hit

    wrong[..., 5] = 1
    assert score_trials(iter(spans), [passage], 2)[0][0].hit


@given(
    form=st.sampled_from(["int8", "int4-s4", "int8-r64", "kivi-k4v4-g32-r64-s3", "kivi-paper-k2v2-g32-r64", "fp16"]),
    position=st.integers(0, 300),
    windows=st.lists(st.sampled_from([None, 1, 20, 90]), min_size=1, max_size=2),
)
def test_whether_a_position_reads_quantized_tokens_is_what_listing_them_says(
    form: str, position: int, windows: list[int | None]
) -> None:
    parsed = parse(form)
    layout = spec(*windows).layers[0].layout(parsed, 32, parsed.float_type or spec(None).float_type)
    quantized = set[int]()
    if parsed.quantized:
        for count in layout.quantized_tokens(position + 1):
            quantized |= set(range(parsed.sink_tokens, parsed.sink_tokens + count))
    seen = {token for window in windows for token in range(max(0, position + 1 - (window or 10**9)), position + 1)}

    assert reads_quantized(spec(*windows), parsed, position) == bool(quantized & seen)
