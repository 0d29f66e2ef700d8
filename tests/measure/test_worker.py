import ast
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources

from kvplan.core.figures import FIGURES
from kvplan.core.records import CellKey, CellStatus, Load
from kvplan.core.specs import ModelSpec
from kvplan.core.workloads import Bucket, Prefill, Target, Workload
from kvplan.errors import InputError, MismatchError, NotRecordedError
from kvplan.measure import faults, worker
from kvplan.measure.cells import Setting, exact_figures, plan_cells
from kvplan.measure.device import CpuDevice
from kvplan.measure.jobs import DECODER, Effort, Job, Measured, Message, Refused, Started
from kvplan.measure.launch import WorkerDiedError, launch
from kvplan.quality.calibrating import calibrate, calibration_documents
from kvplan.runtime.chunks import flushes_group
from kvplan.runtime.loading import load_model
from kvplan.runtime.ops import Kernel, load_ops
from kvplan.runtime.pool import CachedSequence
from kvplan.runtime.session import Runtime
from kvplan.store.calibrations import save_calibration
from kvplan.store.models import load_model_spec
from kvplan_kernels.format import UnsupportedError, parse
from kvplan_kernels.layout import KVLayout

EFFORT = Effort(kernel_samples=4, kernel_budget_s=1.0, step_samples=3, step_budget_s=2.0)
FORMATS = ("bf16", "int8", "kivi-k4v4-g32-r32")
OF_EVERY_CELL = {
    "decode_fused_s", "decode_16bit_s", "append_s", "tpot_s", "tpot_16bit_s", "quantize_share",
    "achieved_bandwidth_bytes_per_s", "process_peak_bytes",
}  # fmt: skip


class SmallCache(CpuDevice):
    """The processor, but with a cache that buffers outgrow at once."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._info = replace(self._info, last_level_cache_bytes=2**20)


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return load_model_spec("demo")


@pytest.fixture
def job(spec: ModelSpec) -> Job:
    buckets = (
        Bucket(name="chat", prompt_tokens=80, generate_tokens=10, share=0.6),
        Bucket(name="long", prompt_tokens=150, generate_tokens=4, share=0.4),
    )
    workload = Workload(model="demo", buckets=buckets, target=Target(concurrency=3))
    setting = Setting(
        device_uuid="cpu-1", threads=1, kernel="reference", prefill=Prefill.EXACT, cache_bytes=2**30
    )  # fmt: skip
    grid = plan_cells(workload, spec, setting, formats=FORMATS, block_tokens=(32,))
    return Job(
        model="demo", spec=spec, has_weights=True, device="cpu", kernel=Kernel.REFERENCE, threads=1,
        prefill=Prefill.EXACT, max_batched_tokens=64, effort=EFFORT, groups=grid.groups,
    )  # fmt: skip


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[[Job], list[Message]]:
    def go(job: Job) -> list[Message]:
        found: list[Message] = []
        worker.run(job, found.append)
        return found

    monkeypatch.setattr(worker, "open_device", SmallCache)
    return go


def cells(messages: list[Message]) -> dict[CellKey, Measured]:
    return {message.key: message for message in messages if isinstance(message, Measured)}


def test_a_repeat_of_the_demo_model_has_every_figure_or_the_reason(
    run: Callable[[Job], list[Message]], job: Job, spec: ModelSpec
) -> None:
    messages = run(job)

    assert isinstance(messages[0], Started)
    assert messages[0].base["model_resident_bytes"][0] > 0
    found = cells(messages)
    assert list(found) == [key for group in job.groups for key in group]
    for key, message in found.items():
        assert message.status is CellStatus.OK
        told = set(message.figures) | set(message.missing) | set(exact_figures(key, spec))
        of_all = {"model_resident_bytes", "read_bandwidth_bytes_per_s"}
        assert told | of_all == {name for name, figure in FIGURES.items() if not figure.of_gpu}
        assert not set(message.figures) & set(message.missing)
        assert set(message.figures) >= OF_EVERY_CELL
        assert all(samples and min(samples) >= 0 for samples in message.figures.values())
        assert len(message.figures["tpot_s"]) == 3
        assert ("ttft_s" in message.figures) == (len(key.loads) == 1)
        assert ("decode_unfused_s" in message.figures) == (key.format != "bf16")
        assert message.conditions is not None


def test_formats_that_learn_are_measured_with_what_they_learned(
    run: Callable[[Job], list[Message]], job: Job, tmp_path: Path
) -> None:
    loaded, form, path = load_model("demo"), parse("unbias-order-k4v4-g32"), tmp_path / "c"
    documents = calibration_documents(loaded, context_tokens=64, documents=1)
    save_calibration(calibrate(loaded, [form], documents, versions={}), path)
    key = replace(job.groups[-1][0], format=form.name)

    assert cells(run(replace(job, groups=((key,),), calibration=str(path))))[key].status is CellStatus.OK
    with pytest.raises(InputError, match="kvplan calibrate demo -f unbias-order-k4v4-g32"):
        run(replace(job, groups=((key,),)))


def test_interleaved_16_bit_times_are_those_of_the_16_bit_cell(run: Callable[[Job], list[Message]], job: Job) -> None:
    found = cells(run(replace(job, groups=job.groups[:1])))

    whole = next(message for key, message in found.items() if key.format == "bf16")
    assert all(message.figures["tpot_16bit_s"] == whole.figures["tpot_s"] for message in found.values())


class Recording(SmallCache):
    """A processor that records as a GPU does, by looping; calls of the kind `unrecordable` it refuses."""

    unrecordable = ""

    @property
    def records(self) -> bool:
        return True

    def repeated(self, call: Callable[[], object], times: int) -> Callable[[], object]:
        if self.unrecordable and self.unrecordable in getattr(call, "__qualname__", ""):
            raise NotRecordedError("a CUDA graph cannot hold the call: operation not permitted")
        return super().repeated(call, times)


@pytest.mark.parametrize("unrecordable", ["", "recordable"])
def test_where_calls_are_recorded_a_step_is_timed_both_ways(
    unrecordable: str, run: Callable[[Job], list[Message]], job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "open_device", Recording)
    monkeypatch.setattr(Recording, "unrecordable", unrecordable)

    found = cells(run(replace(job, groups=job.groups[1:2])))

    for message in found.values():
        assert len(message.figures["tpot_launched_s"]) == 3
        assert len(message.figures["decode_fused_s"]) == 4
        if not unrecordable:
            assert len(message.figures["tpot_s"]) == len(message.figures["tpot_16bit_s"]) == 3
            continue
        for name in ("tpot_s", "tpot_16bit_s", "quantize_share"):
            assert name not in message.figures
            assert message.missing[name].startswith("a CUDA graph cannot hold the call")


def test_the_recorded_step_flushes_no_group(
    run: Callable[[Job], list[Message]], job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is done again and again: traffic has a flush once a group."""
    seen: dict[str, list[int]] = {}
    recordable = Runtime.recordable

    def spy(self: Runtime, sequences: list[CachedSequence], token_ids: Tensor) -> Callable[[], Tensor]:
        seen.setdefault(self.format.name, []).extend(sequence.length for sequence in sequences)
        return recordable(self, sequences, token_ids)

    monkeypatch.setattr(worker, "open_device", Recording)
    monkeypatch.setattr(Runtime, "recordable", spy)
    bucket = Bucket(name="flush", prompt_tokens=80, generate_tokens=16, share=1.0)  # 96 tokens: 32 + 2 groups
    loads = (Load(bucket=bucket, sequences=1),)
    group = tuple(replace(key, loads=loads) for key in job.groups[1])
    run(replace(job, groups=(group,)))

    assert seen["int8"] == [95]
    (held,) = seen["kivi-k4v4-g32-r32"]
    assert not flushes_group(parse("kivi-k4v4-g32-r32"), held)
    assert flushes_group(parse("kivi-k4v4-g32-r32"), 95)
    assert held == 94


def test_appending_covers_a_flush_of_every_format(run: Callable[[Job], list[Message]], job: Job) -> None:
    found = cells(run(replace(job, groups=job.groups[1:2])))

    steps = {key.format: len(message.figures["append_s"]) for key, message in found.items()}
    assert steps == {"bf16": 9, "int8": 9, "kivi-k4v4-g32-r32": 40}


def test_a_format_by_layer_has_the_figures_of_any_other(run: Callable[[Job], list[Message]], job: Job) -> None:
    mixed = "int8@0=bf16@-1=kivi-k4v4-g32-r32"
    group = tuple(replace(key, format=form) for key, form in zip(job.groups[1][:2], ("int8", mixed), strict=True))
    found = {key.format: message for key, message in cells(run(replace(job, groups=(group,)))).items()}

    assert found[mixed].status is CellStatus.OK
    assert set(found[mixed].figures) == set(found["int8"].figures)
    assert len(found[mixed].figures["append_s"]) == 40  # a flush of the layer that holds groups is among them


def test_later_chunks_that_read_the_cache_are_in_the_time_to_the_first_token(
    run: Callable[[Job], list[Message]], job: Job
) -> None:
    chunked = replace(job, groups=job.groups[2:], prefill=Prefill.THROUGH_CACHE)

    found = cells(run(chunked))

    for message in found.values():
        assert message.figures["ttft_s"] != message.figures["prefill_s"]
        assert len(message.figures["ttft_s"]) == 1


def test_a_config_without_weights_gives_the_kernels_alone(run: Callable[[Job], list[Message]], job: Job) -> None:
    messages = run(replace(job, has_weights=False, groups=job.groups[1:2]))

    for message in cells(messages).values():
        assert "decode_fused_s" in message.figures
        assert "tpot_s" not in message.figures
        assert message.missing["tpot_s"] == message.missing["ttft_s"] == "the model has no weights here"


def test_a_cell_that_does_not_fit_beside_others_is_told_apart(
    run: Callable[[Job], list[Message]], job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = job.groups[1]
    small = next(key for key in group if key.format == "int8")

    def bench(device: object, ops: object, spec: object, keys: tuple[CellKey, ...]) -> object:
        if small not in keys or len(keys) > 1:
            raise MemoryError("DefaultCPUAllocator: not enough memory")
        return real(device, ops, spec, keys)  # type: ignore[arg-type]

    real = worker.KernelBench
    monkeypatch.setattr(worker, "KernelBench", bench)

    found = cells(run(replace(job, groups=(group,))))

    assert {key.format: message.status for key, message in found.items()} == {
        "bf16": CellStatus.OUT_OF_MEMORY,
        "int8": CellStatus.OK,
        "kivi-k4v4-g32-r32": CellStatus.OUT_OF_MEMORY,
    }


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (MemoryError(), CellStatus.OUT_OF_MEMORY),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), CellStatus.OUT_OF_MEMORY),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), CellStatus.OUT_OF_MEMORY),
        (torch.AcceleratorError("CUDA error: out of memory"), CellStatus.OUT_OF_MEMORY),
        (RuntimeError("Triton Error [CUDA]: out of memory"), CellStatus.OUT_OF_MEMORY),
        (RuntimeError("cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY"), CellStatus.OUT_OF_MEMORY),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `c(h)`"),
            CellStatus.OUT_OF_MEMORY,
        ),
        (OutOfResources(300, 200, "shared memory"), CellStatus.UNSUPPORTED),
        (RuntimeError("Triton Error [CUDA]: too many resources requested for launch"), CellStatus.UNSUPPORTED),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), None),
        (torch.AcceleratorError("CUDA error: device-side assert triggered"), None),
        (RuntimeError("Triton Error [CUDA]: misaligned address"), None),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(h)`"), None),
        (UnsupportedError("71 query heads for 1 KV heads"), CellStatus.UNSUPPORTED),
        (RuntimeError("shape mismatch"), None),
        (ValueError("can't allocate memory"), None),
    ],
)
def test_what_ended_a_cell_is_told_from_a_fault(error: Exception, status: CellStatus | None) -> None:
    assert worker.outcome(error) is status


def test_an_error_that_ended_the_recording_of_a_graph_is_the_one_that_counts() -> None:
    ended = torch.AcceleratorError("CUDA error: operation failed due to a previous error during capture")
    ended.__context__ = torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. Of the allocated memory"
    )

    assert worker.outcome(ended) is CellStatus.OUT_OF_MEMORY
    assert faults.last_words(ended).startswith("torch.OutOfMemoryError: CUDA out of memory.")


def test_the_words_of_a_kernel_that_does_not_compile_come_before_its_source() -> None:
    node = ast.parse("x = tl.dot(a)").body[0]

    error = CompilationError("x = tl.dot(a)", node, "dot() missing 1 required argument")

    assert faults.last_words(error) == "triton.compiler.errors.CompilationError: dot() missing 1 required argument"


@pytest.mark.parametrize("error", [KeyError(), RuntimeError("\n \n"), MemoryError()])
def test_an_error_without_words_has_its_name(error: Exception) -> None:
    assert faults.last_words(error) == type(error).__name__


def test_a_gpu_out_of_memory_gives_back_what_torch_holds(
    run: Callable[[Job], list[Message]], job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bench(*_: object) -> object:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    emptied: list[int] = []
    monkeypatch.setattr(worker, "KernelBench", bench)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))

    found = cells(run(replace(job, has_weights=False, groups=job.groups[1:2])))

    assert {message.status for message in found.values()} == {CellStatus.OUT_OF_MEMORY}
    assert len(emptied) == 1 + len(found), "after the group, and after each cell of it"


def test_what_a_kernel_refuses_is_unsupported_and_the_rest_goes_on(
    run: Callable[[Job], list[Message]], job: Job
) -> None:
    wide = replace(job, spec=replace(job.spec, query_heads=64), has_weights=False, groups=job.groups[1:2])

    found = cells(run(wide))

    assert {message.status for message in found.values()} == {CellStatus.UNSUPPORTED}
    assert all("64 query heads for 2 KV heads" in message.reason for message in found.values())


def test_an_address_space_that_is_too_small_is_a_result_and_not_the_end(job: Job) -> None:
    key = job.groups[1][1]
    big = replace(key, loads=(replace(key.loads[0], sequences=400_000),))
    limited = replace(job, groups=((big,), (key,)), memory_limit_bytes=6 * 2**30, has_weights=False)

    messages = list(launch(limited))

    found = cells(messages)
    assert found[big].status is CellStatus.OUT_OF_MEMORY
    assert "alloc" in found[big].reason.lower() or "free" in found[big].reason
    assert found[key].status is CellStatus.OK


def test_a_model_that_is_not_there_is_told_to_the_session(job: Job, tmp_path: Path) -> None:
    messages: list[Message] = []

    worker.answer(replace(job, model=str(tmp_path / "none")), messages.append)

    assert [type(message) for message in messages] == [Refused]


def test_a_process_that_dies_says_its_last_line(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr(sys, "executable", "/bin/false")

    with pytest.raises(WorkerDiedError) as caught:
        list(launch(job))

    assert caught.value.returncode == 1


def test_a_process_whose_messages_nobody_wants_is_ended(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def popen(*args: object, **kwargs: Any) -> object:
        started.append(real([sys.executable, "-c", _ENDLESS], **kwargs))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", popen)
    messages = launch(job)

    assert next(messages) == Started(base={})
    messages.close()

    assert started[0].poll() is not None


_ENDLESS = """
import sys, time
sys.stdin.buffer.read()
print('{"type":"started","base":{}}', flush=True)
time.sleep(600)
"""


def test_half_a_line_of_a_dying_process_is_not_a_message(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    real = subprocess.Popen
    code = 'import sys; sys.stdin.buffer.read(); sys.stdout.write(\'{"type":"started","ba\'); sys.exit(3)'
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: real([sys.executable, "-c", code], **k))

    with pytest.raises(WorkerDiedError) as caught:
        list(launch(job))

    assert caught.value.returncode == 3
    assert caught.value.reason == "the measuring process ended with status 3"


def test_a_job_survives_the_pipe(job: Job) -> None:
    assert msgspec.json.decode(msgspec.json.encode(job), type=Job) == job
    assert DECODER.decode(b'{"type":"started","base":{}}') == Started(base={})


def test_a_kernel_that_disagrees_with_its_definition_is_not_timed(job: Job, spec: ModelSpec) -> None:
    right = load_ops(Kernel.REFERENCE, 1)
    wrong = replace(
        right,
        name="cpu/wrong",
        decode=lambda *args, **kwargs: replace(right.decode(*args, **kwargs), output=torch.zeros(1)),
    )
    with pytest.raises(MismatchError, match="differs from its definition"):
        worker.check_kernels(wrong, spec, job.groups[0], set())
    assert worker.outcome(MismatchError("m")) is CellStatus.FAILED
    checked: set[KVLayout] = set()
    worker.check_kernels(replace(right, name="cpu/right"), spec, job.groups[0], checked)
    assert {layout.format.name for layout in checked} == set(FORMATS)
