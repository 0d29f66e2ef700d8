"""The table of figures that cells and profiles hold: what each means and which way is better."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class FigureKind(StrEnum):
    """How a figure is compared between two profiles."""

    EXACT = "exact"
    TIME = "time"
    INFO = "info"


@dataclass(frozen=True, slots=True)
class FigureSpec:
    """A figure's meaning.

    Attributes:
        reference: The figure of the same cell that a time is divided by before two profiles are compared.
        of_gpu: Whether only a GPU has it.
    """

    name: str
    unit: str
    kind: FigureKind
    meaning: str
    reference: str | None = None
    of_gpu: bool = False


_ALL: Final = (
    FigureSpec(
        "allocated_bytes_per_sequence",
        "bytes",
        FigureKind.EXACT,
        "cache of one sequence at full length, all layers, as allocated (mean over the cell's sequences)",
    ),
    FigureSpec("logical_bytes_per_sequence", "bytes", FigureKind.EXACT, "geometry times format for the same sequence"),
    FigureSpec("cache_bytes", "bytes", FigureKind.EXACT, "all tensors of the cell's cache, as allocated"),
    FigureSpec("read_bytes_per_step", "bytes", FigureKind.EXACT, "cache bytes that one decode step reads"),
    FigureSpec("prefill_s", "s", FigureKind.INFO, "16-bit prefill of one prompt through the model"),
    # Not compared: nothing in its run is of its kind to divide by.
    FigureSpec("pack_s", "s", FigureKind.INFO, "quantizing one prompt's K and V into pages, all layers"),
    FigureSpec("ttft_s", "s", FigureKind.TIME, "prefill and pack of one prompt", "prefill_s"),
    FigureSpec("append_s", "s", FigureKind.INFO, "appending one token to every sequence, all layers; flushes included"),
    FigureSpec(
        "decode_fused_s", "s", FigureKind.TIME, "attention of one step, all layers, fused kernel", "decode_16bit_s"
    ),
    FigureSpec(
        "decode_16bit_s", "s", FigureKind.INFO, "the same by the best 16-bit kernel, interleaved sample by sample"
    ),
    FigureSpec(
        "decode_unfused_s",
        "s",
        FigureKind.TIME,
        "the same by dequantizing to a temporary and attending to it",
        "decode_16bit_s",
    ),
    FigureSpec("tpot_s", "s", FigureKind.TIME, "one decode step of the real model, all sequences", "tpot_16bit_s"),
    FigureSpec("tpot_16bit_s", "s", FigureKind.INFO, "the same with a 16-bit cache, interleaved"),
    FigureSpec("quantize_share", "share", FigureKind.INFO, "append_s over tpot_s"),
    FigureSpec(
        "dequantize_share",
        "share",
        FigureKind.INFO,
        "part of tpot_s that decode_fused_s spends above reading its bytes at the measured bandwidth",
    ),
    FigureSpec("read_bandwidth_bytes_per_s", "bytes/s", FigureKind.INFO, "the machine's, same threads, same process"),
    FigureSpec("achieved_bandwidth_bytes_per_s", "bytes/s", FigureKind.INFO, "read_bytes_per_step over decode_fused_s"),
    FigureSpec("process_peak_bytes", "bytes", FigureKind.INFO, "peak resident memory of the measuring process"),
    FigureSpec("model_resident_bytes", "bytes", FigureKind.INFO, "memory that loading the model added on the device"),
)
_OF_GPU: Final = {
    "copy_bandwidth_bytes_per_s": "read_bandwidth_bytes_per_s of a copy, reads and writes counted",
    "tpot_launched_s": "tpot_s as Python launches it, kernel by kernel; tpot_s is recorded in a CUDA graph there",
    "allocator_peak_bytes": "most bytes of tensors at once in the cell's group, by torch's allocator",
    "allocator_reserved_bytes": "what torch's allocator took of the device for the cell's group",
    "own_device_bytes": "what the measuring process holds of the device after the cell's group, by NVML",
    "device_used_bytes": "what all processes hold of the device then, by NVML",
    "outside_allocator_bytes": (
        "held but not reserved: context, code, workspaces; other processes too where own_device_bytes is absent"
    ),
}


def _unit(name: str) -> str:
    return "bytes/s" if name.endswith("_bytes_per_s") else "s" if name.endswith("_s") else "bytes"


FIGURES: Final = {
    spec.name: spec
    for spec in (
        *_ALL,
        *(
            FigureSpec(name, _unit(name), FigureKind.INFO, f"GPU: {what}", of_gpu=True)
            for name, what in _OF_GPU.items()
        ),
    )
}
