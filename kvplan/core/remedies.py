"""What would make an unreachable target reachable: fewer sessions, shorter context, more memory."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from math import ceil

from kvplan.core.assessments import Measurements, assess, memory_of
from kvplan.core.plans import Option, Quantity, Remedy, Status
from kvplan.core.specs import ModelSpec
from kvplan.core.workloads import Bucket, Workload
from kvplan.units import format_bytes


def find_remedies(
    options: Sequence[Option], workload: Workload, model: ModelSpec, known: Measurements
) -> tuple[Remedy, ...]:
    """Return at most one remedy of a kind: the one that changes least, then the least aggressive setting for it.

    Where none is known to meet every target, those are returned that meet all but what was not measured, and say so.
    """
    for good in ((Status.FITS,), (Status.FITS, Status.UNDECIDED)):
        small = [option for option in options if _only_memory_is_over(option, good)]
        found = [
            _fewer_sessions(options, workload, model, known, good),
            _shorter_context(small, workload, model, known),
            _more_memory(small, workload, model, known),
        ]
        remedies = tuple(remedy for remedy in found if remedy is not None)
        if remedies:
            return remedies if len(good) == 1 else tuple(_unmeasured(remedy) for remedy in remedies)
    return ()


def _unmeasured(remedy: Remedy) -> Remedy:
    return replace(remedy, text=f"{remedy.text}, as far as memory goes: other targets were not measured")


def _only_memory_is_over(option: Option, good: Sequence[Status]) -> bool:
    return all(v.status in good for v in option.verdicts if v.quantity is not Quantity.MEMORY)


def _fewer_sessions(
    options: Sequence[Option], workload: Workload, model: ModelSpec, known: Measurements, good: Sequence[Status]
) -> Remedy | None:
    best: tuple[int, Option] | None = None
    for option in options:
        highest = min(option.sessions, workload.target.concurrency - 1)
        floor = best[0] if best else 0
        if highest <= floor:
            continue

        def meets(count: int, option: Option = option) -> bool:
            fewer = replace(workload, target=replace(workload.target, concurrency=count))
            return assess(option.setting, fewer, model, known).status in good

        count = _largest(meets, highest)
        if count > floor:
            best = (count, option)
    if best is None:
        return None
    count, option = best
    text = f"serve {count} sessions instead of {workload.target.concurrency}, with {option.label}"
    return _remedy("sessions", text, count, option)


def _shorter_context(
    options: Sequence[Option], workload: Workload, model: ModelSpec, known: Measurements
) -> Remedy | None:
    best: tuple[int, Option] | None = None
    for option in options:

        def fits(percent: int, option: Option = option) -> bool:
            scaled = replace(workload, buckets=tuple(_scale(bucket, percent) for bucket in workload.buckets))
            memory = memory_of(option.setting, scaled, model, known)
            return memory.plan(workload.target.concurrency).fits

        percent = _largest(fits, 99)
        if percent > (best[0] if best else 0):
            best = (percent, option)
    if best is None:
        return None
    percent, option = best
    text = f"shorten every bucket to {percent}% of its tokens, with {option.label}"
    return _remedy("context", text, percent / 100, option)


def _more_memory(options: Sequence[Option], workload: Workload, model: ModelSpec, known: Measurements) -> Remedy | None:
    if not options:
        return None
    option = min(options, key=lambda o: o.memory.need_bytes)
    needed = ceil(Fraction(option.memory.need_bytes) / Fraction(workload.memory_utilization))
    memory = memory_of(option.setting, workload, model, known)
    text = (
        f"a device of {format_bytes(needed, digits=2)} instead of {format_bytes(memory.memory_bytes, digits=2)}, "
        f"with {option.label}"
    )
    return _remedy("memory", text, needed, option)


def _remedy(kind: str, text: str, value: float, option: Option) -> Remedy:
    return Remedy(kind=kind, text=text, value=value, format=option.format, block_tokens=option.block_tokens)


def _scale(bucket: Bucket, percent: int) -> Bucket:
    return replace(
        bucket,
        prompt_tokens=max(1, bucket.prompt_tokens * percent // 100),
        generate_tokens=max(1, bucket.generate_tokens * percent // 100),
        shared_prefix_tokens=bucket.shared_prefix_tokens * percent // 100,
    )


def _largest(meets: Callable[[int], bool], highest: int) -> int:
    """Return the largest count up to *highest* that meets, by bisection; 0 where none is found."""
    if highest < 1:
        return 0
    if meets(highest):
        return highest
    low, high = 0, highest
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if meets(middle) else (low, middle)
    return low
