"""vLLM's printed figures, each computed anew.

What a log does not say of the setting is tried: the fewest departures from vLLM's defaults under which all figures
follow are the explanation, and are named.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product as combinations
from typing import Any, Final

from kvplan.core.allocation import GroupedAllocation
from kvplan.core.specs import LayerKind, ModelSpec
from kvplan.engines.logs import Finding, LogFacts, Printed, Verdict
from kvplan.engines.vllm import HYBRID_OFF, allocate, default_format
from kvplan.errors import KvplanError

_GIB: Final = 2.0**30
_RATIO_BAND: Final = 0.005
"""Concurrency is printed with two decimals."""
_DEPARTURES_MAX: Final = 3
"""More of them would explain anything."""
_BLOCKS_LOST: Final = 3
"""The pool is made of bytes that were printed rounded, after a few pages went elsewhere."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Case:
    """One setting under which the figures may follow.

    Attributes:
        departures: What it takes that the log does not say, in words.
    """

    allocation: GroupedAllocation
    departures: tuple[str, ...]


def explain(facts: LogFacts, model: ModelSpec | None) -> tuple[Finding, ...]:
    """Return a finding for each figure of the cache in a log."""
    found = [*_memory_sum(facts), *_rank_lines(facts)]
    checks = _figures(facts)
    if model is None:
        return (*found, *(_unchecked(what, figure) for what, figure in checks), *_consistency(facts))
    cases = list(_cases(facts, model))
    if not cases:
        return (*found, *(_unchecked(what, figure) for what, figure in checks))
    scored = [(case, [_expected(case.allocation, facts, what) for what, _ in checks]) for case in cases]
    best, bands = max(
        scored,
        key=lambda item: (_met(checks, item[1]), -len(item[0].departures)),
    )
    found += [_finding(what, figure, band, best, facts) for (what, figure), band in zip(checks, bands, strict=True)]
    return (*found, *_consistency(facts))


def _figures(facts: LogFacts) -> list[tuple[str, Printed]]:
    """Return the figures that the pool and the geometry make, with what each is."""
    named = (
        ("blocks", "blocks"), ("tokens", "GPU KV cache size"), ("concurrency", "maximum concurrency"),
        ("needed", "needed for a sequence"), ("longest", "estimated maximum model length"),
        ("block_tokens", "attention block size"), ("padding_layers", "padding layers"),
    )  # fmt: skip
    found = [(what, facts.last(name)) for name, what in named]
    return [(what, figure) for what, figure in found if figure is not None]


def _unchecked(what: str, figure: Printed) -> Finding:
    return Finding(
        line=figure.line, what=what, printed=figure.text, verdict=Verdict.NOT_CHECKED,
        reason="the model's geometry is not known: name it with --model",
    )  # fmt: skip


def _met(checks: Sequence[tuple[str, Printed]], bands: Sequence[tuple[float, float] | None]) -> int:
    return sum(band is None or _meets(figure, what, band) for (what, figure), band in zip(checks, bands, strict=True))


def _meets(figure: Printed, what: str, band: tuple[float, float]) -> bool:
    slack = _RATIO_BAND if what == "maximum concurrency" else 0.0
    return figure.meets(band[0] - slack, band[1] + slack)


def _cases(facts: LogFacts, model: ModelSpec) -> Iterator[_Case]:
    """Yield the settings to try, the fewest departures first among those of as many figures."""
    context = facts.setup.context_tokens or model.context_tokens
    base = replace(facts.setup, context_tokens=max(1, context), version=facts.setup.version or (0,))
    choices = [
        _formats(facts, model), _ranks(facts), _hybrids(facts, model), _caching(facts, model), _batches(facts, model),
        _blocks(facts), _stages(facts), _flight(facts, model),
    ]  # fmt: skip
    for combination in combinations(*choices):
        if sum(bool(name) for name, _ in combination) > _DEPARTURES_MAX:
            continue
        setup, form = base, ""
        for _, change in combination:
            if "format" in change:
                form = str(change["format"])
            setup = replace(setup, **{key: value for key, value in change.items() if key != "format"})
        try:
            yield _Case(
                allocation=allocate(model, form, setup), departures=tuple(name for name, _ in combination if name)
            )
        except KvplanError:
            continue


_Choice = tuple[str, dict[str, Any]]
"""What is departed from, in words, and the fields of the setting that change with it."""


def _formats(facts: LogFacts, model: ModelSpec) -> list[_Choice]:
    if facts.format:
        return [("", {"format": facts.format})]
    own = default_format(model)
    unsaid: list[_Choice] = [] if "format" in facts.stated else [("the cache is in 8 bits", {"format": "fp8_e4m3"})]
    return [("", {"format": own}), *unsaid]


def _ranks(facts: LogFacts) -> list[_Choice]:
    if "tensor_parallel" in facts.stated:
        return [("", {})]
    return [("", {}), *((f"{n} tensor parallel ranks", {"tensor_parallel": n}) for n in (2, 4, 8, 16))]


def _hybrids(facts: LogFacts, model: ModelSpec) -> list[_Choice]:
    windows = any(layer.kind in (LayerKind.SLIDING, LayerKind.CHUNKED) for layer in model.layers)
    if not windows or HYBRID_OFF in facts.setup.options:
        return [("", {})]
    off = {"options": facts.setup.options | {HYBRID_OFF}}
    return [("", {}), ("the hybrid KV cache manager is off: windows are kept whole", off)]


def _caching(facts: LogFacts, model: ModelSpec) -> list[_Choice]:
    if "prefix_caching" in facts.stated or not any(layer.states for layer in model.layers):
        return [("", {})]
    return [("", {}), ("prefix caching is on: a second state for each sequence", {"prefix_caching": True})]


def _batches(facts: LogFacts, model: ModelSpec) -> list[_Choice]:
    windows = any(layer.kind is LayerKind.SLIDING for layer in model.layers)
    if not windows or "max_batched_tokens" in facts.stated:
        return [("", {})]
    sizes = (2048, 1024, 4096, 16384, 512)
    return [("", {}), *((f"{n} tokens a batch", {"max_batched_tokens": n}) for n in sizes)]


def _blocks(facts: LogFacts) -> list[_Choice]:
    if "block_tokens" in facts.stated or "block_tokens" in facts.figures:
        return [("", {})]
    return [("", {}), *((f"blocks of {n} tokens", {"block_tokens": n}) for n in (32, 64, 128))]


def _stages(facts: LogFacts) -> list[_Choice]:
    if facts.setup.pipeline_parallel == 1:
        return [("", {})]
    bug = "every stage is charged for the layers of all stages (vllm-project/vllm#34076)"
    return [("", {}), (bug, {"pipeline_parallel": 1})]


def _flight(facts: LogFacts, model: ModelSpec) -> list[_Choice]:
    windows = any(layer.kind is LayerKind.SLIDING for layer in model.layers)
    if not windows or facts.setup.version:
        return [("", {})]
    return [("", {}), ("two batches are in flight: asynchronous scheduling, from 0.26", {"version": (0, 26)})]


def _expected(allocation: GroupedAllocation, facts: LogFacts, what: str) -> tuple[float, float] | None:
    """Return the band in which the figure must lie; None where the log lacks what it follows from."""
    context = allocation.setup.context_tokens
    if what == "needed for a sequence":
        need = allocation.charged_bytes(context)
        return need, need
    if what == "attention block size":
        sizes = {float(group.block_tokens) for group in allocation.groups if group.block_tokens}
        return min(sizes), max(sizes)
    if what == "padding layers":
        return _padding_layers(allocation)
    blocks = _block_band(allocation, facts)
    if blocks is None:
        return None
    if what == "blocks":
        return blocks
    if what == "estimated maximum model length":
        return _longest_band(allocation, facts, blocks)
    if what == "maximum concurrency":
        each = _blocks_each(allocation)
        return blocks[0] / each, blocks[1] / each
    return _token_band(allocation, facts, blocks)


def _blocks_each(allocation: GroupedAllocation) -> float:
    """Return the blocks that a sequence of the context is taken to need when concurrency is printed."""
    size = allocation.groups[0].bytes_per_block
    return 1e6 / allocation.capacity(int(1e6 * size)).max_concurrency


def _padding_layers(allocation: GroupedAllocation) -> tuple[float, float]:
    """Return how many empty layers one kind of layer is given: what a warning says for each kind in turn."""
    most = max(group.layers for group in allocation.groups)
    kinds: dict[tuple[str, int | None], int] = {}
    for group in allocation.groups:
        key = group.name, group.held_tokens_max
        kinds[key] = kinds.get(key, 0) + most - group.layers
    return float(min(kinds.values())), float(max(kinds.values()))


def _block_band(allocation: GroupedAllocation, facts: LogFacts) -> tuple[float, float] | None:
    override = facts.last("override")
    if override is not None:
        return override.value, override.value
    available = facts.least("available")
    if available is not None:
        size = allocation.groups[0].bytes_per_block
        return max(0.0, available.low // size - _BLOCKS_LOST), available.high // size
    blocks = facts.last("blocks")
    return None if blocks is None else (blocks.value, blocks.value)


def _longest_band(allocation: GroupedAllocation, facts: LogFacts, blocks: tuple[float, float]) -> tuple[float, float]:
    available = facts.least("available")
    size = allocation.groups[0].bytes_per_block
    rooms = (available.low, available.high) if available else tuple(count * size for count in blocks)
    longest = [_longest(allocation, room) for room in rooms]
    return longest[0], longest[1]


def _longest(allocation: GroupedAllocation, room_bytes: float) -> float:
    low, high = 0, allocation.setup.context_tokens + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if allocation.charged_bytes(middle) <= room_bytes else (low, middle)
    return float(low)


def _token_band(allocation: GroupedAllocation, facts: LogFacts, blocks: tuple[float, float]) -> tuple[float, float]:
    """Return the tokens of a pool by the formula that was printed: of either era, the one that concurrency belies."""
    context, each = allocation.setup.context_tokens, _blocks_each(allocation)
    if _by_groups(allocation, facts):
        smallest = min(group.block_tokens for group in allocation.groups if group.block_tokens)
        counts = [count // len(allocation.groups) * smallest for count in blocks]
        return counts[0], counts[1]
    return blocks[0] / each * context - 1, blocks[1] / each * context


def _by_groups(allocation: GroupedAllocation, facts: LogFacts) -> bool:
    """Whether tokens were printed as blocks over groups: the older formula, which is not concurrency x context."""
    tokens, concurrency = facts.last("tokens"), facts.last("concurrency")
    if tokens is None or len(allocation.groups) == 1:
        return False
    if concurrency is None:
        return (facts.setup.version or (1,)) < (0, 21)
    return not _is_product(tokens, concurrency, allocation.setup.context_tokens)


def _is_product(tokens: Printed, concurrency: Printed, context: int) -> bool:
    ratio = tokens.value / context
    return concurrency.low - _RATIO_BAND <= ratio <= concurrency.high + _RATIO_BAND


def _finding(what: str, figure: Printed, band: tuple[float, float] | None, case: _Case, facts: LogFacts) -> Finding:
    if band is None:
        return Finding(
            line=figure.line, what=what, printed=figure.text, verdict=Verdict.NOT_CHECKED,
            reason="the log does not say how much memory the pool has",
        )  # fmt: skip
    verdict, reason = Verdict.AGREES, "; ".join(case.departures)
    if reason:
        verdict = Verdict.EXPLAINED
    if not _meets(figure, what, band):
        verdict, reason = Verdict.UNEXPLAINED, _difference(what, figure, band, facts)
    elif what == "GPU KV cache size" and len(case.allocation.groups) > 1:
        verdict, reason = Verdict.MISLEADS, _misleading(case, facts, reason)
    return Finding(
        line=figure.line, what=what, printed=figure.text, recomputed=_shown(what, band), verdict=verdict, reason=reason
    )


def _misleading(case: _Case, facts: LogFacts, reason: str) -> str:
    allocation = case.allocation
    context = allocation.setup.context_tokens
    blocks = _block_band(allocation, facts)
    held = "" if blocks is None else f"{int(blocks[1] / _blocks_each(allocation) * context):,}"
    text = f"derived from concurrency x {context:,} tokens: it changes with the context"
    if _by_groups(allocation, facts):
        text = f"blocks over {len(allocation.groups)} groups; at {context:,} tokens a sequence the pool holds {held}"
    return "; ".join(part for part in (reason, text) if part)


def _difference(what: str, figure: Printed, band: tuple[float, float], facts: LogFacts) -> str:
    middle = (band[0] + band[1]) / 2
    text = f"{figure.value / middle - 1:+.1%} against what follows" if middle else "nothing follows"
    ranked = facts.setup.tensor_parallel * facts.setup.pipeline_parallel > 1
    below = figure.value < band[0]
    lone = len(facts.figures.get("available", ())) < 2
    if ranked and below and lone and what != "needed for a sequence":
        text += "; the pool is the least of the ranks', and the log may show another rank's memory"
    return text


def _shown(what: str, band: tuple[float, float]) -> str:
    if what == "needed for a sequence":
        return f"{band[0] / _GIB:.2f} GiB"
    if what == "maximum concurrency":
        return f"{band[0]:.2f}x" if round(band[0], 2) == round(band[1], 2) else f"{band[0]:.2f}x to {band[1]:.2f}x"
    low, high = f"{band[0]:,.0f}", f"{band[1]:,.0f}"
    return low if low == high else f"{low} to {high}"


def _memory_sum(facts: LogFacts) -> Iterator[Finding]:
    """Yield whether the parts of the memory make the pool: usable less weights, activations and what is not tensors."""
    run = facts.measured
    available = facts.least("available")
    if not (run.usable and run.weights and run.activations and run.context and available):
        return
    parts = [run.weights, run.activations, run.context]
    graphs = facts.last("graphs_estimated")
    for chosen, words in ((parts, ""), ([*parts, *([graphs] if graphs else [])], ", graphs included")):
        low = run.usable.low - sum(part.high for part in chosen)
        high = run.usable.high - sum(part.low for part in chosen)
        if available.meets(low, high) or words:
            verdict = Verdict.AGREES if available.meets(low, high) else Verdict.UNEXPLAINED
            yield Finding(
                line=available.line, what="available KV cache memory", printed=available.text,
                recomputed=f"{(low + high) / 2 / _GIB:.2f} GiB", verdict=verdict,
                reason=f"usable less weights, activations and what is not tensors{words}",
            )  # fmt: skip
            return


def _rank_lines(facts: LogFacts) -> Iterator[Finding]:
    found = facts.figures.get("available", ())
    if len({figure.value for figure in found}) > 1:
        least = min(found, key=lambda figure: figure.value)
        yield Finding(
            line=least.line, what="available KV cache memory", printed=least.text, verdict=Verdict.AGREES,
            reason=f"the least of {len(found)} that were printed: it binds every rank",
        )  # fmt: skip


def _consistency(facts: LogFacts) -> Iterator[Finding]:
    """Yield whether tokens are concurrency times context, which needs no model."""
    tokens, concurrency, context = facts.last("tokens"), facts.last("concurrency"), facts.setup.context_tokens
    if tokens is None or concurrency is None or not context:
        return
    if _is_product(tokens, concurrency, context):
        verdict, reason = Verdict.AGREES, "tokens over context"
    else:
        verdict = Verdict.MISLEADS
        reason = (
            f"tokens are not concurrency x context ({concurrency.value * context:,.0f}): groups of layers share a pool"
        )
    yield Finding(
        line=concurrency.line, what="tokens over concurrency", printed=f"{concurrency.text} of {context:,}",
        recomputed=f"{tokens.value / context:.2f}x", verdict=verdict, reason=reason,
    )  # fmt: skip
