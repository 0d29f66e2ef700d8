"""`kvplan size`: exact bytes of a model's cache, without loading the model."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from kvplan.errors import InputError

if TYPE_CHECKING:
    from kvplan.core.sizes import CacheSize
    from kvplan.core.specs import ModelSpec
    from kvplan.engines.sizing import Question, Room


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
        None,
        help="Release of the engine whose rules count, as 0.27; a build of llama.cpp, as b7100.",
        show_default=False,
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
    tensor_parallel: int | None = typer.Option(
        None, "--tp", "--tensor-parallel-size", min=1, help="Tensor parallel ranks. Default: 1.", show_default=False
    ),
    pipeline_parallel: int | None = typer.Option(
        None, "--pp", "--pipeline-parallel-size", min=1, help="Pipeline stages. Default: 1.", show_default=False
    ),
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
    draft_tokens: int | None = typer.Option(
        None, min=0, help="Tokens a step that the model's own draft layers propose. Default: none.", show_default=False
    ),
    terms: bool = typer.Option(False, help="Print what lies between geometry and allocation, by name."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Count the exact bytes of a model's KV cache, and the sequences that a pool holds.

    Bytes are of one rank: the one that binds. A model that kvplan's runtime cannot hold has its logical bytes counted:
    geometry times format.
    """
    from kvplan.core.allocation import Setup
    from kvplan.engines import OWN, find_engine
    from kvplan.engines.sizing import Question, sizes, told
    from kvplan.store.models import load_model_spec
    from kvplan.units import parse_bytes, parse_version

    said: dict[str, Any] = {
        "context_tokens": context, "tensor_parallel": tensor_parallel, "pipeline_parallel": pipeline_parallel,
        "max_batched_tokens": max_batched_tokens, "block_tokens": block_size, "sequences": sequences,
        "prefix_caching": prefix_caching, "draft_tokens": draft_tokens,
        "version": None if engine_version is None else parse_version(engine_version),
        "options": frozenset(engine_options) or None,
    }  # fmt: skip
    said = {name: value for name, value in said.items() if value is not None}
    setup = replace(Setup(context_tokens=0), **said)
    given = {"activations": activation_memory, "graphs": graph_memory, "beside tensors": process_memory}
    room = told(
        _room(kv_memory, memory, utilization), {n: parse_bytes(text) for n, text in given.items() if text is not None}
    )
    asked = Question(formats=tuple(formats), setup=setup, said=frozenset(said), room=room)
    if measured is not None:
        asked, engines = _calibrated(asked, engines, measured, load_model_spec(_only(models), runtime=False))
    chosen = [find_engine(name) for name in dict.fromkeys(engines or [OWN])]
    if engine_version is not None and len(chosen) > 1:
        raise InputError(f"a release is of one engine, and {len(chosen)} are given", where="--engine-version")
    loaded = [_load(name, asked, beyond_model=beyond_model) for name in models]
    pairs = [(engine, model) for model in loaded for engine in chosen]
    alone = len(pairs) * max(1, len(formats)) == 1
    results = [size for pair in pairs for size in sizes(*pair, asked, alone=alone)]
    if not any(size.logical for size in results):  # the last refusal is then said as if it had been asked for alone
        results += sizes(*pairs[-1], asked, alone=True)
    _print(results, terms=terms or len(results) == 1, as_json=as_json)


def _load(name: str, asked: "Question", *, beyond_model: bool) -> "ModelSpec":
    from kvplan.store.models import load_model_spec

    model = replace(load_model_spec(name, runtime=False, weights=asked.room.weighed), name=name)
    context = asked.setup.context_tokens
    if not beyond_model and 0 < model.context_tokens < context:
        message = f"{context} tokens are beyond the {model.context_tokens} that {model.name} was made for"
        raise InputError(message, where="--context", hint="--beyond-model counts them all the same")
    return model


def _room(kv_memory: str | None, memory: str | None, utilization: str) -> "Room":
    from kvplan.engines.sizing import Room
    from kvplan.units import parse_bytes, parse_share

    if kv_memory is not None and memory is not None:
        raise InputError("--kv-memory and --memory are two answers to one question", hint="give one")
    share = parse_share(utilization)
    if not 0 < share <= 1:
        raise InputError(f"{utilization!r} of the memory", where="--memory-utilization", hint="write it as 90%")
    return Room(
        kv_bytes=None if kv_memory is None else parse_bytes(kv_memory),
        memory_bytes=None if memory is None else parse_bytes(memory),
        share=share,
    )


def _only(models: list[str]) -> str:
    if len(models) > 1:
        raise InputError(f"a log is of one model, and {len(models)} are given", where="--measured", hint="give one")
    return models[0]


def _calibrated(asked: "Question", engines: list[str], log: Path, model: "ModelSpec") -> "tuple[Question, list[str]]":
    """Return what was asked with what *log* tells, and the log's engine."""
    from kvplan.cli.explain import load_facts
    from kvplan.engines.calibration import calibrated_room, calibrated_setup, checked_facts, departures_note

    facts = load_facts(log)
    if engines and set(engines) != {facts.engine}:
        message = f"the log is of {facts.engine}, and {', '.join(engines)} was asked for"
        raise InputError(message, where="--measured", hint=f"leave --engine out, or give {facts.engine}")
    facts = checked_facts(facts, model, asked.setup.tensor_parallel if "tensor_parallel" in asked.said else None)
    setup = calibrated_setup(facts, asked.setup, asked.said)
    room = calibrated_room(facts, setup, asked.room)
    note = "; ".join(text for text in (room.note, departures_note(facts, model)) if text)
    room = replace(room, note=note)
    formats = asked.formats or ((facts.format,) if facts.format else ())
    return replace(asked, formats=formats, setup=setup, room=room), [facts.engine]


def _print(results: "list[CacheSize]", *, terms: bool, as_json: bool) -> None:
    if as_json:
        from kvplan.report.json import sizes_json

        sys.stdout.write(sizes_json(results) + "\n")
        return
    from kvplan.report.console import open_console
    from kvplan.report.sizes import print_sizes

    print_sizes(open_console(), results, terms=terms)
