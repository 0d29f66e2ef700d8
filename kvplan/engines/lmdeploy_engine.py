"""LMDeploy's row of the table of engines."""

from typing import Final

from kvplan.engines.engine import Engine, run_type
from kvplan.engines.lmdeploy import FORMATS, NAME, RULES, allocate, launch

ENGINE: Final = Engine(
    name=NAME, title="LMDeploy TurboMind", rules=RULES, allocate=allocate, launch=launch, formats=FORMATS,
    default_format=run_type, logs=("kvplan.engines.lmdeploy_log", "kvplan.engines.lmdeploy_log"),
)  # fmt: skip
