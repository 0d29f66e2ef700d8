"""The measuring process: one repeat of some groups of cells, and nothing else of a session in its memory.

Reads a job from standard input and writes a message a line to standard output, each when it is known.
"""

import ctypes
import gc
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Final, NoReturn, TextIO

import msgspec
import torch

from kvplan.core.records import CellKey, CellStatus, Conditions
from kvplan.core.specs import ModelSpec
from kvplan.errors import DoesNotFitError, KvplanError
from kvplan.measure.bandwidth import COPY, READ, bandwidths
from kvplan.measure.beds import COLD_FACTOR
from kvplan.measure.cells import cell_layout, exact_figures
from kvplan.measure.device import Device
from kvplan.measure.devices import open_device
from kvplan.measure.environment import Watch
from kvplan.measure.faults import FAULT, last_words, outcome, told
from kvplan.measure.gate import check_decode
from kvplan.measure.jobs import ENCODER, Job, Measured, Message, Refused, Samples, Started
from kvplan.measure.kernel_figures import KernelBench, derived_figures
from kvplan.measure.model_figures import ModelBench
from kvplan.runtime.loading import LoadedModel, load_model
from kvplan.runtime.ops import Kernel, Ops, load_ops
from kvplan.store.calibrations import Calibration, load_calibration
from kvplan_kernels.layout import KVLayout

_BANDWIDTHS: Final = {READ: "read_bandwidth_bytes_per_s", COPY: "copy_bandwidth_bytes_per_s"}
_BANDWIDTH_MEMORY_SHARE: Final = 0.25
_BANDWIDTH_BYTES_MIN: Final = 2**26
_PR_SET_PDEATHSIG: Final = 1
"""linux/prctl.h: a process whose session was killed measures nothing for nobody."""
_OF_THE_MODEL: Final = ("prefill_s", "ttft_s", "tpot_s", "tpot_16bit_s")

Report = Callable[[Message], None]


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Bench:
    """What a process has at hand for all its cells.

    Attributes:
        checked: Layouts on which the kernel was seen to agree with its definition.
    """

    device: Device
    ops: Ops
    job: Job
    loaded: LoadedModel | None
    bandwidth: tuple[float, ...]
    calibration: Calibration | None = None
    checked: set[KVLayout] = field(default_factory=set)


def main() -> None:
    """Run the job on standard input."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    answers = _claim_stdout()

    def report(message: Message) -> None:
        answers.write(ENCODER.encode(message).decode() + "\n")
        answers.flush()

    try:
        answer(msgspec.json.decode(sys.stdin.buffer.read(), type=Job), report)
    except Exception as error:
        _end_with(error)


def answer(job: Job, report: Report) -> None:
    """Run *job*; what is to be told to the user is a message like others."""
    try:
        run(job, report)
    except KvplanError as error:
        report(Refused(error=type(error).__name__, message=error.message, where=error.where, hint=error.hint))


def _claim_stdout() -> TextIO:
    """Return standard output, and send what libraries print there to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def run(job: Job, report: Report) -> None:
    """Measure every group of *job*; a cell that does not fit is a result, not the end."""
    if job.memory_limit_bytes is not None:
        resource.setrlimit(resource.RLIMIT_AS, (job.memory_limit_bytes, job.memory_limit_bytes))
    torch.set_num_threads(job.threads)
    try:
        bench = _prepare(job, report)
    except Exception as error:
        if isinstance(error, KvplanError) or outcome(error) is not CellStatus.OUT_OF_MEMORY:
            raise
        raise DoesNotFitError(f"{job.model} does not fit: {told(error)}") from error
    for group in job.groups:
        for message in _measure_apart(bench, group):
            report(message)


def _prepare(job: Job, report: Report) -> Bench:
    device, missing = open_device(job.device), {}
    before = device.resident_bytes()
    base: dict[str, tuple[float, ...]] = {}
    loaded = load_model(job.model, device=device.torch_name) if job.has_weights else None
    if loaded is None:
        missing["model_resident_bytes"] = "the model has no weights here"
    else:
        base["model_resident_bytes"] = (float(device.resident_bytes() - before),)
    ops = load_ops(job.kernel, job.threads, device.torch_name)
    bandwidth: tuple[float, ...] = ()
    if job.kernel is Kernel.REFERENCE:
        missing[_BANDWIDTHS[READ]] = "the probe is part of the fused kernels"
    else:
        base |= {_BANDWIDTHS[name]: found for name, found in _bandwidths(device, job.threads).items()}
        bandwidth = base[_BANDWIDTHS[READ]]
    report(Started(base=base, missing=missing))
    calibration = None if job.calibration is None else load_calibration(Path(job.calibration), job.spec)
    return Bench(device=device, ops=ops, job=job, loaded=loaded, bandwidth=bandwidth, calibration=calibration)


def _bandwidths(device: Device, threads: int) -> dict[str, tuple[float, ...]]:
    wanted = max(_BANDWIDTH_BYTES_MIN, COLD_FACTOR * device.info.last_level_cache_bytes)
    allowed = int(device.available_bytes() * _BANDWIDTH_MEMORY_SHARE)
    return bandwidths(device, threads=threads, buffer_bytes=min(wanted, allowed))


def _measure_apart(bench: Bench, group: Sequence[CellKey]) -> Iterator[Measured]:
    """Yield one repeat of a group; of cells that cannot be measured together, each by itself."""
    try:
        together = _measure(bench, group)
    except Exception as error:
        status, reason = outcome(error), told(error)
        if status is None:
            raise
    else:
        yield from together
        return
    _release()  # the error is gone by now, and with it its frames and what they had allocated
    if len(group) == 1:
        yield Measured(key=group[0], status=status, reason=reason or "memory ran out")
        return
    for key in group:
        yield from _measure_apart(bench, (key,))


def _release() -> None:
    """Give back what a cell that came to nothing has left in torch's hands."""
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def _measure(bench: Bench, group: Sequence[CellKey]) -> list[Measured]:
    """Return one repeat of the cells of a group."""
    spec, job = bench.job.spec, bench.job
    bench.device.start_cell()
    check_kernels(bench.ops, spec, group, bench.checked)
    with Watch(bench.device) as watch:
        kernels = KernelBench(bench.device, bench.ops, spec, group).measure(job.effort)
        found = {key: kernels[key] for key in group}
        del kernels
        if bench.loaded is None:
            for samples in found.values():
                samples.missing = dict.fromkeys(_OF_THE_MODEL, "the model has no weights here") | samples.missing
        else:
            figures, missing = ModelBench(bench.device, bench.loaded, job, group, bench.calibration).measure()
            for key, samples in found.items():
                samples.figures |= figures[key]
                samples.missing |= missing[key]
        conditions = watch.conditions()
    return [_measured(bench, key, samples, conditions) for key, samples in found.items()]


def check_kernels(ops: Ops, spec: ModelSpec, group: Sequence[CellKey], checked: set[KVLayout]) -> None:
    """Refuse to time kernels that disagree with their definition; each layout is tried once.

    Raises:
        MismatchError: One does.
    """
    if ops.name == Kernel.REFERENCE:
        return
    for key in group:
        for layout, _ in cell_layout(key, spec).counted:
            if layout not in checked:
                check_decode(ops, layout, spec.query_heads)
                checked.add(layout)


def _measured(bench: Bench, key: CellKey, samples: Samples, conditions: Conditions) -> Measured:
    read_bytes = exact_figures(key, bench.job.spec)["read_bytes_per_step"].value or 0.0
    derived_figures(samples, read_bytes, bench.bandwidth)
    figures = samples.figures
    memory = bench.device.memory()
    figures |= {name: (value,) for name, value in memory.figures.items()}
    samples.missing |= memory.missing
    if bench.bandwidth:
        figures["read_bandwidth_bytes_per_s"] = (median(bench.bandwidth),)
    return Measured(
        key=key, status=CellStatus.OK, figures=figures, missing=samples.missing, conditions=conditions,
        kernel_16bit=samples.kernel_16bit, cold_bytes=samples.cold_bytes,
    )  # fmt: skip


def _end_with(error: Exception) -> NoReturn:
    """End this process at once, its last line on standard error saying why.

    After most errors of CUDA's its context answers nothing but the same error, and tidying up may hang or write
    more: nothing of torch's is run on the way out.
    """
    traceback.print_exception(error)
    sys.stderr.write(f"{last_words(error)}\n")
    sys.stderr.flush()
    os._exit(FAULT)


if __name__ == "__main__":
    main()
