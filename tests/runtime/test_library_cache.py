"""transformers' own quantized caches serve a model here as they do in the library."""

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import QuantizedCache

from kvplan.core.workloads import Prefill
from kvplan.engines import transformers_cache
from kvplan.engines.engine import find_format
from kvplan.engines.transformers_cache import FORMATS, NAME, cache_config
from kvplan.errors import MissingPartError, UnsupportedFormatError
from kvplan.runtime import library_cache
from kvplan.runtime.attention import switch
from kvplan.runtime.library_cache import LibraryRuntime, LibrarySequence
from kvplan.runtime.loading import LoadedModel

NAMES = ["fp8", "quanto-int4", "quanto-int2-axis-1", "hqq-int4", "hqq-int8-axis1"]
ROUNDING = 1e-4
"""Of the largest logit, in float32: two ways to attend round otherwise, and hardly ever does a code change with it."""

RESIDUAL = 32
"""Tokens that wait, of the library's 128: fewer make short tests."""

Build = Callable[..., LoadedModel]
pytestmark = pytest.mark.usefixtures("quanto_in_python")


@pytest.fixture(autouse=True)
def short_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_cache, "RESIDUAL_TOKENS", RESIDUAL)


def runtime(loaded: LoadedModel, name: str) -> LibraryRuntime:
    return LibraryRuntime(loaded, find_format(NAME, FORMATS, name))


def token_ids(count: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 199, (1, count), generator=torch.Generator().manual_seed(seed))


def stock_logits(loaded: LoadedModel, name: str, passes: list[Tensor]) -> list[Tensor]:
    """Returns what the library's own model and cache compute, pass by pass."""
    switch(loaded.model, "sdpa")
    cache: Any = QuantizedCache(config=loaded.model.config, **cache_config(find_format(NAME, FORMATS, name)))
    with torch.inference_mode():
        return [loaded.model(ids, cache=cache, use_cache=True).logits[0] for ids in passes]


def worst(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("name", NAMES)
def test_token_by_token_it_gives_the_logits_of_the_library(build: Build, name: str) -> None:
    loaded = build("Llama")
    prompt, tail = token_ids(64), token_ids(RESIDUAL + 4, 1)
    stock = torch.cat(stock_logits(loaded, name, [prompt, *tail.split(1, dim=1)])[1:])
    run = runtime(loaded, name)
    sequence = run.prefill(prompt[0].tolist()).sequence
    found = torch.cat([run.step([sequence], ids) for ids in tail.split(1, dim=1)], dim=1)[0]

    assert worst(found, stock) < ROUNDING
    assert sequence.length == 64 + RESIDUAL + 4


@pytest.mark.parametrize("name", NAMES)
def test_chunks_read_the_cache_that_single_tokens_read(build: Build, name: str) -> None:
    loaded = build("Llama")
    prompt, tail = token_ids(64).tolist()[0], token_ids(RESIDUAL + 4, 1)
    run = runtime(loaded, name)
    logits = []
    for limit in (1, 20):
        sequence = run.prefill(prompt).sequence
        sizes = run.step_sizes([sequence], tail.shape[1], limit)
        assert max(sizes) == limit
        logits.append(torch.cat([run.step([sequence], ids) for ids in tail.split(sizes, dim=1)], dim=1))

    assert worst(logits[1], logits[0]) < ROUNDING


def test_steps_end_where_all_is_quantized_anew(build: Build) -> None:
    run = runtime(build("Llama"), "quanto-int4")
    sequence = run.prefill([5] * 40).sequence
    assert run.step_sizes([sequence], 80, 20) == [20, 12, 20, 12, 16]

    run.step([sequence], token_ids(30))
    assert run.step_sizes([sequence], 10, 20) == [2, 8]
    assert runtime(run.loaded, "fp8").step_sizes([sequence], 80, 50) == [50, 30]


def test_rows_of_a_batch_do_not_share_groups(build: Build) -> None:
    """Of several requests at once the library's groups may reach from one into the next; here each is alone."""
    loaded, tail = build("Llama"), token_ids(8, 2)
    run = runtime(loaded, "hqq-int4")
    alone = run.step([run.prefill(token_ids(48).tolist()[0]).sequence], tail)
    sequences = [run.prefill(token_ids(48, seed).tolist()[0]).sequence for seed in (0, 3)]

    assert worst(run.step(sequences, tail.expand(2, -1))[0], alone[0]) < ROUNDING


def test_a_prompt_through_the_cache_is_what_chunks_of_the_library_are(build: Build) -> None:
    loaded, prompt = build("Llama"), token_ids(160)
    stock = stock_logits(loaded, "quanto-int2", list(prompt.split(64, dim=1)))[-1]
    found = runtime(loaded, "quanto-int2").prefill(prompt.tolist()[0], Prefill.THROUGH_CACHE, max_batched_tokens=64)

    assert worst(found.logits, stock[-1]) < ROUNDING
    assert found.sequence.length == 160


def errors(run: LibraryRuntime, times: int) -> list[float]:
    """Returns the relative error of a prompt's keys after each of *times* times that all was quantized."""
    generator = torch.Generator().manual_seed(0)
    prompt, found = torch.randn(1, 2, 64, 32, generator=generator), []
    sequence = run.admit(64).sequence
    run.append(sequence, 0, prompt, prompt)
    for _ in range(times):
        more = torch.randn(1, 2, RESIDUAL, 32, generator=generator)
        held, _ = run.append(sequence, 0, more, more)
        found.append(float((held[:, :, :64] - prompt).norm() / prompt.norm()))
    return found


@pytest.mark.parametrize(("name", "rises"), [("hqq-int4", 1.5), ("hqq-int2", 1.5), ("quanto-int4-axis-1", 1.02)])
def test_errors_grow_where_a_group_has_other_elements_each_time(build: Build, name: str, rises: float) -> None:
    found = errors(runtime(build("Llama"), name), 5)
    assert found == sorted(found)
    assert found[-1] > rises * found[0]


@pytest.mark.parametrize("name", ["quanto-int4", "quanto-int2", "hqq-int4-axis1", "fp8"])
def test_errors_stay_where_it_has_the_same(build: Build, name: str) -> None:
    found = errors(runtime(build("Llama"), name), 5)
    assert max(found) < 1.001 * min(found)


@pytest.mark.parametrize(("name", "package"), [("quanto-int4", "optimum-quanto"), ("hqq-int8", "hqq")])
def test_a_package_that_is_missing_is_named(
    build: Build, monkeypatch: pytest.MonkeyPatch, name: str, package: str
) -> None:
    def version(wanted: str) -> str:
        if wanted == package:
            raise PackageNotFoundError(package)
        return "1"

    monkeypatch.setattr(library_cache, "version", version)
    with pytest.raises(MissingPartError, match=f"transformers:{name} needs the package {package}; pip install"):
        runtime(build("Llama"), name)


def test_what_the_library_raises_is_a_refusal_with_its_words(build: Build) -> None:
    run = runtime(build("Llama"), "quanto-int4-axis-1")
    with pytest.raises(UnsupportedFormatError, match=r"axis-1: the library's cache fails: Group size \(64\) must be"):
        run.prefill([5] * 33)


def test_numbers_that_are_not_finite_are_a_refusal(build: Build) -> None:
    run = runtime(build("Llama"), "fp8")
    sequence: LibrarySequence = run.admit(1).sequence
    key = torch.ones(1, 2, 1, 32)
    run.append(sequence, 0, key, key)
    with pytest.raises(UnsupportedFormatError, match="not finite, after 0 tokens"):
        run.append(sequence, 0, key * torch.nan, key)


def test_a_freed_sequence_holds_nothing(build: Build) -> None:
    run = runtime(build("Llama"), "fp8")
    sequence = run.prefill([5] * 40).sequence
    run.free(sequence)
    assert (len(sequence.layers), sequence.length) == (0, 0)
