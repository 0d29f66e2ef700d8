"""Logs of TurboMind, cut to the lines that matter, and what is said of each figure."""

from typing import Any

import pytest

from kvplan.engines import explain_log, read_log
from kvplan.engines.logs import Finding, Verdict

INTERNLM_7B = {"layers": 32, "heads": 32, "kv": 32, "hidden": 4096, "model_type": "internlm"}
LLAMA_8B = {"layers": 32, "heads": 32, "kv": 8, "hidden": 4096}

OLD = """
[TM][INFO] [BlockManager] block_size = 64 MB
[TM][INFO] [BlockManager] max_block_count = 159
[TM][INFO] [BlockManager] chunk_size = 1
"""
"""A public log of InternLM-Chat-7B in fp16."""

NEW = (
    "Loading:   0%|          | 0/36\rLoading: 100%|#####|\r[TM][INFO][0930.14:37:15.641964][turbomind.cc:319] "
    "Object cache budget: 55634.70 MB from free 63488.19 MB and ratio 0.876\n"
)
"""A public log of 0.17, with what a progress bar overwrote."""


def explained(spec: Any, log: str, config: dict[str, Any] | None) -> dict[str, Finding]:
    facts = read_log(log)
    assert facts is not None
    assert facts.engine == "lmdeploy"
    return {finding.what: finding for finding in explain_log(facts, spec(**config) if config else None)}


def test_blocks_of_whole_mb_say_their_tokens(spec: Any) -> None:
    found = explained(spec, OLD, INTERNLM_7B)
    assert (found["block size"].verdict, found["block size"].reason) == (Verdict.EXPLAINED, "blocks of 128 tokens")
    assert found["blocks"].recomputed == "20,352 tokens"


def test_whole_mb_are_cut_and_not_rounded(spec: Any) -> None:
    """4 MB were printed of 4.125 as well (v0.5.3); later releases print decimals."""
    found = explained(spec, OLD.replace("64 MB", "8 MB"), LLAMA_8B)["block size"]
    assert (found.verdict, found.recomputed) == (Verdict.AGREES, "8.000 MB")
    either = explained(spec, OLD.replace("64 MB", "4 MB"), LLAMA_8B)
    assert either["block size"].reason == "2 tensor parallel ranks or blocks of 32 tokens or the cache is in int8"
    assert either["blocks"].recomputed == "5,088 tokens or 10,176 tokens"
    exact = explained(spec, OLD.replace("64 MB", "4.125 MB"), LLAMA_8B)["block size"]
    assert exact.reason == "the cache is in int8"


def test_the_budget_is_a_part_of_what_is_free(spec: Any) -> None:
    found = explained(spec, NEW, None)["object cache budget"]
    assert found.verdict is Verdict.AGREES
    assert "not printed" in found.reason
    cacheable = explained(spec, NEW.replace("from free", "from cacheable"), None)["object cache budget"]
    assert cacheable.verdict is Verdict.AGREES
    other = explained(spec, NEW.replace("55634.70", "50000.00"), None)["object cache budget"]
    assert other.verdict is Verdict.UNEXPLAINED


def test_another_model_is_not_explained(spec: Any) -> None:
    found = explained(spec, OLD.replace("64 MB", "61.5 MB"), LLAMA_8B)
    assert found["block size"].verdict is Verdict.UNEXPLAINED
    assert explained(spec, OLD, None)["block size"].verdict is Verdict.NOT_CHECKED


@pytest.mark.parametrize("lines", range(4))
def test_a_log_that_breaks_off_is_read_as_far_as_it_goes(spec: Any, lines: int) -> None:
    facts = read_log("\n".join(OLD.splitlines()[:lines]))
    if facts is not None:
        explain_log(facts, spec(**LLAMA_8B))


def test_no_other_figure_agrees(spec: Any, agreeing: Any) -> None:
    """Half of a block of 128 tokens is one of 64, the default, which the log does not say."""
    assert agreeing(OLD, spec(**INTERNLM_7B)) == [(2, "block size", "32 MB")]
    assert agreeing(NEW, spec(**LLAMA_8B)) == []
