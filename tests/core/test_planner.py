from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvplan.core.assessments import Measurements
from kvplan.core.formats import read_format
from kvplan.core.latency import StepShares
from kvplan.core.planner import make_plan
from kvplan.core.plans import Gap, Outcome, Plan, Quantity, Status
from kvplan.core.records import Cell, CellStatus, Figure, Profile
from kvplan.core.sentences import bottleneck
from kvplan.core.workloads import Bucket, Prefill, QualityBudget, Search, Target, Workload
from kvplan.errors import InputError, UnsupportedFormatError
from kvplan_kernels import format as format_module

MIB = 1 << 20
SHARED = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def known(profile: Profile) -> Measurements:
    return Measurements(cells=profile.cells, quality=profile.quality, device=profile.device)


def plan(make: Any, *, profile: Profile | None = None, **changes: object) -> Plan:
    workload = make.workload(**changes)
    return make_plan(workload, make.model(), known(profile or make.profile(workload)))


def picked(made: Plan) -> str | None:
    return made.pick.format if made.pick else None


def test_sixteen_bits_are_kept_when_they_meet_every_target(make: Any) -> None:
    made = plan(make, memory_bytes=1 << 30)
    assert made.outcome is Outcome.KEEP_16_BIT
    assert picked(made) == "bf16"
    assert made.sentence.startswith("Keep 16 bits: 32 sessions need 90.5 MiB")


@pytest.mark.parametrize(("mebibytes", "form"), [(190, "bf16"), (150, "int8"), (120, "k8v4")])
def test_less_memory_takes_the_next_step_and_no_more(make: Any, mebibytes: int, form: str) -> None:
    assert picked(plan(make, memory_bytes=mebibytes * MIB)) == form


def test_a_tight_quality_budget_leaves_no_aggressive_setting(make: Any) -> None:
    tight = plan(make, memory_bytes=120 * MIB, quality=QualityBudget(max_perplexity_increase=0.001))
    assert tight.outcome is Outcome.NOTHING_FITS
    loose = plan(make, memory_bytes=110 * MIB, quality=QualityBudget(max_perplexity_increase=0.2))
    assert picked(loose) == "int4"


def test_a_time_target_can_ask_for_fewer_bits(make: Any) -> None:
    made = plan(make, memory_bytes=1 << 30, target=Target(concurrency=32, tpot_ms={95: 16.0}))
    assert picked(made) == "int8"
    assert "TPOT p95" in made.sentence


def test_nothing_fits_says_what_would(make: Any) -> None:
    made = plan(make, memory_bytes=100 * MIB)
    assert made.outcome is Outcome.NOTHING_FITS
    assert made.pick is None
    assert {remedy.kind for remedy in made.remedies} == {"sessions", "context", "memory"}


def test_what_was_not_measured_is_no_reason_to_say_that_nothing_helps(make: Any) -> None:
    workload = make.workload(
        memory_bytes=85 * MIB, target=Target(concurrency=32, tpot_ms={95: 50.0}),
        quality=QualityBudget(max_perplexity_increase=0.01),
    )  # fmt: skip
    made = make_plan(workload, make.model(), Measurements())
    assert made.outcome is Outcome.NOTHING_FITS
    assert {remedy.kind for remedy in made.remedies} == {"sessions", "context", "memory"}
    assert all(remedy.text.endswith("other targets were not measured") for remedy in made.remedies)
    larger = replace(workload, memory_bytes=int(made.remedies[2].value))
    assert make_plan(larger, make.model(), Measurements()).outcome is Outcome.UNDECIDED


def test_every_remedy_works(make: Any) -> None:
    workload = make.workload(memory_bytes=100 * MIB, target=Target(concurrency=32))
    evidence = known(make.profile(workload))
    remedies = {remedy.kind: remedy for remedy in make_plan(workload, make.model(), evidence).remedies}
    fewer = replace(workload, target=Target(concurrency=int(remedies["sessions"].value)))
    shorter = replace(
        workload,
        buckets=tuple(
            replace(
                b,
                prompt_tokens=int(b.prompt_tokens * remedies["context"].value),
                generate_tokens=int(b.generate_tokens * remedies["context"].value),
            )
            for b in workload.buckets
        ),
    )
    larger = replace(workload, memory_bytes=int(remedies["memory"].value))
    for changed in (fewer, shorter, larger):
        assert make_plan(changed, make.model(), evidence).outcome is Outcome.QUANTIZE
    still_small = replace(workload, memory_bytes=int(remedies["memory"].value) - MIB)
    assert make_plan(still_small, make.model(), evidence).outcome is Outcome.NOTHING_FITS


def test_fewer_sessions_is_a_remedy_for_time_and_as_many_as_meet_it(make: Any) -> None:
    workload = make.workload(memory_bytes=1 << 30, target=Target(concurrency=32, tpot_ms={95: 12.9}))
    evidence = known(make.profile(workload))
    made = make_plan(workload, make.model(), evidence)
    (remedy,) = made.remedies
    assert remedy.kind == "sessions"
    for count, outcome in ((int(remedy.value), Outcome.QUANTIZE), (int(remedy.value) + 1, Outcome.NOTHING_FITS)):
        fewer = replace(workload, target=Target(concurrency=count, tpot_ms={95: 12.9}))
        found = make_plan(fewer, make.model(), evidence)
        assert (found.outcome is outcome) or (outcome is Outcome.NOTHING_FITS and found.pick is None)


def test_an_unmeasured_less_aggressive_setting_makes_it_undecided_and_is_named(make: Any) -> None:
    workload = make.workload(memory_bytes=120 * MIB)
    profile = make.profile(workload)
    without = replace(profile, quality=tuple(q for q in profile.quality if q.key.format != "k8v4"))
    loose = replace(workload, memory_bytes=110 * MIB, quality=QualityBudget(max_perplexity_increase=0.2))
    assert picked(make_plan(loose, make.model(), known(profile))) == "int4"
    made = make_plan(replace(loose, memory_bytes=120 * MIB), make.model(), known(without))
    assert made.outcome is Outcome.UNDECIDED
    assert made.pick is None
    assert made.missing == (("k8v4", 64, "perplexity increase"),)
    assert "int4 block 64 meets every target" in made.sentence


def test_an_unmeasured_setting_that_does_not_fit_into_memory_decides_nothing(make: Any) -> None:
    workload = make.workload(memory_bytes=120 * MIB)
    profile = make.profile(workload)
    without = replace(
        profile,
        cells=tuple(c for c in profile.cells if c.key.format not in ("int8", "bf16")),
        quality=tuple(q for q in profile.quality if q.key.format != "int8"),
    )
    assert picked(make_plan(workload, make.model(), known(without))) == "k8v4"


def test_without_a_profile_memory_alone_decides(make: Any) -> None:
    timeless = make.workload(memory_bytes=150 * MIB, target=Target(concurrency=32), quality=QualityBudget())
    assert picked(make_plan(timeless, make.model(), Measurements())) == "int8"
    timed = make.workload(memory_bytes=1 << 30)
    made = make_plan(timed, make.model(), Measurements())
    assert made.outcome is Outcome.UNDECIDED
    assert "fits into memory" in made.sentence
    assert ("bf16", 64, "tpot") in made.missing


def test_no_memory_anywhere_is_an_error_that_says_where_to_put_it(make: Any) -> None:
    with pytest.raises(InputError, match="add memory: 24GiB"):
        make_plan(make.workload(memory_bytes=None), make.model(), Measurements())


def test_a_time_within_noise_of_the_target_is_not_picked_but_mentioned(maker: Callable[..., object]) -> None:
    noisy = maker(noise=0.2)
    target = Target(concurrency=32, tpot_ms={95: 19.5})
    made = plan(noisy, memory_bytes=1 << 30, target=target)
    baseline = made.options[0]
    assert baseline.format == "bf16"
    assert [v.gap for v in baseline.verdicts if v.quantity is Quantity.TPOT] == [Gap.SPREAD]
    assert picked(made) != "bf16"
    assert any("bf16 block 64 may do as well" in remark for remark in made.remarks)


def test_other_work_only_slows_so_a_disturbed_time_can_meet_a_target_but_not_miss_it(make: Any) -> None:
    profile = make.profile()
    cells = tuple(replace(c, status=CellStatus.DISTURBED, reason="steal 20%") for c in profile.cells)
    disturbed = replace(profile, cells=cells)
    assert picked(plan(make, memory_bytes=1 << 30, profile=disturbed)) == "bf16"
    tight = plan(make, memory_bytes=1 << 30, profile=disturbed, target=Target(concurrency=32, tpot_ms={95: 12.0}))
    assert tight.outcome is Outcome.UNDECIDED
    assert "steal 20%" in tight.sentence


def test_settings_that_no_kernel_takes_are_listed_with_the_reason(make: Any) -> None:
    search = Search(formats=("bf16", "kivi-k4v4-g64-r128"), block_tokens=(32, 64))
    made = plan(make, memory_bytes=1 << 30, search=search, profile=make.profile())
    assert [setting for setting, _ in made.refused] == ["kivi-k4v4-g64-r128 block 32"]
    assert "use block size 64" in made.refused[0][1]


def test_a_format_that_the_measured_kernel_does_not_take_is_refused_and_without_a_profile_it_is_not(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(format_module._KERNEL_TAKES, "cpu", lambda tensor: not tensor.code.is_float)
    search = Search(formats=("bf16", "fp8_e4m3", "int4"), block_tokens=(64,))
    profile = make.profile(make.workload(search=Search(formats=("bf16", "int4"), block_tokens=(64,))))
    cells = tuple(replace(cell, key=replace(cell.key, kernel="cpu/avx2")) for cell in profile.cells)

    measured = plan(make, profile=replace(profile, cells=cells), search=search)
    unmeasured = make_plan(make.workload(search=search, memory_bytes=1 << 30), make.model(), Measurements())

    assert measured.refused[0][0] == "fp8_e4m3 block 64"
    assert "has no CPU kernel" in measured.refused[0][1]
    assert "fp8_e4m3" in [option.format for option in unmeasured.options]


def test_a_search_without_a_possible_setting_is_an_error(make: Any) -> None:
    model = make.model()
    odd = replace(model, layers=tuple(replace(layer, head_dim=512) for layer in model.layers))
    with pytest.raises(UnsupportedFormatError, match="512"):
        make_plan(make.workload(memory_bytes=1 << 30), odd, Measurements())


def test_16_bits_are_always_compared_with(make: Any) -> None:
    made = plan(make, memory_bytes=1 << 30, search=Search(formats=("int4",), block_tokens=(64,)))
    assert [option.format for option in made.options] == ["bf16", "int4"]
    assert made.outcome is Outcome.KEEP_16_BIT


def test_a_slower_pick_says_so(make: Any) -> None:
    profile = make.profile()
    held = [(bucket, bucket.sequences(32)) for bucket in make.buckets()]
    slow = make.cell("int8", held, times=3.0)
    cells = tuple(slow if cell.key == slow.key else cell for cell in profile.cells)
    made = plan(make, memory_bytes=150 * MIB, profile=replace(profile, cells=cells))
    assert picked(made) == "int8"
    assert any("slower than 16 bits" in remark for remark in made.remarks)


def test_a_pick_without_a_quality_budget_says_that_nothing_guards_quality(make: Any) -> None:
    made = plan(make, memory_bytes=150 * MIB, quality=QualityBudget())
    assert any("no quality budget" in remark for remark in made.remarks)


def test_quality_of_another_prefill_decides_nothing(make: Any) -> None:
    workload = make.workload(memory_bytes=150 * MIB, prefill=Prefill.THROUGH_CACHE)
    made = make_plan(workload, make.model(), known(make.profile()))
    assert made.outcome is Outcome.UNDECIDED
    assert ("int8", 64, "perplexity increase") in made.missing


def test_of_several_thread_counts_the_most_is_planned_with(make: Any) -> None:
    profile = make.profile()

    def alone(cell: Cell) -> Cell:
        slow = {k: Figure.measured("s", ((9.0,),) * 5) for k, f in cell.figures.items() if f.repeats}
        return replace(cell, key=replace(cell.key, threads=1), figures=cell.figures | slow)

    both = replace(profile, cells=(*(alone(cell) for cell in profile.cells), *profile.cells))
    assert picked(plan(make, memory_bytes=1 << 30, profile=both)) == "bf16"


def test_no_remedy_names_a_setting_over_the_quality_budget(make: Any) -> None:
    made = plan(make, memory_bytes=100 * MIB)
    assert {remedy.format for remedy in made.remedies} <= {"bf16", "int8", "k8v4"}


def test_retrieval_that_was_not_measured_is_missing_and_not_met(make: Any) -> None:
    made = plan(make, memory_bytes=150 * MIB, quality=QualityBudget(max_retrieval_drop=0.05))
    assert made.outcome is Outcome.UNDECIDED
    assert made.missing[0][2] == "retrieval drop"


@SHARED
@given(
    mebibytes=st.integers(60, 400),
    concurrency=st.integers(1, 60),
    tpot_ms=st.floats(5, 60),
    increase=st.floats(0.0001, 5),
    shared=st.integers(0, 1024),
)
def test_a_pick_meets_everything_and_nothing_milder_does(
    make: Any, mebibytes: int, concurrency: int, tpot_ms: float, increase: float, shared: int
) -> None:
    buckets = (
        Bucket(name="chat", prompt_tokens=1024, generate_tokens=128, share=0.7, shared_prefix_tokens=shared),
        Bucket(name="long", prompt_tokens=1800, generate_tokens=128, share=0.3),
    )
    workload: Workload = make.workload(
        memory_bytes=mebibytes * MIB,
        buckets=buckets,
        target=Target(concurrency=concurrency, tpot_ms={95: tpot_ms}),
        quality=QualityBudget(max_perplexity_increase=increase),
    )
    made = make_plan(workload, make.model(), known(make.profile(make.workload())))
    if made.pick is None:
        assert made.outcome in (Outcome.NOTHING_FITS, Outcome.UNDECIDED)
        assert not [o for o in made.options if o.status is Status.FITS] or made.outcome is Outcome.UNDECIDED
        return
    assert made.pick.status is Status.FITS
    assert made.pick.memory.need_bytes <= mebibytes * MIB * 0.9
    assert made.pick.sessions >= concurrency
    milder = made.options[: made.options.index(made.pick)]
    assert all(option.status is not Status.FITS for option in milder)
    assert all(not option.gaps or option.status is Status.OVER for option in milder)
    forms = [read_format(option.format) for option in made.options]
    bits = [form.key.bits + form.value.bits for form in forms]
    assert bits == sorted(bits, reverse=True)


@pytest.mark.parametrize(("steps", "says"), [((0.9, 0.7), "22% shorter (int4 block 64)"), ((0.9, 0.88), "not speed")])
def test_what_fewer_bits_would_gain_is_what_was_measured(make: Any, steps: tuple[float, float], says: str) -> None:
    free = {"memory_bytes": 1 << 30, "quality": QualityBudget()}
    made = plan(make, **free, search=Search(formats=("bf16", "int8", "int4"), block_tokens=(64,)))
    shares = [StepShares(attention=0.1, append=0.1, rest=0.8, slowdown=step) for step in (1.0, *steps)]
    options = [replace(option, shares=known) for option, known in zip(made.options, shares, strict=True)]
    assert says in bottleneck(options[1], options)


def test_eight_bits_are_milder_than_four_behind_a_long_residual(make: Any) -> None:
    short = (Bucket(name="short", prompt_tokens=192, generate_tokens=32),)
    made = plan(make, buckets=short, search=Search(formats=("bf16", "kivi-k4v4-g64-r128", "int8"), block_tokens=(64,)))
    assert [option.format for option in made.options] == ["bf16", "int8", "kivi-k4v4-g64-r128"]
    assert made.options[2].effective_bits > made.options[1].effective_bits


def test_formats_by_layer_stand_where_the_mean_of_their_bits_does(make: Any) -> None:
    search = Search(formats=("int4", "int8", "int4@0=bf16", "bf16", "int4@4=bf16"), block_tokens=(64,))
    workload = make.workload(search=search, memory_bytes=1 << 30, quality=QualityBudget())
    made = make_plan(workload, make.model(), known(make.profile()))
    assert [option.format for option in made.options] == ["bf16", "int8", "int4@0=bf16", "int4"]
    assert [option.setting.bits for option in made.options] == [(16, 16), (8, 8), (7, 7), (4, 4)]
    assert made.refused == (("int4@4=bf16", "no layer 4 among the 4 that cache keys and values"),)


def test_a_pick_by_layer_is_said_with_its_mean(make: Any) -> None:
    search = Search(formats=("bf16", "int4@0=bf16@1=int8"), block_tokens=(64,))
    made = plan(make, search=search, quality=QualityBudget(), memory_bytes=150 * MIB)
    assert made.pick is not None
    assert made.pick.format == "int4@0=bf16@1=int8"
    assert "quantize to 8 bits on average" in made.sentence
    assert made.pick.memory.cache_bytes < made.options[0].memory.cache_bytes
