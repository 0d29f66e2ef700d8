"""LMDeploy's row of the table of engines."""

from typing import Final

from kvplan.engines.engine import Engine, run_type
from kvplan.engines.lmdeploy import FORMATS, NAME, RULES, allocate, launch
from kvplan.engines.lmdeploy_log import explain, read_log

LMDEPLOY: Final = Engine(
    name=NAME, title="LMDeploy TurboMind", rules=RULES, allocate=allocate, launch=launch, formats=FORMATS,
    default_format=run_type, read_log=read_log, explain=explain,
)  # fmt: skip
