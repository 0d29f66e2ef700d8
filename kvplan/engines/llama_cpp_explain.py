"""llama.cpp's buffers, each computed anew: what a cell takes, how many there are, and what devices hold of them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from kvplan.core.specs import ModelSpec
from kvplan.engines.llama_cpp import BATCH_TOKENS, NO_FLASH_ATTENTION, SWA_FULL, allocate
from kvplan.engines.llama_cpp_buffers import DRAFT, BufferAllocation, CellCache, Slots
from kvplan.engines.llama_cpp_formats import FORMATS
from kvplan.engines.llama_cpp_log import CacheKind, LlamaFacts, LoggedCache, LoggedStates
from kvplan.engines.llama_cpp_models import drafts
from kvplan.engines.logs import Finding, LogFacts, Printed, Verdict
from kvplan.errors import KvplanError

_MIB: Final = 2.0**20
_BATCHES: Final = (512, 2048, 1024, 256, 128, 64, 4096)
_ALIGNED_BYTES: Final = 4096
"""The most that a buffer type adds to a tensor so that the next one is aligned."""
_LAYERS_UNSAID: Final = 160
"""As many layers as a cache may have whose line does not say."""
_SIDE: Final = "indexer keys"
_SECOND: Final = "it is of a second context, as that of a draft is"
_OPTIONS: Final = (
    ("", ""),
    ("the cache of windows is as large as the other (--swa-full)", SWA_FULL),
    ("without flash attention V is as wide in all layers as in the widest", NO_FLASH_ATTENTION),
)
"""What a log may leave unsaid, and the option that it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Case:
    """A setting under which sizes may follow, and what of it the log does not say."""

    allocation: BufferAllocation
    departure: str = ""

    @property
    def slots(self) -> Slots:
        return self.allocation.slots

    @property
    def context_tokens(self) -> int:
        return self.allocation.setup.context_tokens

    def caches(self, kind: CacheKind) -> list[CellCache]:
        """Return what is kept in the cache of a kind."""
        if kind is CacheKind.INDEXER:
            return [cache for cache in self.allocation.caches if cache.name == _SIDE]
        window = kind is CacheKind.WINDOW
        others = (_SIDE, DRAFT)
        return [cache for cache in self.allocation.caches if cache.window_kept == window and cache.name not in others]


def explain(facts: LogFacts, model: ModelSpec | None) -> tuple[Finding, ...]:
    """Return a finding for each figure of the caches in a log."""
    if not isinstance(facts, LlamaFacts):
        return ()
    cases, missing = _cases(facts, model)
    found: list[Finding] = []
    for cache in facts.caches:
        found += _cache_findings(facts, cache, cases, missing)
        found += _sums(cache, cases)
    for states in facts.states:
        found += _state_findings(states, cases, missing)
    return (*found, *_device_findings(facts, cases, missing))


def _cases(facts: LlamaFacts, model: ModelSpec | None) -> tuple[list[_Case], str]:
    """Return the settings to try, those that the log says first; and why there are none."""
    if model is None:
        return [], "the model's geometry is not known: name it with --model"
    context = max(1, facts.setup.context_tokens or model.context_tokens)
    drafting = bool(model.draft_layers) and drafts(model) and any(cache.context > 1 for cache in facts.caches)
    setup = replace(facts.setup, context_tokens=context, version=None, draft_tokens=int(drafting))
    made: list[_Case] = []
    reason = ""
    for form in [facts.format] if facts.format else [form.name for form in FORMATS]:
        unsaid = "" if facts.format or form == FORMATS[0].name else f"the cache is in {form}"
        for text, option in _OPTIONS:
            options = setup.options | ({option} if option else set())
            try:
                allocation = allocate(model, form, replace(setup, options=frozenset(options)))
            except KvplanError as error:
                reason = reason or str(error)
                continue
            made.append(_Case(allocation=allocation, departure="; ".join(part for part in (unsaid, text) if part)))
    return made, "" if made else reason


def _cache_findings(facts: LlamaFacts, cache: LoggedCache, cases: Sequence[_Case], missing: str) -> Iterator[Finding]:
    figure = cache.size or _sum(cache.buffers)
    if figure is None:
        return
    if not cases:
        yield _unchecked(cache.kind, figure, missing)
        return
    if cache.context > 1:
        yield _draft_finding(cache, figure, cases[0])
        return
    yield _size_finding(facts, cache, figure, cases)
    if cache.cells is not None and facts.setup.context_tokens:
        yield _cell_finding(facts, cache, cache.cells, cases[0])


def _draft_finding(cache: LoggedCache, figure: Printed, case: _Case) -> Finding:
    """Return whether a second context's cache is that of the model's own layers that draft."""
    kept = [part for part in case.allocation.caches if part.name == DRAFT]
    size = sum(float(part.cells(case.slots, case.context_tokens) * part.cell_bytes) for part in kept)
    if not kept or not _same(figure, size * case.slots.buffers, cache):
        return _unchecked(cache.kind, figure, _SECOND)
    reason = "f16 of the layers that draft, in a context of their own"
    return _found(cache.kind, figure, _mib(size * case.slots.buffers), Verdict.AGREES, reason)


def _size_finding(facts: LlamaFacts, cache: LoggedCache, figure: Printed, cases: Sequence[_Case]) -> Finding:
    """Return whether cells times what a cell takes is the size, under the first setting of which it is."""
    shown = ""
    for case in cases:
        kept = case.caches(cache.kind)
        cells = cache.cells.value if cache.cells else _asked_cells(facts, case, kept)
        if not kept or cells is None:
            continue
        takes, layers = float(sum(part.cell_bytes for part in kept)), sum(part.layers for part in kept)
        size = cells * (cache.streams or 1) * takes
        shown = shown or _mib(size)
        if _same(figure, size, cache) and cache.layers in (None, layers):
            verdict = Verdict.EXPLAINED if case.departure else Verdict.AGREES
            reason = case.departure or f"{cells:,.0f} cells of {takes:,.0f} B in {layers} layers"
            return _found(cache.kind, figure, _mib(size), verdict, reason)
    if shown or cache.cells:
        return _found(cache.kind, figure, shown, Verdict.UNEXPLAINED, _difference(cache, cases[0]))
    return _unchecked(cache.kind, figure, "the log does not say how many cells there are")


def _same(figure: Printed, size: float, cache: LoggedCache) -> bool:
    """Whether a size is printed so; a sum of buffers may be larger by what aligns their tensors."""
    slack = 0.0 if cache.size else 2.0 * _ALIGNED_BYTES * (cache.layers or _LAYERS_UNSAID)
    return figure.meets(size, size + slack)


def _difference(cache: LoggedCache, case: _Case) -> str:
    layers = sum(part.layers for part in case.caches(cache.kind))
    if not layers:
        return "the model has no such cache"
    if cache.layers not in (None, layers):
        return f"the log has {cache.layers} layers in it and the model {layers}: it may be another model"
    return "no format or setting that is known makes it"


def _asked_cells(facts: LlamaFacts, case: _Case, kept: Sequence[CellCache]) -> float | None:
    if not facts.setup.context_tokens or not kept:
        return None
    return float(kept[0].cells(case.slots, case.context_tokens))


def _cell_finding(facts: LlamaFacts, cache: LoggedCache, figure: Printed, case: _Case) -> Finding:
    """Return whether the number of cells follows from the context, the slots and the batch."""
    what = f"cells of the {cache.kind}"
    kept = case.caches(cache.kind) or case.caches(CacheKind.WHOLE)
    rules = list(_cell_rules(facts, case, kept))
    windows = any(part.window_kept for part in kept)
    for words, count in rules:
        if figure.holds(count):
            verdict = Verdict.EXPLAINED if words else Verdict.AGREES
            reason = "; ".join(part for part in (words, _advice(facts, figure, case, kept)) if part)
            return _found(what, figure, f"{count:,}", verdict, reason, needs_model=windows)
    shown = f"{rules[0][1]:,}" if rules else ""
    reason = "no padding or batch that is known makes it"
    return _found(what, figure, shown, Verdict.UNEXPLAINED, reason, needs_model=windows)


def _cell_rules(facts: LlamaFacts, case: _Case, kept: Sequence[CellCache]) -> Iterator[tuple[str, int]]:
    """Yield numbers of cells with what makes them other than what the log says, today's rule first."""
    if not kept:
        return
    slots, tokens = case.slots, case.context_tokens
    yield "", kept[0].cells(slots, tokens)
    batches = _BATCHES if facts.setup.max_batched_tokens is None else ()
    for batch in batches:
        yield f"a batch of {batch} tokens", kept[0].cells(replace(slots, batch_tokens=batch), tokens)
    eras = (
        ("all have as many cells (--swa-full)", None),
        ("cells are padded to 256 before the context caps them, as up to November 2025", (256, True)),
        ("cells are padded to 32, as without flash attention up to November 2025", (32, True)),
        ("cells are not padded, as for some days of November 2025 (ggml-org/llama.cpp#16812)", (1, False)),
    )
    for words, padding in eras:
        if padding is None:
            yield words, slots.cells(tokens)
        else:
            yield words, kept[0].cells(replace(slots, pad_cells=padding[0], window_first=padding[1]), tokens)


def _advice(facts: LlamaFacts, figure: Printed, case: _Case, kept: Sequence[CellCache]) -> str:
    """Return what makes a cache of windows smaller, and by how much: fewer slots, and hardly a shorter context."""
    slots, window = case.slots, kept[0].window_tokens
    if not kept[0].window_kept or window is None or slots.sharing == 1:
        return ""
    whole = slots.counted * case.context_tokens
    fewer = kept[0].cells(replace(slots, count=1, counted=1, shared=False), whole)
    batch = facts.setup.max_batched_tokens or BATCH_TOKENS
    saved = float((int(figure.value) - fewer) * sum(part.cell_bytes for part in kept))
    if saved <= 0:
        return ""
    others = [part for part in case.allocation.caches if not part.window_kept]
    total = sum(float(part.cells(slots, case.context_tokens) * part.cell_bytes) for part in others)
    total += float(int(figure.value) * sum(part.cell_bytes for part in kept))
    return (
        f"{slots.sharing} slots with a window of {window:,} each and a batch of {batch:,}: --parallel 1 makes it"
        f" {fewer:,} cells and all caches {_mib(total - saved)} instead of {_mib(total)} ({-saved / total:+.0%}),"
        " a shorter context hardly fewer"
    )


def _sums(cache: LoggedCache, cases: Sequence[_Case]) -> Iterator[Finding]:
    """Yield whether K and V, and the buffers of devices, make the size that restates them."""
    if cache.size is None:
        return
    layers = cache.layers or sum(part.layers for case in cases[:1] for part in case.caches(cache.kind))
    aligned = 2.0 * _ALIGNED_BYTES * (layers or _LAYERS_UNSAID)
    for what, parts, slack in (("K and V", cache.parts, 0.0), ("buffers", cache.buffers, aligned)):
        total = _sum(parts)
        if total is None:
            continue
        if total.meets(cache.size.low, cache.size.high + slack):
            verdict, reason = Verdict.AGREES, "the size line restates them: they are one cache" + _shares(cache, parts)
        else:
            verdict, reason = Verdict.UNEXPLAINED, "they do not make the size that restates them"
        yield _found(f"{what} of the {cache.kind}", total, cache.size.text, verdict, reason, needs_model=False)


def _shares(cache: LoggedCache, parts: Sequence[Printed]) -> str:
    """Return how many layers each device holds; nothing where buffers are not of whole layers."""
    if cache.size is None or not cache.layers or parts is cache.parts or len(parts) == 1:
        return ""
    counts = [round(part.value * cache.layers / cache.size.value) for part in parts]
    whole = all(
        part.meets(cache.size.low * count / cache.layers, cache.size.high * count / cache.layers)
        for part, count in zip(parts, counts, strict=True)
    )
    return f", {', '.join(map(str, counts))} layers on the devices" if whole else ""


def _sum(figures: Sequence[Printed]) -> Printed | None:
    """Return the sum of figures, with all that it may stand for."""
    if not figures:
        return None
    value, low, high = (sum(getattr(figure, name) for figure in figures) for name in ("value", "low", "high"))
    text = figures[0].text if len(figures) == 1 else _mib(value)
    return Printed(value, low, high, text, figures[0].line)


def _state_findings(states: LoggedStates, cases: Sequence[_Case], missing: str) -> Iterator[Finding]:
    figure, what = states.size or _sum(states.buffers), "recurrent states"
    if figure is None:
        return
    if states.context > 1 or not cases:
        yield _unchecked(what, figure, missing if states.context == 1 else _SECOND)
        return
    allocation = cases[0].allocation
    slots = states.slots or allocation.slots.count
    size = float(slots * allocation.state_bytes // allocation.states * (1 + states.kept))
    slack = 0.0 if states.size else 2.0 * _ALIGNED_BYTES * max(1, allocation.state_layers)
    if figure.meets(size, size + slack):
        verdict, reason = Verdict.AGREES, _state_reason(states, allocation, slots)
    else:
        verdict, reason = Verdict.UNEXPLAINED, "the model's states make another size"
    yield _found(what, figure, _mib(size), verdict, reason)


def _state_reason(states: LoggedStates, allocation: BufferAllocation, slots: int) -> str:
    text = f"float32 of {allocation.state_layers} layers for each of {slots} slots"
    if states.kept:
        text += f", and of {states.kept} earlier tokens for each, to go back to"
    if states.layers not in (None, allocation.state_layers):
        text += f"; {states.layers} layers are all of the model's"
    return text


def _device_findings(facts: LlamaFacts, cases: Sequence[_Case], missing: str) -> Iterator[Finding]:
    """Yield whether what Ollama says of its devices is the whole cache."""
    total = _sum(facts.devices)
    if total is None:
        return
    what = "kv cache of the device" if len(facts.devices) == 1 else f"kv cache of {len(facts.devices)} devices"
    if not cases or not facts.setup.context_tokens:
        yield _unchecked(what, total, missing or "the context is not in the log: no KvSize is printed")
        return
    kept = cases[0].allocation
    if kept.state_layers or any(cache.window_tokens for cache in kept.caches):
        yield _unchecked(what, total, "how Ollama's own caches keep windows and states is not known here")
        return
    yield _total_finding(what, total, facts.setup.context_tokens, cases)


def _total_finding(what: str, total: Printed, tokens: int, cases: Sequence[_Case]) -> Finding:
    shown = ""
    for case in cases:
        takes = float(sum(cache.cell_bytes for cache in case.allocation.caches))
        cells = case.slots.cells(tokens)
        shown = shown or _mib(cells * takes)
        if total.holds(cells * takes):
            verdict = Verdict.EXPLAINED if case.departure else Verdict.AGREES
            reason = case.departure or f"the sum over devices: {cells:,} cells of {takes:,.0f} B"
            return _found(what, total, _mib(cells * takes), verdict, reason)
    return _found(what, total, shown, Verdict.UNEXPLAINED, "no format that is known makes it")


def _found(
    what: str, figure: Printed, recomputed: str, verdict: Verdict, reason: str, *, needs_model: bool = True
) -> Finding:
    return Finding(
        line=figure.line, what=what, printed=figure.text, recomputed=recomputed, verdict=verdict, reason=reason,
        needs_model=needs_model,
    )  # fmt: skip


def _unchecked(what: str, figure: Printed, reason: str) -> Finding:
    return _found(what, figure, "", Verdict.NOT_CHECKED, reason)


def _mib(size: float) -> str:
    return f"{size / _MIB:.2f} MiB"
