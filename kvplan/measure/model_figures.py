"""The figures of the real model: prefill, and whole decode steps with the cache in each format."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from kvplan.core.records import CellKey, Load
from kvplan.core.specs import ModelSpec
from kvplan.core.workloads import Prefill
from kvplan.errors import DoesNotFitError, NotRecordedError
from kvplan.measure.cells import cell_layout
from kvplan.measure.device import Device
from kvplan.measure.jobs import Job
from kvplan.measure.kernel_figures import baseline_key
from kvplan.measure.timing import Call, Sampling, sample_interleaved
from kvplan.runtime.chunks import flushes_group
from kvplan.runtime.loading import LoadedModel
from kvplan.runtime.pool import CachedSequence
from kvplan.runtime.server import prefill_exact
from kvplan.runtime.session import Runtime
from kvplan.store.calibrations import Calibration
from kvplan.units import format_bytes
from kvplan_kernels.layer_formats import parse_formats

MEMORY_SHARE: Final = 0.85
WARMUP_STEPS: Final = 2
WARMUP_TOKENS: Final = 64
TPOT: Final = "tpot_s"
TPOT_LAUNCHED: Final = "tpot_launched_s"


@dataclass(frozen=True, slots=True)
class _Part:
    """Cells whose caches are in memory together, with the 16-bit one where *paired*."""

    keys: tuple[CellKey, ...]
    paired: bool = True


class ModelBench:
    """Whole steps of the loaded model, for a group of cells that hold the same sequences."""

    def __init__(
        self,
        device: Device,
        loaded: LoadedModel,
        job: Job,
        keys: Sequence[CellKey],
        calibration: Calibration | None = None,
    ) -> None:
        self._device = device
        self._loaded = loaded
        self._job = job
        self._calibration = calibration
        self._spec = loaded.spec
        self._keys = tuple(keys)
        self._baseline = baseline_key(keys, loaded.spec)
        self._steps = WARMUP_STEPS + job.effort.step_samples
        self._unrecorded = ""

    def measure(self) -> tuple[dict[CellKey, dict[str, tuple[float, ...]]], dict[CellKey, dict[str, str]]]:
        """Return samples by cell and figure, and why others are absent.

        Raises:
            DoesNotFitError: A cell's cache is more than the memory there is.
        """
        found: dict[CellKey, dict[str, tuple[float, ...]]] = {}
        missing: dict[CellKey, dict[str, str]] = {key: {} for key in self._keys}
        base = cell_pool_bytes(self._baseline, self._spec)
        for part in self._parts(base):
            if not part.paired:
                reason = f"a 16-bit cache takes {format_bytes(base)} more and does not fit"
                missing[part.keys[0]]["tpot_16bit_s"] = reason
            found |= self._measure_part(part)
        if self._unrecorded:
            for key in self._keys:
                missing[key] |= dict.fromkeys((TPOT, "tpot_16bit_s"), self._unrecorded)
        return found, missing

    def _parts(self, base_bytes: int) -> list[_Part]:
        """Split the cells so that each part's caches and the 16-bit one fit into memory together."""
        allowed = int(self._device.available_bytes() * MEMORY_SHARE)
        parts: list[_Part] = []
        paired: list[CellKey] = []
        taken = base_bytes
        for key in self._keys:
            size = 0 if key == self._baseline else cell_pool_bytes(key, self._spec)
            if size + base_bytes > allowed and key != self._baseline:
                _check_fits(size, allowed)
                parts.append(_Part((key,), paired=False))
                continue
            _check_fits(size + base_bytes, allowed)
            if paired and taken + size > allowed:
                parts.append(_Part(tuple(paired)))
                paired, taken = [], base_bytes
            paired.append(key)
            taken += size
        return [*parts, _Part(tuple(paired))] if paired else parts

    def _measure_part(self, part: _Part) -> dict[CellKey, dict[str, tuple[float, ...]]]:
        keys = part.keys if self._baseline in part.keys or not part.paired else (*part.keys, self._baseline)
        runtimes = {key: self._runtime(key) for key in keys}
        figures: dict[CellKey, dict[str, tuple[float, ...]]] = {key: {} for key in keys}
        sequences: dict[CellKey, list[CachedSequence]] = {key: [] for key in keys}
        tokens = min(WARMUP_TOKENS, min(load.bucket.total_tokens for load in keys[0].loads))
        self._warm_up(runtimes[keys[0]], _tokens(self._spec, tokens))
        for load in keys[0].loads:
            self._fill(load, runtimes, sequences, figures)
        for name, times in self._sample_steps(runtimes, sequences).items():
            for key in keys:
                figures[key][name] = times[key.label]
            if part.paired and name == TPOT:
                for key in keys:
                    figures[key]["tpot_16bit_s"] = times[self._baseline.label]
        return {key: figures[key] for key in part.keys}

    def _sample_steps(
        self, runtimes: dict[CellKey, Runtime], sequences: dict[CellKey, list[CachedSequence]]
    ) -> dict[str, dict[str, tuple[float, ...]]]:
        """Return samples of a step by figure and cell: where a device records calls, launched from Python and recorded.

        The recorded step is the one that engines take. It comes last, since it is done over and over at one length.
        """
        effort = self._job.effort
        sampling = Sampling(
            samples=effort.step_samples, warmups=WARMUP_STEPS, repeated=False, budget_s=effort.step_budget_s
        )
        calls = {key.label: self._step(runtimes[key], sequences[key]) for key in runtimes}
        launched = sample_interleaved(self._device, calls, sampling)
        if not self._device.records:
            return {TPOT: launched}
        once = {key.label: self._recordable(runtimes[key], sequences[key]) for key in runtimes}
        try:
            recorded = sample_interleaved(self._device, once, replace(sampling, repeated=True, sample_s_min=0.0))
        except NotRecordedError as error:
            self._unrecorded = f"{error.message}; {TPOT_LAUNCHED} is there"
            return {TPOT_LAUNCHED: launched}
        return {TPOT_LAUNCHED: launched, TPOT: recorded}

    def _runtime(self, key: CellKey) -> Runtime:
        blocks, slots = pool_size(key, self._spec)
        return Runtime(
            self._loaded, parse_formats(key.format), block_tokens=key.block_tokens, blocks=blocks, slots=slots,
            kernel=self._job.kernel, threads=self._job.threads, calibration=self._calibration,
        )  # fmt: skip

    def _warm_up(self, runtime: Runtime, prompt: list[int]) -> None:
        runtime.free(runtime.prefill(prompt).sequence)

    def _fill(
        self,
        load: Load,
        runtimes: dict[CellKey, Runtime],
        sequences: dict[CellKey, list[CachedSequence]],
        figures: dict[CellKey, dict[str, tuple[float, ...]]],
    ) -> None:
        """Prefill one prompt, go on to full length less the steps to be timed, and replicate."""
        prompt = _tokens(self._spec, load.bucket.prompt_tokens)
        rest = load.bucket.generate_tokens - self._steps
        prefilled = self._prefill(prompt, runtimes, figures)
        if rest < 0:
            for runtime, sequence in zip(runtimes.values(), prefilled, strict=True):
                runtime.free(sequence)
            again = prefill_exact(list(runtimes.values()), prompt[: max(1, len(prompt) + rest)])
            prefilled = [item.sequence for item in again]
        for (key, runtime), sequence in zip(runtimes.items(), prefilled, strict=True):
            if rest > 0:
                runtime.extend(sequence, _tokens(self._spec, rest))
            sequences[key] += [sequence, *runtime.fork(sequence, load.sequences - 1, copy=True)]

    def _prefill(
        self,
        prompt: list[int],
        runtimes: dict[CellKey, Runtime],
        figures: dict[CellKey, dict[str, tuple[float, ...]]],
    ) -> list[CachedSequence]:
        """Bring one prompt into every cache, and note how long the model and the later chunks took."""
        chunked = self._job.prefill is Prefill.THROUGH_CACHE and len(prompt) > self._job.max_batched_tokens
        if self._device.records:  # the first call of a shape loads its kernels
            self._warm_up(next(iter(runtimes.values())), prompt)
        exact = prefill_exact(list(runtimes.values()), prompt)
        single = len(self._keys[0].loads) == 1
        sequences = []
        for (key, runtime), prefilled in zip(runtimes.items(), exact, strict=True):
            sequence = prefilled.sequence
            if single:
                figures[key]["prefill_s"] = (prefilled.spent.total_s - prefilled.spent.append_s,)
            if chunked:
                runtime.free(sequence)
                again = runtime.prefill(prompt, self._job.prefill, max_batched_tokens=self._job.max_batched_tokens)
                sequence = again.sequence
                if single:
                    figures[key]["ttft_s"] = (again.spent.total_s,)
            sequences.append(sequence)
        return sequences

    def _recordable(self, runtime: Runtime, sequences: list[CachedSequence]) -> Call:
        """Return a step at the greatest length below the present one where no group leaves the residual.

        It is done again and again: a flush in it would count in every step, where traffic has it once a group.
        """
        for sequence in sequences:
            while flushes_group(runtime.format, sequence.length - 1):
                sequence.length -= 1
            sequence.length -= 1
        return runtime.recordable(sequences, self._next_tokens(len(sequences)))

    def _next_tokens(self, sequences: int) -> Tensor:
        return torch.tensor(_tokens(self._spec, sequences), dtype=torch.int64, device="cpu")[:, None]

    def _step(self, runtime: Runtime, sequences: list[CachedSequence]) -> Call:
        token_ids = self._next_tokens(len(sequences))
        return lambda: runtime.step(sequences, token_ids)


def cell_pool_bytes(key: CellKey, spec: ModelSpec) -> int:
    """Return the bytes of a runtime's pool for a cell."""
    blocks, slots = pool_size(key, spec)
    return cell_layout(key, spec).pool_bytes(blocks=blocks, slots=slots)


def pool_size(key: CellKey, spec: ModelSpec) -> tuple[int, int]:
    """Return the blocks and slots of a pool that holds a cell's sequences at full length and no more."""
    layout = cell_layout(key, spec)
    blocks = sum(load.sequences * layout.blocks(load.bucket.total_tokens) for load in key.loads)
    return blocks, sum(load.sequences for load in key.loads)


def _check_fits(needed: int, allowed: int) -> None:
    if needed > allowed:
        raise DoesNotFitError(f"its cache takes {format_bytes(needed)}, {format_bytes(allowed)} is free")


def _tokens(spec: ModelSpec, count: int) -> list[int]:
    """Return seeded tokens: times do not depend on which they are."""
    generator = torch.Generator().manual_seed(count)
    tokens: list[int] = torch.randint(spec.vocab_size, (count,), generator=generator).tolist()
    return tokens
