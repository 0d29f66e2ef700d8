from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest

from kvplan.core.records import CellKey, CellStatus, Conditions
from kvplan.core.specs import Evidence, ModelSpec
from kvplan.measure.cells import exact_figures
from kvplan.measure.jobs import DECODER, ENCODER, Measured
from kvplan.measure.repeats import failed, least_disturbed, repeats_of, with_repeat

Maker = Callable[..., Measured]
NOISY = Conditions(load_average=1, steal_share=0.0, foreign_cpu_share=0.5)
STOLEN = Conditions(load_average=1, steal_share=0.3, foreign_cpu_share=0.0)


def test_every_sample_of_every_repeat_is_kept(key: CellKey, spec: ModelSpec, measured: Maker) -> None:
    cell = with_repeat(with_repeat(None, measured(key, 1.0), spec), measured(key, 3.0), spec)

    assert cell.status is CellStatus.OK
    assert repeats_of(cell) == 2
    assert cell.figures["decode_fused_s"].repeats == ((1.0, 1.0), (3.0, 3.0))
    assert cell.figures["decode_fused_s"].value == 2.0


def test_bytes_are_exact_and_absent_figures_have_a_reason(key: CellKey, spec: ModelSpec, measured: Maker) -> None:
    cell = with_repeat(None, measured(key), spec)

    assert cell.figures["cache_bytes"] == exact_figures(key, spec)["cache_bytes"]
    assert cell.figures["cache_bytes"].evidence is Evidence.EXACT
    assert cell.figures["pack_s"].value is None
    assert cell.figures["pack_s"].reason == "a mix"


def test_a_figure_that_one_repeat_lacked_keeps_its_others(key: CellKey, spec: ModelSpec, measured: Maker) -> None:
    first = measured(key)
    second = msgspec.structs.replace(measured(key), figures={"decode_fused_s": (2.0,)}, missing={"tpot_s": "no room"})

    cell = with_repeat(with_repeat(None, first, spec), second, spec)

    assert cell.figures["tpot_s"].repeats == ((2.0,),)


@pytest.mark.parametrize(("conditions", "said"), [(NOISY, "other processes took 50%"), (STOLEN, "hypervisor took 30%")])
def test_a_disturbed_repeat_marks_the_cell(
    key: CellKey, spec: ModelSpec, measured: Maker, conditions: Conditions, said: str
) -> None:
    cell = with_repeat(with_repeat(None, measured(key), spec), measured(key, 1.0, conditions), spec)

    assert cell.status is CellStatus.DISTURBED
    assert cell.reason.startswith("repeat 2: ")
    assert said in cell.reason


def test_out_of_memory_keeps_its_reason_and_its_exact_bytes(key: CellKey, spec: ModelSpec) -> None:
    cell = with_repeat(None, Measured(key=key, status=CellStatus.OUT_OF_MEMORY, reason="too large"), spec)

    assert (cell.status, cell.reason) == (CellStatus.OUT_OF_MEMORY, "too large")
    assert cell.figures["cache_bytes"].value


def test_the_least_disturbed_attempt_is_taken(key: CellKey, measured: Maker) -> None:
    better = replace(NOISY, foreign_cpu_share=0.2)

    found = least_disturbed([measured(key, 1.0, NOISY), measured(key, 2.0, better), measured(key, 3.0, NOISY)])

    assert found.figures["tpot_s"] == (4.0,)


def test_a_failed_cell_says_why(key: CellKey, spec: ModelSpec) -> None:
    cell = failed(key, CellStatus.FAILED, "RuntimeError: no", spec)

    assert (cell.status, cell.reason, repeats_of(cell)) == (CellStatus.FAILED, "RuntimeError: no", 0)


def test_messages_survive_the_pipe(key: CellKey, measured: Maker) -> None:
    message = measured(key, 0.1, NOISY)

    assert DECODER.decode(ENCODER.encode(message)) == message
