"""llama.cpp's row of the table of engines."""

from typing import Final

from kvplan.engines.engine import Engine
from kvplan.engines.llama_cpp import NAME, RULES, allocate, default_format, launch
from kvplan.engines.llama_cpp_formats import FORMATS

ENGINE: Final = Engine(
    batched_tokens=512, batch_logits=True,
    name=NAME, title="llama.cpp", rules=RULES, allocate=allocate, launch=launch, formats=FORMATS,
    default_format=default_format, pairs=True,
    logs=("kvplan.engines.llama_cpp_log", "kvplan.engines.llama_cpp_explain"),
)  # fmt: skip
