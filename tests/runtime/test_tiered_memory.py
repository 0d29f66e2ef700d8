"""What a plan counts of a cache in tiers is what the runtime allocates, and a launch text starts it."""

from collections.abc import Callable

import pytest
import torch

from kvplan.core.records import Load
from kvplan.core.specs import LayerKind, LayerSpec, ModelSpec
from kvplan.core.tiered_memory import TieredMemory, runtime_memory
from kvplan.core.workloads import Bucket, Target, Workload
from kvplan.engines import ENGINES
from kvplan.engines.engine import Launch
from kvplan.errors import DoesNotFitError
from kvplan.runtime.loading import LoadedModel
from kvplan.runtime.tiered import TieredRuntime, TieredSequence, _arrivals
from kvplan_kernels.layer_formats import parse_formats
from kvplan_kernels.layout import Order
from kvplan_kernels.tier_formats import parse_tiers

BLOCK = 16
BUCKETS = (
    Bucket(name="short", prompt_tokens=20, generate_tokens=10, share=0.5),
    Bucket(name="long", prompt_tokens=100, generate_tokens=60, share=0.5),
)
FORMATS = (
    "tiers-w16-25-k8v4+50-k4v2", "tiers-sum-w8-20-16bit", "tiers-once-w8-25-16bit+50-int4-o1", "tiers-w8-0-int8",
    "tiers-w30-100-int8",
)  # fmt: skip
LAYER = LayerSpec(kind=LayerKind.FULL, kv_heads=2, head_dim=32)
MODEL = ModelSpec(
    name="tiny", digest="0" * 64, architecture="LlamaForCausalLM", layers=(LAYER,) * 3, query_heads=6,
    hidden_size=96, vocab_size=199, context_tokens=512, weight_bytes=1000, parameters=500,
)  # fmt: skip


def planned(model: ModelSpec, name: str, sessions: int = 4, buckets: tuple[Bucket, ...] = BUCKETS) -> TieredMemory:
    workload = Workload(model=model.name, buckets=buckets, target=Target(concurrency=sessions))
    memory = runtime_memory(parse_formats(name), BLOCK, workload, model, 1 << 30, Order.LANES)
    assert isinstance(memory, TieredMemory)
    return memory


def filled(server: TieredRuntime, memory: TieredMemory, sessions: int = 4) -> list[TieredSequence]:
    """Return the planned sequences at full length: prompts that are placed, then tokens one by one."""
    held = []
    for bucket in memory.workload.buckets:
        for _ in range(bucket.sequences(sessions)):
            sequence = server.prefill(list(range(3, 3 + bucket.prompt_tokens))).sequence
            for _ in range(0, bucket.generate_tokens, 10):
                server.step([sequence], torch.full((1, 10), 5))
            held.append(sequence)
    return held


@pytest.mark.parametrize("name", FORMATS)
def test_planned_pools_hold_the_planned_sequences_and_no_more(build: Callable[..., LoadedModel], name: str) -> None:
    loaded = build("Llama")
    memory = planned(loaded.spec, name)
    server = TieredRuntime(
        loaded, parse_tiers(name), block_tokens=BLOCK, blocks=memory.tier_blocks(4), slots=4, threads=1
    )
    terms = {term.name: term.bytes for term in memory.cache_terms(4)}
    tables = terms.pop("block tables")
    sequences = filled(server, memory)

    assert memory.pool_blocks(4) == sum(memory.tier_blocks(4))
    assert sum(terms.values()) == server.nbytes
    assert terms["scores and positions"] == sum(layer.note_bytes for layer in server.layers)
    assert all(pool.free_blocks == 0 for pool in server.pools)
    heads = loaded.spec.layers[0].kv_heads
    rows = server.rows(sequences, heads)
    lengths = torch.tensor([[server.lengths(sequence, sequence.length) for sequence in sequences]] * 2)
    (arrival,) = _arrivals(lengths.to(torch.int32), torch.tensor([s.length for s in sequences]), heads)
    held = [rows.slots, arrival.positions, *arrival.before, *arrival.after]
    host = [pool._tables for pool in server.pools]  # by sequence; a row of each head has as many columns
    assert tables == sum(t.nbytes for t in held) + heads * sum(t.nbytes for t in host)
    if name != "tiers-w8-0-int8":  # that holds its window and no more
        with pytest.raises(DoesNotFitError):
            server.reserve(sequences[0], 7 * BLOCK)


@pytest.mark.parametrize("name", FORMATS)
def test_effective_bits_are_the_bytes_of_what_lies_in_tiers(build: Callable[..., LoadedModel], name: str) -> None:
    spec = build("Llama").spec
    one = BUCKETS[1]
    memory = planned(spec, name, buckets=(one,))
    form = parse_tiers(name)
    lengths = form.lengths(one.total_tokens, one.prompt_tokens)
    elements = 2 * 32 * 2 * 3
    stored = 0.0
    for tier, length in zip(form.tiers, lengths, strict=True):
        key, value = tier.form.key, tier.form.value
        beside = 2 * 24 * tier.form.outliers
        numbers = sum(32 for tensor in (key, value) if tensor.quantized)
        stored += length * 2 * 3 * (32 * (key.bits + value.bits) + numbers + beside + 8 * form.note_bytes)
    assert memory.effective_bits() == pytest.approx(stored / (elements * one.total_tokens))


@pytest.mark.parametrize("name", FORMATS)
def test_sessions_are_the_most_that_memory_holds(name: str) -> None:
    found = []
    for size in (4, 8, 64):
        workload = Workload(model="tiny", buckets=BUCKETS, target=Target(concurrency=1))
        memory = runtime_memory(parse_formats(name), BLOCK, workload, MODEL, size << 20, Order.LANES)
        found.append(memory.sessions())
        assert memory.plan(found[-1]).fits
        assert not memory.plan(found[-1] + 1).fits
    assert 0 < found[0] < found[1] < found[2]
    assert found[2] > runtime_memory(parse_formats("bf16"), BLOCK, workload, MODEL, 64 << 20, Order.LANES).sessions()


def test_a_longer_prompt_in_the_place_of_answers_takes_less_where_tokens_are_placed_once() -> None:
    both = [Bucket(name="a", prompt_tokens=prompt, generate_tokens=400 - prompt) for prompt in (50, 350)]
    once, again = (
        [planned(MODEL, name, buckets=(bucket,)).tier_blocks(1) for bucket in both]
        for name in ("tiers-once-w16-25-16bit", "tiers-w16-25-16bit")
    )
    assert once[0] > once[1]
    assert again[0] == again[1]


def test_working_memory_has_what_is_noted_of_attention() -> None:
    noted, once = (
        {term.name: term.bytes for term in planned(MODEL, name).plan(4).working}
        for name in ("tiers-w16-25-k8v4+50-k4v2", "tiers-once-w16-25-k8v4+50-k4v2")
    )
    places = 16 * sum(parse_tiers("tiers-w16-25-k8v4+50-k4v2").blocks(160, 16))
    assert noted["attention received"] == 4 * 4 * 6 * places
    assert "attention received" not in once
    assert noted["prompt scores"] == once["prompt scores"] == 4 * 6 * 100 * (32 + 3 * 16)


@pytest.mark.parametrize("kernel", ["cpu/avx2", "reference"])
def test_the_launch_text_starts_a_runtime_for_the_loads(build: Callable[..., LoadedModel], kernel: str) -> None:
    loaded = build("Llama")
    name = "tiers-once-w8-25-k8v4+50-k4v2"
    memory = planned(loaded.spec, name)
    loads = tuple(Load(bucket=bucket, sequences=bucket.sequences(4)) for bucket in BUCKETS)
    setting = Launch(
        model="tiny", format=name, block_tokens=BLOCK, context_tokens=160, sequences=4, loads=loads, kernel=kernel,
    )  # fmt: skip
    text = ENGINES["kvplan"].launch(setting).command
    names = {"TieredRuntime": TieredRuntime, "parse_formats": parse_formats, "loaded": loaded}
    server = eval(text, names)  # noqa: S307 - what a user would run
    assert isinstance(server, TieredRuntime)
    assert tuple(pool.free_blocks for pool in server.pools) == memory.tier_blocks(4)
    assert server.name.startswith(kernel.partition("/")[0])


@pytest.mark.parametrize("name", ["tiers-w8-20-int8+20-int4", "tiers-sum-w8-10-int8+10-int4"])
def test_a_tier_without_a_page_holds_nothing(build: Callable[..., LoadedModel], name: str) -> None:
    form = parse_tiers(name)
    blocks = form.blocks(10, BLOCK)
    assert blocks[1] == 0
    server = TieredRuntime(build("Llama"), form, block_tokens=BLOCK, blocks=blocks, slots=1, threads=1)
    sequence = server.prefill(list(range(3, 11))).sequence
    logits = server.step([sequence], torch.tensor([[5, 6]]))
    assert logits.isfinite().all()
    assert server.lengths(sequence, 10)[1] == 0
