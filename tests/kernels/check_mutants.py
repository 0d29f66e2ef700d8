"""Break the kernels on purpose, one fault at a time, and see that the kernel tests notice each.

Run with `make mutants`. Each fault goes into a copy of the package in a temporary folder; the tests run against that
copy, of the C++ compiled for one instruction set, of Triton in its interpreter. Exits 1 where a fault goes unnoticed,
or where the tests fail without any.
"""

import argparse
import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from unittest import mock

ROOT: Final = Path(__file__).resolve().parents[2]
PACKAGE: Final = ROOT / "kernels" / "kvplan_kernels"
NATIVE_TESTS: Final = ("test_agreement.py", "test_hostile.py", "test_rotation.py")
TRITON_TESTS: Final = ("test_triton.py",)
NOTICED: Final = 1
"""pytest's exit status where a test failed; a crash is a negative one."""


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A fault.

    Attributes:
        name: What is wrong.
        file: The file in the package; one of Python is one of Triton's kernels.
        before: Text of it, which stands there once.
        after: Its replacement.
    """

    name: str
    file: str
    before: str
    after: str

    @property
    def triton(self) -> bool:
        """Whether it is a fault of a Triton kernel."""
        return self.file.endswith(".py")

    def broken(self, source: str) -> str:
        """Return *source* with the fault; ValueError where its text is gone."""
        if source.count(self.before) != 1:
            raise ValueError(f"mutant {self.name!r}: {source.count(self.before)} times in {self.file}: {self.before}")
        return source.replace(self.before, self.after)


MUTANTS: Final = (
    Mutant(
        name="what was rotated is not turned back",
        file="native/decode_tasks.h",
        before="if (s.layout->rotated) rotate_row(out, s.dim);",
        after="",
    ),
    Mutant(
        name="codes near a tie are left to the reciprocal",
        file="native/append.h",
        before="fset(0.4999f)",
        after="fset(0.6f)",
    ),
    Mutant(
        name="a half word overwrites its neighbour",
        file="native/append.h",
        before="(both & 1 ? 0xffffu : 0) | (both & 2 ? 0xffff0000u : 0)",
        after="0xffffffffu",
    ),
    Mutant(
        name="the residual is overwritten before groups leave it",
        file="native/append.h",
        before="for (int pages = 1; pages >= 0; pages--)",
        after="for (int pages = 0; pages < 2; pages++)",
    ),
    Mutant(
        name="a minimum of -0 is kept",
        file="native/append.h",
        before="low = fadd(low, fzero());",
        after="",
    ),
    Mutant(
        name="a poisoned group keeps codes",
        file="native/append.h",
        before="m.coded = m.sound & ~fequal(m.scale, fzero());",
        after="m.coded = ALL & ~fequal(m.scale, fzero());",
    ),
    Mutant(
        name="queries see past the length",
        file="native/decode_tasks.h",
        before="*last = kvplan_least(position + 1, s.batch->lengths[sequence]);",
        after="*last = kvplan_least(position + 1, s.batch->lengths[sequence] + 1);",
    ),
    Mutant(
        name="the window is one token too wide",
        file="native/decode_tasks.h",
        before="position - s.call->window + 1",
        after="position - s.call->window",
    ),
    Mutant(
        name="the residual does not wrap",
        file="native/decode_tasks.h",
        before="(token + j * LANES) % capacity * token_bytes",
        after="(token + j * LANES) * token_bytes",
    ),
    Mutant(
        name="chunks are merged without their maxima",
        file="native/decode_tasks.h",
        before="weight = exp2_scalar(state[r] - most)",
        after="weight = 1.0f",
    ),
    Mutant(
        name="the logit without a value is forgotten",
        file="native/decode_tasks.h",
        before="exp2_scalar(c.sink_logits[query_head] * LOG2_E - most) : 0.0f",
        after="0.0f : 0.0f",
    ),
    Mutant(
        name="operands keep 8 bits of 16",
        file="native/vectors.h",
        before="OPERAND_MOST = 32512.0f",
        after="OPERAND_MOST = 127.0f",
    ),
    Mutant(
        name="operands of the last token group are used for the next",
        file="native/decode.h",
        before="if (rows.channel_group != group)",
        after="if (!rows.channel_group)",
    ),
    Mutant(
        name="minima beyond the last token are multiplied by 0",
        file="native/decode.h",
        before="y0 = fselect(m0, y0, fzero());",
        after="",
    ),
    Mutant(
        name="the total is not scaled to a new maximum",
        file="native/decode.h",
        before="F sum = fmul(fload(rows.total + r * LANES), fset(w.shrink[r]));",
        after="F sum = fload(rows.total + r * LANES);",
    ),
    Mutant(
        name="of channels as large the last are boosted",
        file="native/append_any.h",
        before="fless(own, others) | (fequal(own, others) & lanes_between(0, c - v * LANES))",
        after="ALL & ~fless(others, own) & ~lanes_between(c - v * LANES, c - v * LANES + 1)",
    ),
    Mutant(
        name="boosts of the last token group are used for the next",
        file="native/decode_boosts.h",
        before="if (rows.boost_group != group)",
        after="if (!rows.boost_group)",
    ),
    Mutant(
        name="the high bits of boosted channels are rounded",
        file="native/append_any.h",
        before="high = ftruncate(fdiv(code, fset(BOOST_STEPS)));",
        after="high = fround(fdiv(code, fset(BOOST_STEPS)));",
    ),
    Mutant(
        name="low bits of boosted channels are read back by the scale",
        file="native/dequantize.h",
        before="fset(scales[channel] / BOOST_STEPS)",
        after="fset(scales[channel])",
    ),
    Mutant(
        name="a poisoned group is counted once more where it is boosted",
        file="native/append_any.h",
        before="__builtin_popcount(counted[v] & ~f.sound);",
        after="__builtin_popcount((v == a.vectors - 1 ? a.tail : ALL) & ~f.sound);",
    ),
    Mutant(
        name="of channels as large the last are boosted on a device",
        file="append/gpu_kernels.py",
        before="earlier = (other * T.width + i)[None, :] < (k * T.width + i)[:, None]",
        after="earlier = (other * T.width + i)[None, :] > (k * T.width + i)[:, None]",
    ),
    Mutant(
        name="the offset of boosted channels is taken off in another unit",
        file="decode/gpu_kernels.py",
        before="bias -= lift * fold_unit",
        after="bias -= lift",
    ),
    Mutant(
        name="low bits of boosted channels count as scales",
        file="gpu/boosts.py",
        before="return level_scale(meta, place, mask, T) * STEP",
        after="return level_scale(meta, place, mask, T)",
    ),
    Mutant(
        name="rows past the length are left as they were",
        file="native/dequantize.h",
        before="memset(base + length * d.dim, 0, (d.call->tokens - length) * d.dim * 2);",
        after="",
    ),
    Mutant(
        name="triton: splits are merged without their maxima",
        file="decode/gpu_kernels.py",
        before="out += tl.sum(parts * factor[:, None], 0)",
        after="out += tl.sum(parts, 0)",
    ),
    Mutant(
        name="triton: the weight is not scaled to a new maximum",
        file="decode/gpu_kernels.py",
        before="total = total * shrink",
        after="total = total",
    ),
    Mutant(
        name="triton: the last tiles belong to no split",
        file="decode/gpu_kernels.py",
        before="share = tl.cdiv(tl.maximum(tiles, 0), splits)",
        after="share = tl.maximum(tiles, 0) // splits",
    ),
    Mutant(
        name="triton: two splits share a token",
        file="decode/gpu_kernels.py",
        before="hi = tl.minimum(tl.minimum(lo + share * BN, both), seen_last)",
        after="hi = tl.minimum(tl.minimum(lo + share * BN + 1, both), seen_last)",
    ),
    Mutant(
        name="triton: a page ends one token early",
        file="decode/scores_gpu_kernels.py",
        before="page = tl.load(table + token // G.block, mask=token < limit, other=0)",
        after="page = tl.load(table + (token + 1) // G.block, mask=token + 1 < limit, other=0)",
    ),
    Mutant(
        name="triton: the zero of K is one off",
        file="decode/scores_gpu_kernels.py",
        before="score = score - (OFFSET * total)[None, :]",
        after="score = score - ((OFFSET + 1.0) * total)[None, :]",
    ),
    Mutant(
        name="triton: the zero of V is one off",
        file="decode/outputs_gpu_kernels.py",
        before="operand.shape[0]], -OFFSET, tl.float32)",
        after="operand.shape[0]], 1.0 - OFFSET, tl.float32)",
    ),
    Mutant(
        name="triton: sums keep the unit of smaller scales",
        file="decode/outputs_gpu_kernels.py",
        before="factor = shrink * (units[g] / unit)",
        after="factor = shrink",
    ),
    Mutant(
        name="triton: the residual does not wrap",
        file="decode/scores_gpu_kernels.py",
        before="T.ring + (token % T.capacity) * G.head_dim",
        after="T.ring + token * G.head_dim",
    ),
    Mutant(
        name="triton: the window is one token too wide",
        file="decode/gpu_kernels.py",
        before="tl.maximum(position - window + 1, 0), 0)\n    blind",
        after="tl.maximum(position - window, 0), 0)\n    blind",
    ),
    Mutant(
        name="triton: keys that wait for their values begin one late",
        file="decode/gpu_kernels.py",
        before="both // BN * BN, both, key_paged",
        after="both // BN * BN, both + 1, key_paged",
    ),
    Mutant(
        name="triton: the logit without a value is forgotten",
        file="decode/gpu_kernels.py",
        before="extra = tl.exp2(logit - most)",
        after="extra = 0.0",
    ),
    Mutant(
        name="triton: what a row does not see may make it NaN",
        file="decode/outputs_gpu_kernels.py",
        before="lifted = tl.where(seen, lifted, 0.0)",
        after="lifted = lifted",
    ),
    Mutant(
        name="triton: a word's other token loses its bits",
        file="append/gpu_kernels.py",
        before="packed |= old & kept",
        after="packed |= 0 * (old & kept)",
    ),
    Mutant(
        name="triton: ties are rounded up",
        file="append/fits_gpu_kernels.py",
        before="code = (height + NEAREST) - NEAREST",
        after="code = tl.floor(height + 0.5)",
    ),
    Mutant(
        name="triton: a minimum of -0 is kept",
        file="append/fits_gpu_kernels.py",
        before="low = low + 0.0",
        after="low = low",
    ),
    Mutant(
        name="triton: tokens in pages stay in the residual too",
        file="append/gpu_kernels.py",
        before="token >= paged_tokens(after, T)",
        after="token >= paged_tokens(before, T)",
    ),
    Mutant(
        name="triton: ties of floats are rounded up",
        file="gpu/floats.py",
        before="(bits + ((1 << (CUT - 1)) - 1) + ((bits >> CUT) & 1)) >> CUT",
        after="(bits + (1 << (CUT - 1))) >> CUT",
    ),
    Mutant(
        name="triton: a poisoned token keeps its floats",
        file="append/gpu_kernels.py",
        before="tl.where((bad > 0)[:, None], all_nan, packed)",
        after="tl.where((bad > 99)[:, None], all_nan, packed)",
    ),
    Mutant(
        name="triton: floats of tokens that a row does not see make it NaN",
        file="decode/outputs_gpu_kernels.py",
        before="return tl.where(sound[None, :], words, 0), reached",
        after="return words, reached",
    ),
    Mutant(
        name="triton: a NaN is not seen",
        file="append/fits_gpu_kernels.py",
        before="bad = nan > 0",
        after="bad = nan < 0",
    ),
    Mutant(
        name="triton: what lies past a length is left as it was",
        file="dequantize/gpu_kernels.py",
        before="stays & (token < tokens - G.sinks), G)",
        after="stays & (token < held), G)",
    ),
    Mutant(
        name="triton: a token's scale is that of its word's first",
        file="dequantize/gpu_kernels.py",
        before="value = values_of(levels, meta, slab, in_page + p, k, G, T)",
        after="value = values_of(levels, meta, slab, in_page, k, G, T)",
    ),
    Mutant(
        name="triton: the high plane's codes are those of another channel",
        file="gpu/unpack.py",
        before="((high >> shift_of(T.high, PLACE, T.planes, k)) &",
        after="((high >> shift_of(T.high, PLACE, T.planes, k ^ 1)) &",
    ),
    Mutant(
        name="triton: tokens before the first lose their low bits",
        file="append/gpu_kernels.py",
        before="mask = mask & (token + PLACES > first)[:, None]",
        after="mask = mask & (token + PLACES > 0)[:, None]",
    ),
    Mutant(
        name="triton: a level that stands for 0 is one off",
        file="decode/scores_gpu_kernels.py",
        before="(score - (T.centre * sums)[None, :])",
        after="(score - ((T.centre + 1.0) * sums)[None, :])",
    ),
    Mutant(
        name="triton: scales below 0 are no unit",
        file="decode/outputs_gpu_kernels.py",
        before="size = tl.abs(scale) if SIGNED else scale",
        after="size = scale",
    ),
    Mutant(
        name="triton: a tie between levels takes the higher one",
        file="append/fits_gpu_kernels.py",
        before="above = x > middle if tie_falls(T, rank) else x >= middle",
        after="above = x >= middle",
    ),
    Mutant(
        name="triton: of several largest elements the last one counts",
        file="append/fits_gpu_kernels.py",
        before="(tl.abs(x) > tl.abs(largest)) | (e == 0)",
        after="(tl.abs(x) >= tl.abs(largest)) | (e == 0)",
    ),
    Mutant(
        name="triton: slices of a plane share the first one's words",
        file="decode/scores_gpu_kernels.py",
        before="first = slab + (PLANE.start + n * WIDTH) + row * T.width",
        after="first = slab + PLANE.start + row * T.width",
    ),
    Mutant(
        name="triton: the least power of two is 0",
        file="gpu/numbers.py",
        before="bits = tl.where(stored == 0, 1 << 22, bits)",
        after="bits = tl.where(stored == 0, 0, bits)",
    ),
)


def main() -> int:
    """Check every mutant, or those whose names contain a given text; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("text", nargs="?", default="", help="only mutants whose names contain this")
    text = parser.parse_args().text
    flags, isa = compiler_flags()
    chosen = [mutant for mutant in MUTANTS if text in mutant.name]
    with tempfile.TemporaryDirectory(prefix="kvplan-mutants-") as folder:
        copy = Path(folder)
        shutil.copytree(PACKAGE, copy / PACKAGE.name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        for what, tests in ((f"C++, {isa}", NATIVE_TESTS), ("Triton", TRITON_TESTS)):
            if not any(mutant.triton == (tests is TRITON_TESTS) for mutant in chosen):
                continue
            say(f"no fault ({what}) ... ")
            if tests is NATIVE_TESTS:
                build(copy, flags)
            if status := run_tests(copy, tests):
                say(f"tests exit with {status}: mend them first\n")
                return 1
            say("passes\n")
        unnoticed = [mutant.name for mutant in chosen if not noticed(mutant, copy, flags)]
    say(f"{len(chosen) - len(unnoticed)} of {len(chosen)} faults noticed\n")
    return 1 if unnoticed else 0


def say(text: str) -> None:
    """Write *text* at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def compiler_flags() -> tuple[list[str], str]:
    """Return the build's own flags for one instruction set, and its name; AVX2 compiles fastest where it runs."""
    with mock.patch("setuptools.setup"):
        settings: dict[str, Any] = runpy.run_path(str(ROOT / "setup.py"))
    isa = "avx2" if "avx2" in Path("/proc/cpuinfo").read_text(encoding="utf-8").split() else "portable"
    # One variant under the name that is always there, so that the library holds nothing else.
    return [*settings["FLAGS"], settings["OPENMP"], "-fPIC", *settings["VARIANTS"][isa]], isa


def build(copy: Path, flags: list[str]) -> None:
    """Compile the kernels in *copy*, as one variant called portable."""
    native = copy / PACKAGE.name / "native"
    compiler = os.environ.get("CXX", "c++")
    objects = []
    for source, define in (
        ("dispatch.cpp", ["-DKVPLAN_BUILT(X)=X(portable)"]),
        ("kernels.cpp", ["-DKVPLAN_ISA=portable"]),
    ):
        objects.append(str(copy / f"{source}.o"))
        subprocess.run([compiler, *flags, *define, "-c", str(native / source), "-o", objects[-1]], check=True)
    library = native / f"_kernels{sysconfig.get_config_var('EXT_SUFFIX')}"
    subprocess.run([compiler, "-shared", *objects, "-o", str(library)], check=True)


def run_tests(copy: Path, names: tuple[str, ...]) -> int:
    """Return the exit status of the kernel tests against the package in *copy*."""
    tests = [str(Path(__file__).parent / name) for name in names]
    environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    environment.pop("KVPLAN_CPU_VARIANT", None)
    where = subprocess.run(
        [sys.executable, "-c", "import kvplan_kernels; print(kvplan_kernels.__file__)"],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    if not where.stdout.startswith(str(copy)):
        raise RuntimeError(f"the tests would import {where.stdout.strip()}, not the copy in {copy}")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not slow", "-p", "no:cacheprovider", *tests]
    return subprocess.run(command, env=environment, cwd=ROOT, stdout=subprocess.DEVNULL, check=False).returncode


def noticed(mutant: Mutant, copy: Path, flags: list[str]) -> bool:
    """Return whether the tests fail with *mutant*, and say so."""
    path = copy / PACKAGE.name / mutant.file
    whole = path.read_text(encoding="utf-8")
    say(f"{mutant.name} ... ")
    path.write_text(mutant.broken(whole), encoding="utf-8")
    try:
        if not mutant.triton:
            build(copy, flags)
        status = run_tests(copy, TRITON_TESTS if mutant.triton else NATIVE_TESTS)
    finally:
        path.write_text(whole, encoding="utf-8")
    say("noticed\n" if status == NOTICED else f"crashed ({status})\n" if status < 0 else f"UNNOTICED ({status})\n")
    return status == NOTICED or status < 0


if __name__ == "__main__":
    sys.exit(main())
