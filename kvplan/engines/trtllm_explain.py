"""TensorRT-LLM's printed figures, each computed anew."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from kvplan.core.specs import ModelSpec
from kvplan.engines.checks import GIB, Bands, Check, Choice, best_case, format_choices, judge, settings, unchecked
from kvplan.engines.engine import run_type
from kvplan.engines.logs import Finding, LogFacts, Printed, Verdict
from kvplan.engines.trtllm import ATTENTION_DP, STATE_TYPE, WINDOWS, WindowPools, allocate, default_format
from kvplan.engines.trtllm_log import FRACTION, fraction
from kvplan.errors import KvplanError
from kvplan_kernels.layout import ceil_div

_DEPARTURES_MAX: Final = 2
"""More of them would explain anything."""
_NO_MODEL: Final = "the model's geometry is not known: name it with --model"
_NO_BLOCKS: Final = "the log does not say how many blocks each window has"
_OVER: Final = "the memory for the cache over the bytes of a token"
_PLACEHOLDER: Final = (
    "a placeholder of AutoDeploy: its cache is allocated elsewhere, and its size is in no line that is known"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Case:
    """What one setting allocates.

    Attributes:
        drafting: With the layers that draft; the same where there are none.
    """

    pools: WindowPools
    drafting: WindowPools

    def token_bytes(self, pools: WindowPools) -> float:
        """Return the bytes of a token in all windows."""
        return sum(group.bytes_per_block / group.units_per_block for group in pools.windows)


def explain(facts: LogFacts, model: ModelSpec | None) -> tuple[Finding, ...]:
    """Return a finding for each figure of the cache in a log."""
    if "placeholder_pages" in facts.figures:
        return tuple(_placeholders(facts))
    found = [*_profiling(facts), *_budget(facts), *_blocks(facts), *_context(facts)]
    checks = _checks(facts)
    if model is None:
        return (*found, *(unchecked(check, _NO_MODEL) for check in checks))
    cases, refused = _cases(facts, model)
    if not cases:
        return (*found, *(unchecked(check, refused) for check in checks))
    best, bands, departures = best_case(cases, checks, lambda check, case: _expected(check, case, facts))
    found += [_finding(check, band, departures) for check, band in zip(checks, bands, strict=True)]
    return (*found, *_tokens(facts, best, departures))


def _placeholders(facts: LogFacts) -> Iterator[Finding]:
    """Yield that a pool of no bytes is none, whatever tokens were printed for it."""
    for name, what in (("placeholder_pages", "pages"), ("allocated", "allocated"), ("tokens", "tokens")):
        figure = facts.last(name)
        if figure is not None:
            yield Finding(
                line=figure.line, what=what, printed=figure.text, verdict=Verdict.NOT_CHECKED, reason=_PLACEHOLDER
            )


def _pools(facts: LogFacts) -> list[tuple[Printed, Printed]]:
    """Return the bytes and tokens of each pool that was allocated, each once however many ranks printed it."""
    tokens = {(figure.line, figure.rank): figure for figure in facts.figures.get("tokens", ())}
    found: dict[tuple[str, str], tuple[Printed, Printed]] = {}
    for size in facts.figures.get("allocated", ()):
        count = tokens.get((size.line, size.rank))
        if count is not None:
            found.setdefault((size.text, count.text), (size, count))
    return list(found.values())


def _serving(facts: LogFacts) -> tuple[Printed, Printed] | None:
    """Return the pool that serves: the last; where the last two have as many tokens, the second is what drafts."""
    pools = _pools(facts)
    if not pools:
        return None
    last = pools[-1][1].value
    return next(pool for pool in pools if pool[1].value == last)


def _checks(facts: LogFacts) -> list[Check]:
    """Return the figures that the geometry makes."""
    found: list[Check] = []
    serving = _serving(facts)
    for size, count in _pools(facts):
        drafting = serving is not None and count.value == serving[1].value and size is not serving[0]
        check = Check(what="allocated", name="allocated", figure=size, tokens=count.value)
        if drafting:
            why = "it is of a draft model, whose geometry is not known"
            check = replace(check, what="allocated for what drafts", name="drafted", why=why)
        found.append(check)
    token = facts.last("token_bytes")
    if token is not None:
        found.append(Check(what="bytes of a token", name="token_bytes", figure=token))
    whole, used = facts.last("bytes"), facts.last("used_tokens")
    if whole is not None and used is not None:
        found.append(Check(what="bytes of the cache", name="bytes", figure=whole, tokens=used.value))
    blocks = facts.last("blocks")
    if blocks is not None and serving is None and "free" in facts.figures:
        found.append(Check(what="blocks", name="blocks", figure=blocks))
    slots = facts.last("slots")
    for name, what in (("conv_size", "convolution inputs"), ("state_size", "recurrent states")):
        figure = facts.last(name)
        if figure is not None and slots is not None:
            found.append(Check(what=what, name=name, figure=figure, tokens=slots.value))
    return found


def _expected(check: Check, case: _Case, facts: LogFacts) -> Bands:
    """Return what the figure may be; None where the log lacks what it follows from."""
    own, both = case.token_bytes(case.pools), case.token_bytes(case.drafting)
    if check.name == "token_bytes":
        return ((int(own), own), (int(both), both))
    if check.name == "drafted":
        size = check.tokens * (both - own)
        return ((size, size),) if check.figure.holds(size) else None
    if check.name == "bytes":
        page = case.pools.windows[0].units_per_block
        return ((check.tokens * own, ceil_div(int(check.tokens), page) * page * own),)
    if check.name == "blocks":
        return _block_bands(case, facts)
    if check.name in ("conv_size", "state_size"):
        return _state_bands(check, case)
    if len(case.pools.windows) > 1:
        return _window_bands(check, case, facts)
    return ((check.tokens * own, check.tokens * own), (check.tokens * both, check.tokens * both))


def _block_bands(case: _Case, facts: LogFacts) -> Bands:
    """Return the blocks that the free memory makes; None where each window has its own."""
    free = facts.last("free")
    if free is None or len(case.pools.windows) > 1:
        return None
    page, size = case.pools.windows[0].units_per_block, case.token_bytes(case.pools)
    share = fraction(facts.setup)
    return ((free.low * share // size // page, float(ceil_div(int(free.high * share // size), page))),)


def _window_bands(check: Check, case: _Case, facts: LogFacts) -> Bands:
    """Return the bytes of pools of several windows: tokens are printed of all together."""
    blocks = {figure.line: figure.value for figure in facts.figures.get("window_blocks", ())}
    held: dict[float, float] = {}
    for window in facts.figures.get("window", ()):
        held.pop(window.value, None)
        held[window.value] = blocks.get(window.line, 0)
    groups = sorted(case.pools.windows, key=lambda group: group.held_tokens_max or float("inf"))
    if len(held) < len(groups):
        return None
    latest = sorted(list(held.items())[-len(groups) :])
    size = sum(count * group.bytes_per_block for (_, count), group in zip(latest, groups, strict=True))
    return ((size, size),)


def _state_bands(check: Check, case: _Case) -> Bands:
    """Return the bytes of states, of which padding may have one more."""
    if case.pools.states is None:
        return ()
    name = "convolution inputs" if check.name == "conv_size" else "recurrent state"
    each = sum(part.unit_bytes for part in case.pools.states.parts if part.name == name)
    return ((check.tokens * each, check.tokens * each), ((check.tokens + 1) * each, (check.tokens + 1) * each))


def _cases(facts: LogFacts, model: ModelSpec) -> tuple[list[tuple[tuple[str, ...], _Case]], str]:
    """Return the settings to try, and why the pools of the model are not known where there are none."""
    context = max(1, facts.setup.context_tokens or model.context_tokens)
    base = replace(facts.setup, context_tokens=context)
    choices = [_formats(facts, model), _ranks(facts), _pages(facts), _windows(facts, model), _states(facts)]
    found, refused = [], ""
    for departures, form, setup in settings(base, choices, _DEPARTURES_MAX):
        try:
            pools = allocate(model, form, setup)
            drafting = allocate(model, form, replace(setup, draft_tokens=1)) if model.draft_layers else pools
        except KvplanError as error:
            refused = refused or error.message
            continue
        found.append((departures, _Case(pools=pools, drafting=drafting)))
    return found, refused


def _formats(facts: LogFacts, model: ModelSpec) -> list[Choice]:
    unsaid = {"fp8": "the cache is in 8 bits", "nvfp4": "the cache is in 4 bits"}
    return format_choices(facts, default_format(model), run_type(model), unsaid)


def _ranks(facts: LogFacts) -> list[Choice]:
    if "tensor_parallel" in facts.stated:
        return [("", {})]
    found: list[Choice] = [("", {})]
    if ATTENTION_DP not in facts.setup.options:
        found += [(f"{n} tensor parallel ranks", {"tensor_parallel": n}) for n in (2, 4, 8, 16)]
    return found


def _pages(facts: LogFacts) -> list[Choice]:
    if "block_tokens" in facts.stated or not facts.figures.keys() & {"blocks", "bytes"}:
        return [("", {})]
    return [("", {}), *((f"blocks of {n} tokens", {"block_tokens": n}) for n in (64, 128, 16))]


def _windows(facts: LogFacts, model: ModelSpec) -> list[Choice]:
    if WINDOWS in facts.setup.options or not any(layer.window_tokens for layer in model.layers):
        return [("", {})]
    return [("", {}), ("windows are kept as windows (max_attention_window)", {"options": {WINDOWS}})]


def _states(facts: LogFacts) -> list[Choice]:
    if "slots" not in facts.figures or facts.setup.option(STATE_TYPE):
        return [("", {})]
    words = {"float32": "states are in 32 bits", "bfloat16": "states are in 16 bits"}
    return [("", {}), *((text, {"options": {f"{STATE_TYPE}={name}"}}) for name, text in words.items())]


def _finding(check: Check, bands: Bands, departures: str) -> Finding:
    return judge(check, bands, departures) if bands is not None else unchecked(check, check.why or _NO_BLOCKS)


def _profiling(facts: LogFacts) -> Iterator[Finding]:
    """Yield which pools serve nothing: those of a pass that measures what is left for the one that does."""
    serving = _serving(facts)
    for _, count in _pools(facts):
        if serving is not None and count.value != serving[1].value:
            yield Finding(
                line=count.line, what="tokens", printed=count.text, verdict=Verdict.MISLEADS,
                recomputed=f"{serving[1].value:,.0f}",
                reason=f"of the pass that measures memory: the pool that serves is that of line {serving[1].line}",
            )  # fmt: skip
    reduced, longest = facts.figures.get("reduced", ()), facts.last("longest")
    for figure in reduced:
        if longest is not None and figure.value != longest.value and figure.line < longest.line:
            yield Finding(
                line=figure.line, what="window reduced to", printed=figure.text, verdict=Verdict.MISLEADS,
                recomputed=f"{longest.value:,.0f}", reason="of the pass that measures memory",
            )  # fmt: skip


def _budget(facts: LogFacts) -> Iterator[Finding]:
    """Yield whether the device less the peak makes the memory of the pool, which needs no model."""
    budget, peak, device = facts.last("budget"), facts.last("peak"), facts.last("device")
    if budget is None or peak is None or device is None:
        return
    profiled, share = facts.last("profiled"), fraction(facts.setup)
    least, most = (0.0, 0.0) if profiled is None else (profiled.low, profiled.high)
    low, high = (device.low - peak.high + least) * share, (device.high - peak.low + most) * share
    reason = f"{share:.4g} of the device less the peak, with what the pass that measures had of cache"
    verdict = Verdict.AGREES if budget.meets(low, high) else Verdict.UNEXPLAINED
    if verdict is Verdict.UNEXPLAINED and facts.setup.option(FRACTION) is None:
        verdict = Verdict.NOT_CHECKED
    yield Finding(
        line=budget.line, what="memory for the cache", printed=budget.text,
        recomputed=f"{(low + high) / 2 / GIB:.2f} GiB", verdict=verdict, reason=reason,
    )  # fmt: skip


def _blocks(facts: LogFacts) -> Iterator[Finding]:
    """Yield whether blocks of so many tokens are the tokens that were printed, which needs no model."""
    serving, blocks, page = _serving(facts), facts.last("blocks"), facts.last("block_tokens")
    if serving is None or blocks is None or page is None or not page.value or blocks.line > serving[1].line:
        return
    product = blocks.value * page.value
    verdict = Verdict.AGREES if serving[1].holds(product) else Verdict.UNEXPLAINED
    yield Finding(
        line=blocks.line, what="blocks", printed=blocks.text, recomputed=f"{serving[1].value / page.value:,.0f}",
        verdict=verdict, reason=f"{page.value:,.0f} tokens each",
    )  # fmt: skip


def _context(facts: LogFacts) -> Iterator[Finding]:
    """Yield that the pool cut the longest sequence, which no line says in so many words."""
    longest, asked = facts.last("longest") or facts.last("cut"), facts.setup.option("max-seq-len")
    if longest is None or (asked is None and "cut" not in facts.figures):
        return
    wish = "more" if asked is None else f"{int(asked):,} tokens"
    yield Finding(
        line=longest.line, what="longest sequence", printed=longest.text,
        recomputed="" if asked is None else f"{int(asked):,}", verdict=Verdict.MISLEADS,
        reason=f"{wish} were asked for and the pool holds fewer: the longest sequence became {longest.value:,.0f}, "
        "without an error",
    )  # fmt: skip


def _tokens(facts: LogFacts, case: _Case, departures: str) -> Iterator[Finding]:
    """Yield whether the memory makes the tokens of the pool that serves."""
    serving, free = _serving(facts), facts.last("free")
    if serving is None or len(case.pools.windows) != 1 or case.pools.states is not None:
        return
    budget = facts.last("budget")
    if budget is None and free is not None:
        share = fraction(facts.setup)
        budget = replace(free, low=free.low * share, high=free.high * share)
    if budget is None or budget.line > serving[1].line:
        return
    page = case.pools.windows[0].units_per_block
    sizes = [case.token_bytes(case.pools), case.token_bytes(case.drafting)]
    bands = [(budget.low // size // page * page, ceil_div(int(budget.high // size), page) * page) for size in sizes]
    low, high = next((band for band in bands if serving[1].meets(*band)), bands[0])
    agrees = Verdict.EXPLAINED if departures else Verdict.AGREES
    limit = facts.last("max_tokens")
    if limit is not None and limit.meets(budget.low // sizes[0], budget.high // sizes[0]):
        yield Finding(
            line=limit.line, what="max_tokens", printed=limit.text, verdict=agrees,
            recomputed=f"{budget.low // sizes[0]:,.0f} to {budget.high // sizes[0]:,.0f}",
            reason="; ".join(filter(None, (departures, f"{_OVER}, before whole blocks"))), needs_model=True,
        )  # fmt: skip
    verdict, reason = agrees, "; ".join(filter(None, (departures, f"{_OVER}, in whole blocks")))
    if not serving[1].meets(low, high):
        verdict = Verdict.NOT_CHECKED
        reason += "; the log does not show what else bounds it (max_tokens, another rank's memory)"
    yield Finding(
        line=serving[1].line, what="tokens", printed=serving[1].text, recomputed=f"{low:,.0f} to {high:,.0f}",
        verdict=verdict, reason=reason, needs_model=True,
    )  # fmt: skip
