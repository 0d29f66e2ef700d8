"""The least aggressive setting that meets every target, or what would make the target reachable."""

from collections.abc import Iterable, Sequence
from functools import partial
from math import inf

from kvplan.core.assessments import Measurements, assess, tpot_percent
from kvplan.core.formats import mean_bits, read_format
from kvplan.core.plans import Option, Outcome, Plan, Status
from kvplan.core.remedies import find_remedies
from kvplan.core.sentences import bottleneck, remarks, sentence
from kvplan.core.settings import Setting
from kvplan.core.specs import ModelSpec
from kvplan.core.tiered_memory import runtime_memory
from kvplan.core.workloads import Workload
from kvplan.errors import UnsupportedFormatError
from kvplan_kernels.format import UnsupportedError
from kvplan_kernels.layer_formats import ModelFormat


def make_plan(
    workload: Workload,
    model: ModelSpec,
    known: Measurements,
    *,
    settings: Sequence[Setting] | None = None,
    refused: Sequence[tuple[str, str]] = (),
    engine: str = "kvplan",
) -> Plan:
    """Return the recommendation among *settings*, without them among those of kvplan's runtime.

    *refused* are settings that the engine does not have, with the reason.

    Raises:
        InputError: The memory or the weights are not known.
        UnsupportedFormatError: No kernel takes any of the search's settings with this model.
    """
    chosen, misfits = _settings(workload, model) if settings is None else (settings, [])
    options, found = _options(chosen, workload, model, known)
    fitting = [option for option in options if option.status is Status.FITS]
    blockers = _blockers(options, fitting[0] if fitting else None)
    outcome = _outcome(options, fitting, blockers)
    pick = fitting[0] if outcome in (Outcome.KEEP_16_BIT, Outcome.QUANTIZE) else None
    missing = blockers if outcome is Outcome.UNDECIDED else []
    return Plan(
        outcome=outcome,
        sentence=sentence(outcome, options, pick, fitting, blockers, workload),
        concurrency=workload.target.concurrency,
        percent=tpot_percent(workload),
        pick=pick,
        options=options,
        refused=(*refused, *misfits, *found),
        engine=engine,
        device=known.device.name if known.device else "",
        kernels=tuple(sorted(known.kernels)),
        remedies=find_remedies(options, workload, model, known) if outcome is Outcome.NOTHING_FITS else (),
        missing=tuple((o.format, o.block_tokens, str(gap.quantity)) for o in missing for gap in o.gaps),
        remarks=remarks(options, pick, workload, model, known.kernels),
        bottleneck=bottleneck(pick, options) if pick else "",
    )


def _blockers(options: Sequence[Option], first: Option | None) -> list[Option]:
    """Return the less aggressive settings that might fit, had they been measured."""
    found: list[Option] = []
    for option in options:
        if first is not None and option.format == first.format:
            break
        if option.status is Status.UNDECIDED and (option.gaps or first is None):
            found.append(option)
    return found


def _outcome(options: Sequence[Option], fitting: Sequence[Option], blockers: Sequence[Option]) -> Outcome:
    if blockers:
        return Outcome.UNDECIDED
    if not fitting:
        return Outcome.NOTHING_FITS
    return Outcome.QUANTIZE if fitting[0].quantized else Outcome.KEEP_16_BIT


def _options(
    settings: Iterable[Setting], workload: Workload, model: ModelSpec, known: Measurements
) -> tuple[tuple[Option, ...], tuple[tuple[str, str], ...]]:
    """Return every setting that kernels take, least aggressive first, and those that they refuse."""
    options: list[Option] = []
    refused: list[tuple[str, str]] = []
    for setting in settings:
        try:
            if setting.own and setting.measured_as:
                known.check_kernels(setting.measured_as)
            options.append(assess(setting, workload, model, known))
        except UnsupportedFormatError as error:
            refused.append((f"{setting.format} block {setting.block_tokens}", error.message))
    if not options:
        raise UnsupportedFormatError(refused[0][1] if refused else "no setting is left to choose among")
    own = str(model.float_type)
    options.sort(key=lambda o: (o.quantized, o.format != own if not o.quantized else False, *_aggressiveness(o)))
    return tuple(options), tuple(refused)


def _aggressiveness(option: Option) -> tuple[float, float, str, int, float, int]:
    """Return what options are ordered by: bits of a code, then bits an element takes with its share of 16-bit tokens.

    A long residual in front of 4-bit codes takes more bytes at short lengths than 8-bit codes, and is no milder.
    """
    time_s = option.tpot.value_s if option.tpot.value_s is not None else inf
    return (
        -sum(option.setting.bits), -round(option.effective_bits, 6), option.format, option.residual_bytes,
        time_s, option.block_tokens,
    )  # fmt: skip


def _settings(workload: Workload, model: ModelSpec) -> tuple[list[Setting], list[tuple[str, str]]]:
    """Return the settings of kvplan's own runtime that the workload's search names, and the formats of other layers."""
    forms = {form.name: form for form in map(read_format, workload.search.formats)}
    if all(form.quantized for form in forms.values()):
        forms = {str(model.float_type): read_format(model.float_type)} | forms
    settings: list[Setting] = []
    refused: list[tuple[str, str]] = []
    for form in forms.values():
        try:
            settings += [runtime_setting(form, block_tokens, model) for block_tokens in workload.search.block_tokens]
        except UnsupportedError as error:
            refused.append((form.name, str(error)))
    return settings, refused


def runtime_setting(form: ModelFormat, block_tokens: int, model: ModelSpec) -> Setting:
    """Return a setting of kvplan's own runtime.

    Raises:
        UnsupportedError: The format names layers that the model does not have.
    """
    return Setting(
        format=form.name,
        block_tokens=block_tokens,
        bits=mean_bits(form, model.caching_layers),
        measured_as=form,
        memory_of=partial(runtime_memory, form, block_tokens),
    )
