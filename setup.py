"""Builds the CPU kernels: one shared library, its kernels compiled once per instruction set.

Everything else about the package is in pyproject.toml. Without a C++ compiler the package installs all the same, and
`kvplan_kernels.native` says that the kernels are missing.
"""

import os
import platform
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

NATIVE = Path("kernels/kvplan_kernels/native")
FLAGS = [
    "-O2",  # loops are unrolled and vectorized by hand; -O3 takes three times as long for the same speed
    "-fno-tree-vectorize",
    "-std=c++17",
    "-ffp-contract=off",  # the quantization must round every step, as its definition does
    "-fno-exceptions",
    "-fno-rtti",
    "-fvisibility=hidden",
    "-Wno-psabi",
    "-Wno-maybe-uninitialized",  # GCC 12 on its own intrinsics
    "-g0",
]
OPENMP = "-fopenmp"  # for compiling only: the loader binds the runtime that torch has already loaded
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni", "-mprefer-vector-width=512"]
VARIANTS = {
    "avx512_amx": ["-DKVPLAN_AVX512", "-DKVPLAN_AMX", *AVX512, "-mamx-tile", "-mamx-int8", "-mamx-bf16"],
    "avx512_vnni_bf16": ["-DKVPLAN_AVX512", "-DKVPLAN_DOT_BF16", *AVX512, "-mavx512bf16"],
    "avx512_vnni": ["-DKVPLAN_AVX512", *AVX512],
    "avx2": ["-DKVPLAN_AVX2", *AVX2],
    "portable": [],
}
PORTABLE = "portable"
ONLY = "KVPLAN_VARIANTS"
"""Environment variable: variants to build beside the portable one, for a build that need not be fast; all if unset."""


def x86() -> bool:
    """Return whether the build is for a 64-bit x86 machine."""
    return platform.machine().lower() in {"x86_64", "amd64"}


class BuildKernels(build_ext):
    """Compile the kernels' source per variant, and link without an OpenMP runtime of our own."""

    def build_extension(self, ext: Extension) -> None:
        """Build the one library of the variants that the compiler knows; without the portable one there is none."""
        names = list(VARIANTS) if x86() else [PORTABLE]
        only = os.environ.get(ONLY, "").split()
        names = [name for name in names if not only or name in (*only, PORTABLE)]
        with ThreadPoolExecutor(self.parallel if isinstance(self.parallel, int) else 2) as pool:
            built = {name: found for name, found in zip(names, pool.map(self._variant, names), strict=True) if found}
        listed = "".join(f"X({name})" for name in built)
        objects = self._compile("dispatch.cpp", "dispatch", [f"-DKVPLAN_BUILT(X)={listed}"])
        objects += [obj for found in built.values() for obj in found]
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        self.compiler.link_shared_object(objects, str(target), target_lang="c++")

    def _variant(self, name: str) -> list[str]:
        """Return the objects of a variant, none where the compiler does not know its instructions."""
        try:
            return self._compile("kernels.cpp", name, [f"-DKVPLAN_ISA={name}", *VARIANTS[name]])
        except CompileError as error:
            if name == PORTABLE:
                raise
            self.warn(f"the {name} kernels are left out: {error}")
            return []

    def _compile(self, source: str, name: str, flags: list[str]) -> list[str]:
        return self.compiler.compile(
            [str(NATIVE / source)],
            output_dir=str(Path(self.build_temp) / name),
            extra_postargs=[*FLAGS, OPENMP, *flags],
            depends=[str(path) for path in NATIVE.glob("*.h")],
        )


setup(
    ext_modules=[
        Extension(
            "kvplan_kernels.native._kernels", sources=[str(NATIVE / "kernels.cpp")], language="c++", optional=True
        )
    ]
    if sys.platform == "linux"
    else [],
    cmdclass={"build_ext": BuildKernels},
)
