from io import StringIO

import pytest
from rich.console import Console

from kvplan.core.records import Conditions
from kvplan.measure.bench import DecodeBench, DecodeCell
from kvplan.measure.held import Held, HeldCalls
from kvplan.measure.traffic import Traffic
from kvplan.report.bench import print_bench


def cell(impl: str, form: str, seconds: float, size: int) -> DecodeCell:
    return DecodeCell(
        impl=impl, format=form, batch=1, query_heads=4, kv_heads=2, head_dim=64, tokens=256, threads=1,
        median_s=seconds, samples_s=(seconds,), bytes=size,
    )  # fmt: skip


@pytest.fixture
def bench() -> DecodeBench:
    return DecodeBench(
        read_bandwidth_bytes_per_s=4e12, kernel="triton/sm_90", cold_bytes=2**30, cold_bytes_wanted=2**30,
        conditions=Conditions(load_average=0, steal_share=0, foreign_cpu_share=0),
        cells=(cell("kvplan", "int4", 2e-5, 70_000_000), cell("torch-sdpa-folded", "bf16", 9e-5, 268_000_000)),
        not_compared={"flashinfer": "flashinfer is not installed"},
    )  # fmt: skip


def printed(bench: DecodeBench, **more: object) -> str:
    out = StringIO()
    print_bench(Console(file=out, width=120), bench, **more)  # type: ignore[arg-type]
    return out.getvalue()


def test_who_was_not_compared_with_is_told_with_the_reason(bench: DecodeBench) -> None:
    assert "not compared with flashinfer: flashinfer is not installed" in printed(bench)


def test_a_prediction_stands_beside_what_was_measured(bench: DecodeBench) -> None:
    held = HeldCalls(calls=(Held(format="int4", device="H200 SXM", predicted_s=1.6e-5, measured_s=2e-5),))

    line = next(line for line in printed(bench, held=held).splitlines() if line.endswith("1.25x"))
    assert line.split() == ["int4", "16.0", "us", "20.0", "us", "1.25x"]
    assert "maker's figures (H200 SXM)" in printed(bench, held=held)


def test_without_a_prediction_its_reason_is_told(bench: DecodeBench) -> None:
    assert "not held against a prediction: no figures" in printed(bench, held=HeldCalls(reason="no figures of X"))


def test_traffic_is_shown_as_a_multiple_of_what_had_to_be_read(bench: DecodeBench) -> None:
    traffic = {
        "int4": Traffic(counted_bytes=2**26, read_bytes=2**26 + 2**25, written_bytes=2**20),
        "int8": Traffic(counted_bytes=2**27, reason="ncu is not found"),
    }

    out = printed(bench, traffic=traffic)

    line = next(line for line in out.splitlines() if "1.50x" in line)
    assert line.split() == ["int4", "64.0", "MiB", "96.0", "MiB", "1.50x", "1.0", "MiB"]
    assert "DRAM traffic not known: ncu is not found" in out
