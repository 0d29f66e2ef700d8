"""TensorRT-LLM's row of the table of engines."""

from typing import Final

from kvplan.engines.engine import Engine
from kvplan.engines.trtllm import FORMATS, NAME, RULES, allocate, default_format, launch

ENGINE: Final = Engine(
    name=NAME, title="TensorRT-LLM", rules=RULES, allocate=allocate, launch=launch, formats=FORMATS,
    default_format=default_format, logs=("kvplan.engines.trtllm_log", "kvplan.engines.trtllm_explain"),
)  # fmt: skip
