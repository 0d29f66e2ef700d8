"""Rows of parameters such that every two values of two parameters meet in some row."""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations

Row = dict[str, object]
Pair = tuple[str, object, str, object]


def pairwise_rows(
    parameters: Mapping[str, Sequence[object]], allowed: Callable[[Row], bool], seeds: Iterable[Row]
) -> list[Row]:
    """Return *seeds* filled up, then more rows, until all pairs of values that *allowed* lets meet have met.

    Args:
        parameters: The values of each parameter.
        allowed: Whether a row, which may lack parameters, can still become a case.
        seeds: Rows that must be there, with the parameters that matter to them.
    """
    order = random.Random(0)
    missing = {
        (one, x, other, y)
        for one, other in combinations(parameters, 2)
        for x in parameters[one]
        for y in parameters[other]
        if allowed({one: x, other: y})
    }
    rows = [_filled(dict(seed), parameters, allowed, missing, order) for seed in seeds]
    while missing:
        one, x, other, y = min(missing, key=repr)
        rows.append(_filled({one: x, other: y}, parameters, allowed, missing, order))
    return rows


def _filled(
    row: Row,
    parameters: Mapping[str, Sequence[object]],
    allowed: Callable[[Row], bool],
    missing: set[Pair],
    order: random.Random,
) -> Row:
    """Give *row* a value for each parameter, the one that meets the most values for the first time."""
    for name in order.sample(list(parameters), len(parameters)):
        if name in row:
            continue
        values = [value for value in parameters[name] if allowed({**row, name: value})]
        order.shuffle(values)
        gains = [_gain(row, name, value, parameters, missing) for value in values]
        row[name] = values[gains.index(max(gains))]
    missing.difference_update((a, row[a], b, row[b]) for a, b in combinations(parameters, 2))
    return row


def _gain(row: Row, name: str, value: object, parameters: Mapping[str, Sequence[object]], missing: set[Pair]) -> int:
    """Return how many pairs of *value* with the values of *row* have not met."""
    gain, before = 0, True
    for other in parameters:
        if other == name:
            before = False
        elif other in row:
            pair = (other, row[other], name, value) if before else (name, value, other, row[other])
            gain += pair in missing
    return gain
