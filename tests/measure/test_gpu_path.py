"""The path of a GPU through beds and runtime, its kernels in Triton's interpreter, its tensors on the processor.

Where a tensor is made without saying on which device, it would be on the wrong one with a GPU: here the device taken by
default is `meta`, whose tensors hold nothing and cannot be used beside others.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvplan.core.records import CellKey, Load
from kvplan.core.specs import ModelSpec
from kvplan.core.workloads import Bucket
from kvplan.errors import MissingPartError
from kvplan.measure.beds import DenseBed, Group, PagedBed
from kvplan.measure.device import FakeDevice
from kvplan.measure.jobs import Effort
from kvplan.measure.kernel_figures import KernelBench
from kvplan.runtime.ops import Kernel, load_ops, require_compiled
from kvplan_kernels.cache import AttentionOptions
from kvplan_kernels.format import parse
from kvplan_kernels.gpu.read import TILE, TILES, read_words
from kvplan_kernels.layout import KVLayout, Order

FORMATS = ("bf16", "int8", "int4", "kivi-k4v2-g32-r16")
GROUPS = (Group(sequences=2, tokens=70), Group(sequences=1, tokens=40))
OPTIONS = AttentionOptions(scale=0.2)


@pytest.fixture
def nowhere_by_default() -> Iterator[None]:
    with torch.device("meta"):
        yield


def layout(name: str) -> KVLayout:
    return KVLayout(format=parse(name), kv_heads=2, head_dim=32, block_tokens=32)


def query(sequences: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(sequences, 1, 4, 32, generator=generator, device="cpu").bfloat16()


@pytest.mark.parametrize("name", FORMATS)
def test_a_bed_holds_the_same_cache_for_every_kernel(name: str) -> None:
    defined = PagedBed(layout(name), GROUPS, load_ops("reference"), copies=2).decode(query(3), OPTIONS)
    with torch.device("meta"):
        bed = PagedBed(layout(name), GROUPS, load_ops("triton"), copies=2)
        found = bed.decode(query(3), OPTIONS)

    assert bed.layout.order is Order.ROWS
    torch.testing.assert_close(found, defined, rtol=0, atol=0.02)


@pytest.mark.usefixtures("nowhere_by_default")
def test_what_a_bed_offers_runs_where_its_cache_is() -> None:
    bed = PagedBed(layout("int4"), GROUPS, load_ops("triton"), copies=1)
    key = torch.zeros(3, 2, 32, dtype=torch.bfloat16, device="cpu")

    bed.decode_unfused(query(3), OPTIONS)
    bed.append_call(key, key, back=1)()
    DenseBed(layout("bf16"), GROUPS, copies=1, device="cpu").decode_folded(query(3), OPTIONS)


@pytest.mark.usefixtures("nowhere_by_default")
def test_the_kernels_of_a_cell_have_every_figure(key: CellKey, spec: ModelSpec) -> None:
    ops = load_ops("triton")
    loads = (Load(bucket=Bucket(name="short", prompt_tokens=20, generate_tokens=12, share=1.0), sequences=1),)
    key = replace(key, kernel=ops.name, loads=loads)
    effort = Effort(kernel_samples=1, kernel_budget_s=0, step_samples=1, step_budget_s=0)
    small, device = (
        replace(spec, layers=spec.layers[:1]),
        FakeDevice(info=replace(FakeDevice().info, last_level_cache_bytes=0)),
    )

    found = KernelBench(device, ops, small, [key]).measure(effort)[key]

    assert {"decode_fused_s", "decode_16bit_s", "decode_unfused_s", "append_s", "pack_s"} <= set(found.figures)


def test_kernels_in_the_interpreter_are_not_timed() -> None:
    with pytest.raises(MissingPartError, match="interpreter"):
        require_compiled(load_ops("triton"))


@pytest.mark.parametrize("kernel", [Kernel.CPU, Kernel.REFERENCE])
def test_a_kernel_of_the_processor_does_not_run_on_a_gpu(kernel: Kernel) -> None:
    with pytest.raises(MissingPartError, match="use --kernel triton"):
        load_ops(kernel, device="cuda:0")


@pytest.mark.parametrize("count", [1, TILE, TILE * TILES + 5])
def test_the_bandwidth_probe_reads_every_word(count: int) -> None:
    words = torch.randint(-(2**31), 2**31, (count,), generator=torch.Generator().manual_seed(1), dtype=torch.int32)

    parts = torch.split(words, TILE * TILES)
    assert read_words(words).tolist() == [np.bitwise_xor.reduce(part.numpy()) for part in parts]
