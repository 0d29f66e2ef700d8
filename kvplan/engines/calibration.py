"""What one run's log tells of the memory of another setting of the same model and engine.

Weights, activations, context and graphs are what the run measured. Where the setting differs, the term that it changes
is scaled, and is then a prediction: weights with the ranks, activations with the tokens of a batch. What other ranks
change in a way that no rule tells is taken as it was, and is a prediction too.
"""

import re
from dataclasses import fields, replace
from typing import Final

from kvplan.core.allocation import Setup, Term
from kvplan.core.sizes import REST, TAKEN
from kvplan.core.specs import Evidence, ModelSpec
from kvplan.engines import explain_log
from kvplan.engines.logs import LogFacts, Measured, Printed, Verdict
from kvplan.engines.sizing import Room
from kvplan.errors import NotComparableError

_RANKS: Final = re.compile(r"(?<!\d)(\d{1,6}) tensor parallel ranks")
"""As `explain` words a departure from one rank."""
_RANKS_NOTE: Final = (
    "what a process takes beside tensors grows with ranks: 0.10 to 0.15 GiB on one, 0.55 to 3.58 GiB on two in "
    "published logs of vLLM"
)


def calibrated_setup(facts: LogFacts, asked: Setup, said: frozenset[str]) -> Setup:
    """Return *asked* with what was not *said*, by the names of its fields, as the log has it."""
    left_open = [field.name for field in fields(Setup) if field.name not in said]
    return replace(asked, **{name: getattr(facts.setup, name) for name in left_open})


def checked_facts(facts: LogFacts, model: ModelSpec, ranks: int | None) -> LogFacts:
    """Return what the log of a run of *model* says, with the ranks that its figures follow from.

    Args:
        facts: Of the log.
        model: That was served.
        ranks: Tensor parallel ranks that were asked for; None where none were said.

    Raises:
        NotComparableError: A figure does not follow from the model, or only from ranks that neither the log nor
            *ranks* states.
    """
    findings = explain_log(facts, model)
    wrong = [finding for finding in findings if finding.verdict is Verdict.UNEXPLAINED]
    if wrong:
        message = (
            f"line {wrong[0].line} of the log, {wrong[0].what} {wrong[0].printed}, does not follow from {model.name}"
        )
        hint = f"it prints {facts.model}" if facts.model else "give the model that was served"
        raise NotComparableError(message, where="--measured", hint=hint)
    found = [(finding, int(count)) for finding in findings for count in _RANKS.findall(finding.reason)]
    counts = sorted({count for _, count in found})
    if not counts or "tensor_parallel" in facts.stated:
        return facts
    if ranks is None or (len(counts) > 1 and ranks not in counts):
        first = found[0][0]
        message = f"line {first.line} of the log, {first.what} {first.printed}, follows from {first.reason}"
        hint = "the log does not state its ranks: give " + " or ".join(f"--tp {count}" for count in counts)
        raise NotComparableError(message, where="--measured", hint=hint)
    run = ranks if ranks in counts else counts[0]
    setup = replace(facts.setup, tensor_parallel=run)
    return replace(facts, setup=setup, stated=facts.stated | {"tensor_parallel"})


def departures_note(facts: LogFacts, model: ModelSpec) -> str:
    """Return what the log's figures follow from that it does not say, ranks apart; empty where there is nothing."""
    explained = [finding for finding in explain_log(facts, model) if finding.verdict is Verdict.EXPLAINED]
    reasons = dict.fromkeys(finding.reason for finding in explained if not _RANKS.search(finding.reason))
    if not reasons:
        return ""
    return f"figures of the log follow from what it does not say, and what is not counted here: {'; '.join(reasons)}"


def calibrated_room(facts: LogFacts, setup: Setup, room: Room) -> Room:
    """Return *room* with what the log's run measured; what a person said of it wins.

    Raises:
        NotComparableError: The log says nothing that memory could be counted from under *setup*.
    """
    usable = None if room.memory_bytes is None else room.memory_bytes * room.share
    terms = measured_terms(facts, setup, usable)
    if not terms and usable is None and room.kv_bytes is None:
        hint = facts.hint or "give --memory or --kv-memory beside it, or the log of a run that prints its memory"
        only = ", only what pool it left under its own setting" if facts.measured.pool else ""
        raise NotComparableError(f"the log says nothing of what the run took{only}", where="--measured", hint=hint)
    notes = (
        graphs_note(facts.measured) if terms else "the log says nothing of what the run took: only its setting counts",
        _RANKS_NOTE if terms and _split(facts.setup) != _split(setup) else "",
    )
    return replace(room, known={**terms, **room.known}, note="; ".join(note for note in notes if note))


def measured_terms(facts: LogFacts, setup: Setup, usable_bytes: float | None = None) -> dict[str, Term]:
    """Return the terms of a rank's memory under *setup*, by name, as the log's run measured them.

    What the log does not name is what is missing to the pool that it printed; under the setting of the run the pool
    itself is among them. *usable_bytes* is what may be used where the log does not say it.

    Raises:
        NotComparableError: The log says only what all took, and the setting has other ranks.
    """
    run = facts.measured
    found = {name: _term(name, figure) for name, figure in _named(run) if figure is not None}
    if run.taken is not None:
        if _ranks(facts.setup) != _ranks(setup):
            message = "the log does not say what weights took, and they are what other ranks change"
            raise NotComparableError(message, where="--measured", hint="give a log of as many ranks")
        found[TAKEN] = _term(TAKEN, run.taken)
    usable = run.usable.value if run.usable else usable_bytes
    if run.pool is not None and usable is not None and run.weights is not None:
        rest = usable - run.pool.value - sum(term.bytes for name, term in found.items() if name != "usable")
        name = REST if run.activations else "activations"
        formula = f"what is missing to the pool that line {run.pool.line} prints"
        formula += "" if run.usable else ", if that run had as much memory"
        found[name] = Term(name, rest, formula, Evidence.MEASURED)
    if run.pool is not None and _same_run(facts.setup, setup):
        found["pool"] = _pool(run.pool)
    return _of_setting(found, facts, setup)


def _named(run: Measured) -> tuple[tuple[str, Printed | None], ...]:
    graphs = run.graphs if run.graphs_within else None
    return (
        ("usable", run.usable), ("weights", run.weights), ("activations", run.activations),
        ("beside tensors", run.context), ("graphs", graphs),
    )  # fmt: skip


def _pool(figure: Printed) -> Term:
    rounded = ", as it is rounded" if figure.low < figure.high else ""
    return Term("pool", figure.value, f"line {figure.line} of the log: {figure.text}{rounded}", Evidence.MEASURED)


def _of_setting(found: dict[str, Term], facts: LogFacts, setup: Setup) -> dict[str, Term]:
    """Return the terms as they would be under *setup*; weights of a log that does not name its ranks are left out."""
    if _split(facts.setup) != _split(setup):
        ranks = _ranks(facts.setup)
        why = f"of a run on {ranks} rank{'s' if ranks > 1 else ''}, taken as it was"
        found.update({name: _carried(term, why) for name, term in found.items() if name not in ("usable", "weights")})
    if "weights" in found:
        if "tensor_parallel" not in facts.stated and _ranks(setup) > 1:
            del found["weights"]
        else:
            found["weights"] = _scaled(found["weights"], _ranks(facts.setup), _ranks(setup), "ranks", inverse=True)
    then, now = facts.setup.max_batched_tokens, setup.max_batched_tokens
    if then != now:
        why = "the log does not say its batch: taken as it was" if then is None else f"of a batch of {then} tokens"
        unscaled = ("activations", TAKEN, REST) if then is None else (TAKEN,)
        found.update({name: _carried(found[name], why) for name in unscaled if name in found})
    if "activations" in found:
        found["activations"] = _scaled(found["activations"], then, now, "tokens a batch")
    return found


def graphs_note(run: Measured) -> str:
    """Return what to know of graphs that are captured after the pool is made; empty where they are in the sum."""
    if run.graphs is None or run.graphs_within:
        return ""
    return f"graphs took {run.graphs.text} more after the pool was made"


def _ranks(setup: Setup) -> int:
    return setup.tensor_parallel * setup.pipeline_parallel


def _split(setup: Setup) -> tuple[int, int]:
    return setup.tensor_parallel, setup.pipeline_parallel


def _same_run(then: Setup, now: Setup) -> bool:
    """Whether what is no cache takes as much, so that the pool is as large."""
    changing = ("tensor_parallel", "pipeline_parallel", "max_batched_tokens", "sequences", "draft_tokens", "options")
    return all(getattr(then, name) == getattr(now, name) for name in changing)


def _carried(term: Term, why: str) -> Term:
    """Return *term* as a prediction for a setting that changes it as no rule tells; a rule of the engine's stays."""
    if term.evidence is Evidence.EXACT:
        return term
    return replace(term, formula=f"{term.formula}, {why}", evidence=Evidence.PREDICTED)


def _term(name: str, figure: Printed) -> Term:
    evidence = Evidence.MEASURED if figure.value else Evidence.EXACT  # nothing is a rule of the engine's
    return Term(name, figure.value, f"line {figure.line} of the log: {figure.text}", evidence)


def _scaled(term: Term, then: int | None, now: int | None, what: str, *, inverse: bool = False) -> Term:
    """Return *term* as it would be with *now* of what it was measured with *then* of."""
    if then is None or now is None or then == now or not term.bytes:
        return term
    factor = then / now if inverse else now / then
    formula = f"{term.formula}, with {then} {what}, scaled to {now}"
    return Term(term.name, term.bytes * factor, formula, Evidence.PREDICTED)
