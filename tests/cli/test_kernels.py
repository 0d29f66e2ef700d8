import json

import pytest
import torch

from kvplan.cli import main
from kvplan.core.records import Conditions
from kvplan.errors import ExitStatus
from kvplan.measure import bench as measuring
from kvplan.measure.bench import DecodeBench, DecodeCell
from kvplan_kernels import native

pytestmark = pytest.mark.skipif(native.missing() is not None, reason="the fused kernels are not built")

SMALL = ["--tokens", "256", "--query-heads", "4", "--kv-heads", "2", "--head-dim", "64", "--repeats", "3"]
CELL = {
    "impl", "format", "batch", "query_heads", "kv_heads", "head_dim", "tokens", "threads", "median_s", "samples_s",
    "bytes",
}  # fmt: skip


@pytest.fixture(autouse=True)
def small_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "COLD_FACTOR", 0)


def cell(impl: str, form: str, seconds: float, size: int) -> DecodeCell:
    return DecodeCell(
        impl=impl, format=form, batch=1, query_heads=4, kv_heads=2, head_dim=64, tokens=256, threads=1,
        median_s=seconds, samples_s=(seconds,), bytes=size,
    )  # fmt: skip


def test_the_json_has_every_implementation_with_all_samples(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "bench", "decode", *SMALL, "-f", "bf16", "-f", "int4", "--json"]) == ExitStatus.DONE

    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == 1
    assert found["read_bandwidth_bytes_per_s"] > 0
    assert [(cell["impl"], cell["format"]) for cell in found["cells"]] == [
        ("kvplan", "bf16"), ("kvplan", "int4"), ("torch-sdpa-folded", "bf16"), ("torch-sdpa-gqa", "bf16"),
    ]  # fmt: skip
    assert all(set(cell) == CELL and len(cell["samples_s"]) == 3 for cell in found["cells"])
    sizes = {(cell["impl"], cell["format"]): cell["bytes"] for cell in found["cells"]}
    assert sizes["kvplan", "bf16"] == sizes["torch-sdpa-gqa", "bf16"] == 256 * 2 * 64 * 2 * 2
    assert sizes["kvplan", "int4"] == 256 * 2 * (64 // 2 + 4) * 2


def test_the_table_shows_the_gain_over_both_baselines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = DecodeBench(
        read_bandwidth_bytes_per_s=20e9, kernel="cpu/x", cold_bytes=2**20, cold_bytes_wanted=2**21,
        conditions=Conditions(load_average=1, steal_share=0, foreign_cpu_share=0.5),
        cells=(
            cell("kvplan", "bf16", 0.004, 40_000_000), cell("kvplan", "int4", 0.001, 10_000_000),
            cell("torch-sdpa-folded", "bf16", 0.008, 40_000_000),
        ),
    )  # fmt: skip
    monkeypatch.setattr(measuring, "bench_decode", lambda *_, **__: made)

    assert main(["kernels", "bench", "decode"]) == ExitStatus.DONE

    out, err = capsys.readouterr()
    line = next(line for line in out.splitlines() if "int4" in line)
    assert line.split() == ["kvplan", "int4", "1.00", "ms", "10.0", "50%", "8.00x", "4.00x"]
    assert "rotated over 1.0 MiB, 2.0 MiB wanted" in out
    assert "other processes took 50%" in err


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["-f", "kivi-k4v4-g128"], ExitStatus.UNSUPPORTED, "use block size 128"),
        (["--query-heads", "9", "--kv-heads", "2"], ExitStatus.BAD_INPUT, "use a multiple of 2"),
        (["-f", "nonsense"], ExitStatus.UNSUPPORTED, "unknown format"),
        (["--tokens", "99000000"], ExitStatus.NOT_MET, "is free"),
        (["--tokens", "0"], ExitStatus.BAD_INPUT, "--tokens"),
    ],
)
def test_what_cannot_be_timed_is_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], status: ExitStatus, said: str
) -> None:
    assert main(["kernels", "bench", "decode", *SMALL, *arguments]) == status

    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert "Traceback" not in err


def test_a_kernel_that_disagrees_with_its_definition_gets_no_time(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    from kvplan.runtime import ops

    real = ops.load_ops

    def broken(kernel: str, threads: int | None = None, device: str = "cpu") -> ops.Ops:
        found = real(kernel, threads, device)
        if kernel == "reference":
            return found

        def decode(cache: object, batch: object, query: object, options: object) -> object:
            result = found.decode(cache, batch, query, options)  # type: ignore[arg-type]
            result.output[:, :, 0] *= 1.2
            return result

        return replace(found, decode=decode)

    monkeypatch.setattr(ops, "load_ops", broken)

    status = main(["kernels", "bench", "decode", *SMALL, "-f", "int4"])

    assert status == ExitStatus.MISMATCH
    assert "differs from its definition" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. 1.00 GiB is free. Of it"),
         ExitStatus.NOT_MET, "error: CUDA out of memory. Tried to allocate 2.00 GiB. 1.00 GiB is free."),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), ExitStatus.BUG, "Traceback"),
    ],
)  # fmt: skip
def test_memory_that_runs_out_is_one_line_and_a_fault_shows_where(
    error: Exception, status: ExitStatus, said: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(measuring, "bench_decode", fails)

    assert main(["kernels", "bench", "decode"]) == status
    assert capsys.readouterr().err.startswith(said)
