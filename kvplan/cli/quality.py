"""`kvplan quality`: what a format costs a model's answers, without timing anything."""

import sys
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import typer

from kvplan.errors import InputError

if TYPE_CHECKING:
    from kvplan.core.quality_bounds import QualityBounds
    from kvplan.core.records import Quality

Choice = TypeVar("Choice", bound=StrEnum)

CONFIDENCE: Final = 0.95
"""Of the upper bounds that are printed."""
_DATA_BYTES_MAX: Final = 1 << 28


def register(app: typer.Typer) -> None:
    """Add the command to *app*."""
    app.command("quality")(quality_command)


def quality_command(
    model: str = typer.Argument(..., help="Hugging Face id, folder, GGUF file, or demo."),
    formats: list[str] = typer.Option(
        [], "-f", "--format", help="Format to score; may be repeated. Default: 16 bits to 2.", show_default=False
    ),
    data: Path | None = typer.Option(
        None, help="Text file to score on. Default: held-out Python documentation.", show_default=False
    ),
    block_size: int = typer.Option(64, "--block-size", min=1, help="Tokens of a page."),
    context: int | None = typer.Option(
        None, "--context", "--max-model-len", min=32,
        help="Tokens of a document; its last quarter is scored. Default: 1024, or what the model takes.",
        show_default=False,
    ),
    documents: int | None = typer.Option(
        None, min=1, help="Documents. Default: what the text holds, up to 16.", show_default=False
    ),
    trials: int = typer.Option(16, min=0, help="Keys to look up in a context of that length."),
    chunk: int = typer.Option(32, min=1, max=32, help="Tokens of one forward pass, fewer where groups are flushed."),
    prefill: str = typer.Option("exact", help="exact, or through_cache: later chunks of a prompt read the cache."),
    threads: int | None = typer.Option(None, min=1, help="Threads. Default: the cores.", show_default=False),
    device: str = typer.Option("cpu", help="cpu, cuda, cuda:1, a UUID, or auto: a GPU if there is one."),
    kernel: str | None = typer.Option(
        None, help="cpu, triton, or reference: the definitions in PyTorch, slow. Default: the device's.",
        show_default=False,
    ),
    calibration: Path | None = typer.Option(
        None, "--calibration",
        help="What formats have learned. Default: <model>.calibration.safetensors in this folder, where one needs it.",
        show_default=False,
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
    output: Path | None = typer.Option(None, "-o", "--output", help="Write the JSON to a file.", show_default=False),
) -> None:  # fmt: skip
    """Score text and retrieval through the quantized cache, against 16 bits on the same tokens."""
    from kvplan.core.quality_bounds import bound_quality
    from kvplan.core.workloads import Prefill
    from kvplan.measure.checks import require_packages
    from kvplan.measure.devices import open_device
    from kvplan.measure.progress import open_progress
    from kvplan.store.calibrations import find_calibration
    from kvplan.store.files import read_text

    require_packages()
    from kvplan.quality.lane import own_formats
    from kvplan.quality.scoring import QualityOptions, default_formats, score
    from kvplan.runtime.loading import load_model
    from kvplan.runtime.ops import Kernel, default_kernel, load_ops

    if output is not None and not output.parent.is_dir():
        raise InputError("lies in a folder that does not exist", where=str(output), hint="give a file to write")
    where = "cpu" if device == "cpu" else open_device(device).torch_name
    chosen = _choice("--kernel", kernel, Kernel) if kernel else default_kernel(where)
    load_ops(chosen, threads, where)  # refuses a kernel that does not run there before the model is loaded
    options = QualityOptions(
        block_tokens=block_size, documents=documents, trials=trials, chunk_tokens=chunk,
        prefill=_choice("--prefill", prefill, Prefill), kernel=chosen, threads=threads,
    )  # fmt: skip
    text = None if data is None else read_text(data, limit_bytes=_DATA_BYTES_MAX)
    loaded = load_model(model, device=where)
    tokens = context or min(options.context_tokens, loaded.spec.context_tokens - 1)
    options = replace(options, context_tokens=tokens)
    names = list(dict.fromkeys(formats)) or default_formats(loaded.spec, options)
    learned = find_calibration(loaded.spec, own_formats(names, loaded.spec), calibration)
    with open_progress() as progress:
        results = score(
            loaded, names, options, text=text, calibration=learned,
            progress=lambda share: progress.share("quality", share),
        )  # fmt: skip
    bounded = [(result, bound_quality(result, CONFIDENCE)) for result in results]
    _show(model, str(loaded.spec.float_type), bounded, as_json=as_json, output=output)


def _choice(option: str, name: str, choices: type[Choice]) -> Choice:
    if name not in list(choices):
        raise InputError(f"no {name!r}", where=option, hint=f"use {', '.join(choices)}")
    return choices(name)


def _show(
    model: str, sixteen_bit: str, results: "list[tuple[Quality, QualityBounds]]", *, as_json: bool, output: Path | None
) -> None:
    from kvplan.quality.scoring import NOISE_FLOOR
    from kvplan.report.console import open_console
    from kvplan.report.quality import print_quality, quality_json
    from kvplan.store.files import write_atomically

    if output is not None:
        write_atomically(output, (quality_json(model, results) + "\n").encode())
    if as_json:
        sys.stdout.write(quality_json(model, results) + "\n")
        return
    print_quality(open_console(), results, sixteen_bit=sixteen_bit, floor=NOISE_FLOOR)
