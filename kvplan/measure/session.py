"""A whole profile's measuring: which process runs what, in which order, and what is kept of it.

Repeats are the outer loop, so that a slow drift of the machine spreads over all cells alike. Each repeat is a process
of its own that goes through the groups of cells; what it reports is on disk before the next group starts.
"""

from collections import deque
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, NoReturn

from kvplan import __version__, errors
from kvplan.core.figures import FIGURES
from kvplan.core.records import Cell, CellKey, CellStatus, Figure, Profile
from kvplan.core.specs import DeviceKind, Evidence, ModelSpec
from kvplan.core.workloads import Prefill, Workload
from kvplan.measure.cells import Grid, Setting, cache_budget, plan_cells
from kvplan.measure.device import Device
from kvplan.measure.environment import TOLERANCE, disturbance, versions
from kvplan.measure.jobs import FULL_EFFORT, QUICK_EFFORT, Effort, Job, Measured, Refused, Started
from kvplan.measure.launch import LIMIT_S, Launch, WorkerDiedError, WorkerHungError, launch
from kvplan.measure.progress import Progress
from kvplan.measure.repeats import FINAL, failed, least_disturbed, repeats_of, with_repeat
from kvplan.runtime.ops import Kernel
from kvplan.store.journal import EFFORT, Journal, Refusal, drop_other_setup, resume_cells
from kvplan.units import format_bytes

REPEATS: Final = 5
QUICK_REPEATS: Final = 3
RETRIES: Final = 2
QUICK_RETRIES: Final = 1
CPU_LIMIT_S: Final = 6 * 3600.0
"""On a processor one long prompt through a large model takes an hour or more, and hardly anything hangs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What a profile is asked to measure.

    Attributes:
        model: As the user named it.
        retries: How often a disturbed repeat is measured again.
        tolerance: Core time of other processes, as a share, from which on a repeat is disturbed.
        command: What the user typed.
        cell_timeout_s: How long a process may take to start, and for a group of cells, before it counts as hung; None
            is `limit_s` of the device.
        calibration: File of what formats have learned; None where none learns anything.
    """

    model: str
    spec: ModelSpec
    workload: Workload
    formats: tuple[str, ...]
    block_tokens: tuple[int, ...]
    kernel: Kernel
    kernel_name: str
    threads: int
    prefill: Prefill
    device: str = "cpu"
    repeats: int = REPEATS
    retries: int = RETRIES
    tolerance: float = TOLERANCE
    effort: Effort = FULL_EFFORT
    command: str = ""
    memory_limit_bytes: int | None = None
    cell_timeout_s: float | None = None
    calibration: Path | None = None

    def quick(self) -> "Request":
        """Return the same with fewer samples, repeats and retries."""
        return replace(self, effort=QUICK_EFFORT, repeats=min(self.repeats, QUICK_REPEATS), retries=QUICK_RETRIES)


@dataclass(kw_only=True, slots=True)
class _Repeat:
    """One repeat while it is under way.

    Attributes:
        queue: Groups still to be measured.
        attempts: Disturbed measurements of cells, kept until an undisturbed one or the last retry.
    """

    number: int
    queue: deque[tuple[CellKey, ...]]
    attempts: dict[CellKey, list[Measured]] = field(default_factory=dict)
    disturbed: list[tuple[CellKey, ...]] = field(default_factory=list)


class Session:
    """Measures the cells of a request and keeps every one in the journal."""

    def __init__(
        self, device: Device, request: Request, journal: Journal, progress: Progress, start: Launch = launch
    ) -> None:
        self._device = device
        self._request = request
        self._journal = journal
        self._progress = progress
        self._launch = start
        self._limit_s = request.cell_timeout_s or limit_s(device)
        self.grid = plan_grid(device, request)
        self._cells: dict[CellKey, Cell] = {cell.key: cell for cell in self.grid.settled}
        self._base: dict[str, tuple[tuple[float, ...], ...]] = {}
        self._base_missing: dict[str, str] = {}
        self._noted: dict[str, set[str]] = {}
        self._seconds: dict[int, float] = {}
        self._since = device.now()

    def run(self) -> Profile:
        """Return the profile of all cells; quality is not in it.

        Raises:
            KvplanError: Nothing can be measured at all: the model does not load, or no kernel is there.
        """
        self._resume()
        self._journal.append(self._header())
        for cell in self.grid.settled:
            self._keep(cell)
        for number in range(self._request.repeats):
            self._run_repeat(number)
        header = self._header()
        self._journal.append(header)
        return replace(header, cells=tuple(self._cells[key] for key in self.grid.keys))

    def _resume(self) -> None:
        contents = self._journal.contents
        other = drop_other_setup(contents, self._header())
        kept, refused = resume_cells(contents.cells, self.grid.keys)
        refused += other
        self._cells |= kept
        for problem in contents.problems:
            self._progress.note(problem)
        for line in refusal_lines(refused):
            self._progress.note(line)
        if contents.header is not None and kept:
            self._progress.note(f"resumed: {len(kept)} of {len(self.grid.keys)} cells")
            figures = contents.header.base_figures
            self._base = {name: figure.repeats for name, figure in figures.items() if figure.repeats}
            for name in _LEARNED:
                if name in contents.header.how:
                    self._noted[name] = set(contents.header.how[name].split(_LEARNED_SEPARATOR))

    def _run_repeat(self, number: int) -> None:
        pending = [[key for key in group if self._wants(key, number)] for group in self.grid.groups]
        repeat = _Repeat(number=number, queue=deque(tuple(keys) for keys in pending if keys))
        for attempt in range(self._request.retries + 1):
            while repeat.queue:
                self._run_process(repeat, last=attempt == self._request.retries)
            if repeat.disturbed and attempt < self._request.retries:
                self._progress.note(f"repeat {number + 1}: {len(repeat.disturbed)} disturbed, measured again")
            repeat.queue, repeat.disturbed = deque(repeat.disturbed), []

    def _wants(self, key: CellKey, number: int) -> bool:
        cell = self._cells.get(key)
        return cell is None or (cell.status not in FINAL and repeats_of(cell) <= number)

    def _run_process(self, repeat: _Repeat, *, last: bool) -> None:
        """Run one process over the queue; what it did not finish stays in the queue."""
        started = False
        self._since = self._device.now()
        try:
            with closing(self._launch(self._job(repeat.queue), self._limit_s)) as messages:
                self._tell(repeat)
                received: list[Measured] = []
                for message in messages:
                    if isinstance(message, Refused):
                        _raise(message)
                    if isinstance(message, Started):
                        started = True
                        self._take_base(message)
                        continue
                    received.append(message)
                    if len(received) == len(repeat.queue[0]):
                        self._take_group(repeat, received, last=last)
                        received = []
                    if not repeat.queue:
                        break  # it has said all; how it tidies up, or whether it ever does, concerns nobody
        except WorkerDiedError as death:
            self._bury(repeat, death, started=started)
        else:
            if repeat.queue:
                self._bury(repeat, WorkerDiedError(0, "it stopped early"), started=started)

    def _job(self, groups: Iterable[tuple[CellKey, ...]]) -> Job:
        request = self._request
        return Job(
            model=request.model,
            spec=request.spec,
            has_weights=request.spec.has_weights,
            device=request.device,
            kernel=request.kernel,
            threads=request.threads,
            prefill=request.prefill,
            max_batched_tokens=request.workload.batched_tokens,
            effort=request.effort,
            groups=tuple(groups),
            memory_limit_bytes=request.memory_limit_bytes,
            calibration=None if request.calibration is None else str(request.calibration),
        )

    def _take_base(self, message: Started) -> None:
        for name, samples in message.base.items():
            self._base[name] = (*self._base.get(name, ()), samples)
        self._base_missing |= message.missing

    def _take_group(self, repeat: _Repeat, received: list[Measured], *, last: bool) -> None:
        group = repeat.queue.popleft()
        self._time_group(group)
        again = []
        for measured in received:
            attempts = repeat.attempts.setdefault(measured.key, [])
            attempts.append(measured)
            if (
                measured.conditions is not None
                and disturbance(measured.conditions, self._request.tolerance)
                and not last
            ):
                again.append(measured.key)
                continue
            best = least_disturbed(attempts)
            self._note(best)
            self._keep(with_repeat(self._cells.get(best.key), best, self._request.spec, self._request.tolerance))
        if again:
            repeat.disturbed.append(tuple(again))
        self._tell(repeat)

    def _bury(self, repeat: _Repeat, death: WorkerDiedError, *, started: bool) -> None:
        """Blame the group that ran; one of several cells is measured cell by cell, to find which it was."""
        if not started:
            if death.killed:
                raise errors.DoesNotFitError(f"{self._request.model} was killed while loading, as when memory runs out")
            hint = "" if isinstance(death, WorkerHungError) else "run `kvplan doctor`"
            raise errors.KvplanError(f"the measuring process did not start: {death.reason}", hint=hint)
        group = repeat.queue.popleft()
        if len(group) > 1:
            self._progress.note(f"{death.reason}; its {len(group)} cells are measured one by one")
            repeat.queue.extendleft((key,) for key in reversed(group))
            return
        status = CellStatus.OUT_OF_MEMORY if death.killed else CellStatus.FAILED
        reason = self._kill_reason() if death.killed else death.reason
        self._progress.note(f"{group[0].label}: {reason}")
        self._keep(failed(group[0], status, reason, self._request.spec))

    def _kill_reason(self) -> str:
        reason = "the system ended it (SIGKILL), as it does when memory runs out"
        # A GPU is never asked from here: it was the host's memory that ran out, and what can hang is for the others.
        if self._device.info.kind is not DeviceKind.CPU:
            return reason
        return f"{reason}; {format_bytes(self._device.available_bytes())} is free without it"

    def _keep(self, cell: Cell) -> None:
        self._cells[cell.key] = cell
        self._journal.append(cell)

    def _note(self, measured: Measured) -> None:
        if measured.kernel_16bit:
            self._noted.setdefault(KERNEL_16BIT, set()).add(measured.kernel_16bit)
        if measured.cold_bytes:
            wanted = _cold_text(measured.cold_bytes, self._device.info.last_level_cache_bytes)
            self._noted.setdefault(ROTATION, set()).add(wanted)

    def _time_group(self, group: tuple[CellKey, ...]) -> None:
        now = self._device.now()
        self._seconds[len(self._seconds)] = (now - self._since) / len(group)
        self._since = now

    def _tell(self, repeat: _Repeat) -> None:
        total = sum(map(len, self.grid.groups)) * self._request.repeats
        done = sum(
            self._request.repeats if cell.status in FINAL else min(repeats_of(cell), self._request.repeats)
            for key, cell in self._cells.items()
            if any(key in group for group in self.grid.groups)
        )
        left = None
        if self._seconds:
            left = (total - done) * sum(self._seconds.values()) / len(self._seconds)
        label = f"repeat {repeat.number + 1}"
        if repeat.queue:
            first = repeat.queue[0][0]
            label += ": " + "+".join(f"{load.bucket.name} x{load.sequences}" for load in first.loads)
        self._progress.at(done, total, label, left)

    def _header(self) -> Profile:
        request = self._request
        base = {name: Figure.measured(FIGURES[name].unit, repeats) for name, repeats in self._base.items()}
        for name, reason in self._base_missing.items():
            base.setdefault(name, Figure.absent(FIGURES[name].unit, Evidence.MEASURED, reason))
        how = {
            "repeats": f"{request.repeats}, each a process of its own",
            EFFORT: "quick" if request.effort == QUICK_EFFORT else "full",
            "threads": str(request.threads),
            "kernel": request.kernel_name,
            "prefill": str(request.prefill),
            "tolerance": f"{request.tolerance:.0%} of the cores' time to other processes",
            "concurrency": str(request.workload.target.concurrency),
            "command": request.command,
        }
        how |= {name: _LEARNED_SEPARATOR.join(sorted(found)) for name, found in self._noted.items()}
        return Profile(
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            kvplan_version=__version__,
            device=self._device.info,
            model=request.spec,
            versions=versions(),
            how=how,
            base_figures=base,
        )


KERNEL_16BIT: Final = "best 16-bit kernel"
ROTATION: Final = "buffers rotated over"
_LEARNED: Final = (KERNEL_16BIT, ROTATION)
_LEARNED_SEPARATOR: Final = " or "


def limit_s(device: Device) -> float:
    """Return how long a process on *device* may be silent before it counts as hung."""
    return CPU_LIMIT_S if device.info.kind is DeviceKind.CPU else LIMIT_S


def refusal_lines(refused: Iterable[Refusal]) -> list[str]:
    """Return what a resumed run does not take, one line a reason."""
    labels: dict[str, list[str]] = {}
    for refusal in refused:
        labels.setdefault(refusal.reason, []).append(refusal.label)
    return [f"not resumed, {reason}: {', '.join(names)}" for reason, names in labels.items()]


def plan_grid(device: Device, request: Request) -> Grid:
    """Return the cells of *request* on *device*."""
    info, spec = device.info, request.spec
    loaded_bytes = spec.weight_bytes or 0 if spec.has_weights else 0
    setting = Setting(
        device_uuid=info.uuid,
        threads=request.threads,
        kernel=request.kernel_name,
        prefill=request.prefill,
        cache_bytes=cache_budget(info.memory_bytes, loaded_bytes),
    )
    return plan_cells(request.workload, spec, setting, formats=request.formats, block_tokens=request.block_tokens)


def _cold_text(cold_bytes: int, last_level_cache_bytes: int) -> str:
    from kvplan.measure.beds import COLD_FACTOR

    wanted = COLD_FACTOR * last_level_cache_bytes
    short = "" if cold_bytes >= wanted else f", as memory allows ({format_bytes(wanted)} wanted)"
    return format_bytes(cold_bytes) + short


def _raise(refused: Refused) -> NoReturn:
    kind = getattr(errors, refused.error, errors.KvplanError)
    raise kind(refused.message, where=refused.where, hint=refused.hint)
