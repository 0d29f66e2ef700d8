"""The screen of `recommend`."""

from typing import Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvplan.core.latency import TimeEstimate
from kvplan.core.plans import Option, Outcome, Plan, Quantity, Status, Verdict
from kvplan.core.sentences import verdict_name
from kvplan.core.specs import Evidence
from kvplan.core.verdicts import limit_text, quality_bound, quality_text
from kvplan.core.workloads import Workload
from kvplan.engines import OWN, find_engine
from kvplan.engines.launching import launch_text
from kvplan.report.table import plain_table, say
from kvplan.units import format_bytes, format_seconds

_QUALITY: Final = (Quantity.PERPLEXITY, Quantity.KL, Quantity.FLIPS, Quantity.RETRIEVAL)
_HEADS: Final = {
    Quantity.PERPLEXITY: "perplexity", Quantity.KL: "mean KL", Quantity.FLIPS: "flips", Quantity.RETRIEVAL: "lost keys",
}  # fmt: skip


def print_plan(console: Console, plan: Plan, workload: Workload, *, path: str, explain: bool = False) -> None:
    """Print the first screen of a recommendation, and what it rests on where *explain*; *path* is the workload's."""
    say(console, plan.sentence, style="bold")
    console.print(_options_table(plan))
    say(console, _evidence_line(plan))
    for remedy in plan.remedies:
        say(console, f"Would fit: {remedy.text}.")
    if plan.outcome is Outcome.NOTHING_FITS and not plan.remedies:
        say(console, "Neither fewer sessions, nor shorter context, nor more memory would meet the target.")
    if plan.pick is not None:
        console.print()
        say(console, launch_text(plan, workload).command, wrap=False)
        say(console, plan.bottleneck)
    if plan.missing:
        _print_missing(console, plan, f"{workload.model} -w {path}")
    for setting, reason in plan.refused:
        say(console, f"{'No kernel' if plan.engine == OWN else 'Not to be had'}: {setting}: {reason}")
    for remark in plan.remarks:
        say(console, remark)
    if plan.pick is not None and (text := launch_text(plan, workload)).file_name:
        say(console, f"The same as {text.file_name}:")
        say(console, text.file_text, wrap=False, lines=True)
    if explain:
        _print_explanation(console, plan)


def _shown(plan: Plan) -> list[Option]:
    """Return one option a format: the pick, else the one that does best."""
    rank = {Status.FITS: 0, Status.UNDECIDED: 1, Status.OVER: 2}
    best: dict[str, Option] = {}
    for option in sorted(plan.options, key=lambda o: (o is not plan.pick, rank[o.status])):
        best.setdefault(option.format, option)
    return [option for option in plan.options if best[option.format] is option]


def _options_table(plan: Plan) -> Table:
    blocks = len({option.block_tokens for option in _shown(plan)}) > 1
    qualities = _quality_columns(plan)[: 1 if blocks else 2]
    heads = [("  format", False), *([("block", True)] if blocks else []), ("sessions", True)]
    heads += [(f"KV for {plan.concurrency}", True), (f"TPOT p{plan.percent}", True)]
    table = plain_table([*heads, *((_quality_head(plan, quantity), True) for quantity in qualities)])
    for option in _shown(plan):
        picked = option is plan.pick
        table.add_row(
            escape(f"{'>' if picked else ' '} {option.format}"),
            *([str(option.block_tokens)] if blocks else []),
            str(option.sessions),
            format_bytes(option.memory.cache_bytes),
            _time_text(option.tpot),
            *(_quality_cell(option, quantity) for quantity in qualities),
            style="bold" if picked else "",
        )
    return table


def _quality_columns(plan: Plan) -> tuple[Quantity, ...]:
    """Return what is limited; what is most telling where nothing is."""
    limited = tuple(q for q in _QUALITY if any(v.quantity is q for v in plan.options[0].verdicts))
    if limited:
        return limited
    return (Quantity.PERPLEXITY, Quantity.FLIPS) if any(option.quality for option in plan.options) else ()


def _quality_head(plan: Plan, quantity: Quantity) -> str:
    verdict = next((v for v in plan.options[0].verdicts if v.quantity is quantity), None)
    return _HEADS[quantity] + (f"\nof {limit_text(quantity, verdict.limit)}" if verdict else "")


def _time_text(estimate: TimeEstimate) -> str:
    if estimate.value_s is None:
        return "-"
    predicted = "~" if estimate.evidence is Evidence.PREDICTED else ""
    return predicted + format_seconds(estimate.value_s) + ("*" if estimate.disturbed else "")


def _quality_cell(option: Option, quantity: Quantity) -> str:
    """Return the upper bound, marked where it is over the limit or not known to be within it."""
    if not option.quantized:
        return "-"
    bound = quality_bound(option.quality, quantity)
    if bound is None:
        return "not measured"
    value = quality_text(quantity, bound.estimate if bound.upper is None else bound.upper)
    verdict = next((v for v in option.verdicts if v.quantity is quantity), None)
    mark = {Status.FITS: "", Status.OVER: " over", Status.UNDECIDED: " ?"}[verdict.status] if verdict else ""
    return value + mark


def _evidence_line(plan: Plan) -> str:
    blocks = {option.block_tokens for option in _shown(plan)}
    paged = f", blocks of {max(blocks)} tokens" if len(blocks) == 1 else ""
    engine = find_engine(plan.engine)
    own = engine.name == OWN
    known = "memory exact but for activations" if own else "cache exact"
    parts = [f"{known} ({engine.allocator}{paged})"]
    if not own:
        weights = plan.options[0].memory.weights.evidence
        parts.append(f"weights {weights}, activations predicted; graphs and the process are not counted")
    whose = "kvplan" if own else f"kvplan's kernels, not {engine.title}'s"
    kinds = {option.tpot.evidence for option in _shown(plan) if option.tpot.value_s is not None}
    if Evidence.MEASURED in kinds:
        parts.append(f"time measured on {plan.device} by {whose} ({', '.join(plan.kernels)})")
    if Evidence.PREDICTED in kinds:
        worst = max(option.tpot.error or 0.0 for option in _shown(plan))
        parts.append(f"~ predicted, {100 * worst:.0f}% off at worst on held-out cells")
    if not kinds:
        parts.append("time not measured")
    if any(option.tpot.disturbed for option in _shown(plan)):
        parts.append("* while other work ran: an upper limit")
    scored = [option.quality for option in plan.options if option.quality]
    if scored:
        parts.append(f"quality measured, upper bounds at {100 * scored[0].confidence:g}%")
    else:
        parts.append("quality not measured")
    return " | ".join(parts)


def _print_missing(console: Console, plan: Plan, what_for: str) -> None:
    by_target: dict[str, list[str]] = {}
    for form, block, target in plan.missing:
        by_target.setdefault(target, []).append(f"{form} block {block}")
    by_settings: dict[str, list[str]] = {}
    for target, settings in by_target.items():
        name = target.upper() if target in (Quantity.TPOT, Quantity.TTFT) else target
        by_settings.setdefault(", ".join(settings), []).append(name)
    for joined, targets in by_settings.items():
        say(console, f"Not measured: {', '.join(targets)} of {joined}.")
    stands = {o.format: o.setting.measured_as.name for o in plan.options if o.setting.measured_as}
    flags = " ".join(dict.fromkeys(f"-f {stands[form]}" for form, _, _ in plan.missing if form in stands))
    for form in dict.fromkeys(form for form, _, _ in plan.missing if form not in stands):
        say(console, f"Nothing of kvplan's stands for {form}: its times and quality cannot be measured here.")
    if not flags:
        return
    say(console, f"Measure it: kvplan profile {what_for} {flags} -o PROFILE.json", wrap=False)


def _print_explanation(console: Console, plan: Plan) -> None:
    subject = plan.pick or plan.options[0]
    console.print()
    say(console, f"Memory of {subject.label} at {plan.concurrency} sessions")
    table = plain_table([("term", False), ("bytes", True), ("known", False), ("made of", False)])
    table.columns[3].no_wrap = False
    for term in subject.memory.terms:
        table.add_row(term.name, str(term.bytes), term.evidence, escape(term.formula))
    table.add_row("all", str(subject.memory.need_bytes), "", f"of {subject.memory.limit_bytes} that may be used")
    console.print(table)
    say(console, "Targets")
    targets = plain_table([("setting", False), ("target", False), ("verdict", False), ("why", False)])
    targets.columns[3].no_wrap = False
    for option in plan.options:
        for verdict in option.verdicts:
            targets.add_row(escape(option.label), verdict_name(verdict), verdict.status, escape(verdict_text(verdict)))
    console.print(targets)


def verdict_text(verdict: Verdict) -> str:
    """Return the figure, the limit and how it is known, or why there is none."""
    if verdict.reason or verdict.value is None:
        return verdict.reason
    if verdict.quantity is Quantity.MEMORY:
        shown = f"{format_bytes(verdict.value)} of {format_bytes(verdict.limit)}"
    elif verdict.quantity in (Quantity.TPOT, Quantity.TTFT):
        bound = verdict.value if verdict.bound is None else verdict.bound
        shown = f"at most {format_seconds(bound)} of {format_seconds(verdict.limit)}"
    else:
        bound = verdict.value if verdict.bound is None else verdict.bound
        shown = f"at most {quality_text(verdict.quantity, bound)} of {limit_text(verdict.quantity, verdict.limit)}"
    activations = verdict.quantity is Quantity.MEMORY and verdict.evidence is Evidence.PREDICTED
    return f"{shown}, {'exact but for activations' if activations else verdict.evidence}"
