"""Predictions beside measured times; both are made up here, who is held against whom is not."""

from dataclasses import replace

import pytest

from kvplan.core.records import Conditions
from kvplan.core.specs import DeviceInfo, DeviceKind
from kvplan.errors import MissingPartError
from kvplan.measure import held
from kvplan.measure.bench import DecodeBench, DecodeCell
from kvplan.measure.held import hold, reported_gpu
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
    ("name", "cores", "found"),
    [
        ("NVIDIA H200", 132, "H200 SXM"),
        ("NVIDIA H100 80GB HBM3", 132, "H100 SXM"),
        ("NVIDIA H100 PCIe", 114, None),
        ("NVIDIA H100 NVL", 132, None),
        ("NVIDIA H200", 16, None),
        ("NVIDIA A100-SXM4-80GB", 108, "A100 SXM 80 GB"),
        ("NVIDIA A100-SXM4-40GB", 108, None),
        ("NVIDIA GeForce RTX 4090", 128, "RTX 4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 76, None),
        ("NVIDIA L40S", 142, "L40S"),
    ],
)
def test_only_the_very_part_and_the_whole_of_it_is_predicted(name: str, cores: int, found: str | None) -> None:
    gpu = reported_gpu(replace(info(name), cores=cores))

    assert (gpu.name if gpu else None) == found


def test_a_toolchain_that_is_not_there_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> list[object]:
        raise MissingPartError("no cuobjdump")

    monkeypatch.setattr(held, "inspect_kernels", missing)

    assert hold(BENCH, info(), block_tokens=64).reason == "no cuobjdump"


def test_a_gpu_whose_figures_are_unknown_is_not_held_against_anothers() -> None:
    assert hold(BENCH, info("NVIDIA H20"), block_tokens=64).reason.startswith("no figures of NVIDIA H20 ")


def test_every_format_of_kvplans_is_held_against_its_own_call(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[tuple[str, ...], list[str], tuple[str, ...], Shape, int]] = []

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
    assert asked[0][4] == 132
    shape = asked[0][3]
    assert (shape.batch, shape.tokens, shape.gqa, shape.kv_heads, shape.block_size) == (2, 4096, 4, 8, 64)
