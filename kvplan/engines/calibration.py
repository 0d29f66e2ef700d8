"""What one run's log tells of the memory of another setting of the same model and engine.

Weights, activations, context and graphs are what the run measured. Where the setting differs, the term that it changes
is scaled, and is then a prediction: weights with the ranks, activations with the tokens of a batch.
"""

from dataclasses import fields, replace

from kvplan.core.allocation import Setup, Term
from kvplan.core.sizes import REST, TAKEN
from kvplan.core.specs import Evidence, ModelSpec
from kvplan.engines import explain_log
from kvplan.engines.logs import LogFacts, Measured, Printed, Verdict
from kvplan.errors import NotComparableError


def calibrated_setup(facts: LogFacts, asked: Setup, said: frozenset[str]) -> Setup:
    """Return *asked* with what was not *said*, by the names of its fields, as the log has it."""
    left_open = [field.name for field in fields(Setup) if field.name not in said]
    return replace(asked, **{name: getattr(facts.setup, name) for name in left_open})


def check_model(facts: LogFacts, model: ModelSpec) -> None:
    """Refuse a log whose figures do not follow from *model*.

    Raises:
        NotComparableError: With the first figure that does not.
    """
    wrong = [finding for finding in explain_log(facts, model) if finding.verdict is Verdict.UNEXPLAINED]
    if wrong:
        message = (
            f"line {wrong[0].line} of the log, {wrong[0].what} {wrong[0].printed}, does not follow from {model.name}"
        )
        hint = f"it prints {facts.model}" if facts.model else "give the model that was served"
        raise NotComparableError(message, where="--measured", hint=hint)


def measured_terms(facts: LogFacts, setup: Setup, usable_bytes: float | None = None) -> dict[str, Term]:
    """Return the terms of a rank's memory under *setup*, by name, as the log's run measured them.

    What the log does not name is what is missing to the pool that it printed. *usable_bytes* is what may be used where
    the log does not say it.

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
        found[name] = Term(
            name, rest, f"what is missing to the pool that line {run.pool.line} prints", Evidence.MEASURED
        )
    return _of_setting(found, facts, setup)


def _named(run: Measured) -> tuple[tuple[str, Printed | None], ...]:
    graphs = run.graphs if run.graphs_within else None
    return (
        ("usable", run.usable), ("weights", run.weights), ("activations", run.activations),
        ("beside tensors", run.context), ("graphs", graphs),
    )  # fmt: skip


def _of_setting(found: dict[str, Term], facts: LogFacts, setup: Setup) -> dict[str, Term]:
    """Return the terms as they would be under *setup*; weights of a log that does not name its ranks are left out."""
    if "weights" in found:
        if "tensor_parallel" not in facts.stated and _ranks(setup) > 1:
            del found["weights"]
        else:
            found["weights"] = _scaled(found["weights"], _ranks(facts.setup), _ranks(setup), "ranks", inverse=True)
    if "activations" in found:
        batches = facts.setup.max_batched_tokens, setup.max_batched_tokens
        found["activations"] = _scaled(found["activations"], *batches, "tokens a batch")
    return found


def graphs_note(run: Measured) -> str:
    """Return what to know of graphs that are captured after the pool is made; empty where they are in the sum."""
    if run.graphs is None or run.graphs_within:
        return ""
    return f"graphs took {run.graphs.text} more after the pool was made"


def _ranks(setup: Setup) -> int:
    return setup.tensor_parallel * setup.pipeline_parallel


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
