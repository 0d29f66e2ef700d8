"""`kvplan recommend`: the least aggressive setting that meets a workload's targets."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import typer

from kvplan.errors import ExitStatus, InputError, KvplanError, NotComparableError, UnsupportedFormatError

if TYPE_CHECKING:
    from kvplan.core.assessments import Measurements
    from kvplan.core.plans import Plan
    from kvplan.core.records import Profile
    from kvplan.core.specs import ModelSpec
    from kvplan.core.workloads import Workload
    from kvplan.engines.engine import Engine

_KEYS: Final = {"--tp": "parallel.tensor", "--pp": "parallel.pipeline", "--block-size": "search.block_size"}
"""A workload's keys by the options of `kvplan size` that engines name."""


def register(app: typer.Typer) -> None:
    """Add the command to *app*."""
    app.command("recommend")(recommend_command)


def recommend_command(
    workload: Path = typer.Argument(..., help="Workload YAML."),
    profiles: list[Path] = typer.Option(
        [], "-p", "--profile", help="Profile that `kvplan profile` wrote; may be repeated.", show_default=False
    ),
    engine: str | None = typer.Option(
        None, help="Engine to plan for. Default: the workload's, else kvplan.", show_default=False
    ),
    explain: bool = typer.Option(False, "--explain", help="Show the memory terms and every target's verdict."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Pick the least aggressive KV cache setting that meets the workload's targets, or say what would.

    Exit status: 0 a setting meets every target; 1 none does; 3 the measurements do not decide.
    """
    from kvplan.core.planner import make_plan
    from kvplan.core.plans import Outcome
    from kvplan.engines import OWN, find_engine
    from kvplan.store.workloads import load_workload

    asked = load_workload(workload, engine=engine)
    chosen = find_engine(asked.engine)
    if chosen.name == OWN and (asked.tensor_parallel != 1 or asked.pipeline_parallel != 1):
        raise UnsupportedFormatError("kvplan's runtime works on one device", hint="set parallel to 1")
    model, known = _known(asked, profiles, runtime=chosen.name == OWN)
    _check_context(asked, model, workload)
    if chosen.name == OWN:
        plan = make_plan(asked, model, known)
    else:
        try:
            plan = _engine_plan(chosen, asked, chosen.served(model), known)
        except KvplanError as error:
            raise _of_file(error, workload) from error
    if as_json:
        from kvplan.engines.launching import launch_text
        from kvplan.report.json import plan_json

        sys.stdout.write(plan_json(plan, launch_text(plan, asked) if plan.pick else None) + "\n")
    else:
        from kvplan.report.console import open_console
        from kvplan.report.plan import print_plan

        print_plan(open_console(), plan, asked, path=str(workload), explain=explain)
    statuses = {Outcome.NOTHING_FITS: ExitStatus.NOT_MET, Outcome.UNDECIDED: ExitStatus.UNSUPPORTED}
    raise typer.Exit(statuses.get(plan.outcome, ExitStatus.DONE))


def _engine_plan(engine: "Engine", asked: "Workload", model: "ModelSpec", known: "Measurements") -> "Plan":
    from kvplan.core.planner import make_plan
    from kvplan.core.specs import DeviceKind
    from kvplan.engines.settings import engine_settings, plan_notes, without_prefixes

    device = asked.device
    if known.device:
        device = "cpu" if known.device.kind is DeviceKind.CPU else known.device.name
    asked, without = without_prefixes(engine, asked)
    settings, refused = engine_settings(engine, asked, model, device)
    plan = make_plan(asked, model, known, settings=settings, refused=refused, engine=engine.name)
    return replace(plan, remarks=(*plan.remarks, *without, *plan_notes(engine, asked, model, plan)))


def _of_file(error: KvplanError, path: Path) -> KvplanError:
    """Return *error* with the workload's key where it names an option of `kvplan size`."""
    if error.where not in _KEYS:
        return error
    return type(error)(f"{_KEYS[error.where]}: {error.message}", where=str(path), hint=error.hint)


def _check_context(workload: "Workload", model: "ModelSpec", path: Path) -> None:
    for bucket in workload.buckets:
        if bucket.total_tokens > model.context_tokens:
            raise InputError(
                f"bucket {bucket.name} has sequences of {bucket.total_tokens} tokens, "
                f"{model.name} takes {model.context_tokens}",
                where=str(path),
                hint="shorten prompt or generate",
            )


def _known(workload: "Workload", paths: list[Path], *, runtime: bool) -> "tuple[ModelSpec, Measurements]":
    from kvplan.core.assessments import Measurements
    from kvplan.store.profiles import load_profile

    if not paths:
        return _without_profile(workload, runtime=runtime)
    found = [load_profile(path) for path in paths]
    model = _model(workload, found, runtime=runtime)
    for path, profile in zip(paths, found, strict=True):
        if profile.model.digest != model.digest:
            raise NotComparableError(
                f"measured {profile.model.name}, the workload asks for {workload.model}", where=str(path)
            )
        if profile.device.uuid != found[0].device.uuid:
            raise NotComparableError(f"measured on another device than {paths[0]}", where=str(path))
        if workload.device not in ("auto", profile.device.name, profile.device.kind):
            raise NotComparableError(
                f"measured on {profile.device.name}, the workload asks for {workload.device}", where=str(path)
            )
    _check_one_setup(paths, found)
    return model, Measurements(
        cells=tuple(cell for profile in found for cell in profile.cells),
        quality=tuple(result for profile in found for result in profile.quality),
        device=found[0].device,
    )


def _check_one_setup(paths: list[Path], profiles: "list[Profile]") -> None:
    """Refuse to mix times of different kernels, versions or threads: none would stand for both."""
    from kvplan.core.setups import versions_difference

    setups = {
        (key.kernel, key.kvplan_version, f"on {key.threads} threads"): path
        for path, profile in zip(paths, profiles, strict=True)
        for key in (cell.key for cell in profile.cells)
    }
    if len(setups) > 1:
        (first, _), (other, path), *_ = setups.items()
        raise NotComparableError(
            f"measured with {' '.join(other)}, another profile with {' '.join(first)}",
            where=str(path),
            hint="give profiles of one kernel, version and number of threads",
        )
    for path, profile in zip(paths, profiles, strict=True):
        if change := versions_difference(profile, profiles[0], f"{paths[0]} has"):
            raise NotComparableError(change, where=str(path), hint="give profiles of one set of versions")


def _without_profile(workload: "Workload", *, runtime: bool) -> "tuple[ModelSpec, Measurements]":
    """Return what a bundled profile of the workload's device and model says; nothing where there is none."""
    from kvplan.core.assessments import Measurements
    from kvplan.store.models import load_model_spec
    from kvplan.store.profiles import load_profile

    model = load_model_spec(workload.model, runtime=runtime)
    if workload.device != "auto":
        for path in _bundled_profiles():
            profile = load_profile(path)
            if profile.model.digest == model.digest and profile.device.name == workload.device:
                return model, Measurements(cells=profile.cells, quality=profile.quality, device=profile.device)
    return model, Measurements()


def _bundled_profiles() -> list[Path]:
    from importlib.resources import files

    return sorted(Path(str(files("kvplan_profiles"))).glob("measured/*.json"))


def _model(workload: "Workload", profiles: "list[Profile]", *, runtime: bool) -> "ModelSpec":
    """Return the model that the workload names; a profile of that name has read it already."""
    for profile in profiles:
        if profile.model.name == workload.model:
            return profile.model
    from kvplan.store.models import load_model_spec

    return load_model_spec(workload.model, runtime=runtime)
