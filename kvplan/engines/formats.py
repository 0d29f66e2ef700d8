"""Which engines store what: kvplan's formats in them, and those that only they have."""

from collections.abc import Iterator
from dataclasses import replace

from kvplan.core.allocation import Setup
from kvplan.core.formats import FORMATS, REFERENCE_HEAD_DIM, FormatFacts
from kvplan.core.packing import EngineFormat
from kvplan.core.specs import ModelSpec
from kvplan.engines import ENGINES, OWN, allocate
from kvplan.engines.engine import Engine
from kvplan.errors import KvplanError, UnsupportedFormatError


def with_engines(fact: FormatFacts) -> FormatFacts:
    """Return the facts of one of kvplan's formats with the engines that store the same bits."""
    others = [engine.name for engine in ENGINES.values() if engine.has_format(fact.name)]
    return replace(fact, engines=(OWN, *others))


def engine_facts(model: ModelSpec | None = None) -> Iterator[FormatFacts]:
    """Yield the facts of the formats that an engine has and kvplan has no kernels for, for *model* where given."""
    for engine in ENGINES.values():
        for form in engine.formats:
            if form.quantized and not _is_own(engine, form):
                yield _facts(engine, form, model)


def _is_own(engine: Engine, form: EngineFormat) -> bool:
    """Return whether one of kvplan's formats in the list stores the same."""
    return any(name in FORMATS for name in (*form.names, f"{engine.name}:{form.name}"))


def refuse_format(name: str, reason: str, where: str = "") -> UnsupportedFormatError:
    """Return the error that kvplan has no kernel for the format called *name*.

    Args:
        name: As a user gave it.
        reason: Why the grammar of kvplan's own formats does not take it; told where no engine has it either.
        where: The option it came by.
    """
    engine = ENGINES[prefix] if (prefix := name.partition(":")[0]) in ENGINES else None
    if engine is None or not engine.has_format(name):
        return UnsupportedFormatError(reason, where=where)
    message = f"{name} is a format of {engine.title} alone: kvplan has no kernel for it that could be run or timed"
    hint = "`kvplan quality` scores it by the library's code" if engine.runs_here else "`kvplan size` counts its bytes"
    return UnsupportedFormatError(message, where=where, hint=hint)


def _facts(engine: Engine, form: EngineFormat, model: ModelSpec | None) -> FormatFacts:
    since = f" since {form.since}" if form.since else ""
    needs = f", compute capability {form.capability / 10} up" if form.capability else ""
    grown, unsupported = _growth(engine, form, model)
    return FormatFacts(
        name=f"{engine.name}:{form.name}",
        bits_k=form.key.bits,
        bits_v=form.value.bits,
        effective_bits=form.effective_bits(REFERENCE_HEAD_DIM),
        source=form.source,
        fused={"cpu": False, "cuda": False},
        bytes_per_token=grown,
        unsupported=unsupported,
        engines=(engine.name,),
        summary=f"{engine.title}{since}{needs}",
    )


def _growth(engine: Engine, form: EngineFormat, model: ModelSpec | None) -> tuple[float | None, str]:
    """Return the bytes that a token adds to *model*'s caches, windows not yet full, or why there are none."""
    if model is None:
        return None, ""
    try:
        return allocate(engine, model, form.name, Setup(context_tokens=1)).logical_growth_bytes(1), ""
    except KvplanError as error:
        return None, error.message
