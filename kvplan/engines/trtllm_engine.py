"""TensorRT-LLM's row of the table of engines."""

from typing import Final

from kvplan.engines.engine import Engine
from kvplan.engines.limits import Limits
from kvplan.engines.trtllm import (
    ATTENTION_DP,
    FORMATS,
    NAME,
    RULES,
    STATE_BITS,
    STATE_TYPE,
    WINDOWS,
    allocate,
    default_format,
    launch,
)
from kvplan.engines.trtllm_models import check_model

LIMITS: Final = Limits(
    oldest=(0, 5), newest=(1, 3), power_of_2=True,
    options={
        WINDOWS: "", ATTENTION_DP: "", "backend": "pytorch|tensorrt|trt", "max-tokens": "N",
        STATE_TYPE: "|".join(("auto", *STATE_BITS)), "free-gpu-memory-fraction": "SHARE", "max-seq-len": "N",
    },
)  # fmt: skip
"""0.5 is the first release. Blocks are powers of 2 by docs/source/advanced/kv-cache-reuse.md (tokens_per_block)."""

ENGINE: Final = Engine(
    name=NAME, title="TensorRT-LLM", rules=RULES, allocate=allocate, launch=launch, formats=FORMATS,
    default_format=default_format, limits=LIMITS, check_model=check_model,
    logs=("kvplan.engines.trtllm_log", "kvplan.engines.trtllm_explain"),
)  # fmt: skip
