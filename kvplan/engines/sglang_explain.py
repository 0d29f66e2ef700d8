"""SGLang's printed figures, each computed anew."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from kvplan.core.allocation import CacheGroup, CachePart, Setup
from kvplan.core.specs import ModelSpec
from kvplan.engines.checks import (
    GIB,
    Bands,
    Check,
    Choice,
    best_case,
    exact,
    format_choices,
    judge,
    settings,
    unchecked,
)
from kvplan.engines.engine import run_type
from kvplan.engines.logs import Finding, LogFacts, Printed, Verdict
from kvplan.engines.sglang import OLDEST, allocate_stages, key_share
from kvplan.engines.sglang_formats import default_format
from kvplan.engines.sglang_log import DRAFTED, REQUESTS, STATIC, first_of_ranks
from kvplan.engines.sglang_options import state_slots
from kvplan.engines.sglang_pools import TokenPools
from kvplan.errors import KvplanError

_DEPARTURES_MAX: Final = 3
"""More of them would explain anything."""
_INDEXER, _UNPRINTED = "indexer keys", "unprinted-indexer"
_MAPPED_BYTES: Final = 2 << 20
"""By which a buffer that is mapped after graphs are captured is rounded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Case:
    """What one setting allocates.

    Attributes:
        drafting: What layers that draft have; empty where there are none.
        left_out: Parts of the pools that are not in the sizes that were printed.
    """

    stages: tuple[TokenPools, ...]
    key_share: float
    drafting: tuple[TokenPools, ...]
    left_out: tuple[str, ...] = ()

    def pools(self) -> list[CacheGroup]:
        """Return the pools of tokens and of windows of all stages."""
        return [group for stage in self.stages for group in (stage.full, stage.windows) if group is not None]


def explain(facts: LogFacts, model: ModelSpec | None) -> tuple[Finding, ...]:
    """Return a finding for each figure of the pools in a log."""
    found = [*_reserved(facts), *_agreement(facts, model), *_context(facts)]
    checks = _checks(facts)
    if model is None:
        reason = "the model's geometry is not known: name it with --model"
        return (*found, *(unchecked(check, reason) for check in checks))
    cases, refused = _cases(facts, model)
    if not cases:
        return (*found, *(unchecked(check, refused) for check in checks))
    best, bands, departures = best_case(cases, checks, lambda check, case: _expected(check, case, facts))
    found += [_finding(check, band, departures) for check, band in zip(checks, bands, strict=True)]
    return (*found, *_memory(facts, best, departures), *_requests(facts, best))


def _checks(facts: LogFacts) -> list[Check]:
    """Return the figures that the geometry makes, each once however many ranks printed it."""
    found: list[Check] = []
    seen: set[tuple[str, str]] = set()
    for check in [*_pool_checks(facts), *_state_checks(facts)]:
        key = check.what, f"{check.figure.text} of {check.tokens}"
        if key not in seen:
            seen.add(key)
            found.append(check)
    return found


def _pool_checks(facts: LogFacts) -> Iterator[Check]:
    tokens = {(figure.line, figure.rank): figure.value for figure in facts.figures.get("pool_tokens", ())}
    total = facts.last("tokens")
    pools = 2 if _has_windows(facts) else 1
    for name, what in (("k_size", "K size"), ("v_size", "V size"), ("kv_size", "KV size")):
        number: dict[str, int] = {}
        for figure in facts.figures.get(name, ()):
            held = tokens.get((figure.line, figure.rank), total.value if total else None)
            drafted = number.get(figure.rank, 0) >= pools
            number[figure.rank] = number.get(figure.rank, 0) + 1
            if held is None:
                why = "the log breaks off before it says how many tokens the pool has"
                yield Check(what=what, name=name, figure=figure, why=why)
            elif drafted:
                why = "it is of a draft model, whose geometry is not known"
                yield Check(what=f"{what} of what drafts", name=f"drafted_{name}", figure=figure, tokens=held, why=why)
            else:
                yield Check(what=what, name=name, figure=figure, tokens=held)
    both, full = facts.last("both_pools"), facts.last("full_tokens")
    if both is not None and full is not None:
        yield Check(what="both pools", name="both_pools", figure=both, tokens=full.value)
    window = facts.last("window_tokens")
    if window is not None and full is not None and _has_windows(facts):
        yield Check(what="tokens of windows", name="window_tokens", figure=window, tokens=full.value)
    captured, size = facts.last("captured_tokens"), facts.last("captured_size")
    if captured is not None and size is not None:
        yield Check(what="KV size after graphs", name="captured_size", figure=size, tokens=captured.value)


def _has_windows(facts: LogFacts) -> bool:
    """Whether windows have a pool beside that of everything."""
    window = facts.last("window_tokens")
    return "full_tokens" in facts.figures and window is not None and window.value != 0


def _state_checks(facts: LogFacts) -> Iterator[Check]:
    slots = facts.last("slots")
    named = (("conv_size", "convolution inputs"), ("state_size", "recurrent states"))
    for name, what in named:
        for figure in first_of_ranks(facts.figures.get(name, ())):
            why = "the log does not say how many slots there are" if slots is None else ""
            yield Check(what=what, name=name, figure=figure, tokens=slots.value if slots else 0, why=why)
    drafted = facts.last("drafted_state_size")
    if drafted is not None:
        why = "the log does not say how many requests draft how many tokens"
        yield Check(what="states of what drafts", name="drafted_state_size", figure=drafted, why=why)


def _expected(check: Check, case: _Case, facts: LogFacts) -> Bands:
    """Return what the figure may be; None where the log lacks what it follows from."""
    if check.name in ("k_size", "v_size", "kv_size"):
        share = {"k_size": case.key_share, "v_size": 1 - case.key_share}.get(check.name, 1.0)
        return None if check.why else exact(share * _printed(group, check.tokens, case) for group in case.pools())
    if check.name.startswith("drafted_") and check.name != "drafted_state_size":
        share = {"drafted_k_size": case.key_share, "drafted_v_size": 1 - case.key_share}.get(check.name, 1.0)
        sizes = [share * _buffer(group, check.tokens) for stage in case.drafting for group in stage.groups]
        return exact(sizes) if any(check.figure.holds(size) for size in sizes) else None
    if check.name == "both_pools":
        window = facts.last("window_tokens")
        return exact(
            _buffer(stage.full, check.tokens) + _buffer(stage.windows, window.value)
            for stage in case.stages
            if stage.full and stage.windows and window
        )
    if check.name == "window_tokens":
        return _window_bands(check, case, facts)
    if check.name == "captured_size":
        return tuple(
            (_buffer(group, check.tokens), _buffer(group, check.tokens) + 2 * group.layers * _MAPPED_BYTES)
            for group in case.pools()
            if group.held_tokens_max is None
        )
    return _state_bands(check, case, facts)


def _buffer(group: CacheGroup, tokens: float) -> float:
    """Return the bytes of a pool: of its tokens, and of a page that padding writes to."""
    return (tokens + group.units_per_block) * group.bytes_per_block / group.units_per_block


def _printed(group: CacheGroup, tokens: float, case: _Case) -> float:
    """Return the bytes of a pool that were printed as its size."""
    left_out = sum(part.unit_bytes for part in group.parts if part.name in case.left_out)
    return _buffer(group, tokens) - (tokens + group.units_per_block) * left_out


def _window_bands(check: Check, case: _Case, facts: LogFacts) -> Bands:
    found: list[float] = []
    for stage in case.stages:
        if stage.windows is None:
            continue
        page, cap = stage.windows.units_per_block, stage.rules.window_tokens
        held = int(check.tokens * stage.rules.window_ratio) // page * page
        found += [held] if cap is None else [min(cap, check.tokens)]
    told = "arguments" in facts.stated or facts.setup.option("swa-full-tokens-ratio")
    return exact(found) if told or any(check.figure.holds(held) for held in found) else None


def _state_bands(check: Check, case: _Case, facts: LogFacts) -> Bands:
    kept = [stage.states.parts for stage in case.stages if stage.states is not None]
    if check.why and check.name != "drafted_state_size":
        return None
    if check.name == "conv_size":
        return exact((check.tokens + 1) * _part_bytes(parts, "convolution inputs") for parts in kept)
    if check.name == "state_size":
        return exact((check.tokens + 1) * _part_bytes(parts, "recurrent state") for parts in kept)
    requests, drafted = facts.last("requests"), facts.setup.option(DRAFTED)
    if requests is None or drafted is None:
        return None
    count = (requests.value + 1) * int(drafted)
    sizes = [count * _part_bytes(parts, "recurrent state") for parts in kept]
    return exact(sizes) if any(check.figure.holds(size) for size in sizes) else None


def _part_bytes(parts: Sequence[CachePart], name: str) -> float:
    return sum(part.unit_bytes for part in parts if part.name == name)


def _cases(facts: LogFacts, model: ModelSpec) -> tuple[list[tuple[tuple[str, ...], _Case]], str]:
    """Return the settings to try, and why SGLang's pools of the model are not known where there are none."""
    options = facts.setup.option(REQUESTS)
    base = replace(
        facts.setup, context_tokens=max(1, facts.setup.context_tokens or model.context_tokens),
        version=None if facts.setup.version is None else max(facts.setup.version, OLDEST),
        sequences=None if options is None else int(options),
    )  # fmt: skip
    choices = [
        _formats(facts, model), _ranks(facts), _pages(facts, model), _windows(facts, model), _states(facts, model),
        _indexers(facts, model),
    ]  # fmt: skip
    found, refused = [], ""
    for departures, form, setup in settings(base, choices, _DEPARTURES_MAX):
        try:
            found.append((departures, _case(model, form, setup)))
        except KvplanError as error:
            refused = refused or error.message
    return found, refused


def _case(model: ModelSpec, form: str, setup: Setup) -> _Case:
    drafting: tuple[TokenPools, ...] = ()
    if model.draft_layers:
        alone = replace(model, layers=model.draft_layers, draft_layers=())
        drafting = allocate_stages(alone, form, replace(setup, pipeline_parallel=1))
    left_out = (_INDEXER,) if _UNPRINTED in setup.options else ()
    stages = allocate_stages(model, form, setup)
    return _Case(stages=stages, key_share=key_share(model, form), drafting=drafting, left_out=left_out)


def _formats(facts: LogFacts, model: ModelSpec) -> list[Choice]:
    unsaid = {"fp8_e4m3": "the cache is in 8 bits"}
    return format_choices(facts, default_format(model), run_type(model), unsaid)


def _ranks(facts: LogFacts) -> list[Choice]:
    if "tensor_parallel" in facts.stated:
        return [("", {})]
    return [("", {}), *((f"{n} tensor parallel ranks", {"tensor_parallel": n}) for n in (2, 4, 8, 16))]


def _pages(facts: LogFacts, model: ModelSpec) -> list[Choice]:
    if "block_tokens" in facts.stated:
        return [("", {})]
    sizes = (1,) if any(layer.sides for layer in model.layers) else (64, 16, 32, 128, 256)
    return [("", {}), *((f"pages of {n} tokens", {"block_tokens": n}) for n in sizes)]


def _windows(facts: LogFacts, model: ModelSpec) -> list[Choice]:
    if "full_tokens" in facts.figures or not any(layer.window_tokens for layer in model.layers):
        return [("", {})]
    return [("", {}), ("windows are kept whole", {"options": {"disable-hybrid-swa-memory"}})]


def _states(facts: LogFacts, model: ModelSpec) -> list[Choice]:
    if facts.setup.option("mamba-ssm-dtype") or not any(layer.states for layer in model.layers):
        return [("", {})]
    return [
        ("", {}), ("states are in 16 bits", {"options": {"mamba-ssm-dtype=bfloat16"}}),
        ("states are in 32 bits", {"options": {"mamba-ssm-dtype=float32"}}),
    ]  # fmt: skip


def _indexers(facts: LogFacts, model: ModelSpec) -> list[Choice]:
    """Return how sparse MLA may be laid out, where the log does not say."""
    if not any(layer.sides for layer in model.layers):
        return [("", {})]
    found: list[Choice] = [("", {})]
    if not facts.setup.version and any(not layer.sides for layer in model.layers):
        older = "layers without an indexer have its buffer: SGLang before 0.5.18"
        found.append((older, {"version": (0, 5, 17)}))
    if not facts.setup.option("dsa-decode-backend"):
        raw = "latent vectors have no scales: TensorRT-LLM's kernels read them"
        found.append((raw, {"options": {"dsa-decode-backend=trtllm"}}))
    if not facts.setup.version:
        found.append(
            ("an indexer's keys are not in the printed size (sgl-project/sglang#11309)", {"options": {_UNPRINTED}})
        )
    return found


def _finding(check: Check, bands: Bands, departures: str) -> Finding:
    if bands is None:
        reason = check.why or "the log does not say what share of the pool windows have (--swa-full-tokens-ratio)"
        return unchecked(check, reason)
    finding = judge(check, bands, departures)
    if finding.verdict is Verdict.UNEXPLAINED or not check.figure.text.endswith("GB"):
        return finding
    if not _reads_otherwise(check.figure):
        return finding
    told = f"GB are GiB: it is {check.figure.value / 1e9:.2f} GB"
    return replace(finding, verdict=Verdict.MISLEADS, reason="; ".join(filter(None, (finding.reason, told))))


def _reads_otherwise(figure: Printed) -> bool:
    """Whether the figure would be another one in GB of 10^9 bytes."""
    return not figure.holds(figure.value / 1e9 * GIB)


def _reserved(facts: LogFacts) -> Iterator[Finding]:
    """Yield what was said of addresses that no memory is behind."""
    figure = facts.last("reserved_tokens")
    if figure is not None:
        yield Finding(
            line=figure.line, what="tokens reserved", printed=figure.text, verdict=Verdict.MISLEADS,
            reason="these are addresses, not memory: what is allocated is said in another line",
        )  # fmt: skip


def _agreement(facts: LogFacts, model: ModelSpec | None) -> Iterator[Finding]:
    """Yield whether `max_total_num_tokens` is the pool's, and what it does not say."""
    total = facts.last("tokens")
    pools = facts.figures.get("captured_tokens") or facts.figures.get("full_tokens")
    pools = pools or facts.figures.get("pool_tokens", ())
    if total is None:
        return
    if not pools:
        reason = "the log does not print the size of the pool"
        yield unchecked(Check(what="max_total_num_tokens", name="tokens", figure=total), reason)
        return
    own = [figure.value for figure in pools]
    verdict, reasons = Verdict.AGREES, ["tokens of the pool"]
    if total.value not in own:
        verdict, reasons = Verdict.UNEXPLAINED, ["it is of no pool that was printed"]
        lone = model is not None and not any(layer.window_tokens for layer in model.layers)
        if total.value > max(own) and (not lone or facts.setup.pipeline_parallel > 1):
            verdict, reasons = Verdict.NOT_CHECKED, ["the log may lack the line of the pool that it is of"]
    window = facts.last("window_tokens")
    if verdict is Verdict.AGREES and window is not None and _has_windows(facts):
        verdict = Verdict.MISLEADS
        reasons = [f"it is of the layers that see everything: those of windows have {window.text}"]
    replicas = facts.setup.option("dp-size")
    if verdict is Verdict.AGREES and "enable-dp-attention" in facts.setup.options and replicas not in (None, "1"):
        verdict, reasons = Verdict.MISLEADS, [f"it is of one of {replicas} replicas of attention: each has as many"]
    yield Finding(
        line=total.line, what="max_total_num_tokens", printed=total.text, recomputed=f"{own[-1]:,.0f}",
        verdict=verdict, reason="; ".join(reasons),
    )  # fmt: skip


def _context(facts: LogFacts) -> Iterator[Finding]:
    """Yield that the pool is shorter than the context, of which SGLang does not warn."""
    context, total = facts.last("context"), facts.last("tokens")
    if context is not None and total is not None and total.value < context.value:
        yield Finding(
            line=context.line, what="context_len", printed=context.text, recomputed=f"{total.value:,.0f}",
            verdict=Verdict.MISLEADS, reason="the pool holds no sequence of that length, and SGLang does not say so",
        )  # fmt: skip


def _memory(facts: LogFacts, case: _Case, departures: str) -> Iterator[Finding]:
    """Yield whether the memory after loading makes the pool, where the log says enough to tell."""
    run, total, share = facts.measured, facts.last("tokens"), facts.setup.option(STATIC)
    before, after = _least(facts, "before_load"), _least(facts, "after_load")
    captured = "captured_tokens" in facts.figures or "reserved_tokens" in facts.figures
    if not (run.usable and total and share and before and after) or captured:
        return
    kept = 1 - float(share)
    low, high = after.low - before.high * kept, after.high - before.low * kept
    sizes = [[stage.sizes(max(0, int(pool))).tokens for stage in case.stages] for pool in (low, high)]
    least, most = min(sizes[0]), min(sizes[1])
    shown = f"{least:,} to {most:,}"
    reason = f"what was free after loading, less {kept:.3f} of what was before it"
    verdict = Verdict.AGREES
    if departures:
        verdict, reason = Verdict.EXPLAINED, f"{departures}; {reason}"
    if not total.meets(least, most):
        verdict = Verdict.NOT_CHECKED
        reason += ": the log does not show all that is taken from it (a draft model, an encoder, graphs)"
    yield Finding(
        line=total.line, what="tokens that memory makes", printed=total.text, recomputed=shown, verdict=verdict,
        reason=reason, needs_model=True,
    )  # fmt: skip


def _least(facts: LogFacts, name: str) -> Printed | None:
    return min(first_of_ranks(facts.figures.get(name, ())), key=lambda figure: figure.value, default=None)


def _requests(facts: LogFacts, case: _Case) -> Iterator[Finding]:
    """Yield how many slots of states a request is counted for, where they bound the requests."""
    slots, requests = facts.last("slots"), facts.last("requests")
    if slots is None or requests is None or not requests.value:
        return
    counts = dict.fromkeys([state_slots(case.stages[0].setup), 5, 4, 3, 1])
    each = next((count for count in counts if slots.value // count == requests.value), None)
    if each is not None:
        yield Finding(
            line=requests.line, what="requests at once", printed=requests.text,
            recomputed=f"{slots.value // each:,.0f}", verdict=Verdict.AGREES,
            reason=f"{slots.value:,.0f} slots of states, {each} for a request",
        )  # fmt: skip
