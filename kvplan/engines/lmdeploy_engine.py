"""LMDeploy's row of the table of engines."""

from typing import Final

from kvplan.engines.engine import Engine, run_type
from kvplan.engines.limits import Limits
from kvplan.engines.lmdeploy import FLOAT_STATES, FORMATS, NAME, RULES, allocate, launch

_VARIABLE, _, _SET = FLOAT_STATES.partition("=")
LIMITS: Final = Limits(oldest=(0, 2), newest=(0, 16), block_multiple=32, options={_VARIABLE: _SET})
"""Blocks are of multiples of 32 tokens, and of 64 on devices before compute capability 8.0 (lmdeploy/cli/utils.py,
--cache-block-seq-len, 0.16). 0.2 is the oldest release whose figures were compared."""

ENGINE: Final = Engine(
    name=NAME, title="LMDeploy TurboMind", rules=RULES, allocate=allocate, launch=launch, formats=FORMATS,
    default_format=run_type, limits=LIMITS,
    logs=("kvplan.engines.lmdeploy_log", "kvplan.engines.lmdeploy_log"),
)  # fmt: skip
