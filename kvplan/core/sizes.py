"""What a model's cache takes in one format: the geometry, what an engine allocates, and how many sequences fit."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kvplan.core.activations import activation_bytes
from kvplan.core.allocation import Allocation, BlockGroup, Capacity, Setup, Term
from kvplan.core.logical import LogicalSize, logical_size
from kvplan.core.specs import Evidence, ModelSpec
from kvplan.errors import InputError
from kvplan.units import format_bytes
from kvplan_kernels.layer_formats import ModelFormat

TAKEN: Final = "all but the cache"
"""Of a run whose log does not say what it was."""
REST: Final = "what else the run took"
_BEFORE_POOL: Final = ("usable", TAKEN, "weights", "activations", "beside tensors", "graphs", REST)


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocatedSize:
    """What an engine takes for a sequence."""

    bytes_per_sequence: float
    growth_bytes_per_token: float
    groups: tuple[BlockGroup, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheSize:
    """The size of one model's cache in one format at one context, of the rank that binds.

    Attributes:
        format: As the engine names it.
        logical: None where the engine has no such format.
        allocated: None where the engine does not hold such a cache.
        terms: What lies between logical and allocated, by name.
        beside: What the engine takes whatever sequences there are.
        pool: What a device's memory goes to, where it was given.
        notes: What to know of the figures.
        reason: Why allocated is None.
    """

    model: str
    format: str
    engine: str
    setup: Setup
    logical: LogicalSize | None = None
    allocated: AllocatedSize | None = None
    terms: tuple[Term, ...] = ()
    beside: tuple[Term, ...] = ()
    capacity: Capacity | None = None
    pool: tuple[Term, ...] = ()
    notes: tuple[str, ...] = ()
    reason: str = ""

    @property
    def pool_evidence(self) -> Evidence:
        """How what fits is known: as the pool is."""
        return self.pool[-1].evidence if self.pool else Evidence.EXACT

    @property
    def context_tokens(self) -> int:
        """Tokens of the sequence."""
        return self.setup.context_tokens


def size_allocation(
    model: str, form: str, engine: str, allocation: Allocation, pool: tuple[Term, ...] | int | None = None
) -> CacheSize:
    """Return the sizes of *allocation*, with what *pool* holds: its bytes, or a device's terms that end with it."""
    context = allocation.setup.context_tokens
    pool_bytes = pool if isinstance(pool, int) or pool is None else int(pool[-1].bytes)
    logical, growth = allocation.logical_bytes(context), allocation.logical_growth_bytes(context)
    return CacheSize(
        model=model,
        format=form,
        engine=engine,
        setup=allocation.setup,
        logical=LogicalSize(
            bytes_per_sequence=logical,
            growth_bytes_per_token=growth,
            fixed_bytes_per_sequence=max(0.0, logical - growth * context),
        ),
        allocated=AllocatedSize(
            bytes_per_sequence=allocation.sequence_bytes(context),
            growth_bytes_per_token=allocation.growth_bytes(context),
            groups=allocation.blocks,
        ),
        terms=allocation.terms(context),
        beside=allocation.beside,
        capacity=None if pool_bytes is None else allocation.capacity(pool_bytes),
        pool=pool if isinstance(pool, tuple) else (),
        notes=allocation.notes,
    )


def size_geometry(model: ModelSpec, form: ModelFormat, engine: str, setup: Setup, reason: str) -> CacheSize:
    """Return the logical bytes alone, of a cache that the engine does not hold.

    Raises:
        UnsupportedFormatError: The format says nothing of what the model caches.
    """
    logical = logical_size(model, form, setup.context_tokens)
    return CacheSize(model=model.name, format=form.name, engine=engine, setup=setup, logical=logical, reason=reason)


def pool_terms(
    model: ModelSpec,
    setup: Setup,
    *,
    memory_bytes: int | None,
    share: float,
    batched_tokens: int,
    batch_logits: bool = False,
    measured: Mapping[str, Term],
) -> tuple[Term, ...]:
    """Return what a rank's memory goes to, the pool last: what the other terms leave of what may be used.

    *measured* are terms that a run or the user told, by name; they stand for what would be computed. What a process
    takes beside tensors and what graphs take is in there only where one of them told it. A pool among them is the pool,
    unless other memory is given. *batch_logits* says that every token of a batch has logits, of 32 bits.

    Raises:
        InputError: The memory or the weights are not known, or leave nothing.
    """
    if memory_bytes is None and "pool" in measured:
        return (*(measured[name] for name in _BEFORE_POOL if name in measured), measured["pool"])
    usable = measured.get("usable")
    if memory_bytes is not None:
        usable = Term("usable", int(memory_bytes * share), f"{share:.1%} of {format_bytes(memory_bytes, digits=2)}")
    if usable is None:
        raise InputError("the log does not say how much memory may be used", hint="give --memory")
    taken = [measured[name] for name in (TAKEN, "beside tensors", "graphs", REST) if name in measured]
    if TAKEN not in measured:
        weights = measured.get("weights") or _weights(model, setup)
        forward = measured.get("activations") or _activations(model, setup, batched_tokens, logits=batch_logits)
        taken = [weights, forward, *taken]
    left = int(usable.bytes - sum(term.bytes for term in taken))
    if left <= 0:
        taken_text = " + ".join(f"{term.name} {format_bytes(term.bytes, digits=2)}" for term in taken)
        why = next((f" (weights: {term.formula})" for term in taken if term.name == "weights"), "")
        message = f"{taken_text} leave nothing of {format_bytes(usable.bytes, digits=2)} for the cache{why}"
        raise InputError(message, where=model.name, hint="give more --memory, or more --tp")
    known = {term.evidence for term in taken}
    evidence = Evidence.MEASURED if known <= {Evidence.MEASURED, Evidence.EXACT} else Evidence.PREDICTED
    return (usable, *taken, Term("pool", left, "what is left for the cache", evidence))


def _weights(model: ModelSpec, setup: Setup) -> Term:
    if model.weight_bytes is None:
        raise InputError(f"no weights to count: {model.weights_unknown}", hint="give --kv-memory instead of --memory")
    ranks = setup.tensor_parallel * setup.pipeline_parallel
    split = f" / {ranks} ranks" if ranks > 1 else ""
    source = "files" if model.weight_evidence is Evidence.EXACT else "config"
    if source == "config" and model.parameters and model.weight_bytes == 2 * model.parameters:
        source = "config, which names no quantization: 16 bits"
    return Term("weights", -(-model.weight_bytes // ranks), f"of the model's {source}{split}", model.weight_evidence)


def _activations(model: ModelSpec, setup: Setup, batched_tokens: int, *, logits: bool) -> Term:
    tokens = min(setup.context_tokens, batched_tokens)
    size, formula = activation_bytes(model, tokens), "of one forward pass"
    if logits:
        size, formula = size + 4 * tokens * model.vocab_size, f"{formula}, with the logits of its {tokens} tokens"
    return Term("activations", size // setup.tensor_parallel, formula, Evidence.PREDICTED)
