from dataclasses import replace

import pytest

from kvplan.core.records import CellStatus, Load
from kvplan.core.specs import FloatType, LayerKind, LayerSpec, ModelSpec
from kvplan.core.tiers import lay_out_tiers
from kvplan.core.workloads import Bucket, Prefill, Target, Workload
from kvplan.measure.cells import Setting, cache_budget, exact_figures, plan_cells
from kvplan.measure.model_figures import pool_size
from kvplan.runtime.pool import CachePool
from kvplan_kernels import format as format_module
from kvplan_kernels.layer_formats import parse_formats
from kvplan_kernels.tier_formats import parse_tiers

FULL = LayerSpec(kind=LayerKind.FULL, kv_heads=2, head_dim=32)
SPEC = ModelSpec(
    name="tiny", digest="d", architecture="LlamaForCausalLM", layers=(FULL, FULL), query_heads=4, hidden_size=128,
    vocab_size=99, context_tokens=512, weight_bytes=1000, float_type=FloatType.BF16,
)  # fmt: skip
CHAT = Bucket(name="chat", prompt_tokens=100, generate_tokens=20, share=0.75)
LONG = Bucket(name="long", prompt_tokens=300, generate_tokens=20, share=0.25)
WORKLOAD = Workload(model="tiny", buckets=(CHAT, LONG), target=Target(concurrency=8))
SETTING = Setting(device_uuid="cpu-1", threads=2, kernel="cpu/x", prefill=Prefill.EXACT, cache_bytes=2**30)


def test_each_bucket_and_the_mix_get_a_cell_for_every_format_and_block_size() -> None:
    grid = plan_cells(WORKLOAD, SPEC, SETTING, formats=("bf16", "int8"), block_tokens=(32, 64))

    assert not grid.settled
    assert [group[0].loads for group in grid.groups] == [
        (Load(bucket=CHAT, sequences=6), Load(bucket=LONG, sequences=2)),
        (Load(bucket=CHAT, sequences=6),),
        (Load(bucket=LONG, sequences=2),),
    ]
    assert all(
        [(key.format, key.block_tokens) for key in group] == [("bf16", 32), ("bf16", 64), ("int8", 32), ("int8", 64)]
        for group in grid.groups
    )


def test_one_bucket_is_its_own_mix() -> None:
    grid = plan_cells(replace(WORKLOAD, buckets=(CHAT,)), SPEC, SETTING, formats=("int8",), block_tokens=(32,))

    assert len(grid.keys) == 1


def test_a_combination_without_a_kernel_is_a_cell_with_the_reason() -> None:
    grid = plan_cells(WORKLOAD, SPEC, SETTING, formats=("kivi-k4v4-g64",), block_tokens=(32, 64))

    refused = [cell for cell in grid.settled if cell.key.block_tokens == 32]
    assert len(refused) == 3
    assert {cell.status for cell in refused} == {CellStatus.UNSUPPORTED}
    assert "use block size 64" in refused[0].reason
    assert sum(map(len, grid.groups)) == 3


def test_a_format_that_the_kernel_does_not_read_is_a_cell_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(format_module._KERNEL_TAKES, "cpu", lambda tensor: not tensor.code.is_float)
    refused = plan_cells(WORKLOAD, SPEC, SETTING, formats=("fp8_e4m3-r16",), block_tokens=(32,))

    assert refused.groups == ()
    assert {cell.status for cell in refused.settled} == {CellStatus.UNSUPPORTED}
    assert refused.settled[0].reason.startswith("format fp8_e4m3-r16 has no CPU kernel; ")

    by_definition = replace(SETTING, kernel="reference")
    taken = plan_cells(WORKLOAD, SPEC, by_definition, formats=("fp8_e4m3-r16",), block_tokens=(32,))
    assert taken.settled == ()


TIERS = "tiers-w16-25-k8v4+50-k4v2"


def test_a_format_in_tiers_is_a_cell_with_its_bytes_and_why_it_is_not_timed() -> None:
    grid = plan_cells(WORKLOAD, SPEC, SETTING, formats=(TIERS,), block_tokens=(32,))

    assert grid.groups == ()
    assert {cell.status for cell in grid.settled} == {CellStatus.UNSUPPORTED}
    assert {cell.reason.partition(",")[0] for cell in grid.settled} == {f"{TIERS}: tokens are put into tiers by torch"}
    mixed = grid.settled[0]
    layout = lay_out_tiers(SPEC, parse_tiers(TIERS), 32)
    allocated = 6 * layout.pool_bytes(layout.blocks(120)) + 2 * layout.pool_bytes(layout.blocks(320))
    assert mixed.figures["cache_bytes"].value == allocated
    assert mixed.figures["allocated_bytes_per_sequence"].value == allocated / 8
    assert "read_bytes_per_step" not in mixed.figures


def test_a_format_in_tiers_of_layers_that_slide_has_no_bytes() -> None:
    sliding = replace(SPEC, layers=(FULL, replace(FULL, kind=LayerKind.SLIDING, window_tokens=50)))
    grid = plan_cells(WORKLOAD, sliding, SETTING, formats=(TIERS,), block_tokens=(32,))

    assert all("looks at its newest 50 tokens" in cell.reason for cell in grid.settled)
    assert not any(cell.figures for cell in grid.settled)


def test_a_bucket_longer_than_the_model_is_refused() -> None:
    workload = replace(WORKLOAD, buckets=(replace(LONG, prompt_tokens=600, share=1.0),))

    grid = plan_cells(workload, SPEC, SETTING, formats=("int8",), block_tokens=(32,))

    assert grid.settled[0].status is CellStatus.UNSUPPORTED
    assert "620 tokens" in grid.settled[0].reason


def test_a_bucket_holds_what_fits_and_the_mix_does_not_fit() -> None:
    whole = plan_cells(WORKLOAD, SPEC, SETTING, formats=("bf16", "int8"), block_tokens=(32,))
    sequence = exact_figures(whole.groups[1][0], SPEC)["allocated_bytes_per_sequence"].value
    assert sequence is not None

    grid = plan_cells(
        WORKLOAD, SPEC, replace(SETTING, cache_bytes=int(4.5 * sequence)), formats=("bf16", "int8"), block_tokens=(32,)
    )

    mixed = grid.settled[0]
    assert mixed.status is CellStatus.OUT_OF_MEMORY
    assert mixed.figures["cache_bytes"].value == exact_figures(mixed.key, SPEC)["cache_bytes"].value
    chat = {key.format: key.loads[0].sequences for group in grid.groups for key in group if key.loads[0].bucket == CHAT}
    assert chat == {"bf16": 4, "int8": 6}


@pytest.mark.parametrize("form", ["bf16", "int8", "kivi-k4v2-g32-r64-s4", "kivi-paper", "int4-r100@0=bf16@1=int8-s4"])
def test_the_bytes_of_a_cell_are_the_bytes_of_the_pool_that_holds_it(form: str) -> None:
    key = plan_cells(WORKLOAD, SPEC, SETTING, formats=(form,), block_tokens=(32,)).groups[0][0]
    blocks, slots = pool_size(key, SPEC)

    pool = CachePool(SPEC, parse_formats(key.format), block_tokens=32, blocks=blocks, slots=slots)

    figures = exact_figures(key, SPEC)
    assert figures["cache_bytes"].value == pool.nbytes
    assert figures["allocated_bytes_per_sequence"].value == pool.nbytes / 8


def test_a_window_limits_what_a_step_reads_and_not_what_is_allocated() -> None:
    window = replace(FULL, kind=LayerKind.SLIDING, window_tokens=50)
    sliding = replace(SPEC, layers=(FULL, window))
    key = plan_cells(WORKLOAD, SPEC, SETTING, formats=("bf16",), block_tokens=(32,)).groups[1][0]

    full, part = exact_figures(key, SPEC), exact_figures(key, sliding)

    assert part["cache_bytes"] == full["cache_bytes"]
    assert (full["read_bytes_per_step"].value, part["read_bytes_per_step"].value) == (6 * 2 * 256 * 120, 6 * 256 * 170)


def test_the_weights_leave_the_cache_what_is_left() -> None:
    assert cache_budget(2000, 1000) == 700
    assert cache_budget(1000, 2000) == 0
