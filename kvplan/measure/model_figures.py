"""The figures of the real model: prefill, and whole decode steps with the cache in each format."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from kvplan.core.records import CellKey, Load
from kvplan.core.specs import ModelSpec
from kvplan.core.workloads import Prefill
from kvplan.errors import DoesNotFitError
from kvplan.measure.device import Device
from kvplan.measure.jobs import Job
from kvplan.measure.kernel_figures import baseline_key
from kvplan.measure.timing import Call, Sampling, sample_interleaved
from kvplan.runtime.loading import LoadedModel
from kvplan.runtime.pool import CachedSequence, blocks_for, pool_bytes
from kvplan.runtime.session import Runtime, prefill_exact
from kvplan.units import format_bytes
from kvplan_kernels.format import parse
from kvplan_kernels.layout import order_of

MEMORY_SHARE: Final = 0.85
WARMUP_STEPS: Final = 2
WARMUP_TOKENS: Final = 64


@dataclass(frozen=True, slots=True)
class _Part:
    """Cells whose caches are in memory together, with the 16-bit one where *paired*."""

    keys: tuple[CellKey, ...]
    paired: bool = True


class ModelBench:
    """Whole steps of the loaded model, for a group of cells that hold the same sequences."""

    def __init__(self, device: Device, loaded: LoadedModel, job: Job, keys: Sequence[CellKey]) -> None:
        self._device = device
        self._loaded = loaded
        self._job = job
        self._spec = loaded.spec
        self._keys = tuple(keys)
        self._baseline = baseline_key(keys, loaded.spec)
        self._steps = WARMUP_STEPS + job.effort.step_samples

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
        self._warm_up(runtimes[keys[0]])
        for load in keys[0].loads:
            self._fill(load, runtimes, sequences, figures)
        calls = {key.label: self._step(runtimes[key], sequences[key]) for key in keys}
        sampling = Sampling(
            samples=self._job.effort.step_samples, warmups=WARMUP_STEPS, repeated=False,
            budget_s=self._job.effort.step_budget_s,
        )  # fmt: skip
        times = sample_interleaved(self._device, calls, sampling)
        for key in keys:
            figures[key]["tpot_s"] = times[key.label]
            if part.paired:
                figures[key]["tpot_16bit_s"] = times[self._baseline.label]
        return {key: figures[key] for key in part.keys}

    def _runtime(self, key: CellKey) -> Runtime:
        form = parse(key.format)
        blocks, slots = pool_size(key)
        return Runtime(
            self._loaded, form, block_tokens=key.block_tokens, blocks=blocks, slots=slots, kernel=self._job.kernel,
            threads=self._job.threads,
        )  # fmt: skip

    def _warm_up(self, runtime: Runtime) -> None:
        tokens = min(WARMUP_TOKENS, min(load.bucket.total_tokens for load in self._keys[0].loads))
        runtime.free(runtime.prefill(_tokens(self._spec, tokens)).sequence)

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

    def _step(self, runtime: Runtime, sequences: list[CachedSequence]) -> Call:
        token_ids = torch.tensor(_tokens(self._spec, len(sequences)))[:, None]
        return lambda: runtime.step(sequences, token_ids)


def cell_pool_bytes(key: CellKey, spec: ModelSpec) -> int:
    """Return the bytes of a runtime's pool for a cell."""
    blocks, slots = pool_size(key)
    form, order = parse(key.format), order_of(key.kernel)
    return pool_bytes(spec, form, block_tokens=key.block_tokens, blocks=blocks, slots=slots, order=order)


def pool_size(key: CellKey) -> tuple[int, int]:
    """Return the blocks and slots of a pool that holds a cell's sequences at full length and no more."""
    form = parse(key.format)
    blocks = sum(load.sequences * blocks_for(form, load.bucket.total_tokens, key.block_tokens) for load in key.loads)
    return blocks, sum(load.sequences for load in key.loads)


def _check_fits(needed: int, allowed: int) -> None:
    if needed > allowed:
        raise DoesNotFitError(f"its cache takes {format_bytes(needed)}, {format_bytes(allowed)} is free")


def _tokens(spec: ModelSpec, count: int) -> list[int]:
    """Return seeded tokens: times do not depend on which they are."""
    generator = torch.Generator().manual_seed(count)
    tokens: list[int] = torch.randint(spec.vocab_size, (count,), generator=generator).tolist()
    return tokens
