from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplan.core.activations import activation_bytes
from kvplan.core.memory import MemoryModel
from kvplan.core.specs import Evidence, LayerKind, LayerSpec, ModelSpec
from kvplan.core.workloads import Bucket, Prefill, Target, Workload
from kvplan.errors import InputError, UnsupportedFormatError
from kvplan_kernels.format import parse
from kvplan_kernels.layout import KVLayout

LAYER = LayerSpec(kind=LayerKind.FULL, kv_heads=2, head_dim=64)
MODEL = ModelSpec(
    name="made-up", digest="d", architecture="LlamaForCausalLM", layers=(LAYER,) * 3, query_heads=8, hidden_size=256,
    vocab_size=1000, context_tokens=8192, weight_bytes=1_000_000, parameters=500_000,
)  # fmt: skip
FORMATS = ("bf16", "int8", "k8v4", "int4", "kivi-k4v4-g64-r128", "kivi-k2v2-g64-r128", "int2", "int4-g32-r100-s4")


def memory(
    form: str = "int4", *buckets: Bucket, block_tokens: int = 64, memory_bytes: int = 1 << 30, **changes: object
) -> MemoryModel:
    some = buckets or (Bucket(name="a", prompt_tokens=100, generate_tokens=30),)
    workload = Workload(model="made-up", buckets=some, target=Target(concurrency=4), memory_utilization=1.0)
    return MemoryModel(
        model=MODEL,
        workload=replace(workload, **changes),
        form=parse(form),
        block_tokens=block_tokens,  # type: ignore[arg-type]
        memory_bytes=memory_bytes,
    )


def term(model: MemoryModel, name: str, concurrency: int = 4) -> int:
    return next(term.bytes for term in model.plan(concurrency).terms if term.name == name)


@pytest.mark.parametrize("form", FORMATS)
def test_cache_terms_are_the_bytes_of_the_layout(form: str) -> None:
    model = memory(form)
    layout = KVLayout(format=parse(form), kv_heads=2, head_dim=64, block_tokens=64)
    parts = term(model, "pages") + term(model, "residual") + term(model, "sinks")
    assert parts == 4 * 3 * layout.sequence_bytes(130)


def test_block_tables_are_as_wide_as_the_longest_sequence_in_whole_steps() -> None:
    long = Bucket(name="a", prompt_tokens=17 * 64, generate_tokens=1)
    assert term(memory("bf16"), "block tables") == 4 * (16 * 4 + 8)
    assert term(memory("bf16", long), "block tables") == 4 * (32 * 4 + 8)


def test_a_shared_prefix_is_held_once_and_in_whole_blocks_only() -> None:
    shared = Bucket(name="a", prompt_tokens=640, generate_tokens=64, shared_prefix_tokens=200)
    model, alone = memory("int4", shared), memory("int4", shared, prefix_caching=False)
    saved = term(alone, "pages") - term(model, "pages")
    assert saved == 3 * 3 * model.layout.block_bytes
    assert memory("int4", replace(shared, shared_prefix_tokens=63)).pool_blocks(4) == alone.pool_blocks(4)


def test_a_prefix_that_is_still_in_the_residual_is_not_shared() -> None:
    bucket = Bucket(name="a", prompt_tokens=2048, generate_tokens=1, shared_prefix_tokens=256)
    assert memory("kivi-k4v4-g64-r128", bucket).shared_blocks(bucket) == 2
    assert memory("bf16", bucket).shared_blocks(bucket) == 4


def test_sinks_are_not_part_of_a_shared_block() -> None:
    bucket = Bucket(name="a", prompt_tokens=300, generate_tokens=1, shared_prefix_tokens=64)
    assert memory("int4-g32-s4", bucket).shared_blocks(bucket) == 0


def test_a_bucket_holds_its_share_rounded_up() -> None:
    buckets = (
        Bucket(name="a", prompt_tokens=64, generate_tokens=64, share=0.5),
        Bucket(name="b", prompt_tokens=128, generate_tokens=64, share=0.5),
    )
    assert memory("bf16", *buckets).pool_blocks(3) == 2 * 2 + 2 * 3


def test_weights_in_fewer_bits_are_counted_from_parameters_and_said_to_be_predicted() -> None:
    weights = memory("bf16", weights="int4").weights
    assert weights.bytes == 250_000
    assert weights.evidence is Evidence.PREDICTED
    assert memory("bf16").weights.bytes == 1_000_000


def test_a_model_without_weights_is_refused() -> None:
    model = replace(memory(), model=replace(MODEL, weight_bytes=None, parameters=None))
    with pytest.raises(InputError, match="no weights"):
        model.plan(1)


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(InputError, match="no layers"):
        replace(memory(), model=replace(MODEL, layers=())).plan(1)


def test_a_block_size_that_no_kernel_takes_is_refused_with_its_reason() -> None:
    with pytest.raises(UnsupportedFormatError, match="no multiple of the group size"):
        memory("kivi-k4v4-g64-r128", block_tokens=32).plan(1)


def test_an_exact_prefill_computes_the_prompt_whole_and_a_chunked_one_does_not() -> None:
    long = Bucket(name="a", prompt_tokens=4000, generate_tokens=1)
    whole = memory("int4", long, max_batched_tokens=512)
    chunked = memory("int4", long, max_batched_tokens=512, prefill=Prefill.THROUGH_CACHE)
    assert term(whole, "activations", 1) == activation_bytes(MODEL, 4000)
    assert term(chunked, "activations", 1) == activation_bytes(MODEL, 512)


@settings(max_examples=60, deadline=None)
@given(
    form=st.sampled_from(FORMATS),
    prompt=st.integers(1, 3000),
    generate=st.integers(1, 500),
    share=st.floats(0.05, 0.95),
    mebibytes=st.integers(1, 600),
)
def test_the_sessions_found_fit_and_one_more_does_not(
    form: str, prompt: int, generate: int, share: float, mebibytes: int
) -> None:
    buckets = (
        Bucket(name="a", prompt_tokens=prompt, generate_tokens=generate, share=share),
        Bucket(name="b", prompt_tokens=100, generate_tokens=20, share=1 - share, shared_prefix_tokens=80),
    )
    model = memory(form, *buckets, memory_bytes=mebibytes << 20)
    count = model.sessions()
    if count:
        plan = model.plan(count)
        assert plan.need_bytes <= plan.limit_bytes
    assert not model.plan(count + 1).fits


@settings(max_examples=60, deadline=None)
@given(form=st.sampled_from(FORMATS), tokens=st.integers(1, 4000), concurrency=st.integers(1, 200))
def test_the_need_never_falls_with_tokens_or_sessions(form: str, tokens: int, concurrency: int) -> None:
    bucket = Bucket(name="a", prompt_tokens=tokens, generate_tokens=1)
    model, longer = memory(form, bucket), memory(form, replace(bucket, prompt_tokens=tokens + 1))
    need = model.plan(concurrency).need_bytes
    assert longer.plan(concurrency).need_bytes >= need
    assert model.plan(concurrency + 1).need_bytes > need


@settings(max_examples=40, deadline=None)
@given(tokens=st.integers(1, 4000), concurrency=st.integers(1, 200))
def test_the_need_falls_with_the_bits(tokens: int, concurrency: int) -> None:
    bucket = Bucket(name="a", prompt_tokens=tokens, generate_tokens=1)
    forms = ("bf16", "k8v8-g64", "k4v4-g64", "k2v2-g64")
    needs = [memory(form, bucket, block_tokens=16).plan(concurrency).cache_bytes for form in forms]
    assert needs[1:] == sorted(set(needs[1:]), reverse=True)
    assert tokens < 100 or needs[0] > needs[1]


def test_effective_bits_count_residual_and_metadata() -> None:
    bucket = Bucket(name="a", prompt_tokens=1000, generate_tokens=24)
    assert memory("bf16", bucket).effective_bits() == 16
    assert memory("int4", bucket).effective_bits() == 4.5
    assert memory("kivi-k4v4-g64-r128", bucket).effective_bits() > memory("k4v4-g64", bucket).effective_bits() + 1
