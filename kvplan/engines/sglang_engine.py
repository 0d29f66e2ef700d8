"""SGLang's row of the table of engines."""

from typing import Final

from kvplan.engines.engine import Engine
from kvplan.engines.sglang import NAME, RULES, allocate, launch
from kvplan.engines.sglang_formats import FORMATS, default_format

ENGINE: Final = Engine(
    name=NAME, title="SGLang", rules=RULES, allocate=allocate, launch=launch, formats=FORMATS,
    default_format=default_format, logs=("kvplan.engines.sglang_log", "kvplan.engines.sglang_explain"),
)  # fmt: skip
