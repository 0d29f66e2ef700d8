"""The engines that kvplan plans for, one module each."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Final

from kvplan.core.allocation import Allocation, Setup
from kvplan.core.formats import read_format
from kvplan.core.specs import ModelSpec
from kvplan.engines.engine import Engine
from kvplan.engines.limits import check_setup
from kvplan.errors import InputError, UnsupportedFormatError

if TYPE_CHECKING:
    from kvplan.engines.logs import Finding, LogFacts

OWN: Final = "kvplan"


class _Table(Mapping[str, Engine]):
    """Engines by name; a module is imported when its engine is asked for, since most commands want one."""

    _modules: Final = {
        OWN: "kvplan.engines.kvplan",
        "vllm": "kvplan.engines.vllm_engine",
        "llama.cpp": "kvplan.engines.llama_cpp_engine",
        "lmdeploy": "kvplan.engines.lmdeploy_engine",
        "transformers": "kvplan.engines.transformers_cache",
        "sglang": "kvplan.engines.sglang_engine",
        "trtllm": "kvplan.engines.trtllm_engine",
    }
    """Each has its row of the table as ENGINE."""
    other_names: Final = {"tensorrt-llm": "trtllm", "llamacpp": "llama.cpp", "hf": "transformers"}

    def __getitem__(self, name: str) -> Engine:
        row: Engine = import_module(self._modules[self.other_names.get(name, name)]).ENGINE
        return row

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __len__(self) -> int:
        return len(self._modules)


ENGINES: Final = _Table()


def find_engine(name: str | None) -> Engine:
    """Return the engine of that name; kvplan's own runtime where none is named.

    Raises:
        InputError: kvplan does not know that engine's allocator.
    """
    known = (name or OWN).lower()
    if known not in ENGINES:
        raise InputError(f"engine {name!r} is not known", where="--engine", hint=f"one of {', '.join(ENGINES)}")
    return ENGINES[known]


def allocate(engine: Engine, model: ModelSpec, format_name: str, setup: Setup) -> Allocation:
    """Return the engine's allocation of *model* in the format of a name.

    Raises:
        UnsupportedFormatError: The engine has no such format; the message names those that have it.
        UnsupportedModelError: The engine does not run the model, or how it keeps what a layer caches is not known.
        UnsupportedSettingError: It does not take the setup: a release, an option, a block size, ranks or stages.
    """
    remarks = check_setup(engine.title, engine.limits, setup)
    try:
        remarks += engine.check_model(model, setup)
        return _remarked(engine.allocate(model, engine.format_name(model, format_name), setup), remarks)
    except UnsupportedFormatError as error:
        others = engines_with(format_name, engine)
        if not others or engine.has_format(format_name):  # what it refuses is this model in it
            raise
        raise UnsupportedFormatError(error.message, where=error.where, hint=having(others)) from error


def _remarked(allocation: Allocation, remarks: tuple[str, ...]) -> Allocation:
    assert is_dataclass(allocation)
    return replace(allocation, notes=(*allocation.notes, *remarks)) if remarks else allocation


def read_log(text: str, name: str | None = None) -> "LogFacts | None":
    """Return what a start-up log says of the cache, of the engine of a name or of whichever finds most in it.

    None is a log of no engine that is known.

    Raises:
        InputError: No such engine, or one that prints no log that is known.
    """
    if name is not None and not find_engine(name).logs:
        known = ", ".join(engine.name for engine in ENGINES.values() if engine.logs)
        raise InputError(f"{name} prints no start-up log that is known", where="--engine", hint=f"one of {known}")
    from kvplan.engines.logs import clean_lines

    lines = clean_lines(text)
    engines = ENGINES.values() if name is None else (find_engine(name),)
    found = [facts for engine in engines if (facts := engine.read_log(lines))]
    return max(found, key=lambda facts: len(facts.figures), default=None)


def explain_log(facts: "LogFacts", model: ModelSpec | None) -> "tuple[Finding, ...]":
    """Return a finding for each figure of a log, in its order."""
    return tuple(sorted(ENGINES[facts.engine].explain(facts, model), key=lambda finding: finding.line))


def having(engines: Sequence[str]) -> str:
    """Return the sentence that says who has a format."""
    return f"{', '.join(engines)} {'has' if len(engines) == 1 else 'have'} it"


def engines_with(format_name: str, but: Engine) -> list[str]:
    """Return the engines other than *but* that cache in the format of a name, kvplan's own runtime last."""
    found = [engine.title for engine in ENGINES.values() if engine is not but and engine.has_format(format_name)]
    try:
        read_format(format_name)
    except UnsupportedFormatError:
        return found
    return found if but.name == OWN else [*found, ENGINES[OWN].title]
