"""An engine's formats as settings that a plan chooses among."""

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from kvplan.core.allocation import Allocation, Setup
from kvplan.core.engine_memory import EngineMemory
from kvplan.core.formats import read_format
from kvplan.core.gpus import capability_of
from kvplan.core.memory import DeviceMemory
from kvplan.core.packing import EngineFormat
from kvplan.core.plans import Plan
from kvplan.core.settings import Setting
from kvplan.core.specs import ModelSpec
from kvplan.core.workloads import Search, Workload
from kvplan.engines import allocate, engines_with, having
from kvplan.engines.engine import CHECKPOINT, GGUF, Engine, run_type
from kvplan.errors import UnsupportedFormatError, UnsupportedModelError
from kvplan_kernels.layout import Order

Refused = tuple[str, str]
"""A format and why it is not among the settings."""
_NO_GPU: Final = "cpu"


def without_prefixes(engine: Engine, workload: Workload) -> tuple[Workload, tuple[str, ...]]:
    """Return *workload* as an engine that keeps no prefixes serves it, with what to know of that."""
    lacking = engine.limits.unused.get("prefix_caching")
    if not lacking or not workload.prefix_caching:
        return workload, ()
    remark = f"{engine.title} {lacking}: every session is counted with its whole prompt."
    return replace(workload, prefix_caching=False), (remark,)


def engine_settings(
    engine: Engine, workload: Workload, model: ModelSpec, device: str
) -> tuple[list[Setting], list[Refused]]:
    """Return the engine's settings of the workload's search, and what is refused.

    Args:
        engine: Not kvplan's own.
        workload: A search that it leaves at its default is over all of the engine's formats.
        model: What is served.
        device: What the plan is for, by its driver's name or `cpu`; a format that it lacks is refused.

    Raises:
        UnsupportedModelError: The engine does not run the model, or is not started with such files.
        UnsupportedSettingError: It does not take the workload's ranks, blocks or prefix caching.
    """
    _check_files(engine, model)
    settings: list[Setting] = []
    refused: list[Refused] = []
    asked = workload.search.formats != Search().formats
    for name in _names(engine, workload, model):
        try:
            form = _named(engine, name)
            made = [_setting(engine, form, model, workload, block, device) for block in _block_sizes(workload)]
        except UnsupportedFormatError as error:
            if asked or name == engine.default_format(model):  # else it was not asked for
                refused.append((name, str(error)))
            continue
        try:
            _check_device(form, device)
            settings += made
        except UnsupportedFormatError as error:
            refused.append((name, str(error)))
    unique = {(setting.format, setting.block_tokens): setting for setting in settings}
    return list(unique.values()), refused


def _names(engine: Engine, workload: Workload, model: ModelSpec) -> Sequence[str]:
    """Return the formats to try: an unquantized one, the engine's default, and those of the search."""
    run, own = run_type(model), engine.default_format(model)
    plain = [form.name for form in engine.formats if not form.quantized]
    sixteen = own if own in plain or run not in plain else run
    if workload.search.formats != Search().formats:
        asked = [engine.format_name(model, name) for name in workload.search.formats]
        return tuple(dict.fromkeys((sixteen, own, *asked)))
    others = [form.name for form in engine.formats if form.quantized]  # other 16-bit types take the same room
    return tuple(dict.fromkeys((sixteen, own, *others)))


def _named(engine: Engine, name: str) -> EngineFormat:
    """Return the engine's format of its own name or kvplan's; of several that kvplan's could mean, the first."""
    word = name.removeprefix(f"{engine.name}:")
    key, slash, value = word.partition("/")
    if slash and engine.pairs:
        return _pair(_named(engine, key), _named(engine, value))
    for form in engine.formats:
        if word in (form.name, form.same_as, form.like, *form.aliases):
            return form
    others = engines_with(name, engine)
    hint = having(others) if others else f"it has {', '.join(form.name for form in engine.formats)}"
    raise UnsupportedFormatError(f"{engine.title} has no cache format {name!r}", hint=hint)


def _pair(key: EngineFormat, value: EngineFormat) -> EngineFormat:
    """Return the format that stores K as the one and V as the other; no figures stand for it."""
    if key is value:
        return key
    return replace(key, name=f"{key.name}/{value.name}", value=value.value, same_as="", like="", aliases=())


def _check_files(engine: Engine, model: ModelSpec) -> None:
    if model.stored_weight_bytes is not None and GGUF not in engine.reads:
        hint = "give the folder or the id of the checkpoint that it was made of"
        raise UnsupportedModelError(f"{engine.title} reads no GGUF files", where=model.name, hint=hint)


def plan_notes(engine: Engine, workload: Workload, model: ModelSpec, plan: Plan) -> tuple[str, ...]:
    """Return what to know of how the engine allocates what was picked, and of starting it, a sentence each."""
    option = plan.pick or plan.options[0]
    sequences = sum(bucket.sequences(workload.target.concurrency) for bucket in workload.buckets)
    allocation = allocate(engine, model, option.format, setup_of(engine, workload, None, sequences))
    notes = [re.sub("--engine-(?:version|option)", r"kvplan size \g<0>", note) for note in allocation.notes]
    known = [f"{note}." if note.startswith(engine.title) else f"{engine.title}: {note}." for note in notes]
    return (*known, *(_start_notes(engine, workload.model, model) if plan.pick else ()))


def _start_notes(engine: Engine, name: str, model: ModelSpec) -> tuple[str, ...]:
    if name.endswith(".json"):
        return (f"{name} is a config without weights: start {engine.title} with the files of its model instead.",)
    if model.stored_weight_bytes is None and CHECKPOINT not in engine.reads:
        return (f"{engine.title} reads GGUF files: convert {name} to one, or start it with a repository that has one.",)
    return ()


def _check_device(form: EngineFormat, device: str) -> None:
    if device == _NO_GPU and form.capability is not None:
        raise UnsupportedFormatError(f"{form.name} needs a GPU of {_needs(form)}", where=device)
    capability = capability_of(device)
    if capability is not None and form.capability is not None and capability < form.capability:
        raise UnsupportedFormatError(f"{form.name} needs {_needs(form)}", where=device)


def _block_sizes(workload: Workload) -> Sequence[int | None]:
    return workload.search.block_tokens if workload.search.block_tokens != Search().block_tokens else (None,)


def setup_of(engine: Engine, workload: Workload, block_tokens: int | None, sequences: int) -> Setup:
    """Return what *engine* is told to serve *workload* with *sequences* at once."""
    batch_tokens = workload.max_batched_tokens
    return Setup(
        context_tokens=max(bucket.total_tokens for bucket in workload.buckets),
        tensor_parallel=workload.tensor_parallel,
        pipeline_parallel=workload.pipeline_parallel,
        max_batched_tokens=None if batch_tokens is None else engine.pass_tokens(batch_tokens),
        block_tokens=block_tokens,
        sequences=sequences,
        prefix_caching=workload.prefix_caching,
    )


def _setting(
    engine: Engine, form: EngineFormat, model: ModelSpec, workload: Workload, block_tokens: int | None, device: str
) -> Setting:
    allocation = allocate(engine, model, form.name, setup_of(engine, workload, block_tokens, 1))
    blocks = [group.block_tokens for group in allocation.blocks if group.block_tokens]
    named = form.same_as or form.like or (form.name if not form.quantized else "")
    return Setting(
        format=form.name,
        block_tokens=min(blocks, default=1),
        bits=(form.key.bits, form.value.bits),
        measured_as=read_format(named) if named else None,
        memory_of=partial(_memory_of, engine, form, block_tokens),
        own=False,
        note="" if not form.like else f"{form.name} stores other codes than {form.like}, whose figures stand for it",
        needs=_needs(form) if capability_of(device) is None else "",
    )


def _needs(form: EngineFormat) -> str:
    if form.capability is None:
        return ""
    return f"compute capability {form.capability / 10}: {form.why}"


def _memory_of(
    engine: Engine,
    form: EngineFormat,
    block_tokens: int | None,
    workload: Workload,
    model: ModelSpec,
    memory_bytes: int,
    _order: Order,
) -> DeviceMemory:
    def made(name: str, model: ModelSpec, workload: Workload, sequences: int) -> Allocation:
        return allocate(engine, model, name, setup_of(engine, workload, block_tokens, sequences))

    return EngineMemory(
        model=model,
        workload=workload,
        memory_bytes=memory_bytes,
        batched_tokens=engine.pass_tokens(workload.max_batched_tokens),
        batch_logits=engine.batch_logits,
        allocate=partial(made, form.name),
        allocate_16_bit=partial(made, str(model.float_type)),
    )
