from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvplan.core.budget import Budget, Limits
from kvplan.core.compare import compare_profiles
from kvplan.core.compare_budget import compare_budget
from kvplan.core.comparisons import Comparison, FigureVerdict, Standing
from kvplan.core.records import Cell, CellStatus, Figure, Profile, RetrievalTrial
from kvplan.core.specs import Evidence
from kvplan.core.workloads import QualityBudget
from kvplan.errors import ExitStatus


def change_cell(profile: Profile, label: str, change: Callable[[Cell], Cell | None]) -> Profile:
    """Return the profile with one cell changed, or left out where *change* gives nothing."""
    cells = [change(cell) if cell.key.label == label else cell for cell in profile.cells]
    assert cells != list(profile.cells)
    return replace(profile, cells=tuple(cell for cell in cells if cell is not None))


def scale(name: str, factor: float) -> Callable[[Cell], Cell]:
    def change(cell: Cell) -> Cell:
        figure = cell.figures[name]
        repeats = tuple(tuple(s * factor for s in samples) for samples in figure.repeats)
        assert figure.value is not None
        return replace(
            cell, figures=cell.figures | {name: replace(figure, value=figure.value * factor, repeats=repeats)}
        )

    return change


def verdicts(comparison: Comparison, standing: Standing) -> list[FigureVerdict]:
    return [verdict for verdict in comparison.verdicts if verdict.standing is standing]


LABEL = "int8/b64/longx10"


def test_a_second_run_of_the_same_holds(make: Any, maker: Any) -> None:
    comparison = compare_profiles(maker(seed=2).profile(), make.profile())
    assert comparison.status is ExitStatus.DONE
    assert comparison.count(Standing.HELD) == len(comparison.verdicts) > 100


def test_second_runs_on_a_noisy_machine_hold_nearly_always(maker: Any) -> None:
    statuses = [
        compare_profiles(maker(seed=seed, noise=0.04).profile(), maker(seed=seed + 100, noise=0.04).profile()).status
        for seed in range(12)
    ]
    assert ExitStatus.NOT_MET not in statuses
    assert statuses.count(ExitStatus.DONE) >= 11


def test_one_block_more_a_sequence_fails(make: Any) -> None:
    base = make.profile()
    worse = change_cell(base, LABEL, scale("allocated_bytes_per_sequence", 1.0001))
    comparison = compare_profiles(worse, base)
    assert comparison.status is ExitStatus.NOT_MET
    assert [(v.cell, v.figure) for v in verdicts(comparison, Standing.REGRESSED)] == [
        (LABEL, "allocated_bytes_per_sequence")
    ]


def test_fewer_bytes_hold(make: Any) -> None:
    base = make.profile()
    assert compare_profiles(change_cell(base, LABEL, scale("cache_bytes", 0.9)), base).status is ExitStatus.DONE


@pytest.mark.parametrize("figure", ["decode_fused_s", "tpot_s", "ttft_s"])
def test_one_time_a_quarter_slower_fails_among_a_hundred_figures(make: Any, maker: Any, figure: str) -> None:
    slower = change_cell(maker(seed=2).profile(), LABEL, scale(figure, 1.25))
    comparison = compare_profiles(slower, make.profile())
    assert comparison.status is ExitStatus.NOT_MET
    assert [(v.cell, v.figure) for v in verdicts(comparison, Standing.REGRESSED)] == [(LABEL, figure)]


def test_a_time_within_the_margin_holds_and_a_smaller_margin_fails_it(make: Any, maker: Any) -> None:
    slower = change_cell(maker(seed=2, noise=0.005).profile(), LABEL, scale("tpot_s", 1.06))
    base = maker(noise=0.005).profile()
    assert compare_profiles(slower, base).status is ExitStatus.DONE
    assert compare_profiles(slower, base, margin=0.03).status is ExitStatus.NOT_MET


def test_a_machine_twice_as_slow_in_everything_holds(make: Any) -> None:
    base = make.profile()
    cells = []
    for cell in base.cells:
        slow = cell
        for name, figure in cell.figures.items():
            if figure.repeats:
                slow = scale(name, 2.0)(slow)
        cells.append(slow)
    assert compare_profiles(replace(base, cells=tuple(cells)), base).status is ExitStatus.DONE


def test_a_cell_whose_few_repeats_agree_by_chance_borrows_the_spread_of_others(maker: Any) -> None:
    def agree(factor: float) -> Callable[[Cell], Cell]:
        def change(cell: Cell) -> Cell:
            seconds = Figure.measured("s", ((1.0,),) * 5)
            return replace(
                cell,
                figures=cell.figures | {"tpot_s": Figure.measured("s", ((factor,),) * 5), "tpot_16bit_s": seconds},
            )

        return change

    base = change_cell(maker(noise=0.12, seed=1).profile(), LABEL, agree(1.0001))
    second = change_cell(maker(noise=0.12, seed=2).profile(), LABEL, agree(1.12))
    (verdict,) = [v for v in compare_profiles(second, base).verdicts if (v.cell, v.figure) == (LABEL, "tpot_s")]
    assert verdict.standing is not Standing.REGRESSED


def without_reference(profile: Profile) -> Profile:
    absent = Figure.absent("s", Evidence.MEASURED, "does not fit beside it")
    return change_cell(profile, LABEL, lambda c: replace(c, figures=c.figures | {"tpot_16bit_s": absent}))


def test_a_time_without_a_reference_in_either_run_is_compared_as_it_is(make: Any, maker: Any) -> None:
    base, second = without_reference(make.profile()), without_reference(maker(seed=2).profile())
    assert compare_profiles(second, base).status is ExitStatus.DONE
    slower = compare_profiles(change_cell(second, LABEL, scale("tpot_s", 1.25)), base)
    assert [(v.cell, v.figure, v.unit) for v in verdicts(slower, Standing.REGRESSED)] == [(LABEL, "tpot_s", "s")]


def test_a_time_without_a_reference_in_one_run_is_not_compared(make: Any) -> None:
    comparison = compare_profiles(without_reference(make.profile()), make.profile())
    assert [v.figure for v in verdicts(comparison, Standing.NOT_COMPARABLE)] == ["tpot_s"]


def test_the_16_bit_kernel_is_its_own_reference_and_says_nothing_of_noise(maker: Any) -> None:
    def own(profile: Profile) -> Profile:
        return change_cell(
            profile,
            "bf16/b64/longx10",
            lambda c: replace(c, figures=c.figures | {"tpot_16bit_s": c.figures["tpot_s"]}),
        )

    noisy, base = own(maker(noise=0.4, seed=2).profile()), own(maker(noise=0.4).profile())
    found = [v for v in compare_profiles(noisy, base).verdicts if (v.cell, v.figure) == ("bf16/b64/longx10", "tpot_s")]
    assert [(v.standing, v.current) for v in found] == [(Standing.HELD, 1.0)]


def test_a_rise_that_may_be_noise_is_undecided_not_held(maker: Any) -> None:
    noisy = maker(noise=0.25, seed=5)
    slower = change_cell(noisy.profile(), LABEL, scale("tpot_s", 1.4))
    comparison = compare_profiles(slower, maker(noise=0.25, seed=6).profile())
    assert (LABEL, "tpot_s") in [(v.cell, v.figure) for v in verdicts(comparison, Standing.UNDECIDED)]
    assert comparison.status is ExitStatus.UNSUPPORTED


def test_a_quarter_slower_is_never_held_as_noise_grows(maker: Any) -> None:
    for seed in range(8):
        slower = change_cell(maker(seed=seed, noise=0.04).profile(), LABEL, scale("tpot_s", 1.3))
        assert compare_profiles(slower, maker(seed=seed + 50, noise=0.04).profile()).status is not ExitStatus.DONE


def test_one_repeat_says_nothing_of_noise(maker: Any) -> None:
    comparison = compare_profiles(maker(repeats=1, seed=2).profile(), maker(repeats=1).profile())
    assert {v.figure for v in verdicts(comparison, Standing.UNDECIDED)} >= {"tpot_s", "decode_fused_s"}


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda cell: None, "missing"),
        (lambda cell: replace(cell, status=CellStatus.FAILED, reason="boom", figures={}), "boom"),
        (lambda cell: replace(cell, status=CellStatus.OUT_OF_MEMORY, reason="40 GiB", figures={}), "40 GiB"),
        (lambda cell: replace(cell, figures={k: v for k, v in cell.figures.items() if k != "tpot_s"}), "missing"),
        (
            lambda cell: replace(
                cell, figures=cell.figures | {"tpot_s": Figure.absent("s", Evidence.MEASURED, "no weights")}
            ),
            "no weights",
        ),
    ],
)  # fmt: skip
def test_what_is_missing_or_broken_has_regressed(make: Any, change: Callable[[Cell], Cell | None], word: str) -> None:
    base = make.profile()
    comparison = compare_profiles(change_cell(base, LABEL, change), base)
    assert comparison.status is ExitStatus.NOT_MET
    assert [word in v.reason for v in verdicts(comparison, Standing.REGRESSED)] == [True]


def test_a_failed_cell_that_the_baseline_never_had_fails(make: Any) -> None:
    base = make.profile()
    extra = make.cell("k4v2-g64", [(make.buckets()[0], 3)])
    failed = replace(extra, status=CellStatus.FAILED, reason="boom", figures={})
    comparison = compare_profiles(replace(base, cells=(*base.cells, failed)), base)
    assert comparison.status is ExitStatus.NOT_MET


def test_another_device_still_compares_exact_figures(make: Any) -> None:
    base = make.profile()
    other = replace(base, device=make.device(uuid="cpu-2", name="Other CPU"))
    comparison = compare_profiles(other, base)
    assert comparison.status is ExitStatus.UNSUPPORTED
    assert {v.figure for v in verdicts(comparison, Standing.HELD)} == {
        "allocated_bytes_per_sequence", "cache_bytes", "read_bytes_per_step",
    }  # fmt: skip
    assert all("Other CPU" in v.reason for v in verdicts(comparison, Standing.NOT_COMPARABLE))
    worse = change_cell(other, LABEL, scale("cache_bytes", 1.01))
    assert compare_profiles(worse, base).status is ExitStatus.NOT_MET


@pytest.mark.parametrize("versions", [{"python": "3.11.7", "torch": "2.14.0"}, {"python": "3.11.7"}])
def test_other_versions_compare_exact_figures_only(make: Any, versions: dict[str, str]) -> None:
    base = make.profile()
    comparison = compare_profiles(replace(base, versions=versions), base)
    assert comparison.status is ExitStatus.UNSUPPORTED
    assert all("torch" in v.reason for v in verdicts(comparison, Standing.NOT_COMPARABLE))


def test_another_model_compares_nothing(make: Any) -> None:
    base = make.profile()
    other = replace(base, model=replace(base.model, digest="e" * 64))
    comparison = compare_profiles(other, base)
    assert comparison.status is ExitStatus.UNSUPPORTED
    assert len(comparison.verdicts) == 1


def test_a_disturbed_cell_compares_bytes_and_not_times(make: Any) -> None:
    base = make.profile()
    disturbed = change_cell(base, LABEL, lambda c: replace(c, status=CellStatus.DISTURBED, reason="steal 30%"))
    comparison = compare_profiles(disturbed, base)
    assert {v.figure for v in verdicts(comparison, Standing.NOT_COMPARABLE)} == {
        "ttft_s", "decode_fused_s", "tpot_s",
    }  # fmt: skip


def worse_quality(profile: Profile, form: str, **factors: float) -> Profile:
    changed = []
    for quality in profile.quality:
        documents = quality.documents
        if quality.key.format == form:
            documents = tuple(
                replace(
                    d,
                    nll=d.nll_16bit + (d.nll - d.nll_16bit) * factors.get("nll", 1),
                    kl=d.kl * factors.get("kl", 1),
                    flips=round(d.flips * factors.get("flips", 1)),
                )
                for d in documents
            )
        changed.append(replace(quality, documents=documents))
    return replace(profile, quality=tuple(changed))


@pytest.mark.parametrize(
    ("factors", "figure"),
    [({"nll": 1.2}, "perplexity increase"), ({"kl": 1.2}, "mean KL divergence"), ({"flips": 1.3}, "top-1 flips")],
)
def test_each_quality_figure_made_worse_fails(make: Any, factors: dict[str, float], figure: str) -> None:
    base = make.profile()
    comparison = compare_profiles(worse_quality(base, "int4", **factors), base)
    assert comparison.status is ExitStatus.NOT_MET
    assert [v.figure for v in verdicts(comparison, Standing.REGRESSED)] == [figure]


def test_quality_a_little_worse_holds(make: Any) -> None:
    base = make.profile()
    assert compare_profiles(worse_quality(base, "int4", nll=1.05, kl=1.05), base).status is ExitStatus.DONE


def test_one_document_much_worse_is_undecided(make: Any) -> None:
    base = make.profile()
    index = next(i for i, q in enumerate(base.quality) if q.key.format == "int8")
    documents = base.quality[index].documents
    spoiled = replace(documents[3], kl=documents[3].kl * 50)
    quality = replace(base.quality[index], documents=(*documents[:3], spoiled, *documents[4:]))
    changed = replace(base, quality=(*base.quality[:index], quality, *base.quality[index + 1 :]))
    assert compare_profiles(changed, base).status is ExitStatus.UNSUPPORTED


def test_other_text_is_not_compared(make: Any) -> None:
    base = make.profile()
    quality = tuple(replace(q, key=replace(q.key, data_digest="u" * 64)) for q in base.quality)
    comparison = compare_profiles(replace(base, quality=quality), base)
    assert comparison.status is ExitStatus.UNSUPPORTED
    assert all(v.reason == "other text was scored" for v in verdicts(comparison, Standing.NOT_COMPARABLE))


def test_a_missing_quality_result_has_regressed(make: Any) -> None:
    base = make.profile()
    assert compare_profiles(replace(base, quality=base.quality[1:]), base).status is ExitStatus.NOT_MET


def test_lost_keys_fail_when_they_are_too_many_to_be_chance(make: Any) -> None:
    base = make.profile(quality=(make.quality("int8", trials=40),))

    def lose(count: int) -> Profile:
        trials = tuple(
            RetrievalTrial(context_tokens=t.context_tokens, hit_16bit=t.hit_16bit, hit=t.hit and i >= count)
            for i, t in enumerate(base.quality[0].trials)
        )
        return replace(base, quality=(replace(base.quality[0], trials=trials),))

    assert compare_profiles(lose(0), base).status is ExitStatus.DONE
    assert compare_profiles(lose(2), base).status is ExitStatus.UNSUPPORTED
    assert compare_profiles(lose(12), base).status is ExitStatus.NOT_MET


def budget(**limits: Any) -> Budget:
    return Budget(default=Limits(**limits), memory_bytes=200 << 20)


@pytest.mark.parametrize(
    ("limits", "status"),
    [
        ({"max_bytes_per_sequence": 4 << 20}, ExitStatus.DONE),
        ({"max_bytes_per_sequence": 3 << 20}, ExitStatus.NOT_MET),
        ({"min_sessions": 20}, ExitStatus.DONE),
        ({"min_sessions": 60}, ExitStatus.NOT_MET),
        ({"max_decode_ratio": 0.9}, ExitStatus.DONE),
        ({"max_decode_ratio": 0.5}, ExitStatus.NOT_MET),
        ({"max_tpot_ms": {95: 30.0}}, ExitStatus.DONE),
        ({"max_tpot_ms": {95: 15.0}}, ExitStatus.NOT_MET),
        ({"quality": QualityBudget(max_kl=2.0)}, ExitStatus.DONE),
        ({"quality": QualityBudget(max_kl=0.02)}, ExitStatus.NOT_MET),
        ({"quality": QualityBudget(max_retrieval_drop=0.02)}, ExitStatus.UNSUPPORTED),
    ],
)
def test_each_limit_of_a_budget_is_held(make: Any, limits: dict[str, Any], status: ExitStatus) -> None:
    assert compare_budget(make.profile(), budget(**limits)).status is status


def test_a_format_named_by_the_budget_must_be_there(make: Any) -> None:
    named = Budget(formats={"k4v2-g64": Limits(max_decode_ratio=2.0)})
    assert compare_budget(make.profile(), named).status is ExitStatus.NOT_MET


def test_a_failed_cell_breaks_any_budget(make: Any) -> None:
    failed = lambda c: replace(c, status=CellStatus.FAILED, reason="boom", figures={})  # noqa: E731
    profile = change_cell(make.profile(), LABEL, failed)
    assert compare_budget(profile, budget(max_tpot_ms={95: 1000.0})).status is ExitStatus.NOT_MET


def test_a_format_without_quality_is_undecided_under_a_quality_budget(make: Any) -> None:
    profile = make.profile(quality=())
    comparison = compare_budget(profile, budget(quality=QualityBudget(max_kl=1.0)))
    assert comparison.status is ExitStatus.UNSUPPORTED
    assert {v.cell for v in comparison.verdicts} == {"int8", "k8v4", "int4", "int2"}
