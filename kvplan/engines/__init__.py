"""The engines that kvplan plans for, one module each."""

from typing import Final

from kvplan.core.allocation import Allocation, Setup
from kvplan.core.specs import ModelSpec
from kvplan.engines.engine import Engine
from kvplan.engines.kvplan import KVPLAN
from kvplan.engines.logs import Finding, LogFacts, clean_lines
from kvplan.engines.sglang_engine import SGLANG
from kvplan.engines.trtllm_engine import TRTLLM
from kvplan.engines.vllm_engine import VLLM
from kvplan.errors import InputError, UnsupportedFormatError

ENGINES: Final = {engine.name: engine for engine in (KVPLAN, VLLM, SGLANG, TRTLLM)}


def find_engine(name: str | None) -> Engine:
    """Return the engine of that name; kvplan's own runtime where none is named.

    Raises:
        InputError: kvplan does not know that engine's allocator.
    """
    engine = ENGINES.get(name or KVPLAN.name)
    if engine is None:
        raise InputError(f"engine {name!r} is not known", where="--engine", hint=f"one of {', '.join(ENGINES)}")
    return engine


def allocate(engine: Engine, model: ModelSpec, format_name: str, setup: Setup) -> Allocation:
    """Return the engine's allocation of *model* in the format of a name.

    Raises:
        UnsupportedFormatError: The engine has no such format; the message names those that have it.
        UnsupportedModelError: How the engine keeps what a layer caches is not known.
        InputError: Ranks or stages do not divide the model.
    """
    try:
        return engine.allocate(model, format_name, setup)
    except UnsupportedFormatError as error:
        others = [other.title for other in ENGINES.values() if other is not engine and _caches(other, format_name)]
        if not others:
            raise
        raise UnsupportedFormatError(error.message, where=error.where, hint=f"{', '.join(others)} has it") from error


def read_log(text: str, name: str | None = None) -> LogFacts | None:
    """Return what a start-up log says of the cache, of the engine of a name or of whichever finds most in it.

    None is a log of no engine that is known.

    Raises:
        InputError: No such engine, or one that prints no log that is known.
    """
    if name is not None and find_engine(name).read_log is None:
        known = ", ".join(engine.name for engine in ENGINES.values() if engine.read_log)
        raise InputError(f"{name} prints no start-up log that is known", where="--engine", hint=f"one of {known}")
    lines = clean_lines(text)
    engines = ENGINES.values() if name is None else (find_engine(name),)
    found = [facts for engine in engines if engine.read_log and (facts := engine.read_log(lines))]
    return max(found, key=lambda facts: len(facts.figures), default=None)


def explain_log(facts: LogFacts, model: ModelSpec | None) -> tuple[Finding, ...]:
    """Return a finding for each figure of a log, in its order."""
    explain = ENGINES[facts.engine].explain
    return () if explain is None else tuple(sorted(explain(facts, model), key=lambda finding: finding.line))


def _caches(engine: Engine, name: str) -> bool:
    return any(name in (form.name, form.same_as, *form.aliases) for form in engine.formats)
