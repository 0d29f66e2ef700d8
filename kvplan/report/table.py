"""The screens of `recommend`, `size` and `formats`."""

from collections.abc import Sequence
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvplan.core.comparisons import Comparison, FigureVerdict, Standing
from kvplan.core.formats import FormatFacts
from kvplan.core.latency import TimeEstimate
from kvplan.core.plans import Option, Outcome, Plan, Quantity, Status, Verdict
from kvplan.core.sentences import verdict_name
from kvplan.core.sizes import CacheSize
from kvplan.core.specs import Evidence
from kvplan.core.verdicts import limit_text, quality_bound, quality_text
from kvplan.engines.kvplan import KVPLAN, start_text
from kvplan.report.verdict_text import change_text
from kvplan.units import format_bytes, format_seconds

ROWS_MAX: Final = 40
"""Of a comparison's table; a screen is for what to look at first."""
_QUALITY: Final = (Quantity.PERPLEXITY, Quantity.KL, Quantity.FLIPS, Quantity.RETRIEVAL)
_HEADS: Final = {
    Quantity.PERPLEXITY: "perplexity", Quantity.KL: "mean KL", Quantity.FLIPS: "flips", Quantity.RETRIEVAL: "lost keys",
}  # fmt: skip


def print_plan(console: Console, plan: Plan, *, model: str, workload: str, explain: bool = False) -> None:
    """Print the first screen of a recommendation, and what it rests on where *explain*."""
    _say(console, plan.sentence, style="bold")
    console.print(_options_table(plan))
    _say(console, _evidence_line(plan))
    for remedy in plan.remedies:
        _say(console, f"Would fit: {remedy.text}.")
    if plan.outcome is Outcome.NOTHING_FITS and not plan.remedies:
        _say(console, "Neither fewer sessions, nor shorter context, nor more memory would meet the target.")
    if plan.pick is not None:
        console.print()
        pick = plan.pick
        _say(console, start_text(pick.format, pick.block_tokens, blocks=pick.blocks, slots=pick.slots), wrap=False)
        _say(console, plan.bottleneck)
    if plan.missing:
        _print_missing(console, plan, f"{model} -w {workload}")
    for remark in plan.remarks:
        _say(console, remark)
    if explain:
        _print_explanation(console, plan)


def _say(console: Console, text: str, *, style: str = "", wrap: bool = True) -> None:
    console.print(escape(printable(text)), style=style, highlight=False, soft_wrap=not wrap)


def plain_table(columns: Sequence[tuple[str, bool]]) -> Table:
    """Return an empty table of *columns*: the heading, and whether the cells are figures."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="")
    for heading, figures in columns:
        table.add_column(escape(heading), justify="right" if figures else "left", no_wrap=True)
    return table


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
    parts = [f"memory exact but for activations ({KVPLAN.allocator}{paged})"]
    kinds = {option.tpot.evidence for option in _shown(plan) if option.tpot.value_s is not None}
    if Evidence.MEASURED in kinds:
        parts.append(f"time measured on {plan.device} by kvplan's kernels")
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
        _say(console, f"Not measured: {', '.join(targets)} of {joined}.")
    flags = " ".join(f"-f {form}" for form in dict.fromkeys(form for form, _, _ in plan.missing))
    _say(console, f"Measure it: kvplan profile {what_for} {flags} -o PROFILE.json", wrap=False)


def _print_explanation(console: Console, plan: Plan) -> None:
    subject = plan.pick or plan.options[0]
    console.print()
    _say(console, f"Memory of {subject.label} at {plan.concurrency} sessions")
    table = plain_table([("term", False), ("bytes", True), ("known", False), ("made of", False)])
    table.columns[3].no_wrap = False
    for term in subject.memory.terms:
        table.add_row(term.name, str(term.bytes), term.evidence, escape(term.formula))
    table.add_row("all", str(subject.memory.need_bytes), "", f"of {subject.memory.limit_bytes} that may be used")
    console.print(table)
    _say(console, "Targets")
    targets = plain_table([("setting", False), ("target", False), ("verdict", False), ("why", False)])
    targets.columns[3].no_wrap = False
    for option in plan.options:
        for verdict in option.verdicts:
            targets.add_row(escape(option.label), verdict_name(verdict), verdict.status, escape(verdict_text(verdict)))
    console.print(targets)
    for setting, reason in plan.refused:
        _say(console, f"No kernel: {setting}: {reason}")


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
    return f"{shown}, {verdict.evidence}"


def print_sizes(console: Console, results: Sequence[CacheSize]) -> None:
    """Print the answers of `kvplan size`."""
    heads = [("model", False), ("format", False), ("context", True), ("a sequence", True), ("a token", True)]
    pooled = any(size.capacity for size in results)
    heads += [("sequences", True), ("tokens", True), ("longest", True)] if pooled else []
    table = plain_table(heads)
    table.columns[0].no_wrap, table.columns[0].overflow = False, "fold"
    for size in results:
        row = [
            escape(size.model), escape(size.format), str(size.context_tokens),
            format_bytes(size.allocated.bytes_per_sequence, digits=2),
            format_bytes(size.logical.growth_bytes_per_token, digits=2),
        ]  # fmt: skip
        if size.capacity:
            row += [str(size.capacity.max_concurrency), str(size.capacity.tokens), str(size.capacity.max_context)]
        table.add_row(*row)
    console.print(table)
    _say(console, f"exact, as {KVPLAN.allocator} allocates: whole blocks, full residuals, sinks")


def print_formats(console: Console, facts: Sequence[FormatFacts]) -> None:
    """Print the list of formats."""
    heads = [("format", False), ("K", True), ("V", True), ("bits in all", True), ("fused on", False)]
    per_model = any(fact.bytes_per_token is not None for fact in facts)
    table = plain_table([*heads, *([("a token", True)] if per_model else []), ("source", False)])
    table.columns[-1].no_wrap = False
    for fact in facts:
        fused = ", ".join(device for device, there in fact.fused.items() if there) or "-"
        grown = [] if not per_model else [format_bytes(fact.bytes_per_token) if fact.bytes_per_token else "-"]
        bits = "-" if fact.unsupported else f"{fact.effective_bits:.2f}"
        table.add_row(escape(fact.name), str(fact.bits_k), str(fact.bits_v), bits, fused, *grown, escape(fact.source))
    console.print(table)
    _say(console, "Further names: [kivi-]k<bits>v<bits>[-g<group>][-r<residual>][-s<sinks>] with 8, 4 or 2 bits.")


def print_comparison(console: Console, comparison: Comparison) -> None:
    """Print what has not held or held with a remark, and how many figures held."""
    _say(console, comparison.sentence, style="bold")
    shown = [verdict for verdict in comparison.verdicts if verdict.standing is not Standing.HELD or verdict.reason]
    if not shown:
        return
    table = plain_table([("", False), ("cell", False), ("figure", False), ("", False)])
    for column in table.columns[1:]:
        column.no_wrap, column.overflow = False, "fold"
    order = [standing for standing in Standing if standing is not Standing.HELD] + [Standing.HELD]
    rows = sorted(_rows(shown), key=lambda row: order.index(row[0]))
    for standing, *texts in rows[:ROWS_MAX]:
        table.add_row(str(standing), *(escape(printable(text)) for text in texts))
    console.print(table)
    if len(rows) > ROWS_MAX:
        _say(console, f"and {len(rows) - ROWS_MAX} more; --json has them all")


def _rows(verdicts: Sequence[FigureVerdict]) -> list[tuple[Standing, str, str, str]]:
    """Return a row a verdict; those without figures share one where standing and reason are the same."""
    grouped: dict[tuple[Standing, str], list[FigureVerdict]] = {}
    rows: list[tuple[Standing, str, str, str]] = []
    for verdict in verdicts:
        if verdict.current is None and verdict.standing is Standing.NOT_COMPARABLE:
            grouped.setdefault((verdict.standing, verdict.reason), []).append(verdict)
        else:
            rows.append((verdict.standing, verdict.cell, verdict.figure, change_text(verdict)))
    for (standing, reason), alike in grouped.items():
        cells, figures = (list(dict.fromkeys(names)) for names in ([v.cell for v in alike], [v.figure for v in alike]))
        rows.append((standing, cells[0] if len(cells) == 1 else f"{len(cells)} cells", ", ".join(figures), reason))
    return rows


def printable(text: str) -> str:
    """Return *text* without what a terminal would obey."""
    return "".join(character if character.isprintable() else "?" for character in text)
