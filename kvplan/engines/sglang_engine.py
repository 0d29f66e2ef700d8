"""SGLang's row of the table of engines."""

from typing import Final

from kvplan.engines.engine import CHECKPOINT, GGUF, Engine
from kvplan.engines.limits import Limits
from kvplan.engines.sglang import OLDEST, RULES, allocate
from kvplan.engines.sglang_formats import FORMATS, NAME, default_format
from kvplan.engines.sglang_launch import launch
from kvplan.engines.sglang_layers import STATE_BITS
from kvplan.engines.sglang_models import check_model
from kvplan.engines.sglang_options import STRATEGIES

LIMITS: Final = Limits(
    oldest=OLDEST, newest=(0, 5, 23),
    options={
        "disable-hybrid-swa-memory": "", "enable-dp-attention": "", "dp-size": "N", "swa-full-tokens-ratio": "SHARE",
        "mamba-full-memory-ratio": "SHARE", "mamba-ssm-dtype": "|".join(STATE_BITS), "max-mamba-cache-size": "N",
        "mamba-radix-cache-strategy": "|".join(STRATEGIES), "max-total-tokens": "N", "dsa-prefill-backend": "NAME",
        "dsa-decode-backend": "NAME", "mem-fraction-static": "SHARE", "max-running-requests": "N",
        "speculative-num-draft-tokens": "N",
    },
)  # fmt: skip

ENGINE: Final = Engine(
    name=NAME, title="SGLang", rules=RULES, allocate=allocate, launch=launch, formats=FORMATS,
    default_format=default_format, limits=LIMITS, check_model=check_model, reads=frozenset({CHECKPOINT, GGUF}),
    logs=("kvplan.engines.sglang_log", "kvplan.engines.sglang_explain"),
)  # fmt: skip
