"""The bytes that a plan counts are those that kvplan's runtime allocates."""

import pytest

from kvplan.core.memory import MemoryModel
from kvplan.core.specs import LayerKind, LayerSpec, ModelSpec
from kvplan.core.workloads import Bucket, Target, Workload
from kvplan.errors import DoesNotFitError
from kvplan.runtime.pool import CachePool
from kvplan_kernels.layer_formats import parse_formats

LAYERS = tuple(LayerSpec(kind=LayerKind.FULL, kv_heads=heads, head_dim=dim) for heads, dim in ((2, 64), (1, 32)))
MODEL = ModelSpec(
    name="tiny", digest="0" * 64, architecture="TinyForCausalLM", layers=LAYERS, query_heads=4, hidden_size=64,
    vocab_size=10, context_tokens=4096, weight_bytes=1000, parameters=500,
)  # fmt: skip
FORMATS = (
    "bf16", "int8", "kivi-k4v2-g32-r64", "kivi-paper-k2v2-g32-r64", "int4-g32-r100-s4", "int4@0=bf16",
    "kivi-k4v2-g32-r64@-1=int8", "int4-r100-s4@0=int8-r33",
)  # fmt: skip


def planned(form: str, prefix: int) -> tuple[MemoryModel, Bucket]:
    bucket = Bucket(name="a", prompt_tokens=600, generate_tokens=77, shared_prefix_tokens=prefix)
    workload = Workload(model="tiny", buckets=(bucket,), target=Target(concurrency=3))
    return MemoryModel(
        model=MODEL, workload=workload, form=parse_formats(form), block_tokens=32, memory_bytes=1 << 30
    ), bucket


@pytest.mark.parametrize("form", FORMATS)
def test_a_pool_of_the_planned_blocks_holds_the_planned_sequences_and_not_one_token_block_more(form: str) -> None:
    model, bucket = planned(form, 0)
    pool = CachePool(MODEL, parse_formats(form), block_tokens=32, blocks=model.pool_blocks(3), slots=3)
    sequences = [pool.open() for _ in range(3)]
    for sequence in sequences:
        pool.grow(sequence, bucket.total_tokens)
        sequence.length = bucket.total_tokens
    terms = {term.name: term.bytes for term in model.plan(3).cache}
    assert pool.free_blocks == 0
    assert terms["pages"] + terms["residual"] + terms["sinks"] == pool.nbytes
    with pytest.raises(DoesNotFitError):
        pool.grow(sequences[0], 33 + max(part.residual_tokens for part in parse_formats(form).parts))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("prefix", [100, 500])
def test_a_shared_prefix_takes_the_blocks_that_forks_of_it_share(form: str, prefix: int) -> None:
    model, bucket = planned(form, prefix)
    pool = CachePool(MODEL, parse_formats(form), block_tokens=32, blocks=model.pool_blocks(3), slots=3)
    first = pool.open()
    pool.grow(first, bucket.total_tokens)
    first.length = bucket.total_tokens
    whole = len(first.blocks)
    shared = min(model.shared_blocks(bucket), whole)
    assert model.pool_blocks(3) == whole + 2 * (whole - shared)
    for sinks in (part.sink_tokens for part in parse_formats(form).parts):
        assert sinks + shared * 32 <= max(bucket.shared_prefix_tokens, sinks)


def test_block_tables_are_as_wide_as_the_plan_says() -> None:
    model, bucket = planned("bf16", 0)
    pool = CachePool(MODEL, parse_formats("bf16"), block_tokens=32, blocks=model.pool_blocks(3), slots=3)
    sequences = [pool.open() for _ in range(3)]
    for sequence in sequences:
        pool.grow(sequence, bucket.total_tokens)
        sequence.length = bucket.total_tokens
    batch = pool.batch(sequences)
    terms = {term.name: term.bytes for term in model.plan(3).cache}
    assert terms["block tables"] == pool._tables.nbytes + batch.slots.nbytes + batch.lengths.nbytes
    assert [row.tolist() for row in batch.block_tables] == [sequence.blocks for sequence in sequences]
