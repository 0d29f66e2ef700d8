"""The GPU kernels looked at without a GPU: compiled ahead of time by Triton's toolchain, disassembled and counted."""

import re
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvplan.core.gpus import GPUS, LANES_PER_CLOCK, Gpu
from kvplan.errors import MissingPartError, UnsupportedFormatError
from kvplan.measure.sass import Loop, main_loop, parse_loops, spills
from kvplan_kernels.decode.gpu import Compilation, compilation
from kvplan_kernels.format import UnsupportedError, parse
from kvplan_kernels.gpu import targets
from kvplan_kernels.layout import KVLayout, Order

FORMATS: Final = (
    "bf16", "fp8_e4m3", "int8", "k8v4", "int4", "int2", "k4v4-g64", "kivi-k8v8-g64", "kivi-k4v4-g64", "kivi-k2v2-g64",
)  # fmt: skip
AMD: Final = "gfx942"
ARCHITECTURES: Final = (*GPUS, AMD)
_TOKENS: Final = 2**15
_REGISTERS: Final = re.compile(r"REG:(\d+)")
_AMD_REGISTERS: Final = re.compile(r"\.vgpr_count:\s+(\d+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """What the counted instructions and the bytes allow at the most; never held against a device.

    Attributes:
        device: The GPU that stands for the architecture.
        bound: memory or issue.
        read_bandwidth_share: Part of the reported bandwidth at which useful bytes could be read.
        seconds_per_token: Of one KV head, on the whole device.
    """

    device: str
    bound: str
    read_bandwidth_share: float
    seconds_per_token: float
    evidence: str = "predicted"


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspected:
    """One kernel on one architecture; figures of a loop are those of the main loop.

    Attributes:
        unsupported: Why there is none, or None.
        note: What could not be counted, and why.
        spills: Instructions that move registers to or from memory.
        occupancy: Part of a multiprocessor's warps.
        instructions_per_element: Lanes' instructions for each element of K and V.
        load_bytes: The widest access to global memory.
        classes: Instructions by name, most frequent first.
    """

    op: str
    format: str
    head_dim: int
    gqa: int
    block_size: int
    arch: str
    unsupported: str | None = None
    note: str = ""
    tile_tokens: int | None = None
    warps: int | None = None
    registers: int | None = None
    spills: int | None = None
    shared_bytes: int | None = None
    occupancy: float | None = None
    instructions_per_element: float | None = None
    int_to_float: int | None = None
    load_bytes: int | None = None
    tensor_core_instructions: int | None = None
    classes: dict[str, int] | None = None
    predicted: Prediction | None = None


def inspect_decode(
    formats: Iterable[str], architectures: Sequence[str], *, head_dim: int, gqa: int, block_tokens: int
) -> list[Inspected]:
    """Return the decode kernel of each format on each architecture.

    Raises:
        MissingPartError: Triton or its toolchain is not there, or runs kernels in its interpreter.
        UnsupportedFormatError: An architecture that nothing is known of.
    """
    _check_toolchain()
    for arch in architectures:
        if arch not in ARCHITECTURES:
            raise UnsupportedFormatError(f"nothing is known of {arch}", hint=f"use {', '.join(ARCHITECTURES)}")
    return [_inspect(name, arch, head_dim, gqa, block_tokens) for name in formats for arch in architectures]


def _check_toolchain() -> None:
    if targets.interpreted():
        raise MissingPartError("Triton runs kernels in its interpreter", hint=f"unset {targets.INTERPRET}")
    try:
        from triton import knobs
    except ImportError as error:
        raise MissingPartError("Triton is not installed", hint="install kvplan[profile] on Linux") from error
    if not Path(knobs.nvidia.cuobjdump.path).exists():
        raise MissingPartError(f"Triton's toolchain is incomplete: no {knobs.nvidia.cuobjdump.path}")


def _inspect(name: str, arch: str, head_dim: int, gqa: int, block_tokens: int) -> Inspected:
    blank: dict[str, Any] = {
        "op": "decode", "format": name, "head_dim": head_dim, "gqa": gqa, "block_size": block_tokens, "arch": arch,
    }  # fmt: skip
    try:
        layout = KVLayout(
            format=parse(name), kv_heads=1, head_dim=head_dim, block_tokens=block_tokens, order=Order.ROWS
        )
        targets.check_format(layout.format, arch)
        asked = compilation(layout, gqa, asm=arch != AMD)
    except UnsupportedError as error:
        return Inspected(**blank, unsupported=str(error))
    compiled = _compile(asked, arch)
    known = {**blank, "tile_tokens": asked.tiling.tokens, "warps": asked.tiling.warps}
    known["shared_bytes"] = compiled.metadata.shared
    if arch == AMD:
        registers = _AMD_REGISTERS.search(compiled.asm["amdgcn"])
        note = "instructions are counted on NVIDIA's architectures only"
        return Inspected(**known, registers=int(registers[1]) if registers else None, note=note)
    sass, registers_used = _disassemble(compiled.asm["cubin"])
    gpu = GPUS[arch]
    known |= {
        "registers": registers_used,
        "spills": spills(sass),
        "occupancy": gpu.occupancy(
            registers=registers_used, shared_bytes=known["shared_bytes"], warps=asked.tiling.warps
        ),
    }
    loop = main_loop(parse_loops(sass))
    if loop is None:
        return Inspected(**known, note="no loop with matrix products was found")
    return Inspected(**known, **_loop_figures(loop, asked, layout, gpu))


def _loop_figures(loop: Loop, asked: Compilation, layout: KVLayout, gpu: Gpu) -> dict[str, Any]:
    elements = 2 * asked.tiling.tokens * layout.head_dim
    per_element = len(loop.body) * 32 * asked.tiling.warps / elements
    return {
        "instructions_per_element": per_element,
        "int_to_float": loop.conversions,
        "load_bytes": loop.widest_load_bytes(),
        "tensor_core_instructions": loop.tensor_core,
        "classes": dict(loop.classes().most_common()),
        "predicted": predict(gpu, per_element, layout.logical_bytes(_TOKENS) / _TOKENS, 2 * layout.head_dim),
    }


def predict(gpu: Gpu, instructions_per_element: float, bytes_per_token: float, elements_per_token: int) -> Prediction:
    """Return the time of a token of one KV head where every clock issues, or every clock reads, whichever is longer."""
    lanes = gpu.multiprocessors * LANES_PER_CLOCK * gpu.clock_hz
    issue_s, memory_s = (
        elements_per_token * instructions_per_element / lanes,
        bytes_per_token / gpu.bandwidth_bytes_per_s,
    )
    seconds = max(issue_s, memory_s)
    return Prediction(
        device=gpu.name,
        bound="issue" if issue_s > memory_s else "memory",
        read_bandwidth_share=memory_s / seconds,
        seconds_per_token=seconds,
    )


def _compile(asked: Compilation, arch: str) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    target = GPUTarget("hip", arch, 64) if arch == AMD else GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)
    source = ASTSource(
        fn=asked.kernel, signature=asked.signature, constexprs=asked.constants, attrs=asked.attributes
    )  # fmt: skip
    return triton.compile(source, target=target, options=asked.options)


def _disassemble(cubin: bytes) -> tuple[str, int]:
    """Return the disassembly, and the registers of a thread."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        sass, usage = (
            subprocess.run(
                [knobs.nvidia.cuobjdump.path, option, file.name], capture_output=True, text=True, check=True
            ).stdout
            for option in ("-sass", "-res-usage")
        )
    registers = _REGISTERS.search(usage)
    assert registers is not None
    return sass, int(registers[1])
