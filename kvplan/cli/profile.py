"""`kvplan profile`: measure a model on this machine over a workload."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import typer

from kvplan.errors import ExitStatus, InputError, KvplanError

if TYPE_CHECKING:
    from kvplan.core.records import Profile
    from kvplan.core.specs import ModelSpec
    from kvplan.core.workloads import Prefill, Workload
    from kvplan.measure.device import Device
    from kvplan.measure.progress import Progress
    from kvplan.measure.session import Request
    from kvplan.runtime.ops import Kernel
    from kvplan.store.calibrations import Calibration
    from kvplan.store.journal import Journal


_MODEL: Final = typer.Argument(..., help="Hugging Face id, folder, GGUF file, config.json, or demo.")
_OUTPUT: Final = typer.Option(..., "-o", "--output", help="Profile to write; its journal P.jsonl lies beside it.")
_WORKLOAD: Final = typer.Option(
    None, "-w", "--workload", help="Workload YAML; without one, short to long requests.", show_default=False
)
_FORMATS: Final = typer.Option(
    [], "-f", "--format", help="Format to measure; may be repeated. Default: the workload's.", show_default=False
)
_BLOCKS: Final = typer.Option(
    [], "--block-size", help="Tokens of a page; may be repeated. Default: the workload's.", show_default=False
)
_DEVICE: Final = typer.Option(
    None, help="cpu, cuda, cuda:1, a UUID, or auto: a GPU if there is one. Default: the workload's.", show_default=False
)
_THREADS: Final = typer.Option(None, min=1, help="Threads. Default: the cores.", show_default=False)
_REPEATS: Final = typer.Option(
    None, min=1, help="Repeats, each a process of its own. Default: 5, 3 with --quick.", show_default=False
)
_RETRIES: Final = typer.Option(
    None, min=0, help="How often a disturbed repeat is measured again. Default: 2, 1 with --quick.", show_default=False
)
_TOLERANCE: Final = typer.Option(
    "10%", "--max-disturbance", help="Core time that other processes may take before a repeat counts as disturbed."
)
_CELL_TIMEOUT: Final = typer.Option(
    None, help="How long starting, or one group of cells, may take before the measuring process counts as hung, as "
    "30min or 2h. Default: 30min on a GPU, 6h on a processor.", show_default=False,
)  # fmt: skip
_QUICK: Final = typer.Option(False, "--quick", help="Fewer samples, repeats and documents.")
_RESUME: Final = typer.Option(False, "--resume", help="Go on with an interrupted run's journal.")
_FORCE: Final = typer.Option(False, "--force", help="Overwrite the profile and its journal.")
_QUALITY: Final = typer.Option(True, "--quality/--no-quality", help="Score what each format costs the answers.")
_PREFILL: Final = typer.Option(
    None,
    help="exact, or through_cache: later chunks of a prompt read the cache. Default: the workload's.",
    show_default=False,
)
_KERNEL: Final = typer.Option(
    None, help="cpu, triton, or reference: the definitions in PyTorch, slow. Default: the device's.", show_default=False
)
_CALIBRATION: Final = typer.Option(
    None, "--calibration", help="What formats have learned. Default: <model>.calibration.safetensors in this folder, "
    "where one needs it.", show_default=False,
)  # fmt: skip
_JSON: Final = typer.Option(False, "--json", help="Print the profile as JSON.")


def register(app: typer.Typer) -> None:
    """Add the command to *app*."""
    app.command("profile")(profile_command)


def profile_command(
    model: str = _MODEL,
    output: Path = _OUTPUT,
    workload: Path | None = _WORKLOAD,
    formats: list[str] = _FORMATS,
    block_size: list[int] = _BLOCKS,
    device: str | None = _DEVICE,
    threads: int | None = _THREADS,
    repeats: int | None = _REPEATS,
    retries: int | None = _RETRIES,
    max_disturbance: str = _TOLERANCE,
    cell_timeout: str | None = _CELL_TIMEOUT,
    quick: bool = _QUICK,
    resume: bool = _RESUME,
    force: bool = _FORCE,
    quality: bool = _QUALITY,
    prefill: str | None = _PREFILL,
    kernel: str | None = _KERNEL,
    calibration: Path | None = _CALIBRATION,
    as_json: bool = _JSON,
) -> None:
    """Measure memory, time and quality of each cache format on the model itself.

    Every finished cell is in the journal at once: after an interruption, --resume goes on.
    Exit status: 0 done, cells out of memory, unsupported or disturbed included; 1 a cell failed; 3 no
    cell is supported.
    """
    from kvplan.measure.checks import require_packages
    from kvplan.measure.devices import open_device

    require_packages()
    _check_output(output, resume=resume, force=force)
    asked = _workload(model, workload)
    name = device or asked.device
    request = _request(
        model, asked, device=open_device(name).torch_name, formats=formats, blocks=block_size, prefill=prefill,
        kernel=kernel, threads=threads, repeats=repeats, retries=retries, max_disturbance=max_disturbance, quick=quick,
        cell_timeout=cell_timeout, calibration=calibration,
    )  # fmt: skip
    machine = open_device(name, request.kernel_name.rpartition("/")[2])
    try:
        profile = _measure(machine, request, output, resume=resume, quality=quality, quick=quick)
    except KeyboardInterrupt:
        from kvplan.store.journal import journal_path

        sys.stderr.write(f"interrupted; everything finished is kept in {journal_path(output)}: --resume goes on\n")
        raise typer.Exit(ExitStatus.INTERRUPTED) from None
    _show(profile, output, as_json=as_json)
    raise typer.Exit(_status(profile))


def _measure(
    machine: "Device", request: "Request", output: Path, *, resume: bool, quality: bool, quick: bool
) -> "Profile":
    """Measure the cells, then the quality, and write the profile after each."""
    from kvplan.measure.progress import open_progress
    from kvplan.measure.session import Session
    from kvplan.store.journal import Journal, journal_path, read_journal
    from kvplan.store.profiles import save_profile

    path = journal_path(output)
    with Journal(path, keep=resume) as journal, open_progress() as progress:
        try:
            profile = Session(machine, request, journal, progress).run()
        except KvplanError:
            if not read_journal(path).cells:
                path.unlink()  # nothing was measured: nothing is left to resume
            raise
        save_profile(profile, output)
        if quality and request.spec.has_weights:
            profile = _with_quality(profile, request, journal, progress, quick=quick)
            save_profile(profile, output)
    return profile


def _check_output(output: Path, *, resume: bool, force: bool) -> None:
    from kvplan.store.journal import journal_path

    if output.is_dir() or not output.parent.is_dir():
        what = "is a folder" if output.is_dir() else "lies in a folder that does not exist"
        raise InputError(what, where=str(output), hint="give a file to write")
    if force and resume:
        raise InputError("--resume keeps what is there and --force does not", hint="give one of them")
    if force or resume:
        return
    for path in (output, journal_path(output)):
        if path.exists():
            hint = "give --resume, --force or another -o"
            raise InputError("exists and is not overwritten", where=str(path), hint=hint)


def _workload(model: str, path: Path | None) -> "Workload":
    from dataclasses import replace

    from kvplan.store.models import load_model_spec
    from kvplan.store.workloads import default_workload, load_workload

    if path is None:
        return default_workload(model, load_model_spec(model).context_tokens)
    return replace(load_workload(path), model=model)


def _request(
    model: str, asked: "Workload", *, device: str, formats: list[str], blocks: list[int], prefill: str | None,
    kernel: str | None, threads: int | None, repeats: int | None, retries: int | None, max_disturbance: str,
    quick: bool, cell_timeout: str | None, calibration: Path | None,
) -> "Request":  # fmt: skip
    from dataclasses import replace

    from kvplan.measure.device import usable_cores
    from kvplan.measure.session import Request
    from kvplan.runtime.ops import default_kernel, load_ops, require_compiled
    from kvplan.store.calibrations import calibration_path
    from kvplan.store.models import load_model_spec

    count, spec = threads or usable_cores(), load_model_spec(model)
    chosen = _kernel(kernel) if kernel else default_kernel(device)
    ops = load_ops(chosen, count, device)
    require_compiled(ops)
    request = Request(
        model=model,
        spec=spec,
        workload=asked,
        formats=tuple(dict.fromkeys(_format_name(name, spec) for name in formats)) or asked.search.formats,
        block_tokens=tuple(dict.fromkeys(blocks)) or asked.search.block_tokens,
        kernel=chosen,
        kernel_name=ops.name,
        threads=count,
        device=device,
        prefill=_prefill(prefill) if prefill else asked.prefill,
        command=shlex.join(["kvplan", *sys.argv[1:]]),
    )
    request = request.quick() if quick else request
    learned = _learned(request, calibration)
    return replace(
        request,
        repeats=request.repeats if repeats is None else repeats,
        retries=request.retries if retries is None else retries,
        tolerance=_tolerance(max_disturbance),
        cell_timeout_s=None if cell_timeout is None else _cell_timeout(cell_timeout),
        calibration=None if learned is None else (calibration or calibration_path(request.spec.name)).absolute(),
    )


def _learned(request: "Request", path: Path | None) -> "Calibration | None":
    """Return what the request's formats have learned; refuse one that has not, before anything is measured."""
    from kvplan.runtime.learned import require_calibration
    from kvplan.store.calibrations import find_calibration
    from kvplan_kernels.layer_formats import parse_formats

    forms = [parse_formats(name) for name in request.formats]
    found = find_calibration(request.spec, forms, path)
    for form in forms:
        require_calibration(request.spec, form, found)
    return found


def _tolerance(text: str) -> float:
    from kvplan.units import parse_share

    share = parse_share(text)
    if not 0 < share <= 1:
        raise InputError(f"{text!r} of the cores' time", where="--max-disturbance", hint="write it as 10%")
    return share


def _cell_timeout(text: str) -> float:
    from kvplan.units import parse_seconds

    try:
        return parse_seconds(text)
    except InputError as error:
        raise InputError(error.message, where="--cell-timeout", hint=error.hint) from error


def _format_name(name: str, spec: "ModelSpec") -> str:
    """Return the canonical name of a format whose layers, where it names any, the model has."""
    from kvplan.engines.formats import refuse_format
    from kvplan.errors import UnsupportedFormatError
    from kvplan_kernels.format import UnsupportedError
    from kvplan_kernels.layer_formats import parse_formats
    from kvplan_kernels.tier_formats import TieredFormat

    try:
        form = parse_formats(name)
    except UnsupportedError as error:
        raise refuse_format(name, str(error), where="--format") from error
    if isinstance(form, TieredFormat):
        return form.name
    try:
        spec.layer_formats(form)
    except UnsupportedError as error:
        raise UnsupportedFormatError(f"{form} on {spec.name}: {error}", where="--format") from error
    return form.name


def _kernel(name: str) -> "Kernel":
    from kvplan.runtime.ops import Kernel

    if name not in list(Kernel):
        raise InputError(f"no kernel {name!r}", where="--kernel", hint=f"use {', '.join(Kernel)}")
    return Kernel(name)


def _prefill(name: str) -> "Prefill":
    from kvplan.core.workloads import Prefill

    if name not in list(Prefill):
        raise InputError(f"no prefill {name!r}", where="--prefill", hint=f"use {' or '.join(Prefill)}")
    return Prefill(name)


def _with_quality(
    profile: "Profile", request: "Request", journal: "Journal", progress: "Progress", *, quick: bool
) -> "Profile":
    """Return *profile* with the quality of its formats; what the journal holds of the same text is not scored again."""
    from dataclasses import replace

    from kvplan import __version__
    from kvplan.core.records import QualityKey
    from kvplan.measure.session import refusal_lines
    from kvplan.quality import effort
    from kvplan.quality.scoring import QualityOptions, prepare, score
    from kvplan.runtime.loading import load_model
    from kvplan.store.calibrations import learned_digest
    from kvplan.store.journal import resume_quality
    from kvplan_kernels.layer_formats import parse_formats

    loaded, spec = load_model(request.model, device=request.device), request.spec
    calibration = _learned(request, request.calibration)
    options = QualityOptions(
        block_tokens=request.block_tokens[0],
        context_tokens=effort.context_tokens(request.workload, spec.context_tokens, quick=quick),
        documents=effort.documents(quick=quick),
        trials=effort.trials(request.workload, quick=quick),
        prefill=request.prefill,
        kernel=request.kernel,
        threads=request.threads,
    )
    digest = prepare(loaded, options).digest
    wanted = [
        QualityKey(
            model_digest=spec.digest, format=name, block_tokens=options.block_tokens, prefill=options.prefill,
            chunk_tokens=options.chunk_tokens, data_digest=digest, kernel=request.kernel_name,
            kvplan_version=__version__, calibration=learned_digest(parse_formats(name), calibration),
        )
        for name in _scored_formats(request)
    ]  # fmt: skip
    kept, refused = resume_quality(journal.contents.quality, wanted)
    for line in refusal_lines(refused):
        progress.note(line)
    missing = [key.format for key in wanted if key not in kept]
    if missing:
        progress.note(f"quality of {', '.join(missing)}")
        results = score(
            loaded, missing, options, calibration=calibration,
            progress=lambda share: progress.share("quality", share),
        )  # fmt: skip
        for result in results:
            journal.append(result)
            kept[result.key] = result
    return replace(profile, quality=tuple(kept[key] for key in wanted))


def _scored_formats(request: "Request") -> list[str]:
    """Return the formats that the kernel takes and that lay out at the block size that quality is scored with."""
    from kvplan.core.tiers import lay_out_tiers
    from kvplan.errors import UnsupportedFormatError
    from kvplan_kernels.format import UnsupportedError
    from kvplan_kernels.layer_formats import check_formats, parse_formats
    from kvplan_kernels.layout import order_of
    from kvplan_kernels.tier_formats import TieredFormat

    found, order = [], order_of(request.kernel_name)
    for name in request.formats:
        try:
            form = parse_formats(name)
            check_formats(request.kernel, form)
            if isinstance(form, TieredFormat):
                lay_out_tiers(request.spec, form, request.block_tokens[0], order)
            else:
                request.spec.layouts(form, request.block_tokens[0], order)
        except (UnsupportedError, UnsupportedFormatError):
            continue
        found.append(name)
    return found


def _show(profile: "Profile", output: Path, *, as_json: bool) -> None:
    if as_json:
        from kvplan.store.encoding import encode

        sys.stdout.write(encode(profile).decode() + "\n")
        return
    from kvplan.report.console import open_console
    from kvplan.report.profile import print_profile

    print_profile(open_console(), profile, str(output))


def _status(profile: "Profile") -> ExitStatus:
    from kvplan.core.records import CellStatus

    statuses = {cell.status for cell in profile.cells}
    if statuses == {CellStatus.UNSUPPORTED}:
        return ExitStatus.UNSUPPORTED
    return ExitStatus.NOT_MET if CellStatus.FAILED in statuses else ExitStatus.DONE
