"""vLLM's printed figures, each computed anew.

What a log does not say of the setting is tried: the fewest departures from vLLM's defaults under which all figures
follow are the explanation, and are named.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from kvplan.core.allocation import GroupedAllocation, Setup
from kvplan.core.specs import LayerKind, ModelSpec
from kvplan.engines.checks import GIB, Band, Bands, Check, Choice, best_case, format_choices, judge, settings, unchecked
from kvplan.engines.engine import run_type
from kvplan.engines.logs import Finding, LogFacts, Printed, Verdict
from kvplan.engines.vllm import HYBRID_OFF, allocate, default_format
from kvplan.errors import KvplanError
from kvplan_kernels.layout import round_up

_RATIO_BAND: Final = 0.005
"""Concurrency is printed with two decimals."""
_BLOCK_TOKENS: Final = 16
"""Of a block, where the log does not say."""
_DEPARTURES_MAX: Final = 3
"""More of them would explain anything."""
_BLOCKS_LOST: Final = 3
"""The pool is made of bytes that were printed rounded, after a few pages went elsewhere."""
_DRAFT_LAYERS: Final = "draft-model-layers"
_UNKNOWN_DRAFT: Final = "the draft model may have part of the pool, and its geometry is not known"
_DRAFT_LAYERS_MAX: Final = 8
"""More of them would explain any difference."""
_ALONE: Final = frozenset({"needed", "block_tokens", "padding_layers"})
"""Figures that the geometry makes whatever the pool is."""
_FIGURES: Final = (
    ("blocks", "blocks"), ("tokens", "GPU KV cache size"), ("concurrency", "maximum concurrency"),
    ("needed", "needed for a sequence"), ("longest", "estimated maximum model length"),
    ("block_tokens", "attention block size"), ("padding_layers", "padding layers"),
)  # fmt: skip
"""What the pool and the geometry make, by the names of the log's patterns."""


def explain(facts: LogFacts, model: ModelSpec | None) -> tuple[Finding, ...]:
    """Return a finding for each figure of the cache in a log."""
    found = [*_memory_sum(facts), *_rank_lines(facts), *_override(facts)]
    checks = [
        Check(what=what, name=name, figure=figure)
        for name, what in _FIGURES
        if (figure := facts.last(name)) is not None
    ]
    cases, refused = _cases(facts, model)
    if not cases:
        return (*found, *(unchecked(check, refused) for check in checks), *_product(facts, refused))
    best, bands, departures = best_case(cases, checks, lambda check, case: _expected(check, case, facts))
    judged = [_finding(check, band, best, departures, facts) for check, band in zip(checks, bands, strict=True)]
    return (*found, *judged, *_shared_product(facts, best, judged))


_Cases = list[tuple[tuple[str, ...], GroupedAllocation]]


def _cases(facts: LogFacts, model: ModelSpec | None) -> tuple[_Cases, str]:
    """Return the settings to try, each with its departures from the defaults; where there are none, why."""
    if model is None:
        return [], "the model's geometry is not known: name it with --model"
    context = facts.setup.context_tokens or model.context_tokens
    base = replace(
        facts.setup, context_tokens=max(1, context), version=facts.setup.version or (0,),
        draft_tokens=facts.setup.draft_tokens if model.draft_layers else 0,
    )  # fmt: skip
    choices = [
        _formats(facts, model), _ranks(facts), _hybrids(facts, model), _caching(facts, model), _batches(facts, model),
        _blocks(facts), _stages(facts), _flight(facts, model), _drafts(facts, model),
    ]  # fmt: skip
    found: _Cases = []
    refused = ""
    for departures, form, setup in settings(base, choices, _DEPARTURES_MAX):
        try:
            found.append((departures, allocate(*_with_draft(model, form, setup))))
        except KvplanError as error:
            refused = refused or str(error)
    return found, refused


def _formats(facts: LogFacts, model: ModelSpec) -> list[Choice]:
    unsaid = {} if "format" in facts.stated else {"fp8_e4m3": "the cache is in 8 bits"}
    return format_choices(facts, default_format(model), run_type(model), unsaid)


def _ranks(facts: LogFacts) -> list[Choice]:
    if "tensor_parallel" in facts.stated:
        return [("", {})]
    return [("", {}), *((f"{n} tensor parallel ranks", {"tensor_parallel": n}) for n in (2, 4, 8, 16))]


def _hybrids(facts: LogFacts, model: ModelSpec) -> list[Choice]:
    windows = any(layer.kind in (LayerKind.SLIDING, LayerKind.CHUNKED) for layer in model.layers)
    if not windows or HYBRID_OFF in facts.setup.options:
        return [("", {})]
    return [("", {}), ("the hybrid KV cache manager is off: windows are kept whole", {"options": [HYBRID_OFF]})]


def _caching(facts: LogFacts, model: ModelSpec) -> list[Choice]:
    if "prefix_caching" in facts.stated or not any(layer.states for layer in model.layers):
        return [("", {})]
    return [("", {}), ("prefix caching is on: a second state for each sequence", {"prefix_caching": True})]


def _batches(facts: LogFacts, model: ModelSpec) -> list[Choice]:
    windows = any(layer.kind is LayerKind.SLIDING for layer in model.layers)
    if not windows or "max_batched_tokens" in facts.stated:
        return [("", {})]
    sizes = (2048, 1024, 4096, 16384, 512)
    return [("", {}), *((f"{n} tokens a batch", {"max_batched_tokens": n}) for n in sizes)]


def _blocks(facts: LogFacts) -> list[Choice]:
    if "block_tokens" in facts.stated or "block_tokens" in facts.figures:
        return [("", {})]
    return [("", {}), *((f"blocks of {n} tokens", {"block_tokens": n}) for n in (32, 64, 128, 256))]


def _stages(facts: LogFacts) -> list[Choice]:
    if facts.setup.pipeline_parallel == 1:
        return [("", {})]
    bug = "every stage is charged for the layers of all stages (vllm-project/vllm#34076)"
    return [("", {}), (bug, {"pipeline_parallel": 1})]


def _flight(facts: LogFacts, model: ModelSpec) -> list[Choice]:
    windows = any(layer.kind is LayerKind.SLIDING for layer in model.layers)
    if not windows or facts.setup.version:
        return [("", {})]
    return [("", {}), ("two batches are in flight: asynchronous scheduling, from 0.26", {"version": (0, 26)})]


def _drafts(facts: LogFacts, model: ModelSpec) -> list[Choice]:
    """Return how many layers a draft model may have in the pool, where the log says that there is one."""
    if not facts.setup.draft_tokens or model.draft_layers:
        return [("", {})]
    found: list[Choice] = [("", {})]
    for count in range(1, _DRAFT_LAYERS_MAX + 1):
        layers = "1 layer" if count == 1 else f"{count} layers"
        text = f"a draft model of {layers} with the model's KV heads has part of the pool"
        change = {"options": [f"{_DRAFT_LAYERS}={count}"], "draft_tokens": facts.setup.draft_tokens}
        found.append((text, change))
    return found


def _with_draft(model: ModelSpec, form: str, setup: Setup) -> tuple[ModelSpec, str, Setup]:
    """Return what to allocate, with the layers of a draft model where the setting has them."""
    count = setup.option(_DRAFT_LAYERS)
    if count is None:
        return model, form, setup
    whole = [layer for layer in model.layers if layer.kind is LayerKind.FULL] or list(model.layers)
    options = setup.options - {f"{_DRAFT_LAYERS}={count}"}
    return replace(model, draft_layers=(whole[-1],) * int(count)), form, replace(setup, options=options)


def _expected(check: Check, allocation: GroupedAllocation, facts: LogFacts) -> Bands:
    """Return what the figure may be; None where the log lacks what it follows from."""
    context = allocation.setup.context_tokens
    if check.name == "needed":
        need = allocation.charged_bytes(context)
        return ((need, need),)
    if check.name == "block_tokens":
        return tuple(
            (float(group.block_tokens), group.block_tokens) for group in allocation.groups if group.block_tokens
        )
    if check.name == "padding_layers":
        return tuple((count, count) for count in _padding_layers(allocation))
    blocks = _block_band(allocation, facts)
    if blocks is None:
        return None
    if check.name == "blocks":
        return (blocks,) if _pool_is_known(facts) else None
    if check.name == "longest":
        return (_longest_band(allocation, facts, blocks),)
    if check.name == "concurrency":
        each = _blocks_each(allocation)
        return ((blocks[0] / each - _RATIO_BAND, blocks[1] / each + _RATIO_BAND),)
    return _token_bands(check.figure, allocation, facts, blocks)


def _blocks_each(allocation: GroupedAllocation) -> float:
    """Return the blocks that a sequence of the context is taken to need when concurrency is printed."""
    size = allocation.groups[0].bytes_per_block
    return 1e6 / allocation.capacity(int(1e6 * size)).max_concurrency


def _padding_layers(allocation: GroupedAllocation) -> list[float]:
    """Return how many empty layers each kind of layer is given: what a warning says of each in turn."""
    most = max(group.layers for group in allocation.groups)
    kinds: dict[tuple[str, int | None], float] = {}
    for group in allocation.groups:
        key = group.name, group.held_tokens_max
        kinds[key] = kinds.get(key, 0.0) + most - group.layers
    return [count for count in kinds.values() if count]


def _block_band(allocation: GroupedAllocation, facts: LogFacts) -> Band | None:
    override = facts.last("override")
    if override is not None and override.value > 0:
        return override.value, override.value
    available = facts.least("available")
    if available is not None:
        size = allocation.groups[0].bytes_per_block
        return max(0.0, available.low // size - _BLOCKS_LOST), available.high // size
    blocks = facts.last("blocks")
    return _blocks_of_tokens(allocation, facts) if blocks is None else (blocks.value, blocks.value)


def _blocks_of_tokens(allocation: GroupedAllocation, facts: LogFacts) -> Band | None:
    """Return the blocks that were printed as tokens by the older formula, where concurrency can belie them."""
    tokens = facts.last("tokens")
    if tokens is None or facts.last("concurrency") is None or not _by_groups(allocation, facts):
        return None
    groups = len(allocation.groups)
    each = tokens.value // _smallest_block(allocation) * groups
    return each, each + groups - 1


def _smallest_block(allocation: GroupedAllocation) -> int:
    return min(group.block_tokens or allocation.setup.context_tokens for group in allocation.groups)


def _longest_band(allocation: GroupedAllocation, facts: LogFacts, blocks: Band) -> Band:
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


def _token_bands(figure: Printed, allocation: GroupedAllocation, facts: LogFacts, blocks: Band) -> Bands:
    """Return the tokens of a pool by the formula that was printed: of either era, the one that concurrency belies.

    A figure that is of no whole number of blocks is none of the pool's: those of the nearest numbers are returned.
    """
    context, each = allocation.setup.context_tokens, _blocks_each(allocation)
    smallest = _smallest_block(allocation)
    if _by_groups(allocation, facts):
        low, high = (count // len(allocation.groups) for count in blocks)
        return _in_steps(figure, (low, high), smallest, cut=0)
    bands = _in_steps(figure, blocks, context / each, cut=1)
    return (*bands, *_in_steps(figure, blocks, smallest, cut=0)) if _is_even(allocation) else bands


def _in_steps(figure: Printed, counts: Band, step: float, *, cut: int) -> tuple[Band, ...]:
    """Return what so many steps make, less what is cut of a fraction; of a figure between steps, those beside it."""
    low, high = counts[0] * step - cut, counts[1] * step
    below = figure.value // step * step
    beside = ((below - cut, below), (below + step - cut, below + step))
    whole = any(figure.meets(*band) for band in beside)
    return beside if figure.meets(low, high) and not whole else ((low, high),)


def _by_groups(allocation: GroupedAllocation, facts: LogFacts) -> bool:
    """Whether tokens were printed as blocks over groups: the older formula, which is not concurrency x context."""
    tokens, concurrency = facts.last("tokens"), facts.last("concurrency")
    if tokens is None or _is_even(allocation):
        return False
    if concurrency is None:
        return (facts.setup.version or (1,)) < (0, 21)
    return not _is_product(tokens, concurrency, allocation.setup.context_tokens)


def _is_even(allocation: GroupedAllocation) -> bool:
    """Whether every token takes as much of the pool: one group of layers, which keep it whole."""
    return len(allocation.groups) == 1 and allocation.groups[0].held_tokens_max is None


def _is_product(tokens: Printed, concurrency: Printed, context: int, page: int = 1) -> bool:
    """Whether tokens over the context, which may be counted in whole pages, are the concurrency."""
    low, high = tokens.value / round_up(context, page), tokens.value / context
    return concurrency.meets(low - _RATIO_BAND, high + _RATIO_BAND)


def _pool_is_known(facts: LogFacts) -> bool:
    return facts.least("available") is not None or facts.last("override") is not None


def _finding(check: Check, bands: Bands, allocation: GroupedAllocation, departures: str, facts: LogFacts) -> Finding:
    if bands is None:
        return unchecked(check, "the log does not say how much memory the pool has")
    found = judge(check, bands, departures)
    held = check.name in _ALONE or not _is_even(allocation)
    found = replace(found, needs_model=held or (facts.least("available") is not None and not facts.last("override")))
    if check.name == "needed":
        found = replace(found, recomputed=f"{bands[0][0] / GIB:.2f} GiB")
    if check.name == "concurrency":
        found = replace(found, recomputed=_ratio_text(bands[0]))
    if found.verdict is Verdict.UNEXPLAINED and _may_be_another_rank(check, bands, facts):
        other = "the pool is the least of the ranks', and the log may show another rank's memory"
        return replace(found, reason=f"{found.reason}; {other}")
    if found.verdict is Verdict.UNEXPLAINED and facts.setup.draft_tokens and not allocation.setup.draft_tokens:
        return replace(found, reason=f"{found.reason}; {_UNKNOWN_DRAFT}")
    if found.verdict is not Verdict.UNEXPLAINED and check.name == "tokens" and len(allocation.groups) > 1:
        return replace(found, verdict=Verdict.MISLEADS, reason=_misleading(allocation, facts, departures))
    return found


def _ratio_text(band: Band) -> str:
    low, high = f"{band[0] + _RATIO_BAND:.2f}x", f"{band[1] - _RATIO_BAND:.2f}x"
    return low if low == high else f"{low} to {high}"


def _may_be_another_rank(check: Check, bands: tuple[Band, ...], facts: LogFacts) -> bool:
    """Whether a figure is less than what follows from the one rank whose memory the log shows, of several ranks."""
    ranked = facts.setup.tensor_parallel * facts.setup.pipeline_parallel > 1
    below = all(check.figure.value < band[0] for band in bands)
    return ranked and below and len(facts.figures.get("available", ())) < 2 and check.name != "needed"


def _misleading(allocation: GroupedAllocation, facts: LogFacts, reason: str) -> str:
    context = allocation.setup.context_tokens
    blocks = _block_band(allocation, facts)
    held = "" if blocks is None else f"{int(blocks[1] / _blocks_each(allocation) * context):,}"
    text = f"derived from concurrency x {context:,} tokens: it changes with the context"
    if len(allocation.groups) == 1:
        return "; ".join(part for part in (reason, f"windows are kept: {text}") if part)
    if _by_groups(allocation, facts):
        text = f"blocks over {len(allocation.groups)} groups; at {context:,} tokens a sequence the pool holds {held}"
    return "; ".join(part for part in (reason, text) if part)


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
                recomputed=f"{(low + high) / 2 / GIB:.2f} GiB", verdict=verdict,
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


def _override(facts: LogFacts) -> Iterator[Finding]:
    """Yield whether blocks were overridden by as much as the kernel's pages are larger than vLLM's.

    As vllm-project/tpu-inference#1285 has it: bytes of a page differ, and the pool is to take as many bytes.
    """
    names = ("counted_page", "kernel_page", "blocks_before", "override")
    counted, kernel, before, override = (facts.last(name) for name in names)
    if counted is None or kernel is None or before is None or override is None or kernel.value <= 0:
        return
    right = before.value * counted.value // kernel.value
    verdict, reason = Verdict.AGREES, f"{before.text} of {counted.text}, as pages of {kernel.text}"
    if override.value != right:
        verdict, reason = Verdict.UNEXPLAINED, f"{reason}, are not as many"
    yield Finding(
        line=override.line, what="blocks overridden", printed=override.text, recomputed=f"{right:,.0f}",
        verdict=verdict, reason=reason,
    )  # fmt: skip


def _product(facts: LogFacts, refused: str) -> Iterator[Finding]:
    """Yield whether tokens are concurrency times context, where nothing is known of the model."""
    page = facts.setup.block_tokens or _BLOCK_TOKENS
    yield from _product_finding(
        facts, page, Verdict.NOT_CHECKED, f"they differ, as with some models they do: {refused}"
    )


def _shared_product(facts: LogFacts, allocation: GroupedAllocation, judged: Sequence[Finding]) -> Iterator[Finding]:
    """Yield whether tokens are concurrency times context; they need not be where layers share a pool unevenly."""
    own = ("GPU KV cache size", "maximum concurrency")
    verdicts = {finding.verdict for finding in judged if finding.what in own}
    if _is_even(allocation):
        verdict, reason = Verdict.UNEXPLAINED, "every token takes as much of this model's pool: one of the two is wrong"
    elif Verdict.UNEXPLAINED in verdicts:
        verdict, reason = Verdict.UNEXPLAINED, "they differ, and do not both follow from the model"
    elif Verdict.NOT_CHECKED in verdicts:
        verdict, reason = Verdict.NOT_CHECKED, "the log does not say how much memory the pool has"
    else:
        shared = f"{len(allocation.groups)} groups of layers share the pool"
        verdict = Verdict.MISLEADS
        reason = f"{shared if len(allocation.groups) > 1 else 'windows are kept'}: tokens are not concurrency x context"
    page = max(group.block_tokens or 1 for group in allocation.groups)
    yield from _product_finding(facts, page, verdict, reason)


def _product_finding(facts: LogFacts, page: int, otherwise: Verdict, why: str) -> Iterator[Finding]:
    tokens, concurrency, context = facts.last("tokens"), facts.last("concurrency"), facts.setup.context_tokens
    if tokens is None or concurrency is None or not context:
        return
    same = _is_product(tokens, concurrency, context, page)
    yield Finding(
        line=concurrency.line, what="concurrency = tokens / max_model_len", printed=concurrency.text,
        recomputed=f"{tokens.value / context:.2f}x", verdict=Verdict.AGREES if same else otherwise,
        reason=f"{tokens.text} over {context:,}" if same else why,
    )  # fmt: skip
