"""`kvplan size`: exact bytes of a model's cache, without loading the model."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from kvplan.errors import InputError, UnsupportedFormatError, UnsupportedModelError, UnsupportedSettingError

if TYPE_CHECKING:
    from kvplan.core.allocation import Setup, Term
    from kvplan.core.sizes import CacheSize
    from kvplan.core.specs import ModelSpec
    from kvplan.engines.engine import Engine


def register(app: typer.Typer) -> None:
    """Add the command to *app*."""
    app.command("size")(size_command)


def size_command(
    models: list[str] = typer.Argument(..., metavar="MODEL...", help="Hugging Face id, folder, GGUF, config or demo."),
    formats: list[str] = typer.Option(
        [], "-f", "--format", help="Format; may be repeated. Default: the engine's.", show_default=False
    ),
    engines: list[str] = typer.Option(
        [], "--engine", help="Engine whose allocator counts; may be repeated. Default: kvplan.", show_default=False
    ),
    engine_version: str | None = typer.Option(
        None, help="Release of the engine whose rules count, as 0.27.", show_default=False
    ),
    engine_options: list[str] = typer.Option(
        [],
        "--engine-option",
        help="Flag of the engine that changes what it allocates, as swa-full.",
        show_default=False,
    ),
    context: int | None = typer.Option(
        None,
        "--context",
        "--max-model-len",
        min=1,
        help="Tokens of a sequence; the model's own without it.",
        show_default=False,
    ),
    beyond_model: bool = typer.Option(False, help="Take a --context beyond what the model was made for."),
    kv_memory: str | None = typer.Option(None, help="Memory of the KV pool of a rank, as 4GiB.", show_default=False),
    memory: str | None = typer.Option(None, help="Memory of a whole device, as 24GiB.", show_default=False),
    utilization: str = typer.Option(
        "90%", "--memory-utilization", "--gpu-memory-utilization", help="Part of --memory that may be used."
    ),
    activation_memory: str | None = typer.Option(
        None, help="Activations of a forward pass, where you know them, as 5GiB.", show_default=False
    ),
    graph_memory: str | None = typer.Option(None, help="Captured graphs, where you know them.", show_default=False),
    process_memory: str | None = typer.Option(
        None, help="What a process takes beside tensors (context, NCCL), where you know it.", show_default=False
    ),
    block_size: int | None = typer.Option(
        None, min=1, help="Tokens of a page. Default: the engine's.", show_default=False
    ),
    measured: Path | None = typer.Option(
        None,
        help="Start-up log of the same model: what only a run can tell is taken from it, and what is not said here.",
        show_default=False,
    ),
    tensor_parallel: int = typer.Option(1, "--tp", "--tensor-parallel-size", min=1, help="Tensor parallel ranks."),
    pipeline_parallel: int = typer.Option(1, "--pp", "--pipeline-parallel-size", min=1, help="Pipeline stages."),
    max_batched_tokens: int | None = typer.Option(
        None,
        "--max-batched-tokens",
        "--max-num-batched-tokens",
        min=1,
        help="Tokens of one forward pass. Default: the engine's, 8192 for kvplan.",
        show_default=False,
    ),
    sequences: int | None = typer.Option(
        None,
        "--sequences",
        "--max-num-seqs",
        min=1,
        help="Most sequences at once. Default: the engine's.",
        show_default=False,
    ),
    prefix_caching: bool | None = typer.Option(
        None,
        "--prefix-caching/--no-prefix-caching",
        help="Whether prefixes stay cached. Default: the engine's.",
        show_default=False,
    ),
    draft_tokens: int = typer.Option(0, min=0, help="Tokens a step that the model's own draft layers propose."),
    terms: bool = typer.Option(False, help="Print what lies between geometry and allocation, by name."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Count the exact bytes of a model's KV cache, and the sequences that a pool holds.

    Bytes are of one rank: the one that binds. A model that kvplan's runtime cannot hold has its logical bytes counted:
    geometry times format.
    """
    from kvplan.core.allocation import Setup
    from kvplan.engines import find_engine
    from kvplan.store.models import load_model_spec
    from kvplan.units import parse_version

    setup = Setup(
        context_tokens=context or 0, tensor_parallel=tensor_parallel, pipeline_parallel=pipeline_parallel,
        max_batched_tokens=max_batched_tokens, block_tokens=block_size, sequences=sequences,
        prefix_caching=prefix_caching, draft_tokens=draft_tokens,
        version=None if engine_version is None else parse_version(engine_version),
        options=frozenset(engine_options),
    )  # fmt: skip
    asked = _Asked(formats=formats, setup=setup, room=_room(kv_memory, memory, utilization))
    given = {"activations": activation_memory, "graphs": graph_memory, "beside tensors": process_memory}
    asked = replace(asked, room=_told(asked.room, given))
    if measured is not None:
        model = load_model_spec(_only(models), runtime=False)
        asked, engines = _calibrated(asked, engines, measured, model)
    chosen = [find_engine(name) for name in dict.fromkeys(engines or ["kvplan"])]
    results: list[CacheSize] = []
    for name in models:
        weighed = asked.room.memory_bytes is not None or bool(asked.room.measured)
        model = replace(load_model_spec(name, runtime=False, weights=weighed), name=name)
        _check_context(model, asked.setup.context_tokens, beyond_model=beyond_model)
        for engine in chosen:
            results += _sizes(engine, model, asked, alone=len(models) * len(chosen) * max(1, len(formats)) == 1)
    if not any(size.logical for size in results):
        raise UnsupportedFormatError(f"none of these is counted: {results[0].reason}")
    _print(results, terms=terms or len(results) == 1, as_json=as_json)


def _check_context(model: "ModelSpec", context: int, *, beyond_model: bool) -> None:
    if not beyond_model and 0 < model.context_tokens < context:
        message = f"{context} tokens are beyond the {model.context_tokens} that {model.name} was made for"
        raise InputError(message, where="--context", hint="--beyond-model counts them all the same")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Room:
    """The memory that was given: of the pool, or of a device with the part of it that may be used."""

    kv_bytes: int | None = None
    memory_bytes: int | None = None
    share: float = 1.0
    measured: "dict[str, Term]" = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Asked:
    formats: list[str]
    setup: "Setup"
    room: _Room


def _room(kv_memory: str | None, memory: str | None, utilization: str) -> _Room:
    from kvplan.units import parse_bytes, parse_share

    if kv_memory is not None and memory is not None:
        raise InputError("--kv-memory and --memory are two answers to one question", hint="give one")
    share = parse_share(utilization)
    if not 0 < share <= 1:
        raise InputError(f"{utilization!r} of the memory", where="--memory-utilization", hint="write it as 90%")
    return _Room(
        kv_bytes=None if kv_memory is None else parse_bytes(kv_memory),
        memory_bytes=None if memory is None else parse_bytes(memory),
        share=share,
    )


def _told(room: _Room, given: dict[str, str | None]) -> _Room:
    """Return *room* with the terms that the user knows, by name."""
    from kvplan.core.allocation import Term
    from kvplan.core.specs import Evidence
    from kvplan.units import parse_bytes

    said = {name: parse_bytes(text) for name, text in given.items() if text is not None}
    if said and room.memory_bytes is None:
        raise InputError("the memory of what else is there says nothing without the device's", hint="give --memory")
    terms = {name: Term(name, size, "as given", Evidence.REPORTED) for name, size in said.items()}
    return replace(room, measured=room.measured | terms)


def _only(models: list[str]) -> str:
    if len(models) > 1:
        raise InputError(f"a log is of one model, and {len(models)} are given", where="--measured", hint="give one")
    return models[0]


def _calibrated(asked: _Asked, engines: list[str], log: Path, model: "ModelSpec") -> tuple[_Asked, list[str]]:
    """Return what was asked with what *log* tells, and the log's engine."""
    from kvplan.cli.explain import load_facts
    from kvplan.engines.calibration import calibrated_setup, check_model, graphs_note, measured_terms

    facts = load_facts(log)
    if engines and set(engines) != {facts.engine}:
        message = f"the log is of {facts.engine}, and {', '.join(engines)} was asked for"
        raise InputError(message, where="--measured", hint=f"leave --engine out, or give {facts.engine}")
    check_model(facts, model)
    setup, room = calibrated_setup(facts, asked.setup), asked.room
    usable = None if room.memory_bytes is None else room.memory_bytes * room.share
    terms = measured_terms(facts, setup, usable) | room.measured
    formats = asked.formats or ([facts.format] if facts.format else [])
    room = replace(room, measured=terms, note=graphs_note(facts.measured))
    return _Asked(formats=formats, setup=setup, room=room), [facts.engine]


def _sizes(engine: "Engine", model: "ModelSpec", asked: _Asked, *, alone: bool) -> "Iterator[CacheSize]":
    """Yield the sizes of one model in one engine; beside others, what is refused is an answer with its reason."""
    from kvplan.core.formats import read_format
    from kvplan.core.logical import runtime_refusal
    from kvplan.core.sizes import CacheSize, size_geometry
    from kvplan.engines import OWN
    from kvplan.engines.limits import check_setup

    tokens = asked.setup.context_tokens or model.context_tokens or 1  # a state is of one size, whatever the context
    setup = replace(asked.setup, context_tokens=tokens)
    for name in dict.fromkeys(asked.formats or [engine.default_format(model)]):
        try:
            reason = runtime_refusal(model) if engine.name == OWN else ""
            if reason:
                check_setup(engine.title, engine.limits, setup)
                yield size_geometry(model, read_format(name), engine.name, setup, reason)
            else:
                yield _allocated(engine, model, name, replace(asked, setup=setup))
        except (UnsupportedFormatError, UnsupportedModelError, UnsupportedSettingError) as error:
            if alone:
                raise
            yield CacheSize(model=model.name, format=name, engine=engine.name, setup=setup, reason=error.message)


def _allocated(engine: "Engine", model: "ModelSpec", name: str, asked: _Asked) -> "CacheSize":
    from kvplan.core.formats import read_format
    from kvplan.core.sizes import size_allocation
    from kvplan.engines import OWN, allocate

    allocation = allocate(engine, model, name, asked.setup)
    form = read_format(name).name if engine.name == OWN else name.removeprefix(f"{engine.name}:")
    pool = _pool(engine.served(model), asked.setup, asked.room, engine.batched_tokens)
    sized = size_allocation(model.name, form, engine.name, allocation, pool)
    return replace(sized, notes=(*sized.notes, asked.room.note) if asked.room.note else sized.notes)


def _pool(model: "ModelSpec", setup: "Setup", room: _Room, batched_tokens: int) -> "tuple[Term, ...] | int | None":
    from kvplan.core.sizes import pool_terms

    if room.kv_bytes is not None or (room.memory_bytes is None and not room.measured):
        return room.kv_bytes
    return pool_terms(
        model, setup, memory_bytes=room.memory_bytes, share=room.share, measured=room.measured,
        batched_tokens=setup.max_batched_tokens or batched_tokens,
    )  # fmt: skip


def _print(results: "list[CacheSize]", *, terms: bool, as_json: bool) -> None:
    if as_json:
        from kvplan.report.json import sizes_json

        sys.stdout.write(sizes_json(results) + "\n")
        return
    from kvplan.report.console import open_console
    from kvplan.report.sizes import print_sizes

    print_sizes(open_console(), results, terms=terms)
