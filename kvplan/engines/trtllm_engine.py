"""TensorRT-LLM's row of the table of engines."""

from typing import Final

from kvplan.engines.engine import Engine, run_type
from kvplan.engines.trtllm import FORMATS, NAME, RULES, allocate, launch

ENGINE: Final = Engine(
    name=NAME, title="TensorRT-LLM", rules=RULES, allocate=allocate, launch=launch, formats=FORMATS,
    default_format=run_type, logs=("kvplan.engines.trtllm_log", "kvplan.engines.trtllm_explain"),
)  # fmt: skip
