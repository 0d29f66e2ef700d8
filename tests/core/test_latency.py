from dataclasses import replace
from typing import Any

import pytest

from kvplan.core.latency import Timings, mix
from kvplan.core.records import Cell, CellStatus, Figure, Load
from kvplan.core.specs import Evidence
from kvplan.core.workloads import Bucket

A = Bucket(name="a", prompt_tokens=900, generate_tokens=100)
B = Bucket(name="b", prompt_tokens=1900, generate_tokens=100)


def step_s(loads: list[tuple[Bucket, int]]) -> float:
    sequences = sum(n for _, n in loads)
    return 0.010 + 1e-4 * sequences + 1e-6 * sum(n * bucket.total_tokens for bucket, n in loads)


def cell(make: Any, loads: list[tuple[Bucket, int]], form: str = "int4") -> Cell:
    """Return a cell without noise of a step that is linear in sequences and tokens."""
    tokens = sum(n * bucket.total_tokens for bucket, n in loads)
    made = make(noise=0.0).cell(form, loads)
    seconds = {"tpot_s": step_s(loads), "decode_fused_s": 1e-6 * tokens}
    return replace(
        made, figures=made.figures | {k: Figure.measured("s", ((v,), (v,), (v,))) for k, v in seconds.items()}
    )


def timings(make: Any, *loads: list[tuple[Bucket, int]]) -> Timings:
    return Timings(cells=tuple(cell(make, some) for some in loads))


def test_a_cell_of_the_same_loads_is_read_and_not_predicted(maker: Any) -> None:
    estimate = timings(maker, [(A, 4)], [(B, 4)]).tpot([Load(bucket=B, sequences=4)], 95)
    assert estimate.evidence is Evidence.MEASURED
    assert estimate.value_s == step_s([(B, 4)])


def test_buckets_of_one_length_count_as_one(maker: Any) -> None:
    twin = replace(A, name="twin")
    loads = [Load(bucket=A, sequences=1), Load(bucket=twin, sequences=3)]
    assert timings(maker, [(A, 4)], [(B, 4)]).tpot(loads, 95).evidence is Evidence.MEASURED


def test_a_linear_step_is_predicted_exactly(maker: Any) -> None:
    known = timings(maker, [(A, 4)], [(B, 4)], [(A, 8)], [(A, 2), (B, 2)])
    estimate = known.tpot([Load(bucket=A, sequences=6), Load(bucket=B, sequences=2)], 50)
    assert estimate.evidence is Evidence.PREDICTED
    assert estimate.value_s == pytest.approx(step_s([(A, 6), (B, 2)]), rel=1e-6)


def test_the_error_of_a_prediction_is_that_of_held_out_cells(maker: Any) -> None:
    known = timings(maker, [(A, 4)], [(B, 4)], [(A, 8)], [(A, 2), (B, 2)])
    estimate = known.tpot([Load(bucket=A, sequences=6)], 50)
    assert estimate.error is not None
    assert estimate.value_s is not None
    assert estimate.high_s == pytest.approx(estimate.value_s * (1 + estimate.error))
    two = timings(maker, [(A, 4)], [(A, 8)]).tpot([Load(bucket=A, sequences=6)], 50)
    assert two.error is not None
    assert two.error > estimate.error


@pytest.mark.parametrize("loads", [[(A, 17)], [(A, 1)], [(replace(A, prompt_tokens=5000), 4)]])
def test_nothing_is_predicted_beyond_twice_what_was_measured(maker: Any, loads: list[tuple[Bucket, int]]) -> None:
    known = timings(maker, [(A, 4)], [(B, 4)], [(A, 8)])
    estimate = known.tpot([Load(bucket=bucket, sequences=n) for bucket, n in loads], 95)
    assert estimate.value_s is None
    assert "too far" in estimate.reason


def test_one_cell_is_too_few_to_predict_from(maker: Any) -> None:
    assert "too few" in timings(maker, [(A, 4)]).tpot([Load(bucket=A, sequences=5)], 95).reason
    assert Timings(cells=()).tpot([Load(bucket=A, sequences=5)], 95).reason == "not measured"


def test_a_disturbed_cell_stands_in_for_none_and_says_so(maker: Any) -> None:
    disturbed = replace(cell(maker, [(A, 4)]), status=CellStatus.DISTURBED, reason="steal 9%")
    loads = [Load(bucket=A, sequences=4)]
    for estimate in (Timings(cells=(disturbed,)).tpot(loads, 95), Timings(cells=(disturbed,)).ttft((A,), 95)):
        assert estimate.value_s is not None
        assert estimate.disturbed == "steal 9%"
    quiet = cell(maker, [(A, 4)])
    assert Timings(cells=(disturbed, quiet)).tpot(loads, 95).disturbed == ""


def test_an_upper_limit_that_was_seen_comes_before_a_prediction(maker: Any) -> None:
    disturbed = replace(cell(maker, [(A, 6)]), status=CellStatus.DISTURBED, reason="steal 9%")
    known = Timings(cells=(cell(maker, [(A, 4)]), cell(maker, [(A, 8)]), disturbed))
    loads = [Load(bucket=A, sequences=6)]
    assert known.tpot(loads, 95).evidence is Evidence.MEASURED
    assert known.tpot(loads, 95).disturbed == "steal 9%"
    assert known.shares(loads) is not None


def test_a_cell_that_failed_gives_its_reason(maker: Any) -> None:
    failed = replace(cell(maker, [(A, 4)]), status=CellStatus.FAILED, reason="boom", figures={})
    estimate = Timings(cells=(failed,)).tpot([Load(bucket=A, sequences=4)], 95)
    assert estimate.value_s is None
    assert "boom" in estimate.reason


def test_sixteen_bit_times_come_from_interleaved_cells_where_there_are_none(maker: Any) -> None:
    other = cell(maker, [(A, 4)])
    estimate = Timings(cells=(), others=(other,)).tpot([Load(bucket=A, sequences=4)], 50)
    assert estimate.value_s == pytest.approx(other.figures["tpot_16bit_s"].value)


def test_a_percentile_is_taken_in_each_repeat_and_the_bound_over_repeats(maker: Any) -> None:
    made = cell(maker, [(A, 4)])
    repeats = tuple(tuple(0.01 * scale * x for x in (1, 1, 1, 1, 2)) for scale in (1.0, 1.1, 1.2, 1.3, 1.4))
    made = replace(made, figures=made.figures | {"tpot_s": Figure.measured("s", repeats)})
    estimate = Timings(cells=(made,)).tpot([Load(bucket=A, sequences=4)], 100)
    assert estimate.value_s == pytest.approx(0.024)
    assert estimate.high_s == pytest.approx(0.028)


def test_ttft_is_a_percentile_over_buckets_by_share(maker: Any) -> None:
    known = timings(maker, [(A, 4)], [(B, 4)])
    mostly_a = (replace(A, share=0.97), replace(B, share=0.03))
    mostly_b = (replace(A, share=0.5), replace(B, share=0.5))
    assert known.ttft(mostly_a, 95).value_s == pytest.approx(0.91)
    assert known.ttft(mostly_b, 95).value_s == pytest.approx(1.91)


def test_ttft_of_a_prompt_that_was_not_measured_is_absent_with_a_reason(maker: Any) -> None:
    estimate = timings(maker, [(A, 4)]).ttft((A, B), 95)
    assert estimate.value_s is None
    assert "1900 tokens" in estimate.reason


def test_shares_of_a_step_sum_to_one(maker: Any) -> None:
    shares = timings(maker, [(A, 4)]).shares([Load(bucket=A, sequences=4)])
    assert shares is not None
    assert shares.attention + shares.append + shares.rest == pytest.approx(1)


def test_a_mix_leaves_out_buckets_without_sequences() -> None:
    assert [load.sequences for load in mix((replace(A, share=0.7), replace(B, share=0.0)), 10)] == [7]
