"""A plan in words: one sentence of verdict, the next bottleneck, and what else to know."""

from collections.abc import Sequence
from math import inf
from typing import Final

from kvplan.core.plans import Gap, Option, Outcome, Quantity, Status, Verdict
from kvplan.core.specs import LayerKind, ModelSpec
from kvplan.core.verdicts import quality_text
from kvplan.core.workloads import Workload
from kvplan.units import format_bytes
from kvplan_kernels.tier_formats import TieredFormat

LONGER: Final = 2.0
"""Sequences longer than the longest scored text by this factor are worth a sentence."""
REFERENCE: Final = "reference"
NOTABLE_GAIN: Final = 1.05
"""A step this much faster with fewer bits is worth having."""
NOTABLE_SLOWDOWN: Final = 1.02
"""A step this much slower than with 16 bits is worth a sentence."""


def sentence(
    outcome: Outcome,
    options: Sequence[Option],
    pick: Option | None,
    fitting: Sequence[Option],
    blockers: Sequence[Option],
    workload: Workload,
) -> str:
    """Return the verdict in one sentence."""
    baseline = next((option for option in options if not option.quantized), None)
    if outcome is Outcome.UNDECIDED:
        return _undecided(fitting, blockers)
    if pick is None:
        return _nothing(options, workload)
    if outcome is Outcome.KEEP_16_BIT:
        return f"Keep 16 bits: {_cache_room(pick, workload)}, and {_others_met(workload)}."
    farther = any(_code_bits(option) < _code_bits(pick) for option in options if option.quantized)
    unknown = "; what that costs in quality was not measured" if pick.quality is None else ""
    return f"{_why_not(baseline, workload)}: quantize {bits_text(pick)}{', not further' if farther else ''}{unknown}."


def _code_bits(option: Option) -> float:
    return sum(option.setting.bits)


def bits_text(option: Option) -> str:
    """Return what a setting does to K and V: 'to 8 bits', 'K to 8 bits and V to 4', 'to 5.5 bits on average'."""
    key, value = option.setting.bits
    form = option.setting.measured_as
    mixed = form is not None and (len(form.parts) > 1 or isinstance(form, TieredFormat))
    mean = " on average" if mixed else ""
    return f"to {key:.4g} bits{mean}" if key == value else f"K to {key:.4g} bits and V to {value:.4g}{mean}"


def _cache_room(option: Option, workload: Workload) -> str:
    sessions, cache = workload.target.concurrency, format_bytes(option.memory.cache_bytes)
    free = format_bytes(max(0, option.memory.free_for_cache_bytes))
    return f"{sessions} session{'s need' if sessions != 1 else ' needs'} {cache} of 16-bit KV cache and {free} are free"


def _others_met(workload: Workload) -> str:
    timed = bool(workload.target.tpot_ms or workload.target.ttft_ms)
    return "every target is met" if timed else "no time is asked for"


def _why_not(option: Option | None, workload: Workload) -> str:
    """Return what is against 16 bits, as the start of a sentence."""
    if option is None:
        return "No 16-bit cache of this model is among the settings"
    reasons = []
    for verdict in option.verdicts:
        if verdict.status is Status.FITS:
            continue
        if verdict.quantity is Quantity.MEMORY:
            reasons.append(_cache_room(option, workload))
        else:
            reasons.append(f"{verdict_name(verdict)} is {verdict.reason} with 16 bits")
    text = ", and ".join(reasons) or "16 bits is not wanted"
    return text[0].upper() + text[1:]


def verdict_name(verdict: Verdict) -> str:
    """Return the name of a target: 'TPOT p95', 'mean KL divergence'."""
    if verdict.quantity in (Quantity.TPOT, Quantity.TTFT):
        return f"{verdict.quantity.upper()} p{verdict.percent}"
    return str(verdict.quantity)


def _undecided(fitting: Sequence[Option], blockers: Sequence[Option]) -> str:
    first = blockers[0]
    verdict = next(v for v in first.verdicts if v.status is Status.UNDECIDED)
    what = f"{verdict_name(verdict)}: {verdict.reason}"
    if fitting:
        milder = f"{first.label}, less aggressive, might too ({what})"
        return f"Undecided: {fitting[0].label} meets every target, but {milder}."
    return f"Undecided: {first.label} fits into memory, but it is not known to meet every target ({what})."


def _nothing(options: Sequence[Option], workload: Workload) -> str:
    closest = min(options, key=_distance)
    failing = [v for v in closest.verdicts if v.status is Status.OVER]
    against = "; ".join(f"{verdict_name(v)} {v.reason}" for v in failing)
    count = workload.target.concurrency
    return f"Nothing fits {count} session{'s' * (count != 1)}: even with {closest.label}, {against}."


def _distance(option: Option) -> tuple[int, float]:
    """Return how far a setting is from meeting its targets: how many it misses, and the widest miss."""
    over = [v for v in option.verdicts if v.status is Status.OVER]
    return len(over), max(((v.value or 0.0) / v.limit if v.limit else inf for v in over), default=0.0)


def bottleneck(pick: Option, options: Sequence[Option]) -> str:
    """Return what takes most of a step, what fewer bits were seen to gain, and how many sessions memory holds."""
    shares = pick.shares
    room = f"Memory holds {pick.sessions} sessions."
    if shares is None:
        return f"Next bottleneck: not known, no step was measured at this load. {room}"
    parts = {
        "reading the weights and the rest of the model": shares.rest,
        "attention over the cache": shares.attention,
        "quantizing new tokens": shares.append,
    }
    name, share = max(parts.items(), key=lambda item: item[1])
    return f"Next bottleneck: {name} ({100 * share:.0f}% of a step).{_further(pick, options)} {room}"


def _further(pick: Option, options: Sequence[Option]) -> str:
    """Return what the fastest of the more aggressive settings that are not over a target makes of a median step."""
    steps = {
        option.label: option.shares.slowdown
        for option in options
        if option.effective_bits < pick.effective_bits
        and option.status is not Status.OVER
        and option.shares
        and option.shares.slowdown
    }
    if not steps or not pick.shares or not pick.shares.slowdown:
        return ""
    fastest = min(steps, key=lambda label: steps[label])
    ratio = steps[fastest] / pick.shares.slowdown
    if ratio > 1 / NOTABLE_GAIN:
        return " Fewer bits would add sessions, not speed."
    return f" Fewer bits would make a median step up to {100 * (1 - ratio):.0f}% shorter ({fastest})."


def remarks(
    options: Sequence[Option], pick: Option | None, workload: Workload, model: ModelSpec, kernels: frozenset[str]
) -> tuple[str, ...]:
    """Return further things to know, most pressing first; *kernels* are those whose times are known."""
    found = []
    if any(name.startswith(REFERENCE) for name in kernels):
        found.append("Times are of the reference operations, which define the kernels and are far slower.")
    if pick is not None:
        found += _pick_remarks(options, pick, workload)
        if pick.setting.needs:
            found.append(f"Not checked, since the device is not known: {pick.format} needs {pick.setting.needs}.")
        if pick.setting.note and (pick.quality or pick.tpot.value_s is not None):
            found.append(f"Stand-in: {pick.setting.note}.")
    if workload.target.ttft_ms:
        found.append("TTFT is prefill and packing of one prompt, timed once a repeat; queueing is not in it.")
    if any(o.setting.own for o in options) and any(layer.kind is LayerKind.SLIDING for layer in model.layers):
        found.append("Sliding-window layers keep every token in kvplan's runtime, and are counted so.")
    return tuple(found)


def _pick_remarks(options: Sequence[Option], pick: Option, workload: Workload) -> list[str]:
    found = []
    for option in options[: options.index(pick)]:
        spread = [v for v in option.verdicts if v.gap is Gap.SPREAD]
        if option.status is Status.UNDECIDED and spread:
            found.append(f"{option.label} may do as well: {verdict_name(spread[0])} {spread[0].reason}.")
    if pick.shares and pick.quantized and pick.shares.slowdown and pick.shares.slowdown >= NOTABLE_SLOWDOWN:
        slower = 100 * (pick.shares.slowdown - 1)
        found.append(f"{pick.label} makes a step {slower:.0f}% slower than 16 bits: it buys sessions, not speed.")
    if pick.quantized and not workload.quality.constrains:
        found.append(f"The workload sets no quality budget{_known_quality(pick)}.")
    longest = max(bucket.total_tokens for bucket in workload.buckets)
    if pick.quality and pick.quality.trials and longest > LONGER * pick.quality.longest_tokens:
        scored = f"Quality was scored on {pick.quality.longest_tokens} tokens at most"
        found.append(f"{scored}; the workload's sequences reach {longest}, where it may cost more.")
    if pick.quality and pick.quality.quantized_positions < pick.quality.positions / 2:
        share = 100 * pick.quality.quantized_positions / pick.quality.positions
        found.append(f"Only {share:.0f}% of the scored positions attended to quantized tokens: score longer text.")
    return found


def _known_quality(pick: Option) -> str:
    if pick.quality is None:
        return ", and quality was not measured"
    increase = quality_text(Quantity.PERPLEXITY, pick.quality.perplexity_increase.estimate)
    return f"; perplexity changes by {increase} with {pick.label}"
