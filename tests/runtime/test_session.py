"""A model on a paged cache computes what it computes on the library's own cache."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from kvplan.core.workloads import Prefill
from kvplan.errors import DoesNotFitError, InputError, UnsupportedFormatError
from kvplan.runtime.attention import switch
from kvplan.runtime.loading import LoadedModel, load_model
from kvplan.runtime.ops import unfused
from kvplan.runtime.server import prefill_exact
from kvplan.runtime.session import Runtime
from kvplan_kernels.layer_formats import parse_formats
from kvplan_profiles import held_out_text

FAMILIES = ["Llama", "Qwen2", "Qwen3", "Phi3", "Mistral", "Gemma2", "Gemma3Text", "GptOss", "Cohere2", "Olmo2"]
ROUNDING_16BIT = 2e-2
"""Of the largest logit: K and V of a model in float32 lose all but 8 bits in bf16 pages."""
FLOAT32_NOISE = 1e-3
"""Of the largest logit: a batch of two rounds otherwise than one, and now and then a code or a 16-bit value with it."""

Build = Callable[..., LoadedModel]


def token_ids(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(3, 199, (count,), generator=generator).tolist()
    return ids


def runtime(loaded: LoadedModel, form: str, **changes: Any) -> Runtime:
    options: dict[str, Any] = {"block_tokens": 32, "blocks": 64, "slots": 8, "kernel": "reference"} | changes
    return Runtime(loaded, parse_formats(form), **options)


def stock_logits(loaded: LoadedModel, ids: list[int]) -> Tensor:
    """Returns the library's own logits [tokens, vocabulary], in one forward pass."""
    switch(loaded.model, "eager")
    with torch.inference_mode():
        logits: Tensor = loaded.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()
    return logits


def worst(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("kernel", ["reference", "cpu"])
@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_batch_of_steps_gives_the_logits_of_the_stock_model(build: Build, family: str, kernel: str) -> None:
    loaded = build(family)
    prompts = [token_ids(70, 1), token_ids(41, 2)]
    tails = [token_ids(9, 3), token_ids(9, 4)]
    run = runtime(loaded, "bf16", kernel=kernel)

    first = [run.prefill(prompt) for prompt in prompts]
    sequences = [prefilled.sequence for prefilled in first]
    fed = torch.tensor(tails)
    steps = [run.step(sequences, fed[:, :1]), run.step(sequences, fed[:, 1:6]), run.step(sequences, fed[:, 6:])]
    found = torch.cat(steps, dim=1)

    for row, (prompt, tail) in enumerate(zip(prompts, tails, strict=True)):
        expected = stock_logits(loaded, prompt + tail)
        assert worst(first[row].logits, expected[len(prompt) - 1]) < 1e-5
        assert worst(found[row], expected[len(prompt) :]) < ROUNDING_16BIT


@pytest.mark.parametrize("family", ["Llama", "Gemma2", "GptOss"])
def test_an_8_bit_cache_differs_from_16_bits_and_only_a_little(build: Build, family: str) -> None:
    loaded = build(family)
    prompt, tail = token_ids(70), torch.tensor([token_ids(20, 5)])
    logits = []
    for form in ("bf16", "int8"):
        run = runtime(loaded, form)
        logits.append(run.step([run.prefill(prompt).sequence], tail))

    assert 1e-4 < worst(logits[1], logits[0].float()) < 5e-2


@pytest.mark.parametrize("form", ["int8", "kivi-k4v4-g32-r32", "int4-r16-s4"])
@pytest.mark.parametrize("family", ["Llama", "Gemma2", "GptOss"])
def test_the_fused_kernel_gives_the_logits_of_the_reference(build: Build, family: str, form: str) -> None:
    loaded = build(family)
    prompts, tail = [token_ids(150, 1), token_ids(41, 2)], torch.tensor([token_ids(30, 5), token_ids(30, 6)])
    logits = []
    for kernel in ("reference", "cpu"):
        run = runtime(loaded, form, kernel=kernel, blocks=32)
        logits.append(run.step([run.prefill(prompt).sequence for prompt in prompts], tail))

    assert worst(logits[1], logits[0]) < 5e-3


@pytest.mark.parametrize("family", ["Llama", "Gemma2", "GptOss", "Mistral"])
def test_the_unfused_path_gives_the_logits_of_the_fused_one(build: Build, family: str) -> None:
    loaded = build(family)
    prompts, tail = [token_ids(70, 1), token_ids(41, 2)], torch.tensor([token_ids(9, 5), token_ids(9, 6)])
    logits = []
    for change in (lambda ops: ops, unfused):
        run = runtime(loaded, "int4")
        run.ops = change(run.ops)
        logits.append(run.step([run.prefill(prompt).sequence for prompt in prompts], tail))

    assert worst(logits[1], logits[0]) < ROUNDING_16BIT  # the temporary holds 16 bits


def test_greedy_text_of_the_demo_model_is_the_stock_model_s() -> None:
    loaded = load_model("demo")
    ids = loaded.tokenizer(held_out_text()[:1500])["input_ids"]
    run = runtime(loaded, "bf16", kernel="cpu", block_tokens=64)
    prefilled = run.prefill(ids)
    found = [int(prefilled.logits.argmax())]
    for _ in range(40):
        found.append(int(run.step([prefilled.sequence], torch.tensor([[found[-1]]]))[0, -1].argmax()))
    switch(loaded.model, "sdpa")
    with torch.inference_mode():
        stock = loaded.model.generate(torch.tensor([ids]), max_new_tokens=41, do_sample=False)[0, len(ids) :]

    assert found == stock.tolist()


def test_a_16_bit_cache_agrees_with_the_stock_cache_within_the_noise_of_the_stock_cache(build: Build) -> None:
    loaded = build("Llama", torch.bfloat16)
    prompt, tail = token_ids(70), token_ids(20, 5)
    run = runtime(loaded, "bf16")
    sequence = run.prefill(prompt).sequence
    found = torch.cat([run.step([sequence], torch.tensor([[token]])) for token in tail], dim=1)[0]

    whole = stock_logits(loaded, prompt + tail)[len(prompt) :]
    stepped = _stock_steps(loaded, prompt, tail)
    noise = worst(stepped, whole)

    assert worst(found, stepped) < 2 * noise + 1e-3


def _stock_steps(loaded: LoadedModel, prompt: list[int], tail: list[int]) -> Tensor:
    switch(loaded.model, "sdpa")
    cache = DynamicCache(config=loaded.model.config)
    with torch.inference_mode():
        loaded.model(input_ids=torch.tensor([prompt]), cache=cache)
        rows = [loaded.model(input_ids=torch.tensor([[token]]), cache=cache).logits[0, -1] for token in tail]
    return torch.stack(rows).float()


@pytest.mark.parametrize("form", ["bf16", "int8", "kivi-k4v4-g32-r32", "int4-r16", "int4-s4"])
def test_a_prompt_through_the_cache_in_one_chunk_is_an_exact_prefill(build: Build, form: str) -> None:
    loaded = build("Llama")
    exact, through = runtime(loaded, form), runtime(loaded, form)
    a = exact.prefill(token_ids(90))
    b = through.prefill(token_ids(90), Prefill.THROUGH_CACHE, max_batched_tokens=90)

    assert torch.equal(a.logits, b.logits)
    assert all(torch.equal(x.pages, y.pages) for x, y in zip(exact.pool.caches, through.pool.caches, strict=True))


@pytest.mark.parametrize("form", ["int4", "kivi-k4v4-g32-r32", "int4-s4", "int4-r16"])
def test_chunks_of_a_prompt_read_the_quantized_cache(build: Build, form: str) -> None:
    loaded = build("Llama")
    prompt = token_ids(150)
    run = runtime(loaded, form)
    exact = run.prefill(prompt)
    through = run.prefill(prompt, Prefill.THROUGH_CACHE, max_batched_tokens=64)
    step_by_step = run.prefill(prompt[:64])
    last = exact.logits
    for token in prompt[64:]:
        last = run.step([step_by_step.sequence], torch.tensor([[token]]))[0, -1]

    assert worst(through.logits, exact.logits) > 1e-3
    assert worst(last, exact.logits) > 1e-3
    if form != "int4-r16":  # whose chunks see tokens quantized up to 31 tokens early
        assert worst(through.logits, last) < 1e-4


def test_no_dense_keys_or_values_outlive_a_prefill(build: Build) -> None:
    loaded = build("Llama")
    run = runtime(loaded, "int4")
    tokens = 117
    prefilled = run.prefill(token_ids(tokens))
    gc.collect()
    live = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor) and tokens in thing.shape]

    assert prefilled.sequence.length == tokens
    assert live == []


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("form", ["bf16", "int4", "kivi-k2v2-g32-r32", "int4-r16-s4"])
def test_forks_go_on_as_the_sequence_itself_would_and_leave_each_other_alone(
    build: Build, form: str, copy: bool
) -> None:
    loaded = build("Llama")
    run = runtime(loaded, form)
    parent = run.prefill(token_ids(80)).sequence
    forks = run.fork(parent, 2, copy=copy)
    tails = torch.tensor([token_ids(40, 7), token_ids(40, 8)])
    together = [run.step(forks, tails[:, i : i + 1]) for i in range(40)]
    alone = [run.step([parent], tails[:1, i : i + 1]) for i in range(40)]

    assert worst(torch.cat(together, 1)[:1], torch.cat(alone, 1)) < FLOAT32_NOISE


def test_one_exact_prefill_fills_several_caches(build: Build) -> None:
    loaded = build("Llama")
    forms = ["bf16", "int4"]
    together = [runtime(loaded, form) for form in forms]
    filled = prefill_exact(together, token_ids(60))

    for form, run, prefilled in zip(forms, together, filled, strict=True):
        alone = runtime(loaded, form)
        expected = alone.prefill(token_ids(60))
        assert torch.equal(prefilled.logits, expected.logits)
        for x, y in zip(run.pool.caches, alone.pool.caches, strict=True):
            assert torch.equal(x.pages, y.pages)


def test_a_call_tells_what_its_parts_took(build: Build) -> None:
    run = runtime(build("Llama"), "int8")
    prefilled = run.prefill(token_ids(40))
    run.step([prefilled.sequence], torch.tensor([[5]]))

    assert 0 < prefilled.spent.append_s < prefilled.spent.total_s
    assert prefilled.spent.attend_s == 0
    assert 0 < run.spent.append_s + run.spent.attend_s < run.spent.total_s


@pytest.mark.parametrize("mode", list(Prefill))
def test_a_full_pool_says_what_is_missing_and_stays_usable(build: Build, mode: Prefill) -> None:
    run = runtime(build("Llama"), "bf16", blocks=4)
    kept = run.prefill(token_ids(60)).sequence
    with pytest.raises(DoesNotFitError, match=r"90 tokens .* more blocks of 32 tokens are needed, [12] of 4 are free"):
        run.prefill(token_ids(90), mode, max_batched_tokens=90 if mode is Prefill.EXACT else 32)

    assert run.pool.free_blocks == 2
    assert run.step([kept], torch.tensor([[5]])).shape == (1, 1, 199)


def test_an_empty_prompt_is_refused(build: Build) -> None:
    with pytest.raises(InputError, match="empty prompt"):
        runtime(build("Llama"), "bf16").prefill([])


def test_a_block_size_that_splits_groups_is_refused_with_the_mend(build: Build) -> None:
    with pytest.raises(UnsupportedFormatError, match="use block size 64"):
        runtime(build("Llama"), "kivi-k4v4-g64-r64", block_tokens=32)


def test_steps_of_more_than_32_tokens_are_a_misuse(build: Build) -> None:
    run = runtime(build("Llama"), "bf16")
    sequence = run.prefill(token_ids(4)).sequence
    with pytest.raises(ValueError, match="33 tokens a step"):
        run.step([sequence], torch.tensor([token_ids(33)]))


def test_a_recordable_step_is_the_next_step_again_and_again(build: Callable[..., LoadedModel]) -> None:
    runtime = Runtime(
        build("Llama"), parse_formats("kivi-k4v4-g32-r16"), block_tokens=32, blocks=8, slots=2, kernel="reference"
    )
    first = runtime.prefill([5, 6, 7] * 20).sequence
    sequences = [first, *runtime.fork(first, 1, copy=True)]
    token_ids = torch.tensor([[3], [4]])

    call = runtime.recordable(sequences, token_ids)
    found = [call(), call()]

    assert [sequence.length for sequence in sequences] == [60, 60]
    expected = runtime.step(sequences, token_ids)
    assert all(torch.equal(one, expected) for one in found)


@pytest.mark.parametrize("kernel", ["reference", "cpu"])
def test_each_layer_holds_the_bytes_of_its_own_format(build: Build, kernel: str) -> None:
    loaded, prompt, rest = build("Llama"), token_ids(100), torch.tensor([token_ids(30, 7)])
    forms = ("int4-r40@0=bf16@-1=kivi-k4v2-g32-s4", "bf16", "int4-r40", "kivi-k4v2-g32-s4")
    runs = [runtime(loaded, form, kernel=kernel) for form in forms]
    filled = prefill_exact(runs, prompt)  # K and V of every layer are those of 16 bits

    pools = [run.pool for run in runs]
    for layer, own in enumerate(pools[1:]):
        found, expected = pools[0].caches[layer], own.caches[layer]
        count = expected.layout.blocks(len(prompt))
        ours, theirs = (one.sequence.blocks[:count] for one in (filled[0], filled[1 + layer]))
        assert found.layout == expected.layout
        assert torch.equal(found.pages[ours], expected.pages[theirs])
        assert torch.equal(found.ring[filled[0].sequence.slot], expected.ring[filled[1 + layer].sequence.slot])
        assert torch.equal(found.sinks[filled[0].sequence.slot], expected.sinks[filled[1 + layer].sequence.slot])

    mixed, sixteen, coarse = (runs[n].step([filled[n].sequence], rest) for n in (0, 1, 3))
    assert 0 < worst(mixed, sixteen) < worst(coarse, sixteen)


def test_layers_that_a_model_does_not_have_are_refused_with_their_number(build: Build) -> None:
    with pytest.raises(UnsupportedFormatError, match="no layer 3 among the 3 that cache keys and values"):
        runtime(build("Llama"), "int4@3=bf16")
