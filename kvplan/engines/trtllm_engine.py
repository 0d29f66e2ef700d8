"""TensorRT-LLM's row of the table of engines."""

from typing import Final

from kvplan.engines.engine import Engine, run_type
from kvplan.engines.trtllm import FORMATS, NAME, RULES, allocate, launch
from kvplan.engines.trtllm_explain import explain
from kvplan.engines.trtllm_log import read_log

TRTLLM: Final = Engine(
    name=NAME, title="TensorRT-LLM", rules=RULES, allocate=allocate, launch=launch, formats=FORMATS,
    default_format=run_type, read_log=read_log, explain=explain,
)  # fmt: skip
