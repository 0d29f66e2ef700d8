"""SGLang's row of the table of engines."""

from typing import Final

from kvplan.engines.engine import Engine, run_type
from kvplan.engines.sglang import NAME, RULES, allocate, launch
from kvplan.engines.sglang_formats import FORMATS

ENGINE: Final = Engine(
    name=NAME, title="SGLang", rules=RULES, allocate=allocate, launch=launch, formats=FORMATS, default_format=run_type,
    logs=("kvplan.engines.sglang_log", "kvplan.engines.sglang_explain"),
)  # fmt: skip
