"""The sizes that a person asks for: one model in one engine, in each format, with the pool that a device leaves."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from kvplan.core.allocation import Setup, Term
from kvplan.core.formats import read_format
from kvplan.core.logical import runtime_refusal
from kvplan.core.sizes import CacheSize, pool_terms, size_allocation, size_geometry
from kvplan.core.specs import Evidence, ModelSpec
from kvplan.engines import OWN, allocate
from kvplan.engines.engine import Engine
from kvplan.engines.limits import check_setup
from kvplan.errors import InputError, UnsupportedFormatError, UnsupportedModelError, UnsupportedSettingError


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """The memory that was given: of the pool, or of a device with the part of it that may be used.

    Attributes:
        known: What takes some of it, by name, where a run measured it or the person says it.
        note: What to know of it.
    """

    kv_bytes: int | None = None
    memory_bytes: int | None = None
    share: float = 1.0
    known: Mapping[str, Term] = field(default_factory=dict)
    note: str = ""

    @property
    def weighed(self) -> bool:
        """Whether the weights are to be known."""
        return self.kv_bytes is None and (self.memory_bytes is not None or bool(self.known))


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What was asked.

    Attributes:
        formats: By the engine's names or kvplan's; empty is the engine's default.
        setup: A context of 0 is the model's own.
        said: The fields of the setup that are not at their default for want of an answer.
    """

    formats: tuple[str, ...] = ()
    setup: Setup
    said: frozenset[str] = frozenset()
    room: Room


def told(room: Room, given: Mapping[str, int]) -> Room:
    """Return *room* with the bytes that a person knows, by the name of what takes them.

    Raises:
        InputError: There is no device that they are a part of.
    """
    if given and room.memory_bytes is None:
        raise InputError("the memory of what else is there says nothing without the device's", hint="give --memory")
    terms = {name: Term(name, size, "as given", Evidence.REPORTED) for name, size in given.items()}
    return replace(room, known={**room.known, **terms})


def sizes(engine: Engine, model: ModelSpec, asked: Question, *, alone: bool) -> Iterator[CacheSize]:
    """Yield the sizes of one model in one engine; unless *alone*, what is refused is an answer with its reason.

    Raises:
        UnsupportedFormatError: The engine has no such format, and nothing else was asked.
        UnsupportedModelError: It does not hold such a model, and nothing else was asked.
        UnsupportedSettingError: It does not take the setup, and nothing else was asked.
        InputError: The memory cannot be.
    """
    tokens = asked.setup.context_tokens or model.context_tokens or 1  # a state is of one size, whatever the context
    setup = replace(asked.setup, context_tokens=tokens)
    for word in dict.fromkeys(asked.formats or [engine.default_format(model)]):
        name = engine.format_name(model, word)
        try:
            reason = runtime_refusal(model) if engine.name == OWN else ""
            if reason:
                check_setup(engine.title, engine.limits, setup)
                yield size_geometry(model, read_format(name), engine.name, setup, reason)
            else:
                yield _allocated(engine, model, name, setup, asked.room, alone=alone)
        except (UnsupportedFormatError, UnsupportedModelError, UnsupportedSettingError) as error:
            if alone:
                raise
            yield CacheSize(model=model.name, format=name, engine=engine.name, setup=setup, reason=error.message)


def _allocated(engine: Engine, model: ModelSpec, name: str, setup: Setup, room: Room, *, alone: bool) -> CacheSize:
    allocation = allocate(engine, model, name, setup)
    form = read_format(name).name if engine.name == OWN else name.removeprefix(f"{engine.name}:")
    lacking = ""
    try:
        pool = _pool(engine, model, setup, room)
    except InputError as error:
        if alone:
            raise
        pool, lacking = None, f"no pool: {error.message}"
    sized = size_allocation(model.name, form, engine.name, allocation, pool)
    notes = (lacking, room.note, _pool_note(engine, room), _stated_note(engine, model))
    return replace(sized, notes=(*sized.notes, *(note for note in notes if note)))


def _pool(engine: Engine, model: ModelSpec, setup: Setup, room: Room) -> tuple[Term, ...] | int | None:
    if not room.weighed:
        return room.kv_bytes
    return pool_terms(
        engine.served(model), setup, memory_bytes=room.memory_bytes, share=room.share, measured=room.known,
        batched_tokens=setup.max_batched_tokens or engine.batched_tokens, batch_logits=engine.batch_logits,
    )  # fmt: skip


def _pool_note(engine: Engine, room: Room) -> str:
    """Return what to know of a pool that the engine itself sizes by another rule than the one that counts here."""
    if not room.weighed or engine.pool_is_rest or any(_measured(term) for term in room.known.values()):
        return ""
    rule = "a share of the device, less weights and activations"
    return f"the pool of {engine.title} is counted by vLLM's rule, {rule}: a log of it tells more (--measured)"


def _measured(term: Term) -> bool:
    return term.evidence is Evidence.MEASURED


def _stated_note(engine: Engine, model: ModelSpec) -> str:
    stated = model.stated_cache
    if stated is None or engine.default_format(model) != str(model.float_type):
        return ""
    return f"the checkpoint of {model.name} names {stated.format} for its cache, which {engine.title} does not go by"
