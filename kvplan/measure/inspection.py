"""The GPU kernels looked at without a GPU: compiled ahead of time by Triton's toolchain, disassembled and counted."""

import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvplan.core.gpus import GPUS, Gpu, of_arch
from kvplan.core.kernel_times import KernelWork, Prediction, predict
from kvplan.errors import InputError, MissingPartError, UnsupportedFormatError
from kvplan.measure.sass import main_loop, parse_loops, spills, whole_kernel
from kvplan_kernels.cases import QueryType
from kvplan_kernels.format import UnsupportedError, parse
from kvplan_kernels.gpu import targets
from kvplan_kernels.gpu.compilation import compilation, compiled
from kvplan_kernels.gpu.targets import Launch
from kvplan_kernels.inputs import QUERY_TYPE
from kvplan_kernels.layout import KVLayout, Order
from kvplan_kernels.recorded import CALLS, KERNELS, Call, CountedKernel, launches_of, stored_tensor

FORMATS: Final = (
    "bf16", "fp8_e4m3", "int8", "k8v4", "int4", "int2", "k4v4-g64", "kivi-k8v8-g64", "kivi-k4v4-g64", "kivi-k2v2-g64",
)  # fmt: skip
AMD: Final = "gfx942"
ARCHITECTURES: Final = (*GPUS, AMD)
OPERATIONS: Final = tuple(CALLS)
ALL: Final = "all"
_LANES: Final = 32
_MULTIPROCESSORS_OF_AMD: Final = 304
"""Of an MI300X, as its data sheet has it."""
_REGISTERS: Final = re.compile(r"REG:(\d+)")
_AMD_REGISTERS: Final = re.compile(r"\.vgpr_count:\s+(\d+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The calls whose kernels are looked at.

    Attributes:
        head_dim: Elements of a head.
        kv_heads: KV heads.
        gqa: Query heads of a KV head.
        block_size: Tokens of a page.
        batch: Sequences.
        tokens: That each holds.
        queries: Query tokens of each, or tokens appended to it.
        query_type: bf16, fp16 or fp32.
        softcap: Softcap, None for none.
        positions: Whether queries stand elsewhere than at the sequence's end.
    """

    head_dim: int = 128
    kv_heads: int = 8
    gqa: int = 4
    block_size: int = 128
    batch: int = 1
    tokens: int = 32768
    queries: int = 1
    query_type: str = "bf16"
    softcap: float | None = None
    positions: bool = False

    def __post_init__(self) -> None:
        """Refuse a type that no query has."""
        if self.query_type not in list(QueryType):
            raise InputError(f"no queries are {self.query_type!r}", hint=f"use {', '.join(QueryType)}")

    def call(self, name: str) -> Call:
        """Return the call on a cache of format *name*; UnsupportedError where it has no layout."""
        layout = KVLayout(
            format=parse(name), kv_heads=self.kv_heads, head_dim=self.head_dim, block_tokens=self.block_size,
            order=Order.ROWS,
        )  # fmt: skip
        return Call(
            layout=layout, batch=self.batch, tokens=self.tokens, queries=self.queries, gqa=self.gqa,
            query_type=QUERY_TYPE[QueryType(self.query_type)], softcap=self.softcap, positions=self.positions,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspected:
    """One kernel on one architecture, as one call launches it.

    Figures of a loop are those of the main loop; a kernel without matrix products is counted whole.

    Attributes:
        kernel: Its name; empty where there is none.
        tensor: "k" or "v" where the kernel handles one of them.
        unsupported: Why there is none, or None.
        note: What could not be counted, and why.
        programs: Of the launch.
        tile_tokens: Tokens of a tile; None where the kernel handles none.
        spills: Instructions that move registers to or from memory for want of them.
        loop_spills: Those in the counted instructions.
        occupancy: Part of a multiprocessor's warps.
        instructions_per_element: Lanes' instructions for each element of K and V, or of the output of a merge.
        load_bytes: The widest access to global memory.
        tensor_core_instructions: Of a program's warp.
        matrix_flops: Of a program, in the counted instructions; None where the instructions do not tell.
        classes: Instructions by name, most frequent first.
        predicted: For each GPU of the architecture, the one that stands for it first.
    """

    op: str
    format: str
    arch: str
    shape: Shape
    kernel: str = ""
    tensor: str = ""
    unsupported: str | None = None
    note: str = ""
    programs: int | None = None
    tile_tokens: int | None = None
    warps: int | None = None
    registers: int | None = None
    spills: int | None = None
    loop_spills: int | None = None
    shared_bytes: int | None = None
    occupancy: float | None = None
    instructions_per_element: float | None = None
    int_to_float: int | None = None
    load_bytes: int | None = None
    tensor_core_instructions: int | None = None
    matrix_flops: float | None = None
    classes: dict[str, int] | None = None
    predicted: tuple[Prediction, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictedCall:
    """The least time of one call: its kernels one after another, each as long as its longest bound.

    Attributes:
        launches: Its kernels.
        seconds: The sum of their predictions.
    """

    op: str
    format: str
    arch: str
    device: str
    shape: Shape
    launches: int
    seconds: float
    evidence: str = "predicted"


def operations(text: str) -> tuple[str, ...]:
    """Return the operations that *text* names.

    Raises:
        InputError: There is none of that name.
    """
    if text == ALL:
        return OPERATIONS
    if text not in OPERATIONS:
        raise InputError(f"no operation is called {text!r}", hint=f"use {', '.join((*OPERATIONS, ALL))}")
    return (text,)


def inspect_kernels(
    ops: Sequence[str],
    formats: Sequence[str],
    architectures: Sequence[str],
    shape: Shape,
    multiprocessors: int | None = None,
) -> list[Inspected]:
    """Return the kernels of each operation, format and architecture, as a call of *shape* launches them.

    *multiprocessors* are those of the GPU; None takes the one that stands for each architecture.

    Raises:
        MissingPartError: Triton or its toolchain is not there, or runs kernels in its interpreter.
        UnsupportedFormatError: An architecture that nothing is known of.
    """
    _check_toolchain()
    for arch in architectures:
        if arch not in ARCHITECTURES:
            raise UnsupportedFormatError(f"nothing is known of {arch}", hint=f"use {', '.join(ARCHITECTURES)}")
    return [
        kernel
        for op in ops
        for name in formats
        for arch in architectures
        for kernel in _inspect(op, name, arch, shape, multiprocessors)
    ]


def predicted_calls(kernels: Sequence[Inspected]) -> list[PredictedCall]:
    """Return the time of each call whose kernels all have a prediction."""
    found = []
    calls: dict[tuple[str, str, str], list[Inspected]] = {}
    for kernel in kernels:
        calls.setdefault((kernel.op, kernel.format, kernel.arch), []).append(kernel)
    for (op, name, arch), of_call in calls.items():
        for made in zip(*(kernel.predicted for kernel in of_call), strict=True):
            seconds = sum(prediction.seconds for prediction in made)
            found.append(
                PredictedCall(
                    op=op, format=name, arch=arch, device=made[0].device, shape=of_call[0].shape, launches=len(made),
                    seconds=seconds,
                )
            )  # fmt: skip
    return found


def _check_toolchain() -> None:
    if targets.interpreted():
        raise MissingPartError("Triton runs kernels in its interpreter", hint=f"unset {targets.INTERPRET}")
    try:
        from triton import knobs
    except ImportError as error:
        raise MissingPartError("Triton is not installed", hint="install kvplan[profile] on Linux") from error
    if not Path(knobs.nvidia.cuobjdump.path).exists():
        raise MissingPartError(f"Triton's toolchain is incomplete: no {knobs.nvidia.cuobjdump.path}")


def _inspect(op: str, name: str, arch: str, shape: Shape, multiprocessors: int | None) -> list[Inspected]:
    blank: dict[str, Any] = {"op": op, "format": name, "arch": arch, "shape": shape}
    if multiprocessors is None:
        multiprocessors = _MULTIPROCESSORS_OF_AMD if arch == AMD else GPUS[arch].multiprocessors
    try:
        call = shape.call(name)
        launches = launches_of(op, call, multiprocessors=multiprocessors, arch=arch)
    except UnsupportedError as error:
        return [Inspected(**blank, unsupported=str(error))]
    return [Inspected(**blank, **_figures(launch, call, arch)) for launch in launches]


def _figures(launch: Launch, call: Call, arch: str) -> dict[str, Any]:
    binary = compiled(compilation(launch, arch), arch)
    programs, warps = 1, launch.options["num_warps"]
    for extent in launch.grid:
        programs *= extent
    known: dict[str, Any] = {
        "kernel": launch.kernel.__name__, "tensor": stored_tensor(launch), "programs": programs,
        "tile_tokens": launch.arguments.get("BN", launch.arguments.get("TILE")), "warps": warps,
        "shared_bytes": binary.metadata.shared,
    }  # fmt: skip
    if arch == AMD:
        registers = _AMD_REGISTERS.search(binary.asm["amdgcn"])
        note = "instructions are counted on NVIDIA's architectures only"
        return {**known, "registers": int(registers[1]) if registers else None, "note": note}
    sass, registers_used = _disassemble(binary.asm["cubin"])
    occupancy = GPUS[arch].occupancy(registers=registers_used, shared_bytes=known["shared_bytes"], warps=warps)
    known |= {"registers": registers_used, "spills": spills(sass), "occupancy": occupancy}
    return known | _counts(sass, KERNELS[known["kernel"]], launch, call, of_arch(arch))


def _counts(sass: str, counted: CountedKernel, launch: Launch, call: Call, gpus: Sequence[Gpu]) -> dict[str, Any]:
    loop, share, warps = main_loop(parse_loops(sass)), counted.share(launch, call), launch.options["num_warps"]
    # A loop over one query is none, and then all of its programs' rounds stand one after another.
    in_loop = counted.loop and loop is not None
    body = loop if in_loop and loop is not None else whole_kernel(sass)
    elements = share.elements * (share.rounds if counted.loop and not in_loop else 1)
    straight = in_loop or not (counted.loop or counted.branches)
    lane_instructions, of_warp = len(body.body) * _LANES * warps, body.matrix_flops()
    flops = None if of_warp is None else of_warp * warps
    work = KernelWork(
        bytes=share.bytes, programs=share.programs, rounds=share.rounds,
        lane_instructions=lane_instructions if straight else None, matrix_flops=flops if straight else None,
    )  # fmt: skip
    return {
        "instructions_per_element": lane_instructions / elements,
        "loop_spills": body.spills,
        "int_to_float": body.conversions,
        "load_bytes": body.widest_load_bytes(),
        "tensor_core_instructions": body.tensor_core,
        "matrix_flops": flops,
        "classes": dict(body.classes().most_common()),
        "note": "" if straight else "instr counts all branches, of which a program takes some",
        "predicted": tuple(predict(gpu, work) for gpu in gpus),
    }


def _disassemble(cubin: bytes) -> tuple[str, int]:
    """Return the disassembly, and the registers of a thread."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        sass, usage = (_told_by([knobs.nvidia.cuobjdump.path, option, file.name]) for option in ("-sass", "-res-usage"))
    registers = _REGISTERS.search(usage)
    if registers is None:
        raise MissingPartError(f"{knobs.nvidia.cuobjdump.path} does not tell a kernel's registers")
    return sass, int(registers[1])


def _told_by(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise MissingPartError(f"{command[0]} fails: {done.stderr.strip().partition(chr(10))[0]}")
    return done.stdout
