import runpy
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
PACKAGE = FOLDER.parents[1] / "kernels" / "kvplan_kernels"


def test_every_mutant_still_has_something_to_break() -> None:
    mutants: tuple[Any, ...] = runpy.run_path(str(FOLDER / "check_mutants.py"))["MUTANTS"]
    for mutant in mutants:
        whole = (PACKAGE / mutant.file).read_text(encoding="utf-8")
        assert mutant.broken(whole) != whole
