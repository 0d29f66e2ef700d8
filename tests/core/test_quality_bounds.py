import random
from dataclasses import replace

import pytest

from kvplan.core.quality_bounds import bound_quality, retrieval_bound
from kvplan.core.records import DocumentScore, Quality, QualityKey, RetrievalTrial
from kvplan.core.workloads import Prefill
from kvplan.errors import InputError

KEY = QualityKey(
    model_digest="m",
    format="int4",
    block_tokens=64,
    prefill=Prefill.EXACT,
    chunk_tokens=32,
    data_digest="d",
    kernel="cpu/portable",
    kvplan_version="0.1.0",
)


def document(positions: int, *, nll: float = 0.0, kl: float = 0.0, flips: int = 0) -> DocumentScore:
    return DocumentScore(
        positions=positions,
        quantized_positions=positions,
        nll_16bit=2.0 * positions,
        nll=2.0 * positions + nll,
        kl=kl,
        flips=flips,
        kl_values=(kl / positions,) * positions,
    )


def quality(*documents: DocumentScore, trials: tuple[RetrievalTrial, ...] = ()) -> Quality:
    return Quality(key=KEY, documents=documents, trials=trials)


def test_estimates_are_ratios_of_sums_over_positions() -> None:
    bounds = bound_quality(quality(document(100, nll=3, kl=1, flips=4), document(300, nll=1, kl=5, flips=0)), 0.95)
    assert bounds.perplexity_increase.estimate == pytest.approx(2.718281828459045**0.01 - 1)
    assert bounds.kl.estimate == pytest.approx(0.015)
    assert bounds.top1_flips.estimate == pytest.approx(0.01)
    assert bounds.perplexity_16bit == pytest.approx(2.718281828459045**2)


def test_one_document_has_no_bound_and_says_why() -> None:
    bound = bound_quality(quality(document(100, kl=1.0)), 0.95).kl
    assert bound.upper is None
    assert "one document" in bound.reason


@pytest.mark.parametrize(
    "documents",
    [
        (),
        (document(1), replace(document(1), positions=0)),
        (document(9, flips=10), document(9)),
        (document(9, nll=1e9), document(9)),
    ],
)
def test_scores_that_no_scoring_gives_are_refused(documents: tuple[DocumentScore, ...]) -> None:
    with pytest.raises(InputError, match="int4"):
        bound_quality(quality(*documents), 0.95)


def test_no_flip_in_few_positions_is_no_proof_of_none() -> None:
    flips = bound_quality(quality(document(20), document(20), document(20)), 0.95).top1_flips
    assert flips.estimate == 0
    assert flips.upper is not None
    assert flips.upper > 0.04


def test_bound_is_the_same_on_every_run() -> None:
    draw = random.Random(1)
    score = quality(*(document(50, kl=draw.expovariate(1)) for _ in range(12)))
    assert bound_quality(score, 0.95) == bound_quality(score, 0.95)


def test_bound_grows_with_confidence_and_shrinks_with_documents() -> None:
    draw = random.Random(2)
    documents = [document(50, kl=draw.expovariate(1)) for _ in range(40)]
    few, many = bound_quality(quality(*documents[:10]), 0.95).kl, bound_quality(quality(*documents), 0.95).kl
    strict = bound_quality(quality(*documents), 0.99).kl
    assert few.upper is not None
    assert many.upper is not None
    assert strict.upper is not None
    assert many.upper - many.estimate < few.upper - few.estimate
    assert strict.upper > many.upper


@pytest.mark.parametrize("documents", [4, 10, 24])
def test_upper_bound_of_a_skewed_divergence_holds_about_as_often_as_it_says(documents: int) -> None:
    draw = random.Random(documents)
    runs, held = 400, 0
    for _ in range(runs):
        sizes = [draw.randrange(40, 160) for _ in range(documents)]
        score = quality(*(document(size, kl=size * draw.gammavariate(2.0, 0.01)) for size in sizes))
        upper = bound_quality(score, 0.95).kl.upper
        assert upper is not None
        held += upper >= 0.02
    assert held / runs >= 0.90


def test_kept_keys_bound_the_drop_only_as_far_as_there_are_trials() -> None:
    kept = RetrievalTrial(context_tokens=512, hit_16bit=True, hit=True)
    lost = RetrievalTrial(context_tokens=512, hit_16bit=True, hit=False)
    few, many = retrieval_bound([kept] * 10, 0.95), retrieval_bound([kept] * 100, 0.95)
    assert few.estimate == many.estimate == 0
    assert few.upper is not None
    assert many.upper is not None
    assert few.upper > 0.2
    assert many.upper < 0.05
    assert retrieval_bound([kept] * 9 + [lost], 0.95).estimate == pytest.approx(0.1)


def test_bound_of_a_retrieval_drop_is_conservative() -> None:
    draw = random.Random(5)
    runs, held = 500, 0
    for _ in range(runs):
        trials = []
        for _ in range(40):
            at_16 = draw.random() < 0.8
            trials.append(RetrievalTrial(context_tokens=1, hit_16bit=at_16, hit=at_16 and draw.random() < 0.9))
        upper = retrieval_bound(trials, 0.95).upper
        assert upper is not None
        held += upper >= 0.08
    assert held / runs >= 0.95
