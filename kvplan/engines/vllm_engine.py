"""vLLM's row of the table of engines."""

from typing import Final

from kvplan.engines.engine import Engine
from kvplan.engines.vllm import NAME, RULES, allocate, default_format, launch
from kvplan.engines.vllm_formats import FORMATS

ENGINE: Final = Engine(
    name=NAME, title="vLLM", rules=RULES, allocate=allocate, launch=launch, formats=FORMATS,
    default_format=default_format, logs=("kvplan.engines.vllm_log", "kvplan.engines.vllm_explain"),
)  # fmt: skip
