"""The least time that a GPU kernel can take, from what it does and what its GPU's maker reports."""

from dataclasses import dataclass
from typing import Final

from kvplan.core.gpus import LANES_PER_CLOCK, LAUNCH_S, Gpu

MEMORY: Final = "memory"
ISSUE: Final = "issue"
TENSOR: Final = "tensor cores"
LAUNCH: Final = "launch"


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelWork:
    """What one launch does.

    Attributes:
        bytes: That have to be read and written, by all programs.
        programs: Those that share the work.
        rounds: Times that the program with most work runs through the counted instructions.
        lane_instructions: The counted instructions of a program, times the lanes that run them; None where unknown.
        matrix_flops: In the counted instructions of a program, multiplications and additions; None where unknown.
    """

    bytes: float
    programs: int
    rounds: int
    lane_instructions: int | None
    matrix_flops: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """What a kernel's instructions and bytes allow at the most; never held against a device.

    Attributes:
        device: The GPU that it is made for.
        bound: The name of the longest of *bounds_s*.
        seconds: The longest of *bounds_s*.
        bounds_s: The least time by memory, issue, tensor cores and launch; what is unknown is absent.
        read_bandwidth_share: Part of the reported bandwidth at which the bytes could be moved.
    """

    device: str
    bound: str
    seconds: float
    bounds_s: dict[str, float]
    read_bandwidth_share: float
    evidence: str = "predicted"


def predict(gpu: Gpu, work: KernelWork) -> Prediction:
    """Return the time where every clock reads, issues or multiplies, whichever is longest.

    A multiprocessor issues, and multiplies, for its own programs alone: the one with most of them is waited for.
    """
    rounds = -(-work.programs // gpu.multiprocessors) * work.rounds
    bounds = {MEMORY: work.bytes / gpu.bandwidth_bytes_per_s, LAUNCH: LAUNCH_S}
    if work.lane_instructions is not None:
        bounds[ISSUE] = rounds * work.lane_instructions / (LANES_PER_CLOCK * gpu.clock_hz)
    if work.matrix_flops is not None:
        bounds[TENSOR] = rounds * work.matrix_flops * gpu.multiprocessors / gpu.dense_flops
    bound = max(bounds, key=lambda name: bounds[name])
    return Prediction(
        device=gpu.name,
        bound=bound,
        seconds=bounds[bound],
        bounds_s=bounds,
        read_bandwidth_share=bounds[MEMORY] / bounds[bound],
    )
