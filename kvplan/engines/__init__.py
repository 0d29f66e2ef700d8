"""The engines that kvplan plans for, one module each."""

from typing import Final

from kvplan.engines.engine import Engine
from kvplan.engines.kvplan import KVPLAN
from kvplan.errors import UnsupportedFormatError

ENGINES: Final = {KVPLAN.name: KVPLAN}


def find_engine(name: str | None) -> Engine:
    """Return the engine of that name; kvplan's own runtime where none is named.

    Raises:
        UnsupportedFormatError: kvplan does not know that engine's allocator.
    """
    engine = ENGINES.get(name or KVPLAN.name)
    if engine is None:
        raise UnsupportedFormatError(
            f"the allocator of engine {name!r} is not known here", hint=f"plan for {', '.join(ENGINES)}"
        )
    return engine
