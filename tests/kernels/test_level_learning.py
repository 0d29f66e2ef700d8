"""Levels that are learned: the best there are, for what an element's error costs."""

from itertools import combinations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplan_kernels.format import parse
from kvplan_kernels.level_learning import LevelLearner, best_levels
from kvplan_kernels.quantize import dequantize_codes, quantize
from kvplan_kernels.seen import Seen
from kvplan_kernels.tensor_format import learned_levels

PLACES = 255 * 8 + 1


def loss(weights: torch.Tensor, levels: tuple[int, ...] | torch.Tensor) -> float:
    places = torch.arange(PLACES, dtype=torch.float64) / 8
    distance = (places[:, None] - torch.as_tensor(levels, dtype=torch.float64)).abs().amin(1)
    return float((weights * distance.square()).sum())


@settings(deadline=None, max_examples=10)
@given(st.integers(0, 10**6), st.sampled_from((2, 3)))
def test_no_other_levels_lose_less(seed: int, count: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.zeros(PLACES, dtype=torch.float64)
    held = torch.randint(0, 21, (12,), generator=generator) * 8 + torch.randint(0, 8, (12,), generator=generator)
    weights[held] = torch.rand(12, generator=generator, dtype=torch.float64)
    least = min(loss(weights, levels) for levels in combinations(range(23), count))
    assert loss(weights, best_levels(weights, count)) <= least + 1e-9


@settings(deadline=None, max_examples=5)
@given(st.integers(0, 10**6))
def test_a_step_to_either_side_of_any_level_loses_more(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(PLACES, generator=generator, dtype=torch.float64) ** 4
    levels = best_levels(weights, 16)
    assert bool((levels.diff() > 0).all())
    for place in range(16):
        for step in (-1, 1):
            moved = levels.clone()
            moved[place] += step
            assert loss(weights, levels) <= loss(weights, moved) + 1e-9


def seen(seed: int) -> Seen:
    generator = torch.Generator().manual_seed(seed)
    key, value = (torch.randn(200, 2, 64, generator=generator) ** 3 for _ in range(2))
    return Seen(key=key, value=value)


def error(values: torch.Tensor, name: str, table: list[int] | None) -> torch.Tensor:
    tensor = parse(name).key
    levels = learned_levels(table, tensor.fit) if table is not None else None
    coded = quantize(values, tensor, levels)
    return (dequantize_codes(coded.codes, coded.metadata, tensor, levels) - values).square()


def test_learned_levels_lose_less_than_even_ones() -> None:
    text = seen(1)
    learner = LevelLearner(parse("nuq3"))
    learner.observe(text)
    table = learner.learned()["k_levels"].tolist()
    assert error(text.key, "nuq3", table).sum() < 0.85 * error(text.key, "int3", None).sum()


def test_what_the_loss_feels_more_is_held_better() -> None:
    """KVQuant, section 3.3: elements weigh by the squared gradient of the model's loss."""
    text = seen(2)
    felt = torch.where(text.key > 1.0, 30.0, 0.1)
    weighted = Seen(key=text.key, value=text.value, key_gradient=felt, value_gradient=torch.ones_like(felt))
    errors = []
    for one in (text, weighted):
        learner = LevelLearner(parse("nuq2"))
        learner.observe(one)
        errors.append(error(text.key, "nuq2", learner.learned()["k_levels"].tolist()))
    assert errors[1][felt > 1].sum() < errors[0][felt > 1].sum()
    assert errors[1].sum() > errors[0].sum()


def test_only_what_is_learned_has_levels() -> None:
    learner = LevelLearner(parse("int4/nuq3"))
    learner.observe(seen(3))
    assert set(learner.learned()) == {"v_levels"}
    assert len(learner.learned()["v_levels"]) == 8
