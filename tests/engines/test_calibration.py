"""What one run's log tells of another setting, held against what the other run printed.

Both runs are in llm-d-planner docs/empirical-vllm-memory-results.md: vLLM 0.11, Qwen3-32B on H100s of 79.18 GiB.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest

from kvplan.core.allocation import Setup
from kvplan.core.sizes import TAKEN, pool_terms
from kvplan.core.specs import Evidence, ModelSpec, StatedCache
from kvplan.engines import read_log
from kvplan.engines.calibration import (
    calibrated_room,
    calibrated_setup,
    checked_facts,
    departures_note,
    graphs_note,
    measured_terms,
)
from kvplan.engines.logs import LogFacts
from kvplan.engines.sizing import Room
from kvplan.errors import NotComparableError

GIB = 1 << 30
ONE_RANK = """
INFO LLM engine (v0.11.0) with config: model='Qwen/Qwen3-32B', max_seq_len=16000, tensor_parallel_size=1, \
max_num_batched_tokens=8192, kv_cache_dtype=auto
INFO Available KV cache memory: 4.45 GiB
INFO Free memory on device (78.7/79.18 GiB) on startup. Desired GPU memory utilization is (0.9, 71.26 GiB). Actual \
usage is 61.03 GiB for weight, 5.64 GiB for peak activation, 0.14 GiB for non-torch memory, and -0.88 GiB for \
CUDAGraph memory.
"""


def test_the_same_setting_has_the_terms_that_were_measured() -> None:
    facts = read_log(ONE_RANK)
    assert facts is not None
    setup = calibrated_setup(facts, Setup(context_tokens=0), frozenset())
    assert (setup.context_tokens, setup.max_batched_tokens, setup.version) == (16000, 8192, (0, 11, 0))
    terms = measured_terms(facts, setup)
    assert {term.evidence for term in terms.values()} == {Evidence.MEASURED}
    left = terms["usable"].bytes - sum(terms[name].bytes for name in ("weights", "activations", "beside tensors"))
    assert left / GIB == pytest.approx(4.45, abs=0.02)
    assert "graphs" not in terms
    assert "-0.88 GiB" in graphs_note(facts.measured)


def test_two_ranks_are_predicted_from_one() -> None:
    """The run on two ranks printed 34.49 GiB: weights 30.59, activations 5.64, 0.54 beside tensors."""
    facts = read_log(ONE_RANK)
    assert facts is not None
    terms = measured_terms(
        facts, calibrated_setup(facts, Setup(context_tokens=0, tensor_parallel=2), frozenset({"tensor_parallel"}))
    )
    assert terms["weights"].evidence is Evidence.PREDICTED
    assert terms["weights"].bytes / GIB == pytest.approx(30.59, rel=0.005)
    left = terms["usable"].bytes - sum(terms[name].bytes for name in ("weights", "activations", "beside tensors"))
    assert left / GIB == pytest.approx(34.49, rel=0.02)


def test_fewer_tokens_a_batch_take_smaller_activations() -> None:
    facts = read_log(ONE_RANK)
    assert facts is not None
    terms = measured_terms(
        facts,
        calibrated_setup(facts, Setup(context_tokens=0, max_batched_tokens=2048), frozenset({"max_batched_tokens"})),
    )
    assert terms["activations"].bytes == pytest.approx(5.64 * GIB / 4, rel=0.001)
    assert terms["activations"].evidence is Evidence.PREDICTED


def test_graphs_are_in_the_sum_where_they_are_taken_first() -> None:
    """From 0.21 vLLM estimates graphs before it makes the pool."""
    facts = read_log(ONE_RANK.replace("v0.11.0", "v0.22.0").replace("-0.88", "0.88"))
    assert facts is not None
    assert measured_terms(facts, facts.setup)["graphs"].bytes == pytest.approx(0.88 * GIB)
    assert graphs_note(facts.measured) == ""


DEBUG = """
INFO vLLM API server version 0.11.0
INFO Model loading took 61.0300 GiB and 30.0 seconds
DEBUG Initial free memory: 78.66 GiB; Requested memory: 0.90 (util), 71.26 GiB
DEBUG Memory profiling takes 14.40 seconds. Total non KV cache memory: 66.81GiB; torch peak memory increase: 5.64GiB; \
non-torch forward increase memory: 0.14GiB; weights memory: 61.03GiB.
INFO Available KV cache memory: 4.45 GiB
"""
"""Worded as `vllm/v1/worker/gpu_worker.py` and `vllm/utils/mem_utils.py` of 0.11 word it, with the figures above."""


def read(log: str) -> LogFacts:
    facts = read_log(log)
    assert facts is not None
    return facts


def test_vllms_debug_lines_tell_the_terms() -> None:
    facts = read(DEBUG)
    terms = measured_terms(facts, facts.setup)
    found = {name: round(term.bytes / GIB, 2) for name, term in terms.items()}
    assert found == {
        "usable": 71.26, "weights": 61.03, "activations": 5.64, "beside tensors": 0.14, "what else the run took": 0.0,
        "pool": 4.45,
    }  # fmt: skip


@pytest.mark.parametrize("changed", [{"tensor_parallel": 2}, {"pipeline_parallel": 2}])
def test_on_other_ranks_nothing_that_they_change_is_measured(changed: dict[str, int]) -> None:
    facts = read(ONE_RANK)
    setup = replace(facts.setup, **changed)  # type: ignore[arg-type]
    terms = measured_terms(facts, setup)
    assert {name for name, term in terms.items() if term.evidence is Evidence.MEASURED} == {"usable"}
    assert terms["beside tensors"].formula.endswith("of a run on 1 rank, taken as it was")
    assert "pool" not in terms
    assert "0.55 to 3.58 GiB on two" in calibrated_room(facts, setup, Room()).note
    assert "on two" not in calibrated_room(facts, facts.setup, Room()).note


def test_a_batch_that_the_log_does_not_say_scales_nothing() -> None:
    facts = read(DEBUG)
    terms = measured_terms(facts, replace(facts.setup, max_batched_tokens=2048))
    assert terms["activations"].bytes == pytest.approx(5.64 * GIB)
    assert terms["activations"].evidence is Evidence.PREDICTED
    assert "the log does not say its batch" in terms["activations"].formula
    assert terms["beside tensors"].evidence is Evidence.MEASURED


@pytest.fixture
def llama_70b(spec: Callable[..., ModelSpec]) -> ModelSpec:
    """nvidia/Llama-3.1-70B-Instruct-FP8, without its weights."""
    return spec(80, 64, 8, 8192)


FOUR_RANKS = """
INFO Model loading took 16.9619 GiB memory and 33.033432 seconds
INFO Available KV cache memory: 106.17 GiB
INFO GPU KV cache size: 1,391,552 tokens
INFO Maximum concurrency for 8,192 tokens per request: 169.87x
"""
"""A public log of 2025-12-02, a model of 70B in fp8 on four ranks, which none of these lines states."""


def test_ranks_that_only_the_figures_tell_are_to_be_said(llama_70b: ModelSpec) -> None:
    facts = read(FOUR_RANKS)
    with pytest.raises(NotComparableError, match="4 tensor parallel ranks") as refused:
        checked_facts(facts, llama_70b, None)
    assert refused.value.hint.endswith("give --tp 4")
    checked = checked_facts(facts, llama_70b, 8)
    assert checked == checked_facts(facts, llama_70b, 4)
    assert (checked.setup.tensor_parallel, "tensor_parallel" in checked.stated) == (4, True)
    eight = replace(checked.setup, tensor_parallel=8)
    assert measured_terms(checked, eight, 127 * GIB)["weights"].bytes == pytest.approx(16.9619 * GIB / 2)


def test_a_pool_that_was_printed_is_that_of_the_same_setting_alone(llama_70b: ModelSpec) -> None:
    facts = checked_facts(read(FOUR_RANKS), llama_70b, 4)
    longer = replace(facts.setup, context_tokens=65536)
    terms = measured_terms(facts, longer)
    assert terms["pool"].bytes == pytest.approx(106.17 * GIB)
    assert terms["pool"].evidence is Evidence.MEASURED
    pool = pool_terms(
        llama_70b, longer, memory_bytes=None, share=1.0, batched_tokens=8192, measured=terms
    )  # no weights of the model, nor memory of the device, are asked for
    assert [term.name for term in pool] == ["weights", "pool"]
    for changed in ({"max_batched_tokens": 2048}, {"sequences": 8}, {"tensor_parallel": 8}):
        assert "pool" not in measured_terms(facts, replace(facts.setup, **changed))  # type: ignore[arg-type]


TRTLLM = """
[TensorRT-LLM][INFO] [MemUsageChange] Allocated 0.56 GiB for max tokens in paged KV cache (8224).
[TRT-LLM] [I] Peak memory during memory usage profiling (torch + non-torch): 113.65 GiB, available KV cache memory \
when calculating max tokens: 5.95 GiB, fraction is set 0.8999999761581421, kv size is 73728. device total memory \
119.70 GiB, , tmp kv_mem 0.56 GiB
"""
"""A public log of gpt-oss-120b, 2025-12-20."""
SERVING = "[TensorRT-LLM][INFO] [MemUsageChange] Allocated 5.95 GiB for max tokens in paged KV cache (86720).\n"


def test_the_tokens_of_trtllms_pool_say_more_than_its_rounded_size() -> None:
    facts = read(TRTLLM + SERVING)
    assert measured_terms(facts, facts.setup)["pool"].bytes == 86720 * 73728
    assert measured_terms(facts, replace(facts.setup, max_batched_tokens=9))[TAKEN].evidence is Evidence.PREDICTED


def test_the_pool_of_the_pass_that_measures_is_not_the_one_that_serves() -> None:
    facts = read(TRTLLM)
    assert "pool" not in measured_terms(facts, facts.setup)


def test_a_log_that_says_nothing_of_memory_is_no_measurement() -> None:
    facts = read("GPU KV cache size: 2,440,192 tokens")
    with pytest.raises(NotComparableError, match="says nothing of what the run took"):
        calibrated_room(facts, facts.setup, Room())
    assert "only its setting counts" in calibrated_room(facts, facts.setup, Room(kv_bytes=GIB)).note


def test_what_the_log_does_not_say_and_its_figures_follow_from_is_a_note(spec: Callable[..., ModelSpec]) -> None:
    """vllm-project/vllm#40691 again: a log of 16 bits, held against the config of a checkpoint that names 8."""
    log = """
INFO Initializing a V1 LLM engine (v0.19.0) with config: model='m', max_seq_len=8192, tensor_parallel_size=1
INFO Available KV cache memory: 16.00 GiB
INFO GPU KV cache size: 131,072 tokens
"""
    facts = read_log(log)
    assert facts is not None
    model = spec(layers=32, heads=32, kv=8, hidden=4096)
    assert departures_note(facts, model) == ""
    stated = replace(model, stated_cache=StatedCache(format="fp8_e4m3", library="modelopt"))
    assert "the cache is in 16 bits" in departures_note(facts, stated)
