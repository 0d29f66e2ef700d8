"""What the GPU kernels are compiled to, held against `inspect_budget.json`; no GPU is needed.

The budget holds figures of `kvplan kernels inspect --json`. A figure that gets better is written into it by hand.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvplan.core.gpus import GPUS
from kvplan.measure.inspection import FORMATS, predict
from kvplan.measure.sass import main_loop, parse_loops, spills

BUDGET = json.loads((Path(__file__).parent / "inspect_budget.json").read_text(encoding="utf-8"))
MOST = ("registers", "spills", "shared_bytes", "instructions_per_element", "int_to_float", "tensor_core_instructions")
LEAST = ("load_bytes",)
ELSEWHERE = "sm_80,sm_100,sm_120,gfx942"
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


def inspect(*arguments: str) -> Any:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "kvplan", "kernels", "inspect", "--json", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return json.loads(done.stdout)["kernels"] if done.returncode == 0 else (done.returncode, done.stderr)


def assert_within_budget(kernels: list[dict[str, Any]]) -> None:
    allowed = {(row["format"], row["arch"]): row for row in BUDGET}
    for kernel in kernels:
        row = allowed[kernel["format"], kernel["arch"]]
        assert kernel["unsupported"] == row.get("unsupported")
        assert (kernel["tile_tokens"], kernel["warps"]) == (row["tile_tokens"], row["warps"])
        for name in (*MOST, *LEAST):
            found, known = kernel[name], row[name]
            if known is not None:
                held = found <= known * 1.005 if name in MOST else found >= known
                assert held, (kernel["format"], kernel["arch"], name, found, known)


def assert_in_bounds(kernel: dict[str, Any]) -> None:
    assert (kernel["int_to_float"], kernel["spills"], kernel["load_bytes"]) == (0, 0, 16)
    assert kernel["registers"] * kernel["warps"] <= REGISTERS_MOST
    assert kernel["instructions_per_element"] <= INSTRUCTIONS_MOST.get(kernel["format"], 5.0)


def test_one_format_of_each_kind_is_within_its_budget_and_the_bounds_on_hopper() -> None:
    kernels = inspect("--arch", "sm_90", *(option for name in COMMON for option in ("-f", name)))
    assert [kernel["format"] for kernel in kernels] == list(COMMON)
    assert_within_budget(kernels)
    for kernel in kernels:
        assert_in_bounds(kernel)


def test_an_amd_target_compiles() -> None:
    kernels = inspect("--arch", "gfx942", "-f", "int4", "-f", "fp8_e4m3")
    assert_within_budget(kernels)
    for kernel in kernels:
        assert kernel["registers"] > 0


def test_an_architecture_without_the_instructions_is_listed_with_the_reason() -> None:
    (kernel,) = inspect("--arch", "sm_80", "-f", "fp8_e4m3")
    assert_within_budget([kernel])
    assert "start with sm_89" in kernel["unsupported"]


@pytest.mark.slow
def test_every_format_is_within_its_budget_on_every_architecture() -> None:
    kernels = inspect()
    assert len(kernels) == len(BUDGET)
    assert_within_budget(kernels)
    for kernel in kernels:
        if kernel["arch"] == "sm_90":
            assert_in_bounds(kernel)


def test_the_budget_lists_every_format_on_every_architecture() -> None:
    assert {(row["format"], row["arch"]) for row in BUDGET} == {
        (form, arch) for form in FORMATS for arch in ["sm_90", *ELSEWHERE.split(",")]
    }


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--arch", "sm_12"], "nothing is known of sm_12; use sm_80, sm_90"),
        (["--arch", "sm_90", "-f", "int3"], "unknown format 'int3'"),
        (["--arch", "sm_90", "--head-dim", "20"], "32 to 256 in steps of 8"),
    ],
)
def test_what_there_is_no_kernel_for_has_its_reason(arguments: list[str], says: str) -> None:
    found = inspect(*arguments)
    if isinstance(found, tuple):
        assert found[0] == 3
        assert found[1].startswith("error: ")
        assert says in found[1]
    else:
        assert says in found[0]["unsupported"]


def test_loops_are_found_by_their_branches_back() -> None:
    loops = parse_loops(SASS)
    assert [len(loop.body) for loop in loops] == [4, 5]
    assert [loop.tensor_core for loop in loops] == [1, 2]
    assert [loop.conversions for loop in loops] == [1, 0]
    assert [loop.widest_load_bytes() for loop in loops] == [16, 4]
    assert main_loop(loops) == loops[1]
    assert spills(SASS) == 1
    assert main_loop([]) is None


def test_a_prediction_is_bound_by_the_slower_of_issue_and_memory() -> None:
    gpu = GPUS["sm_90"]
    memory = predict(gpu, 2.0, 136.0, 256)
    issue = predict(gpu, 20.0, 136.0, 256)
    assert (memory.bound, memory.read_bandwidth_share) == ("memory", 1.0)
    assert memory.seconds_per_token == pytest.approx(136 / 4.8e12)
    assert issue.bound == "issue"
    assert issue.read_bandwidth_share == pytest.approx(memory.seconds_per_token / issue.seconds_per_token)


@pytest.mark.parametrize(
    ("registers", "shared", "warps", "expected"),
    [(128, 1024, 4, 16 / 64), (32, 0, 4, 1.0), (209, 20548, 2, 8 / 64), (32, 100 * 1024, 4, 8 / 64)],
)
def test_occupancy_is_what_registers_and_shared_memory_leave(
    registers: int, shared: int, warps: int, expected: float
) -> None:
    assert GPUS["sm_90"].occupancy(registers=registers, shared_bytes=shared, warps=warps) == expected
