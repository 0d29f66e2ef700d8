import pytest

from kvplan.core.workloads import Arrival, Bucket, Prefill, QualityBudget, Search, Target, Workload
from kvplan.errors import InputError
from kvplan.store.workloads import default_workload, dump_workload, layout_refusal, load_workload

FULL = """\
schema: 1
model: demo
device: auto
memory: 24GiB
memory_utilization: 90%
parallel: {tensor: 2, pipeline: 1}
weights: bf16
engine: vllm
max_batched_tokens: 4096
prefix_caching: false
prefill: through_cache
arrival: {rate_per_s: 4, burstiness: 1.5}
target:
  concurrency: 32
  ttft_ms: {p95: 2000}
  tpot_ms: {p50: 20.5, p95: 50}
quality:
  max_perplexity_increase: 1%
  max_kl: 0.02
  max_top1_flips: 2%
  max_retrieval_drop: 5%
  confidence: 90%
buckets:
  - {name: chat, prompt: 1024, generate: 128, share: 70%, shared_prefix: 256}
  - {name: long, prompt: 1800, generate: 128, share: 30%}
search:
  formats: [bf16, k8v8, kivi-k4v4-g64-r128]
  block_size: [32, 64]
"""
LEAST = """\
schema: 1
model: demo
target: {concurrency: 4}
buckets: [{name: only, prompt: 10, generate: 5}]
"""


@pytest.fixture
def load(tmp_path):
    def load_text(text):
        path = tmp_path / "w.yaml"
        path.write_text(text, encoding="utf-8")
        return load_workload(path)

    return load_text


@pytest.fixture
def refuse(load, tmp_path):
    """The complaint about a text, without the folder."""

    def refuse_text(text):
        with pytest.raises(InputError) as caught:
            load(text)
        line = str(caught.value)
        assert "\n" not in line
        assert line.startswith(f"{tmp_path}/")
        return line.removeprefix(f"{tmp_path}/")

    return refuse_text


def test_every_key_arrives(load):
    assert load(FULL) == Workload(
        model="demo",
        buckets=(
            Bucket(name="chat", prompt_tokens=1024, generate_tokens=128, share=0.7, shared_prefix_tokens=256),
            Bucket(name="long", prompt_tokens=1800, generate_tokens=128, share=0.3),
        ),
        target=Target(concurrency=32, ttft_ms={95: 2000.0}, tpot_ms={50: 20.5, 95: 50.0}),
        memory_bytes=24 * 2**30,
        memory_utilization=0.9,
        tensor_parallel=2,
        engine="vllm",
        max_batched_tokens=4096,
        prefix_caching=False,
        prefill=Prefill.THROUGH_CACHE,
        arrival=Arrival(rate_per_s=4.0, burstiness=1.5),
        quality=QualityBudget(
            max_perplexity_increase=0.01, max_kl=0.02, max_top1_flips=0.02, max_retrieval_drop=0.05, confidence=0.9
        ),
        search=Search(formats=("bf16", "int8", "kivi-k4v4-g64-r128"), block_tokens=(32, 64)),
    )


def test_what_is_left_out_has_the_stated_default(load):
    bucket = Bucket(name="only", prompt_tokens=10, generate_tokens=5)
    assert load(LEAST) == Workload(model="demo", buckets=(bucket,), target=Target(concurrency=4))


@pytest.mark.parametrize(
    ("old", "new", "line", "says", "mend"),
    [
        ("memory: 24GiB", "memory: 24GX", 4, "memory: '24GX'", "24GiB"),
        ("memory: 24GiB", "memory: 0GiB", 4, "memory: '0GiB'", "above 0"),
        ("memory: 24GiB", "memory: 24", 4, "memory: '24' has no unit", "24GiB"),
        ("memory: 24GiB", "memory: " + "9" * 400 + "TiB", 4, "memory: '999", ""),
        ("memory: 24GiB", "memory: 9999999999TiB", 4, "9999999999TiB", ""),
        ("memory_utilization: 90%", "memory_utilization: 90", 5, "90%", "100%"),
        ("memory_utilization: 90%", "memory_utilization: 0%", 5, "0% is out of range", "above 0%"),
        ("tensor: 2", "tenser: 2", 6, "'tenser' in parallel", "did you mean tensor?"),
        ("tensor: 2", "tensor: 0", 6, "tensor: 0", "1 to"),
        ("weights: bf16", "weights: int3", 7, "'int3'", "did you mean int8?"),
        ("engine: vllm", "engine: vlm", 8, "'vlm'", "did you mean vllm?"),
        ("max_batched_tokens: 4096", "max_batched_tokens: 4k", 9, "'4k'", "digits"),
        ("prefix_caching: false", "prefix_caching: nope", 10, "'nope'", "true or false"),
        ("prefill: through_cache", "prefill: through", 11, "'through'", "through_cache"),
        ("rate_per_s: 4", "rate_per_s: 0", 12, "rate_per_s: 0", "above 0"),
        ("rate_per_s: 4, ", "", 12, "no rate_per_s in arrival", "add rate_per_s"),
        ("concurrency: 32", "concurrency: 0", 14, "concurrency: 0", "1 to"),
        ("concurrency: 32", "concurency: 32", 14, "'concurency' in target", "did you mean concurrency?"),
        ("concurrency: 32", "concurrency: 1.5", 14, "'1.5'", "digits"),
        ("ttft_ms: {p95: 2000}", "ttft_ms: fast", 15, "ttft_ms: 'fast'", "{p95: 50}"),
        ("ttft_ms: {p95: 2000}", "ttft_ms: {p95: fast}", 15, "p95: 'fast'", "without a unit"),
        ("ttft_ms: {p95: 2000}", "ttft_ms: {p95: 2s}", 15, "p95: '2s'", "without a unit"),
        ("ttft_ms: {p95: 2000}", "ttft_ms: {p95: -1}", 15, "-1 is out of range", "above 0"),
        ("ttft_ms: {p95: 2000}", "ttft_ms: {p100: 1}", 15, "percentile 100", "p1 to p99"),
        ("ttft_ms: {p95: 2000}", "ttft_ms: {p0: 1}", 15, "percentile 0", "p1 to p99"),
        ("ttft_ms: {p95: 2000}", "ttft_ms: {p99.9: 1}", 15, "percentile 99.9", "p1 to p99"),
        ("ttft_ms: {p95: 2000}", "ttft_ms: {median: 1}", 15, "'median'", "{p95: 50}"),
        ("ttft_ms: {p95: 2000}", "ttft_ms: {p95: 1, p095: 2}", 15, "percentile 95 is given twice", ""),
        ("max_perplexity_increase: 1%", "max_perplexity_increase: -1%", 18, "'-1%'", "70%"),
        ("max_kl: 0.02", "max_kl: 2%", 19, "'2%'", "0.02"),
        ("max_kl: 0.02", "max_kl: .nan", 19, "'.nan'", "0.02"),
        ("max_kl: 0.02", "max_kl: 1e999", 19, "'1e999'", "0.02"),
        ("max_top1_flips: 2%", "max_top1_flips: 200%", 20, "200% is out of range", "100%"),
        ("confidence: 90%", "confidence: 50%", 22, "0.5", "more than 50%"),
        ("confidence: 90%", "confidence: 100%", 22, "confidence: ", "less than 100%"),
        ("share: 70%", "share: 60%", 23, "sum to 90%", "100%"),
        ("share: 70%", "share: 70", 24, "70% is written with the percent sign", ""),
        ("share: 70%, ", "", 24, "no share", "add share"),
        ("prompt: 1024", "prompt: -4", 24, "-4 is out of range", "1 to"),
        ("prompt: 1024", "prompt: 0x10", 24, "'0x10'", "digits"),
        ("prompt: 1024", "prompt: 010", 24, "'010'", "digits"),
        ("shared_prefix: 256", "shared_prefix: 1025", 24, "1025 tokens", "start of the prompt"),
        ("name: long", "name: chat", 25, "'chat' names two", "of its own"),
        ("name: long, ", "", 25, "no name", "add name"),
        ("name: long", 'name: "a\\nb"', 25, "no name", "printable"),
        ("k8v8, ", "q4, ", 27, "'q4'", "use bf16"),
        ("k8v8, ", "bf16, ", 27, "bf16 is given twice", ""),
        ("k8v8, ", "kivi-k4v4, ", 27, "KIVI needs a group size", ""),
        ("formats: [bf16, k8v8, kivi-k4v4-g64-r128]", "formats: []", 27, "empty list", "leave the key out"),
        ("formats: [bf16, k8v8, kivi-k4v4-g64-r128]", "formats: bf16", 27, "where a list belongs", "[a, b]"),
        ("[32, 64]", "[40]", 28, "40 is no multiple of 16", "use 32"),
        ("[32, 64]", "[8]", 28, "8 is out of range", "16 to 256"),
        ("schema: 1\n", "schema: 2\n", 1, "version 2", "reads 1"),
        ("schema: 1\n", "", 1, "no schema", "add schema: 1"),
        ("model: demo\n", "model: demo\nmodel: other\n", 3, "'model' is given twice", "line 2"),
        ("model: demo\n", "model:\n", 2, "model: has no value", "leave the key out"),
        ("model: demo\n", "model: [a]\n", 2, "a list where a name belongs", ""),
        ("model: demo\n", "modle: demo\n", 2, "unknown key 'modle'", "did you mean model?"),
        ("model: demo\n", "", 1, "no model", "add model"),
        ("model: demo\n", "model: !!python/name:os.system x\n", 2, "has the tag", "leave tags out"),
        ("target:\n", "target: 5\nx:\n", 14, "unknown key 'x'", "known are"),
        ("model: demo\n", "model: a: b\n", 2, "is no YAML", ""),
        ("model: demo\n", "model: [demo\n", 3, "is no YAML", ""),
        ("model: demo\n", "<<: {model: demo}\n", 2, "unknown key '<<'", ""),
    ],
)  # fmt: skip
def test_a_bad_value_is_named_with_its_line_and_mend(refuse, old, new, line, says, mend):
    assert old in FULL
    complaint = refuse(FULL.replace(old, new, 1))
    assert complaint.startswith(f"w.yaml:{line}: ")
    assert says in complaint
    assert mend in complaint


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "w.yaml: is empty"),
        ("# nothing\n", "w.yaml: is empty"),
        ("- a\n", "w.yaml:1: is no mapping"),
        ("just words\n", "w.yaml:1: is no mapping"),
        ("schema: 1\n---\nschema: 1\n", "is no YAML: but found another document"),
        ("a: " + "[" * 500 + "]" * 500, "nested more than 12 deep"),
        ("a: " + "[" * 50000, "nest"),
        ("&a [&b [&c [x]]]\n", "is no mapping"),
        ("schema: 1\nmodel: a\x00b\n", "w.yaml:2: is no YAML: "),
    ],
)
def test_a_file_that_is_no_workload_is_refused(refuse, text, says):
    assert says in refuse(text)


def test_aliases_cannot_multiply(refuse):
    rows = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    rows += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 30)]
    assert "aliases" in refuse("\n".join(rows))


def test_a_list_that_holds_itself_is_refused(refuse):
    assert "w.yaml:4: " in refuse(LEAST.replace("buckets: [{name: only, prompt: 10, generate: 5}]", "buckets: &b [*b]"))


def test_no_buckets_is_an_error(refuse):
    assert "no buckets" in refuse(LEAST.partition("buckets")[0])


def test_text_that_is_not_utf8_is_refused_with_its_line(tmp_path):
    path = tmp_path / "w.yaml"
    path.write_bytes(b"schema: 1\nmodel: d\xe9mo\n")
    with pytest.raises(InputError, match=r"w\.yaml:2: byte 0xe9 is not UTF-8; save the file as UTF-8"):
        load_workload(path)


@pytest.mark.parametrize(("name", "says"), [("missing.yaml", "no such file"), (".", "is a folder")])
def test_what_cannot_be_opened_is_refused(tmp_path, name, says):
    with pytest.raises(InputError, match=says):
        load_workload(tmp_path / name)


def test_a_file_too_large_to_be_a_workload_is_not_parsed(tmp_path):
    path = tmp_path / "w.yaml"
    path.write_bytes(b"#" * (2**20 + 1))
    with pytest.raises(InputError, match="larger than 1048576 bytes"):
        load_workload(path)


def test_shares_may_be_rounded(load):
    rows = "\n".join(f"  - {{name: b{n}, prompt: 8, generate: 8, share: 33.3%}}" for n in range(3))
    text = LEAST.partition("buckets")[0] + "buckets:\n" + rows
    assert sum(bucket.share for bucket in load(text).buckets) == pytest.approx(0.999)


def test_a_pair_of_format_and_block_size_that_no_page_holds_is_left_to_the_search(load):
    text = LEAST + "search: {formats: [bf16, kivi-k4v4-g64], block_size: [32, 64]}\n"
    assert load(text).search.block_tokens == (32, 64)
    assert "multiple of the group size 64" in layout_refusal("kivi-k4v4-g64", 32)
    assert layout_refusal("kivi-k4v4-g64", 64) == ""


def test_formats_by_layer_stand_in_a_search_under_their_own_names(load, refuse):
    workload = load(LEAST + 'search: {formats: ["int4@-1,0=bf16", kivi-k4v4-g32@0=int8], block_size: [64]}\n')
    assert workload.search.formats == ("int4@0,-1=bf16", "kivi-k4v4-g32@0=int8")
    assert load(dump_workload(workload)) == workload
    assert "multiple of the group size 64" in layout_refusal("int8@0=kivi-k4v4-g64", 32)
    assert "in quotes in YAML" in refuse(LEAST + "search: {formats: [int4@0,1=bf16]}\n")


def test_no_pair_of_format_and_block_size_left_is_an_error(refuse):
    complaint = refuse(LEAST + "search:\n  formats: [kivi-k4v4-g64]\n  block_size: [32, 96]\n")
    assert complaint.startswith("w.yaml:7: block_size: ")
    assert "use block size 64" in complaint


def test_a_dumped_workload_loads_as_the_same(load):
    for text in (FULL, LEAST):
        workload = load(text)
        assert load(dump_workload(workload)) == workload


def test_the_default_grid_fits_the_context(load):
    for context in (32, 100, 2048, 131072):
        workload = default_workload("demo", context)
        assert max(bucket.total_tokens for bucket in workload.buckets) == min(context, 4096)
        assert all(bucket.prompt_tokens >= 1 and bucket.generate_tokens >= 1 for bucket in workload.buckets)
        assert load(dump_workload(workload)) == workload
    assert default_workload("demo", 2048, formats=("bf16",)).search.formats == ("bf16",)
    with pytest.raises(InputError, match="context of 31 tokens"):
        default_workload("demo", 31)
