"""The least times that inspection predicts, held against the times of a run on the device itself."""

from dataclasses import dataclass

from kvplan.core.gpus import ALL, Gpu
from kvplan.core.specs import DeviceInfo
from kvplan.errors import MissingPartError
from kvplan.measure.bench import OWN, DecodeBench
from kvplan.measure.inspection import Shape, inspect_kernels, predicted_calls


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """One format's decode call.

    Attributes:
        device: Whose reported figures the prediction is made of.
        predicted_s: The least that it can take.
        measured_s: What it took.
    """

    format: str
    device: str
    predicted_s: float
    measured_s: float
    evidence: str = "predicted from reported figures, and measured"

    @property
    def ratio(self) -> float:
        """How many times the prediction it took."""
        return self.measured_s / self.predicted_s


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldCalls:
    """Every format's call, or why there is none."""

    calls: tuple[Held, ...] = ()
    reason: str = ""


def reported_gpu(info: DeviceInfo) -> Gpu | None:
    """Return the GPU that a device is, None where its maker's figures are not known here."""
    return next((gpu for gpu in ALL if (gpu.driver_name, gpu.multiprocessors) == (info.name, info.cores)), None)


def hold(bench: DecodeBench, info: DeviceInfo, *, block_tokens: int) -> HeldCalls:
    """Return the predicted and the measured time of each of kvplan's calls in *bench*."""
    own = [cell for cell in bench.cells if cell.impl == OWN]
    gpu = reported_gpu(info)
    if gpu is None or not own:
        return HeldCalls(
            reason=f"no figures of {info.name} with {info.cores} multiprocessors are known to predict from"
        )
    case = own[0]
    shape = Shape(
        head_dim=case.head_dim, kv_heads=case.kv_heads, gqa=case.query_heads // case.kv_heads, block_size=block_tokens,
        batch=case.batch, tokens=case.tokens,
    )  # fmt: skip
    try:
        kernels = inspect_kernels(("decode",), [cell.format for cell in own], (gpu.arch,), shape, gpu.multiprocessors)
    except MissingPartError as error:
        return HeldCalls(reason=str(error))
    least = {call.format: call.seconds for call in predicted_calls(kernels) if call.device == gpu.name}
    return HeldCalls(
        calls=tuple(
            Held(format=cell.format, device=gpu.name, predicted_s=least[cell.format], measured_s=cell.median_s)
            for cell in own
            if cell.format in least
        )
    )
