from itertools import combinations, product

import pytest

from kvplan_kernels.cases import Data, Tables, all_cases, covering_cases, long_cases
from kvplan_kernels.covering import Row, pairwise_rows
from kvplan_kernels.format import FloatType, parse


def test_every_allowed_pair_of_values_meets() -> None:
    parameters: dict[str, tuple[object, ...]] = {"a": (1, 2, 3), "b": (1, 2), "c": ("x", "y", "z"), "d": (None, True)}

    def allowed(row: Row) -> bool:
        return not (row.get("a") == 3 and row.get("b") == 2)

    rows = pairwise_rows(parameters, allowed, [{"a": 2, "c": "y"}])
    assert rows[0]["a"] == 2
    assert rows[0]["c"] == "y"
    assert all(set(row) == set(parameters) and allowed(row) for row in rows)
    for one, other in combinations(parameters, 2):
        for x, y in product(parameters[one], parameters[other]):
            if allowed({one: x, other: y}):
                assert any(row[one] == x and row[other] == y for row in rows), (one, x, other, y)
    assert len(rows) < 3 * 2 * 3 * 2


def test_no_case_stands_twice_and_each_can_be_laid_out() -> None:
    cases = all_cases()
    assert len({str(case) for case in cases}) == len(cases)
    assert [case.unsupported() for case in cases] == [None] * len(cases)


def test_every_format_is_met_with_every_group() -> None:
    met = {(form.key, form.value, form.rule) for form in (parse(case.format) for case in covering_cases())}
    token, channel = 3 * 3 * 4, 3 * 3 * 3
    assert len(met) == token + 2 * channel + 1


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("head_dim", set(range(32, 257, 8))),
        ("gqa_ratio", set(range(1, 17))),
        ("block_tokens", {16, 32, 48, 64, 128, 160, 256}),
        ("tables", set(Tables)),
        ("float_type", set(FloatType)),
        ("data", set(Data)),
        ("queries", {1, 2, 3, 4, 5, 8, 13, 16, 17, 31, 32}),
        ("window", {None, 1, 17, 64, 150}),
    ],
)
def test_every_class_is_met(name: str, values: set[object]) -> None:
    assert {getattr(case, name) for case in covering_cases()} == values


def test_head_sizes_meet_every_ratio() -> None:
    met = {(case.head_dim, case.gqa_ratio) for case in covering_cases()}
    assert met == set(product(range(32, 257, 8), range(1, 17)))


def test_long_contexts_run_on_one_thread_and_on_two() -> None:
    assert {case.threads for case in long_cases()} == {1, 2}
    assert min(max(case.lengths) for case in long_cases()) > 32_768
