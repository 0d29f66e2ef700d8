"""The compiled kernels come from whatever compiler there is, or say why they are missing."""

import ctypes
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from kvplan_kernels.format import UnsupportedError
from kvplan_kernels.native import abi, loader

ROOT = Path(__file__).parents[2]
PLAIN_COMPILER = """#!/bin/sh
case "$*" in *-mavx2*) echo "unrecognized option -mavx2" >&2; exit 1;; esac
exec c++ "$@"
"""

ONE_RUNTIME = """
import torch
from kvplan_kernels.native import loader
loader.library()
torch.ones(1 << 20).sum()
loader.read_bytes(torch.ones(1 << 20), 2)
print(len(loader.openmp_runtimes()))
"""


def build(folder: Path, compiler: Path) -> tuple[str, list[Path]]:
    """Build with *compiler* into *folder*; return what was said and the libraries."""
    command = [sys.executable, "setup.py", "-q", "build_ext", f"-b{folder / 'lib'}", f"-t{folder / 'temp'}"]
    environment = os.environ | {"CC": str(compiler), "CXX": str(compiler), "LDSHARED": f"{compiler} -shared"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr, list(folder.glob("lib/**/_kernels*.so"))


def test_without_a_compiler_the_build_goes_on_and_the_kernels_say_that_they_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said, libraries = build(tmp_path, tmp_path / "no-compiler")
    assert libraries == []
    assert "no-compiler" in said

    monkeypatch.setattr(loader, "_library_path", lambda folder: None)
    with pytest.raises(UnsupportedError, match=r"was not built; reinstall kvplan with a C\+\+ compiler"):
        loader.library.__wrapped__()


@pytest.mark.usefixtures("variants")
def test_a_compiler_that_lacks_an_instruction_set_loses_its_variants_only(tmp_path: Path) -> None:
    compiler = tmp_path / "plain"
    compiler.write_text(PLAIN_COMPILER)
    compiler.chmod(0o755)
    said, libraries = build(tmp_path, compiler)

    library = ctypes.CDLL(str(libraries[0]))
    library.kvplan_variant_name.restype = ctypes.c_char_p
    assert [library.kvplan_variant_name(index) for index in range(2)] == [b"portable", None]
    if platform.machine().lower() in {"x86_64", "amd64"}:
        assert "avx2 kernels are left out" in said


@pytest.mark.usefixtures("variants")
def test_kernels_of_another_version_are_refused_before_they_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    def declare(library: ctypes.CDLL) -> None:
        raise AssertionError("a symbol that another version may lack")

    monkeypatch.setattr(abi, "ABI_VERSION", abi.ABI_VERSION + 1)
    monkeypatch.setattr(abi, "declare", declare)
    with pytest.raises(UnsupportedError, match="built for another version; reinstall kvplan"):
        loader.library.__wrapped__()


@pytest.mark.usefixtures("variants")
def test_kernels_and_torch_share_one_openmp_runtime() -> None:
    done = subprocess.run([sys.executable, "-c", ONE_RUNTIME], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"
