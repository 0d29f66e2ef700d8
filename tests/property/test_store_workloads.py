import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvplan.core.workloads import Arrival, Bucket, Prefill, QualityBudget, Search, Target, Workload
from kvplan.engines import ENGINES
from kvplan.errors import InputError
from kvplan.store.budgets import load_budget
from kvplan.store.workloads import SHARE_TOLERANCE, dump_workload, load_workload

SETTINGS = settings(deadline=None, max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])
VALID = """\
schema: 1
model: demo
memory: 24GiB
memory_utilization: 90%
parallel: {tensor: 2}
arrival: {rate_per_s: 4}
target:
  concurrency: 32
  ttft_ms: {p95: 2000}
quality:
  max_kl: 0.02
  confidence: 95%
buckets:
  - {name: chat, prompt: 1024, generate: 128, share: 70%, shared_prefix: 256}
  - {name: "long", prompt: 1800, generate: 128, share: 30%}
search: &s
  formats: [bf16, int8]
  block_size: [32, 64]
"""
BUDGET = """\
schema: 1
memory: 24GiB
default: {min_sessions: 3, max_tpot_ms: {p95: 50}, quality: {max_kl: 0.1}}
formats:
  int4: {max_bytes_per_sequence: 12MiB, max_decode_ratio: 0.8}
"""

PIECES = [
    b"", b": ", b"- ", b"{", b"}", b"[", b"]", b"&a ", b"*a", b"<<: *s", b"!!int ", b"'", b'"', b"|", b">", b"\n",
    b"%", b"0", b"-1", b"1e999", b".nan", b"null", b"~", b"{}", b"?", b"9" * 5000, b"\xef\xbb\xbf", b"---\n", b"...\n",
    b"\x85", b"\t",
]  # fmt: skip
"""What YAML gives a meaning to, and numbers that are none."""

names = st.text(min_size=1, max_size=40).filter(lambda text: text.isprintable() and bool(text.strip()))
tokens = st.integers(1, 10**9)
unit = st.floats(0, 1)
positive = st.floats(1e-6, 1e12)
percentiles = st.dictionaries(st.integers(1, 99), positive, max_size=3)


@st.composite
def bucket_lists(draw):
    weights = draw(st.lists(st.floats(0.01, 1), min_size=1, max_size=6))
    total = sum(weights)
    found = []
    for name, weight in zip(draw(st.lists(names, min_size=6, max_size=6, unique=True)), weights, strict=False):
        prompt = draw(tokens)
        found.append(
            Bucket(
                name=name, prompt_tokens=prompt, generate_tokens=draw(tokens), share=weight / total,
                shared_prefix_tokens=draw(st.integers(0, prompt)),
            )
        )  # fmt: skip
    return tuple(found)


budgets = st.builds(
    QualityBudget,
    max_perplexity_increase=st.none() | st.floats(0, 100),
    max_kl=st.none() | st.floats(0, 1e6),
    max_top1_flips=st.none() | unit,
    max_retrieval_drop=st.none() | unit,
    confidence=st.floats(0.5, 1, exclude_min=True, exclude_max=True),
)
formats = st.sampled_from(("bf16", "fp16", "int8", "k8v4", "k4v4-g64-s4", "kivi-k4v2-g64-r128", "kivi-paper"))
blocks = st.sampled_from((16, 32, 48, 64, 256))
searches = st.builds(
    Search,
    formats=st.lists(formats, min_size=1, max_size=4, unique=True).map(tuple),
    block_tokens=st.lists(blocks, max_size=4, unique=True).map(lambda found: (128, *found)),  # 128 holds every format
)
workloads = st.builds(
    Workload,
    model=names,
    buckets=bucket_lists(),
    target=st.builds(Target, concurrency=st.integers(1, 10**6), ttft_ms=percentiles, tpot_ms=percentiles),
    device=names,
    memory_bytes=st.none() | st.integers(1, 2**53),
    memory_utilization=st.floats(0, 1, exclude_min=True),
    tensor_parallel=st.integers(1, 64),
    pipeline_parallel=st.integers(1, 64),
    weights=st.sampled_from(("bf16", "fp16", "int8", "int4", "fp8")),
    engine=st.none() | st.sampled_from(sorted(ENGINES)),
    max_batched_tokens=tokens,
    prefix_caching=st.booleans(),
    prefill=st.sampled_from(Prefill),
    arrival=st.none() | st.builds(Arrival, rate_per_s=positive, burstiness=positive),
    quality=budgets,
    search=searches,
)


@settings(SETTINGS, max_examples=60)
@given(workloads)
def test_a_dumped_workload_loads_as_the_same(tmp_path, workload):
    assert abs(sum(bucket.share for bucket in workload.buckets) - 1) < SHARE_TOLERANCE
    path = tmp_path / "w.yaml"
    path.write_text(dump_workload(workload), encoding="utf-8")
    assert load_workload(path) == workload


@st.composite
def mutations(draw, text):
    """The text with some pieces cut out, doubled, swapped for others, or made up."""
    data = text.encode()
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(data)))
        stop = draw(st.integers(start, min(len(data), start + 30)))
        again = st.just(data[stop : stop + 20])
        data = data[:start] + draw(st.binary(max_size=8) | st.sampled_from(PIECES) | again) + data[stop:]
    return data


def complaint(load, path):
    """The complaint about a file, or nothing; any other exception ends the test."""
    try:
        load(path)
    except InputError as error:
        return str(error)
    return ""


@SETTINGS
@given(mutations(VALID))
def test_no_mutation_of_a_workload_gives_anything_but_a_workload_or_one_line(tmp_path, data):
    path = tmp_path / "w.yaml"
    path.write_bytes(data)
    line = complaint(load_workload, path)
    if line:
        assert line.startswith(str(path))
        assert "\n" not in line
        return
    workload = load_workload(path)
    assert workload.target.concurrency >= 1
    assert all(bucket.shared_prefix_tokens <= bucket.prompt_tokens for bucket in workload.buckets)
    path.write_text(dump_workload(workload), encoding="utf-8")
    assert load_workload(path) == workload


@SETTINGS
@given(mutations(BUDGET))
def test_no_mutation_of_a_budget_gives_anything_but_a_budget_or_one_line(tmp_path, data):
    path = tmp_path / "b.yaml"
    path.write_bytes(data)
    line = complaint(load_budget, path)
    assert line == "" or line.startswith(str(path))
    assert "\n" not in line


@pytest.mark.parametrize(("text", "load"), [(VALID, load_workload), (BUDGET, load_budget)])
def test_what_is_mutated_is_valid(tmp_path, text, load):
    path = tmp_path / "f.yaml"
    path.write_text(text)
    assert complaint(load, path) == ""
