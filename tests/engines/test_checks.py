"""What is tried where a log does not say it, and that no log, however cut, is a fault."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplan.core.allocation import Setup
from kvplan.engines import checks, explain_log, read_log
from kvplan.engines.checks import Check, best_case, judge
from kvplan.engines.logs import Verdict, printed

LLAMA_8B = {"layers": 32, "heads": 32, "kv": 8, "hidden": 4096}
LINES = (
    "server_args=ServerArgs(model_path='m', tp_size=1, page_size=1, mem_fraction_static=0.5, kv_cache_dtype='auto')",
    "[TP0] Load weight begin. avail mem=40.00 GB",
    "[TP0] Load weight end. type=LlamaForCausalLM, avail mem=25.00 GB, mem usage=15.00 GB.",
    "[TP0] KV Cache is allocated. #tokens: 40960, K size: 2.50 GB, V size: 2.50 GB",
    "[TP0] Use sliding window memory pool. full_layer_tokens=40960, swa_layer_tokens=32768",
    "[TP0] Mamba Cache is allocated. max_mamba_cache_size: 0, conv_state size: 0.11GB, ssm_state size: 4.50GB",
    "max_total_num_tokens=40960, max_running_requests=0, context_len=0",
    "[TensorRT-LLM][INFO] Number of tokens per block: 0.",
    "[TensorRT-LLM][INFO] Number of blocks in KV cache primary pool: 0",
    "Max KV cache blocks per sequence: 5 [window size=0], tokens per block=32, primary blocks=500",
    "calculating max tokens in paged kv cache: total: 22.18 GiB, available: 1.42 GiB",
    "[MemUsageChange] Allocated 3.00 GiB for max tokens in paged KV cache (24576).",
    "max_seq_len=0, max_num_requests=64",
    "--tp 0 --max-mamba-cache-size 0 --swa-full-tokens-ratio 7 --dp-size 0 --max_seq_len 99",
)


@settings(deadline=None, max_examples=40)
@given(lines=st.lists(st.sampled_from(LINES), max_size=8), engine=st.sampled_from(["sglang", "trtllm"]))
def test_no_order_of_lines_is_a_fault(spec: Any, lines: list[str], engine: str) -> None:
    facts = read_log("\n".join(lines), engine)
    if facts is not None:
        for model in (spec(**LLAMA_8B), None):
            assert all(finding.line > 0 for finding in explain_log(facts, model))


def test_settings_have_at_most_so_many_departures() -> None:
    choices: list[list[checks.Choice]] = [
        [("", {"format": "bf16"}), ("8 bits", {"format": "fp8"})],
        [("", {}), ("ranks", {"tensor_parallel": 2})],
        [("", {}), ("an option", {"options": {"b=2"}})],
    ]
    base = Setup(context_tokens=1, options=frozenset({"a=1"}))
    found = list(checks.settings(base, choices, 1))
    assert [(departures, form) for departures, form, _ in found] == [
        ((), "bf16"), (("an option",), "bf16"), (("ranks",), "bf16"), (("8 bits",), "fp8"),
    ]  # fmt: skip
    assert [setup.tensor_parallel for _, _, setup in found] == [1, 1, 2, 1]
    assert found[1][2].options == {"a=1", "b=2"}


def test_the_fewest_departures_are_the_explanation_and_ties_are_told() -> None:
    check = Check(what="size", name="size", figure=printed("2.00", "GiB", 1))
    cases = [((), 1.0), (("twice the heads",), 2.0), (("two bytes",), 2.0), (("two bytes", "more"), 2.0)]
    case, bands, words = best_case(cases, [check], lambda _, factor: ((factor * 2**30, factor * 2**30),))
    assert (case, words) == (2.0, "twice the heads or two bytes")
    assert bands[0] is not None
    assert judge(check, bands[0], words).verdict is Verdict.EXPLAINED


def test_a_departure_under_which_nothing_can_be_computed_explains_nothing() -> None:
    check = Check(what="size", name="size", figure=printed("2.00", "GiB", 1))
    follows = ((2.0**30, 2.0**30),)
    cases = [((), True), (("no band",), False)]
    case, bands, words = best_case(cases, [check], lambda _, computable: follows if computable else None)
    assert (case, list(bands), words) == (True, [follows], "")
    drafting = Check(what="size", name="size", figure=check.figure, why="of a draft model")
    assert best_case(cases, [drafting], lambda _, computable: follows if computable else None)[2] == "no band"


def test_fewest_contradictions_come_first() -> None:
    """One departure explains one figure and belies two."""
    checks = [Check(what=text, name=text, figure=printed(text, "tokens", 1)) for text in ("1", "1", "2")]
    cases = [((), 1.0), (("twice",), 2.0)]
    assert best_case(cases, checks, lambda _, value: ((value, value),))[2] == ""


@pytest.mark.parametrize(
    ("number", "unit", "bands", "shown", "reason"),
    [
        ("2.00", "GiB", ((1 << 30, 1 << 30),), "1.00 GiB", "+100.0% against what follows"),
        ("90", "tokens", ((100.0, 120.0), (300.0, 300.0)), "100 to 120", "-18.2% against what follows"),
        ("5", "bytes", ((0.0, 0.0),), "0 bytes", "nothing follows"),
        ("5", "bytes", (), "", "nothing of this model is kept there"),
    ],
)
def test_a_difference_is_told_from_what_is_closest(
    number: str, unit: str, bands: tuple[tuple[float, float], ...], shown: str, reason: str
) -> None:
    found = judge(Check(what="a", name="a", figure=printed(number, unit, 1)), bands, "")
    assert (found.verdict, found.recomputed, found.reason) == (Verdict.UNEXPLAINED, shown, reason)
