"""vLLM's row of the table of engines."""

from typing import Final

from kvplan.engines.engine import Engine
from kvplan.engines.limits import Limits
from kvplan.engines.vllm import (
    BLOCK_TOKENS,
    HYBRID_OFF,
    NAME,
    RULES,
    SKIP_LAYERS,
    STATE_TYPE,
    allocate,
    default_format,
    launch,
)
from kvplan.engines.vllm_formats import FORMATS
from kvplan.engines.vllm_models import check_model

LIMITS: Final = Limits(
    oldest=(0, 6), newest=(0, 29), block_multiple=BLOCK_TOKENS,
    options={HYBRID_OFF: "", SKIP_LAYERS: "LAYERS", STATE_TYPE: "auto|float32|float16|bfloat16"},
)  # fmt: skip
"""0.6 is the oldest release whose figures were compared. Blocks are what the attention backends of 0.29 take alike
(get_supported_kernel_block_sizes in vllm/v1/attention/backends)."""

ENGINE: Final = Engine(
    name=NAME, title="vLLM", rules=RULES, allocate=allocate, launch=launch, formats=FORMATS,
    limits=LIMITS, check_model=check_model, pool_is_rest=True,
    default_format=default_format, logs=("kvplan.engines.vllm_log", "kvplan.engines.vllm_explain"),
)  # fmt: skip
