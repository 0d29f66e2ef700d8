"""`kvplan calibrate`: what formats learn of a model before they can be used."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import typer

from kvplan.errors import InputError

if TYPE_CHECKING:
    from kvplan.store.calibrations import Calibration

_DATA_BYTES_MAX: Final = 1 << 28


def register(app: typer.Typer) -> None:
    """Add the command to *app*."""
    app.command("calibrate")(calibrate_command)


def calibrate_command(
    model: str = typer.Argument(..., help="Hugging Face id, folder, GGUF file, or demo."),
    formats: list[str] = typer.Option(
        ..., "-f", "--format", help="Format that learns from the model, such as unbias-int4; may be repeated."
    ),
    output: Path | None = typer.Option(
        None, "-o", "--output", help="File to write. Default: <model>.calibration.safetensors in this folder.",
        show_default=False,
    ),
    data: Path | None = typer.Option(
        None, help="Text file to learn from, never to be scored. Default: Python documentation kept for this.",
        show_default=False,
    ),
    context: int | None = typer.Option(
        None, "--context", "--max-model-len", min=32,
        help="Tokens of a document. Default: 2048, or what the model takes.", show_default=False,
    ),
    documents: int | None = typer.Option(
        None, min=1, help="Documents. Default: what the text holds, up to 16.", show_default=False
    ),
    threads: int | None = typer.Option(None, min=1, help="Threads. Default: the cores.", show_default=False),
    device: str = typer.Option("cpu", help="cpu, cuda, cuda:1, a UUID, or auto: a GPU if there is one."),
    force: bool = typer.Option(False, "--force", help="Overwrite a file that was learned from other text."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:  # fmt: skip
    """Run the model in 16 bits over text that is never scored, and keep what formats learn of its keys and values.

    `quality` and `profile` take the file. What it holds already of the same model and text is kept.
    """
    from kvplan.core.formats import read_format
    from kvplan.measure.checks import require_packages
    from kvplan.measure.devices import open_device
    from kvplan.measure.environment import versions
    from kvplan.measure.progress import open_progress
    from kvplan.store.calibrations import calibration_path, load_earlier, save_calibration
    from kvplan.store.files import read_text

    require_packages()
    import torch

    from kvplan.quality.calibrating import calibrate, calibration_documents, require_learning
    from kvplan.quality.passages import data_digest
    from kvplan.runtime.loading import load_model

    asked = list(map(read_format, formats))
    require_learning(asked)
    forms = list(dict.fromkeys(part for form in asked for part in form.parts if part.calibrated))
    path = output or calibration_path(model)
    if not path.parent.is_dir():
        raise InputError("lies in a folder that does not exist", where=str(path), hint="give a file to write")
    where = "cpu" if device == "cpu" else open_device(device).torch_name
    text = None if data is None else read_text(data, limit_bytes=_DATA_BYTES_MAX)
    torch.set_num_threads(threads or torch.get_num_threads())
    loaded = load_model(model, device=where)
    passages = calibration_documents(loaded, text=text, context_tokens=context, documents=documents)
    digest, made_by = data_digest(passages), versions()
    before = None if force else load_earlier(path, loaded.spec, data_digest=digest, versions=made_by)
    with open_progress() as progress:
        found = calibrate(
            loaded, forms, passages, versions=made_by, progress=lambda share: progress.share("calibrate", share)
        )
    found = found if before is None else found.kept(before)
    save_calibration(found, path)
    _show(found, path, [passage.tokens for passage in passages], as_json=as_json)


def _show(calibration: "Calibration", path: Path, tokens: list[int], *, as_json: bool) -> None:
    from kvplan.report.calibration import calibration_json, print_calibration
    from kvplan.report.console import open_console

    if as_json:
        sys.stdout.write(calibration_json(calibration, str(path), tokens) + "\n")
        return
    print_calibration(open_console(), calibration, str(path), tokens)
