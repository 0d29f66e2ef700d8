"""The shape of the project: source roots, light imports, short start-up."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "triton", "transformers", "pynvml", "kvplan_kernels.cache"}


def _imported_by(code: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}\nprint('\\n'.join(sys.modules))"],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stdout.split())


def test_no_package_shadows_the_hugging_face_kernels() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert not (ROOT / "profiles" / "__init__.py").exists()


def test_the_command_line_imports_nothing_heavy() -> None:
    assert not _imported_by("import kvplan.cli; kvplan.cli.build_app()") & HEAVY


@pytest.mark.parametrize("command", [["--help"], ["size", "demo"], ["formats"]])
def test_light_commands_never_touch_torch(command: list[str]) -> None:
    quiet = "with contextlib.redirect_stdout(io.StringIO()):"

    loaded = _imported_by(f"import contextlib, io\nfrom kvplan.cli import main\n{quiet} main({command!r})")

    assert not loaded & HEAVY


def test_format_and_layout_need_only_the_standard_library() -> None:
    loaded = _imported_by("import kvplan_kernels.layer_formats, kvplan_kernels.layout")
    assert not loaded & {*HEAVY, "numpy", "yaml", "rich", "typer"}


def test_constraints_pin_every_direct_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = project["project"]["dependencies"] + project["project"]["optional-dependencies"]["profile"]
    wanted += project["dependency-groups"]["dev"]
    names = {_name(requirement) for requirement in wanted}
    pinned = {_name(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")}

    assert names <= pinned


def _name(requirement: str) -> str:
    for separator in "<>=;[ ~!":
        requirement = requirement.split(separator)[0]
    return requirement.lower().replace("_", "-")
