"""What one run's log tells of the memory of another setting of the same model and engine.

Weights, activations, context and graphs are what the run measured. Where the setting differs, the term that it changes
is scaled, and is then a prediction: weights with the ranks, activations with the tokens of a batch.
"""

from dataclasses import fields, replace

from kvplan.core.allocation import Setup, Term
from kvplan.core.specs import Evidence
from kvplan.engines.logs import LogFacts, Measured, Printed


def calibrated_setup(facts: LogFacts, asked: Setup) -> Setup:
    """Return *asked* with what it leaves open as the log says it."""
    default = Setup(context_tokens=0)
    names = [field.name for field in fields(Setup)]
    open_ = [name for name in names if getattr(asked, name) == getattr(default, name)]
    return replace(asked, **{name: getattr(facts.setup, name) for name in open_})


def measured_terms(facts: LogFacts, setup: Setup) -> dict[str, Term]:
    """Return the terms of a rank's memory under *setup*, by name, as the log's run measured them."""
    run, found = facts.measured, {}
    if run.usable is not None:
        found["usable"] = _term("usable", run.usable)
    if run.weights is not None:
        found["weights"] = _scaled(
            _term("weights", run.weights), _ranks(facts.setup), _ranks(setup), "ranks", inverse=True
        )
    if run.activations is not None:
        batches = facts.setup.max_batched_tokens, setup.max_batched_tokens
        found["activations"] = _scaled(_term("activations", run.activations), *batches, "tokens a batch")
    if run.context is not None:
        found["beside tensors"] = _term("beside tensors", run.context)
    if run.graphs is not None and run.graphs_within:
        found["graphs"] = _term("graphs", run.graphs)
    return found


def graphs_note(run: Measured) -> str:
    """Return what to know of graphs that are captured after the pool is made; empty where they are in the sum."""
    if run.graphs is None or run.graphs_within:
        return ""
    return f"graphs took {run.graphs.text} more after the pool was made"


def _ranks(setup: Setup) -> int:
    return setup.tensor_parallel * setup.pipeline_parallel


def _term(name: str, figure: Printed) -> Term:
    return Term(name, figure.value, f"line {figure.line} of the log: {figure.text}", Evidence.MEASURED)


def _scaled(term: Term, then: int | None, now: int | None, what: str, *, inverse: bool = False) -> Term:
    """Return *term* as it would be with *now* of what it was measured with *then* of."""
    if then is None or now is None or then == now:
        return term
    factor = then / now if inverse else now / then
    formula = f"{term.formula}, with {then} {what}, scaled to {now}"
    return Term(term.name, term.bytes * factor, formula, Evidence.PREDICTED)
