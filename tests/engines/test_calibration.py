"""What one run's log tells of another setting, held against what the other run printed.

Both runs are in llm-d-planner docs/empirical-vllm-memory-results.md: vLLM 0.11, Qwen3-32B on H100s of 79.18 GiB.
"""

import pytest

from kvplan.core.allocation import Setup
from kvplan.core.specs import Evidence
from kvplan.engines import read_log
from kvplan.engines.calibration import calibrated_setup, graphs_note, measured_terms

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
