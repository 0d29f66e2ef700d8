import runpy
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
NATIVE = FOLDER.parents[1] / "kernels" / "kvplan_kernels" / "native"


def test_every_mutant_still_has_something_to_break() -> None:
    mutants: tuple[Any, ...] = runpy.run_path(str(FOLDER / "check_mutants.py"))["MUTANTS"]
    for mutant in mutants:
        whole = (NATIVE / mutant.file).read_text(encoding="utf-8")
        assert mutant.broken(whole) != whole
