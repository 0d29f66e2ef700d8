"""docs/how-to/add-a-format.md, followed to the letter on a copy of the package."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = ROOT / "docs/how-to/add-a-format.md"
INSERTIONS: Final = re.compile(
    r"<!-- insert: (?P<file>\S+) after: (?P<line>.+?) -->\n```python\n(?P<text>.*?)```", re.S
)
RUNS: Final = re.compile(r"<!-- run: -->\n```python\n(?P<text>.*?)```", re.DOTALL)
FILES: Final = re.compile(r"`((?:kernels/kvplan_kernels/|kvplan/)?[a-z_/]+\.(?:py|h))`")


def copy(folder: Path) -> Path:
    package = folder / "kernels/kvplan_kernels"
    shutil.copytree(ROOT / "kernels/kvplan_kernels", package, ignore=shutil.ignore_patterns("__pycache__"))
    return package


def run(package: Path, code: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(package.parent)!r})\n{code}"],
        capture_output=True, text=True, check=False, cwd=package.parent,
    )  # fmt: skip


def test_the_page_does_what_it_says(tmp_path: Path) -> None:
    page = PAGE.read_text(encoding="utf-8")
    package = copy(tmp_path)
    (code,) = RUNS.findall(page)
    before = run(package, code)
    assert "unknown format 'fp8_e4m3/fp4_g32-r64'" in before.stderr
    insertions = list(INSERTIONS.finditer(page))
    assert insertions
    for found in insertions:
        path = tmp_path / found["file"]
        text = path.read_text(encoding="utf-8")
        assert text.count(found["line"]) == 1
        path.write_text(text.replace(found["line"], f"{found['line']}\n{found['text'].rstrip()}"), encoding="utf-8")
    after = run(package, code)
    assert after.returncode == 0, after.stderr
    assert after.stdout.split() == ["fp4_g32", "288.0"]


def test_the_files_that_the_page_names_are_there() -> None:
    rooms = (ROOT, ROOT / "kernels/kvplan_kernels")
    named = set(FILES.findall(PAGE.read_text(encoding="utf-8")))
    assert len(named) > 8
    assert not {name for name in named if not any((room / name).exists() for room in rooms)}
