"""What TurboMind prints of its cache, before and since objects in slabs (0.15), and each figure computed anew.

Wordings are those of InternLM/lmdeploy BlockManager.cc at v0.5.3 and at de8b40a^ (0.14), and of
src/turbomind/turbomind.cc at 1263d5c (0.16), with public logs of both. A MB of theirs is 2^20 bytes.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Final

from kvplan.core.allocation import Setup
from kvplan.core.specs import ModelSpec
from kvplan.engines.lmdeploy import BLOCK_TOKENS, FORMATS, NAME, allocate
from kvplan.engines.log_fields import RELEASE, figure_at, first_match
from kvplan.engines.logs import Finding, Line, LogFacts, Printed, Verdict, find_figures
from kvplan.errors import KvplanError

_MB: Final = 2.0**20
_BLOCK_TOKENS: Final = (BLOCK_TOKENS, 128, 32, 256)
_RANKS: Final = (1, 2, 4, 8)
_OLD: Final = (0, 14)

PATTERNS: Final = (
    figure_at("block", r"\bblock_size = MEGABYTES"),
    figure_at("blocks", r"\bmax_block_count = NUMBER", "blocks"),
    figure_at("budget", r"[Oo]bject cache budget: MEGABYTES"),
    figure_at("free", r"from (?:free|cacheable) MEGABYTES"),
    figure_at("ratio", r"MB and ratio NUMBER"),
)
_TURBOMIND: Final = re.compile(r"\[TM\]|BlockManager|Object cache budget")
_RANK: Final = re.compile(r"\[rank ?\d{1,6}\]")
_VERSION: Final = re.compile(r"\blmdeploy[ =:/]{1,9}" + RELEASE, re.IGNORECASE)
_HINT: Final = "start LMDeploy with `--log-level INFO`: TurboMind prints its cache at that level"


def read_log(lines: Sequence[Line]) -> LogFacts | None:
    """Return what a log of TurboMind says; None where nothing in it is TurboMind's."""
    own = [line for line in lines if _TURBOMIND.search(line.text)]
    if not own:
        return None
    figures = {name: tuple(items) for name, items in find_figures(own, PATTERNS, _RANK).items()}
    version = first_match(lines, _VERSION)
    return LogFacts(engine=NAME, version=version, figures=figures, hint=_HINT)


def explain(facts: LogFacts, model: ModelSpec | None) -> tuple[Finding, ...]:
    """Return a finding for each figure of the cache in a log."""
    return (*_block_findings(facts, model), *_budget_findings(facts))


def _block_findings(facts: LogFacts, model: ModelSpec | None) -> Iterator[Finding]:
    block, blocks = facts.last("block"), facts.last("blocks")
    if block is None:
        return
    if model is None:
        reason = "the model's geometry is not known: name it with --model"
        yield _finding("block size", block, "", Verdict.NOT_CHECKED, reason, needs_model=True)
        return
    fits = _settings(model, _truncated(block))
    if not fits:
        reason = "no format, block or number of ranks that is known makes it"
        yield _finding("block size", block, _shown_block(model), Verdict.UNEXPLAINED, reason, needs_model=True)
        return
    size, tokens, words = fits[0]
    reason = " or ".join(dict.fromkeys(fit[2] for fit in fits)) or f"{tokens} tokens of all layers"
    verdict = Verdict.EXPLAINED if words else Verdict.AGREES
    yield _finding("block size", block, f"{size / _MB:.3f} MB", verdict, reason, needs_model=True)
    if blocks is not None:
        count, sizes = round(blocks.value), sorted({fit[1] for fit in fits})
        held = " or ".join(f"{count * each:,} tokens" for each in sizes)
        reason = f"{count} blocks of {' or '.join(map(str, sizes))} tokens; the memory they are made of is not printed"
        yield _finding("blocks", blocks, held, Verdict.NOT_CHECKED, reason)


def _truncated(figure: Printed) -> Printed:
    """Return the figure as what it may stand for: whole MB are cut, not rounded."""
    if "." in figure.text:
        return figure
    return replace(figure, low=figure.value, high=figure.value + _MB)


def _settings(model: ModelSpec, size: Printed) -> list[tuple[float, int, str]]:
    """Return the settings under which a block takes what was printed, of those that depart least from the default.

    Each has the bytes, the tokens of a block, and the departures in words.
    """
    tried: list[tuple[int, float, int, str]] = []
    for form, tokens, ranks in product(FORMATS[1:], _BLOCK_TOKENS, _RANKS):
        words = [f"the cache is in {form.name}"] if form.quantized else []
        words += [f"{ranks} tensor parallel ranks"] if ranks > 1 else []
        words += [f"blocks of {tokens} tokens"] if tokens != BLOCK_TOKENS else []
        taken = _block_bytes(model, form.name, tokens, ranks)
        if taken and size.low <= taken <= size.high:
            tried.append((len(words), taken, tokens, "; ".join(words)))
    least = min((item[0] for item in tried), default=0)
    return [item[1:] for item in tried if item[0] == least]


def _block_bytes(model: ModelSpec, form: str, tokens: int, ranks: int) -> float:
    """Return the bytes of a block; 0 where TurboMind does not run the model so."""
    setup = Setup(context_tokens=tokens, block_tokens=tokens, tensor_parallel=ranks)
    for version in (None, _OLD, (0, 9)):
        try:
            return allocate(model, form, replace(setup, version=version)).groups[0].bytes_per_block
        except KvplanError:
            continue
    return 0.0


def _shown_block(model: ModelSpec) -> str:
    bytes_ = _block_bytes(model, FORMATS[1].name, BLOCK_TOKENS, 1)
    return f"{bytes_ / _MB:.3f} MB" if bytes_ else ""


def _budget_findings(facts: LogFacts) -> Iterator[Finding]:
    """Yield whether the budget is the part of the free memory that the line says; no tokens are printed with it."""
    budget, free, ratio = facts.last("budget"), facts.last("free"), facts.last("ratio")
    if budget is None:
        return
    if free is None or ratio is None:
        reason = "the line does not say of what it is a part"
        yield _finding("object cache budget", budget, "", Verdict.NOT_CHECKED, reason)
        return
    verdict, reason = Verdict.AGREES, f"{ratio.text} of {free.text}; how many tokens it holds is not printed"
    if not budget.meets(free.low * ratio.low, free.high * ratio.high):
        verdict, reason = Verdict.UNEXPLAINED, "the line's own factors make another size"
    yield _finding("object cache budget", budget, f"{free.value * ratio.value / _MB:.0f} MB", verdict, reason)


def _finding(
    what: str, figure: Printed, recomputed: str, verdict: Verdict, reason: str, *, needs_model: bool = False
) -> Finding:
    return Finding(
        line=figure.line, what=what, printed=figure.text, recomputed=recomputed, verdict=verdict, reason=reason,
        needs_model=needs_model,
    )  # fmt: skip
