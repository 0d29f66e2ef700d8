"""`kvplan size`: exact bytes of a model's cache, without loading the model."""

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import typer

from kvplan.errors import InputError, UnsupportedFormatError

if TYPE_CHECKING:
    from kvplan.core.sizes import CacheSize
    from kvplan.core.specs import ModelSpec


def register(app: typer.Typer) -> None:
    """Add the command to *app*."""
    app.command("size")(size_command)


def size_command(
    models: list[str] = typer.Argument(..., metavar="MODEL...", help="Hugging Face id, folder, GGUF, config or demo."),
    formats: list[str] = typer.Option(
        [], "-f", "--format", help="Format; may be repeated. Default: bf16.", show_default=False
    ),
    engine: str = typer.Option("kvplan", help="Engine whose allocator is counted."),
    context: int | None = typer.Option(
        None,
        "--context",
        "--max-model-len",
        min=1,
        help="Tokens of a sequence; the model's own without it.",
        show_default=False,
    ),
    kv_memory: str | None = typer.Option(None, help="Memory of the KV pool, as 4GiB.", show_default=False),
    memory: str | None = typer.Option(None, help="Memory of the whole device, as 24GiB.", show_default=False),
    utilization: str = typer.Option(
        "90%", "--memory-utilization", "--gpu-memory-utilization", help="Part of --memory that may be used."
    ),
    block_size: int | None = typer.Option(None, min=1, help="Tokens of a page. Default: 64.", show_default=False),
    tensor_parallel: int = typer.Option(1, "--tp", "--tensor-parallel-size", min=1, help="Tensor parallel ranks."),
    pipeline_parallel: int = typer.Option(1, "--pp", "--pipeline-parallel-size", min=1, help="Pipeline stages."),
    max_batched_tokens: int = typer.Option(
        8192, "--max-batched-tokens", "--max-num-batched-tokens", min=1, help="Prompt tokens of one forward pass."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Count the exact bytes of a model's KV cache, and the sequences that a pool holds.

    A model that kvplan's runtime cannot hold has its logical bytes counted: geometry times format.
    """
    from kvplan.core.formats import read_format
    from kvplan.core.logical import runtime_refusal
    from kvplan.core.sizes import size_cache
    from kvplan.engines import find_engine
    from kvplan.store.models import load_model_spec
    from kvplan.units import parse_bytes

    chosen = find_engine(engine)
    if tensor_parallel != 1 or pipeline_parallel != 1:
        raise UnsupportedFormatError("kvplan's runtime works on one device", hint="leave --tp and --pp out")
    if kv_memory is not None and memory is not None:
        raise InputError("--kv-memory and --memory are two answers to one question", hint="give one")
    forms = [read_format(name) for name in dict.fromkeys(formats)]
    share = _share(utilization)
    block_tokens = block_size or chosen.default_block_tokens
    results: list[CacheSize] = []
    for name in models:
        model = load_model_spec(name, runtime=False)
        tokens = context or model.context_tokens or 1  # a state is of one size, whatever the context
        counted = not runtime_refusal(model)
        for form in forms or [read_format(str(model.float_type))]:
            pool = parse_bytes(kv_memory) if kv_memory is not None else None
            if memory is not None and counted:
                pool = _pool_bytes(model, parse_bytes(memory), share, min(tokens, max_batched_tokens))
            results.append(replace(size_cache(model, form, block_tokens, tokens, pool), model=name))
    _print(results, chosen.name, predicted=memory is not None, as_json=as_json)


def _share(utilization: str) -> float:
    from kvplan.units import parse_share

    share = parse_share(utilization)
    if not 0 < share <= 1:
        raise InputError(f"{utilization!r} of the memory", where="--memory-utilization", hint="write it as 90%")
    return share


def _pool_bytes(model: "ModelSpec", memory_bytes: int, share: float, chunk_tokens: int) -> int:
    """Return what weights and the activations of one prefill chunk leave of the device."""
    from kvplan.core.memory import activation_bytes
    from kvplan.units import format_bytes

    if model.weight_bytes is None:
        raise InputError(f"no weights to count: {model.weights_unknown}", hint="give --kv-memory instead of --memory")
    left = int(memory_bytes * share) - model.weight_bytes - activation_bytes(model, chunk_tokens)
    if left <= 0:
        needed = format_bytes(int(memory_bytes * share) - left, digits=2)
        raise InputError(f"weights and activations of {model.name} take {needed}", where="--memory")
    return left


def _print(results: "list[CacheSize]", engine: str, *, predicted: bool, as_json: bool) -> None:
    if as_json:
        from kvplan.report.json import sizes_json

        sys.stdout.write(sizes_json(results, engine) + "\n")
        return
    from kvplan.report.console import open_console
    from kvplan.report.sizes import print_sizes

    print_sizes(open_console(), results, predicted=predicted)
