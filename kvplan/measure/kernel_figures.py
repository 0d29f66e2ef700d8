"""The figures of the kernels alone: decode fused, unfused and in 16 bits, append, pack."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Final

from kvplan.core.records import CellKey
from kvplan.core.specs import ModelSpec
from kvplan.measure.beds import COLD_FACTOR, fitting_copies, reads_between
from kvplan.measure.device import Device
from kvplan.measure.jobs import Effort, Samples
from kvplan.measure.stacks import DenseStack, Stack, groups_of, layer_bytes, layer_runs
from kvplan.measure.timing import Call, Sampling, sample_interleaved
from kvplan.runtime.ops import Ops
from kvplan_kernels.layer_formats import parse_formats

MEMORY_SHARE: Final = 0.6
"""Of the memory available, for the copies of all caches of a group."""
CHOOSING_ROUNDS: Final = 3
"""Rounds in which both 16-bit kernels run; the slower is then left out."""
TORCH: Final = "torch-sdpa-folded"

MIX_REASON: Final = "a mix has several prompts; see the cell of each bucket"

_BASELINE: Final = "16-bit"
_TORCH_CALL: Final = "torch"


class KernelBench:
    """The kernels of one group of cells, on caches that hold the same sequences.

    Raises:
        DoesNotFitError: One layer of each cell's cache together is more than the memory there is.
    """

    def __init__(self, device: Device, ops: Ops, spec: ModelSpec, keys: Sequence[CellKey]) -> None:
        self._device = device
        self._ops = ops
        self.baseline = baseline_key(keys, spec)
        stacked = [*keys, *([] if self.baseline in keys else [self.baseline])]
        runs = [layer_runs(key, spec) for key in (*stacked, self.baseline)]  # the last are torch's
        groups = groups_of(self.baseline)
        sizes = [layer_bytes(run, groups) for of_stack in runs for run in of_stack]
        reads = [run.count for of_stack in runs for run in of_stack]
        wanted = COLD_FACTOR * device.info.last_level_cache_bytes
        allowed = int(device.available_bytes() * MEMORY_SHARE)
        copies, self.cold_bytes = fitting_copies(sizes, reads_between(device, reads), wanted, allowed)
        in_turn = iter(copies)
        split = [[next(in_turn) for _ in of_stack] for of_stack in runs]
        self.stacks = {key: Stack(key, spec, ops, numbers) for key, numbers in zip(stacked, split, strict=False)}
        self._dense = DenseStack(self.baseline, spec, split[-1], ops.device)
        self._rotations = {self._name(key): stack.rotation for key, stack in self.stacks.items()}
        self._rotations[_TORCH_CALL] = self._dense.rotation

    def measure(self, effort: Effort) -> dict[CellKey, Samples]:
        """Return the figures of every cell."""
        fused, torch_name = self._decode(effort)
        own_16bit, torch_16bit = fused[_BASELINE], fused.get(_TORCH_CALL, ())
        kernel = TORCH if torch_name else self._ops.name
        best = torch_16bit if torch_name else own_16bit
        unfused = self._unfused(effort)
        return {
            key: self._samples(stack, fused.get(key.label, own_16bit), best, unfused.get(key.label), kernel)
            for key, stack in self.stacks.items()
        }

    def _name(self, key: CellKey) -> str:
        return _BASELINE if key == self.baseline else key.label

    def _decode(self, effort: Effort) -> tuple[dict[str, tuple[float, ...]], bool]:
        """Return seconds of a step by cell, and whether torch's 16-bit attention is the faster one."""
        calls: dict[str, Call] = {self._name(key): stack.decode for key, stack in self.stacks.items()}
        both, few = calls | {_TORCH_CALL: self._dense.decode}, Sampling(samples=CHOOSING_ROUNDS, warmups=1)
        first = sample_interleaved(self._device, both, few, self._rotations)
        torch_wins = median(first[_TORCH_CALL]) < median(first[_BASELINE])
        if torch_wins:
            calls[_TORCH_CALL] = self._dense.decode
        rest = Sampling(
            samples=max(1, effort.kernel_samples - CHOOSING_ROUNDS), warmups=1, budget_s=effort.kernel_budget_s
        )
        later = sample_interleaved(self._device, calls, rest, self._rotations)
        return {name: first[name] + later.get(name, ()) for name in first}, torch_wins

    def _unfused(self, effort: Effort) -> dict[str, tuple[float, ...]]:
        calls: dict[str, Call] = {
            key.label: stack.decode_unfused for key, stack in self.stacks.items() if parse_formats(key.format).quantized
        }
        sampling = Sampling(samples=effort.kernel_samples, warmups=1, budget_s=effort.kernel_budget_s)
        rotations = {key.label: stack.rotation for key, stack in self.stacks.items()}
        return sample_interleaved(self._device, calls, sampling, rotations)

    def _samples(
        self,
        stack: Stack,
        fused: tuple[float, ...],
        best_16bit: tuple[float, ...],
        unfused: tuple[float, ...] | None,
        kernel_16bit: str,
    ) -> Samples:
        found = Samples(kernel_16bit=kernel_16bit, cold_bytes=self.cold_bytes)
        found.figures = {"decode_fused_s": fused, "decode_16bit_s": best_16bit, "append_s": self._append(stack)}
        if unfused is None:
            found.missing["decode_unfused_s"] = "16 bits need no dequantizing"
        else:
            found.figures["decode_unfused_s"] = unfused
        if len(stack.key.loads) == 1:
            call = stack.pack_call(stack.key.loads[0].bucket.prompt_tokens)
            call()
            pack = self._device.repeated(call, 1)
            found.figures["pack_s"] = tuple(self._device.time(pack) for _ in range(3))
        else:
            found.missing |= dict.fromkeys(("prefill_s", "pack_s", "ttft_s"), MIX_REASON)
        return found

    def _append(self, stack: Stack) -> tuple[float, ...]:
        calls = stack.append_calls()
        calls[0]()
        return tuple(self._device.time(self._device.repeated(call, 1)) for call in calls)


def baseline_key(keys: Sequence[CellKey], spec: ModelSpec) -> CellKey:
    """Return the 16-bit cell that *keys* are compared with: one of them, else one like the first of them."""
    name = str(spec.float_type)
    return next((key for key in keys if key.format == name), replace(keys[0], format=name))


def derived_figures(samples: Samples, read_bytes: float, bandwidth: tuple[float, ...]) -> None:
    """Add to *samples* what follows from its medians: shares of a step and bandwidth; one sample a repeat."""
    figures, missing = samples.figures, samples.missing
    fused = median(figures["decode_fused_s"])
    figures["achieved_bandwidth_bytes_per_s"] = (read_bytes / fused,)
    if "tpot_s" in figures:
        step = median(figures["tpot_s"])
        figures["quantize_share"] = (median(figures["append_s"]) / step,)
        if bandwidth:
            figures["dequantize_share"] = (max(0.0, fused - read_bytes / median(bandwidth)) / step,)
        else:
            missing["dequantize_share"] = "the read bandwidth is not known"
    else:
        reason = missing.get("tpot_s", "the step was not measured")
        missing["quantize_share"] = missing["dequantize_share"] = reason
    if "prefill_s" in figures and "pack_s" in figures and "ttft_s" not in figures:
        figures["ttft_s"] = tuple(seconds + median(figures["pack_s"]) for seconds in figures["prefill_s"])
