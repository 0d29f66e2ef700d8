"""What the GPU kernels are compiled to, held against `inspect_budget.json`; no GPU is needed."""

import json
import os
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvplan.core.gpus import GPUS, LAUNCH_S, of_arch
from kvplan.core.kernel_times import KernelWork, predict
from kvplan.measure.inspection import ARCHITECTURES, FORMATS, OPERATIONS
from kvplan.measure.sass import Loop, main_loop, parse_loops, spills, whole_kernel

WRITER: dict[str, Any] = runpy.run_path(str(Path(__file__).parent / "write_budget.py"))
BUDGET = json.loads(WRITER["BUDGET"].read_text(encoding="utf-8"))
MOST = (
    "registers", "spills", "loop_spills", "shared_bytes", "instructions_per_element", "int_to_float",
    "tensor_core_instructions",
)  # fmt: skip
LEAST = ("load_bytes",)
COMMON = ("fp8_e4m3", "int8", "int4", "int2", "kivi-k4v4-g64")
INSTRUCTIONS_MOST = {"fp8_e4m3": 3.0, "int8": 3.0, "int4": 3.0, "int2": 4.0}
REGISTERS_MOST = 128 * 4
"""Of the threads in one lane of a program: 128 at 4 warps."""

SASS = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   STL [R1], R2 ;
        /*0020*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0030*/                   I2F.F16.U32 R5, R4 ;
        /*0040*/                   HMMA.16816.F32.BF16 R8, R4, R6, R8 ;
        /*0050*/             @!P0  BRA 0x20 ;
        /*0060*/                   LOP3.LUT R4, R4, 0xf000f, RZ, 0xc0, !PT ;
        /*0070*/                   LDG.E R4, desc[UR4][R2.64] ;
        /*0080*/               @P1 HMMA.16816.F32.BF16 R8, R4, R6, R8 ;
        /*0090*/                   HMMA.16816.F32.BF16 R8, R4, R6, R8 ;
        /*00a0*/              @UP0 BRA 0x60 ;
        /*00b0*/                   BRA 0xb0 ;
"""


def inspect(*arguments: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = WRITER["inspect"](*arguments)
    return found


def assert_within_budget(kernels: list[dict[str, Any]]) -> None:
    allowed = {WRITER["key"](row): row for row in BUDGET}
    for kernel in kernels:
        row = allowed[WRITER["key"](kernel)]
        assert (kernel["tile_tokens"], kernel["warps"]) == (row["tile_tokens"], row["warps"])
        for name in (*MOST, *LEAST):
            found, known = kernel[name], row[name]
            if known is not None:
                held = found <= known * 1.005 if name in MOST else found >= known
                assert held, (WRITER["key"](kernel), name, found, known)


def assert_in_bounds(kernel: dict[str, Any]) -> None:
    """Hold what is wanted of a decode's main loop on Hopper, of one query token and head size 128."""
    assert (kernel["int_to_float"], kernel["spills"], kernel["load_bytes"]) == (0, 0, 16)
    assert kernel["registers"] * kernel["warps"] <= REGISTERS_MOST
    assert kernel["instructions_per_element"] <= INSTRUCTIONS_MOST.get(kernel["format"], 5.0)


@pytest.mark.parametrize("arguments", WRITER["QUICK"], ids=" ".join)
def test_common_kernels_compile_within_their_budget(arguments: tuple[str, ...]) -> None:
    kernels = inspect(*arguments)
    assert kernels
    assert_within_budget(kernels)


def test_an_architecture_without_the_instructions_is_listed_with_the_reason() -> None:
    (kernel,) = inspect("--arch", "sm_80", "-f", "fp8_e4m3")
    assert "start with sm_89" in kernel["unsupported"]


@pytest.mark.slow
@pytest.mark.parametrize("arguments", WRITER["ALL"], ids=" ".join)
def test_every_kernel_compiles_within_its_budget(arguments: tuple[str, ...]) -> None:
    assert_within_budget([kernel for kernel in inspect(*arguments) if not kernel["unsupported"]])


def of(**wanted: object) -> list[dict[str, Any]]:
    """Return the rows of the budget with these values."""
    return [row for row in BUDGET if all(row[name] == value for name, value in wanted.items())]


@pytest.mark.parametrize("name", FORMATS)
def test_the_budget_itself_is_in_bounds_on_hopper(name: str) -> None:
    one = {"queries": 1, "gqa": 4, "query_type": "bf16", "softcap": None}
    (split,) = of(kernel="decode_split", op="decode", format=name, arch="sm_90", **one)
    assert_in_bounds(split)


@pytest.mark.parametrize("kernel", ["fold_words", "dequantize_tokens", "append_pages", "append_rest"])
def test_what_moves_the_cache_spills_nothing_and_reads_many_bytes_at_once(kernel: str) -> None:
    for row in of(kernel=kernel, arch="sm_90"):
        part = {"int2": 8, "int3": 4} if kernel == "append_pages" else {}  # of the tokens of a word each
        assert (row["load_bytes"], row["spills"]) == (part.get(row["format"], 16), 0), WRITER["key"](row)


def test_the_budget_lists_every_operation_and_architecture_and_decode_of_every_format() -> None:
    assert {row["format"] for row in of(op="decode", arch="sm_90")} >= set(FORMATS)
    for op in OPERATIONS:
        assert {row["arch"] for row in of(op=op)} == set(ARCHITECTURES)
        assert op == "read" or {row["format"] for row in of(op=op, arch="sm_90")} >= set(COMMON)
    for arch in ARCHITECTURES:
        without = {"fp8_e4m3"} if arch == "sm_80" else set()
        assert {row["format"] for row in of(op="decode", arch=arch)} >= {"bf16", *COMMON} - without


def test_kernels_spill_in_no_main_loop_of_the_common_formats() -> None:
    for row in of(kernel="decode_split", arch="sm_90"):
        if row["format"] in COMMON and row["queries"] * row["gqa"] <= 8:
            assert row["loop_spills"] == 0, WRITER["key"](row)


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["--arch", "sm_12"], 3, "nothing is known of sm_12; use sm_80, sm_89"),
        (["--op", "attend"], 2, "no operation is called 'attend'; use decode, received, append, dequantize, read, all"),
        (["--query-type", "fp8"], 2, "no queries are 'fp8'; use bf16, fp16, fp32"),
    ],
)
def test_what_cannot_be_looked_at_ends_with_its_reason(arguments: list[str], status: int, says: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "kvplan", "kernels", "inspect", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (status, "")
    assert done.stderr.startswith("error: ")
    assert says in done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(["-f", "int4", "--head-dim", "20"], "32 to 256 in steps of 8"), (["-f", "int7"], "7 bits")],
)
def test_what_there_is_no_kernel_for_has_its_reason(arguments: list[str], says: str) -> None:
    (found,) = inspect("--arch", "sm_90", *arguments)
    assert says in found["unsupported"]


SPECIALIZED = """
import torch
from kvplan_kernels.format import parse
from kvplan_kernels.gpu.compilation import compilation
from kvplan_kernels.layout import KVLayout, Order
from kvplan_kernels.recorded import Call, launches_of

layout = KVLayout(format=parse("int4"), kv_heads=2, head_dim=64, block_tokens=64, order=Order.ROWS)
call = Call(layout=layout, tokens=100, queries=1, gqa=5)
asked = compilation(launches_of("decode", call, multiprocessors=8, arch="sm_90")[0], "sm_90")
names = list(asked.signature)
print(asked.signature["query"], asked.signature["meta"], asked.signature["queries"], asked.signature["rows"])
print(asked.constants[names.index("queries"),], asked.attributes[names.index("query_stride_head"),])
print(asked.attributes[names.index("rows"),], asked.signature["splits"], asked.attributes.get((names.index("splits"),)))
"""


def test_a_one_is_a_constant_and_a_multiple_of_sixteen_is_known_as_the_launcher_has_it() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", SPECIALIZED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["*bf16 *fp16 constexpr i32", "1 [['tt.divisibility', 16]]", "[] i32 None"]


def test_loops_are_found_by_their_branches_back() -> None:
    loops = parse_loops(SASS)
    assert [len(loop.body) for loop in loops] == [4, 5]
    assert [loop.tensor_core for loop in loops] == [1, 2]
    assert [loop.conversions for loop in loops] == [1, 0]
    assert [loop.widest_load_bytes() for loop in loops] == [16, 4]
    assert main_loop(loops) == loops[1]
    assert spills(SASS) == 1
    assert main_loop([]) is None


@pytest.mark.parametrize(
    ("name", "flops"),
    [
        ("HMMA.16816.F32.BF16", 4096.0),
        ("HMMA.1688.F32", 2048.0),
        ("HGMMA.64x32x16.F32.BF16", 16384.0),
        ("UTCHMMA", None),
        ("HFMA2.MMA", 0.0),
        ("FFMA", 0.0),
    ],
)
def test_the_work_of_a_matrix_instruction_is_in_its_name(name: str, flops: float | None) -> None:
    assert Loop((f"{name} R8, R4, R6, R8",)).matrix_flops() == flops


def test_a_kernel_ends_at_its_last_instruction() -> None:
    assert len(whole_kernel(SASS).body) == 11
    assert len(whole_kernel(SASS + "/*00c0*/ NOP;").body) == 11


WORK = KernelWork(bytes=4.8e6, programs=132, rounds=1, lane_instructions=128 * 100, matrix_flops=1e6)


@pytest.mark.parametrize(
    ("change", "bound", "seconds"),
    [
        ({}, "memory", 1e-6),
        ({"bytes": 1.0}, "launch", LAUNCH_S),
        ({"lane_instructions": 128 * 19800}, "issue", 1e-5),
        ({"lane_instructions": 128 * 19800, "programs": 133}, "issue", 2e-5),
        ({"lane_instructions": 128 * 19800, "rounds": 3}, "issue", 3e-5),
        ({"matrix_flops": 989.4e12 / 132 * 1e-5}, "tensor cores", 1e-5),
    ],
)
def test_a_prediction_is_the_longest_of_its_bounds(change: dict[str, Any], bound: str, seconds: float) -> None:
    made = predict(GPUS["sm_90"], replace(WORK, **change))
    assert made.device == "H200 SXM"
    assert (made.bound, made.seconds) == (bound, pytest.approx(seconds))
    assert made.seconds == max(made.bounds_s.values())
    assert made.read_bandwidth_share == pytest.approx(made.bounds_s["memory"] / seconds)


def test_a_bound_that_is_unknown_is_absent() -> None:
    made = predict(GPUS["sm_90"], replace(WORK, lane_instructions=None, matrix_flops=None))
    assert set(made.bounds_s) == {"memory", "launch"}


def test_one_gpu_stands_for_its_architecture() -> None:
    assert [gpu.name for gpu in of_arch("sm_90")] == ["H200 SXM", "H100 SXM"]
    assert GPUS["sm_90"].name == "H200 SXM"


@pytest.mark.parametrize(
    ("registers", "shared", "warps", "expected"),
    [(128, 1024, 4, 16 / 64), (32, 0, 4, 1.0), (209, 20548, 2, 8 / 64), (32, 100 * 1024, 4, 8 / 64)],
)
def test_occupancy_is_what_registers_and_shared_memory_leave(
    registers: int, shared: int, warps: int, expected: float
) -> None:
    assert GPUS["sm_90"].occupancy(registers=registers, shared_bytes=shared, warps=warps) == expected
