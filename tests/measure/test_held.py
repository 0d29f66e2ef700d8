"""Predictions beside measured times; both are made up here, who is held against whom is not."""

import pytest

from kvplan.core.records import Conditions
from kvplan.core.specs import DeviceInfo, DeviceKind
from kvplan.measure import held
from kvplan.measure.bench import DecodeBench, DecodeCell
from kvplan.measure.held import gpu_named, hold
from kvplan.measure.inspection import PredictedCall, Shape

QUIET = Conditions(load_average=0, steal_share=0, foreign_cpu_share=0)


def info(name: str = "NVIDIA H200") -> DeviceInfo:
    return DeviceInfo(
        name=name, uuid="GPU-1", kind=DeviceKind.CUDA, cores=132, memory_bytes=2**37, kernel_variant="sm_90"
    )


def cell(impl: str, form: str, seconds: float) -> DecodeCell:
    return DecodeCell(
        impl=impl, format=form, batch=2, query_heads=32, kv_heads=8, head_dim=128, tokens=4096, threads=1,
        median_s=seconds, samples_s=(seconds,), bytes=1,
    )  # fmt: skip


BENCH = DecodeBench(
    read_bandwidth_bytes_per_s=4e12, kernel="triton/sm_90", cold_bytes=1, cold_bytes_wanted=1, conditions=QUIET,
    cells=(cell("kvplan", "int8", 3e-5), cell("kvplan", "int4", 2e-5), cell("torch-sdpa-folded", "bf16", 9e-5)),
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "arch", "found"),
    [
        ("NVIDIA H200", "sm_90", "H200 SXM"),
        ("NVIDIA H100 80GB HBM3", "sm_90", "H100 SXM"),
        ("NVIDIA A100-SXM4-80GB", "sm_80", "A100 SXM 80 GB"),
        ("NVIDIA GeForce RTX 4090", "sm_89", "RTX 4090"),
        ("NVIDIA L40S", "sm_89", "L40S"),
        ("NVIDIA L4", "sm_89", None),
        ("NVIDIA A10", "sm_86", None),
        ("NVIDIA H200", "sm_80", None),
    ],
)
def test_a_gpu_is_known_by_what_its_driver_calls_it(name: str, arch: str, found: str | None) -> None:
    gpu = gpu_named(name, arch)

    assert (gpu.name if gpu else None) == found


def test_a_gpu_whose_figures_are_unknown_is_not_held_against_anothers() -> None:
    assert hold(BENCH, info("NVIDIA H20"), block_tokens=64).reason.startswith("no figures of NVIDIA H20 (sm_90)")


def test_every_format_of_kvplans_is_held_against_its_own_call(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[tuple[str, ...], list[str], tuple[str, ...], Shape]] = []

    def calls(shape: Shape) -> list[PredictedCall]:
        return [
            PredictedCall(
                op="decode", format=name, arch="sm_90", device=device, shape=shape, launches=2, seconds=seconds
            )
            for name, device, seconds in (
                ("int8", "H200 SXM", 1e-5), ("int8", "H100 SXM", 7e-5), ("int4", "H200 SXM", 8e-6),
            )
        ]  # fmt: skip

    monkeypatch.setattr(held, "inspect_kernels", lambda *arguments: asked.append(arguments) or [])
    monkeypatch.setattr(held, "predicted_calls", lambda _: calls(asked[0][3]))

    found = hold(BENCH, info(), block_tokens=64).calls

    assert [(one.format, one.device, one.predicted_s, one.measured_s) for one in found] == [
        ("int8", "H200 SXM", 1e-5, 3e-5), ("int4", "H200 SXM", 8e-6, 2e-5),
    ]  # fmt: skip
    assert [one.ratio for one in found] == pytest.approx([3.0, 2.5])
    assert asked[0][:3] == (("decode",), ["int8", "int4"], ("sm_90",))
    shape = asked[0][3]
    assert (shape.batch, shape.tokens, shape.gqa, shape.kv_heads, shape.block_size) == (2, 4096, 4, 8, 64)
