"""The compiled kernels, each variant that this machine runs, against the reference."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvplan_kernels.append import cpu as append_cpu
from kvplan_kernels.append.reference import append
from kvplan_kernels.cache import TORCH_FLOAT, LayerCache
from kvplan_kernels.cases import Case, Data, covering_cases, hard_cases, long_cases, speed_cases
from kvplan_kernels.decode import cpu as decode_cpu
from kvplan_kernels.decode.op import QUANTIZATION_SHARE, output_bound, received_bound
from kvplan_kernels.decode.reference import attend, decode
from kvplan_kernels.decode.result import DecodeResult
from kvplan_kernels.dequantize import cpu as dequantize_cpu
from kvplan_kernels.dequantize.reference import dequantize
from kvplan_kernels.format import TensorFormat
from kvplan_kernels.inputs import Inputs, make_inputs
from kvplan_kernels.quantize import dequantize_codes, quantize
from kvplan_kernels.sequence import sequences

VARIANT = "KVPLAN_CPU_VARIANT"
SIDE_BY_SIDE = [
    *(pytest.param(case, id=str(case)) for case in covering_cases() + long_cases() + hard_cases()),
    *(pytest.param(case, id=str(case), marks=pytest.mark.slow) for case in speed_cases()),
]


def copied(cache: LayerCache) -> LayerCache:
    return replace(cache, pages=cache.pages.clone(), ring=cache.ring.clone(), sinks=cache.sinks.clone())


def filled(case: Case) -> Inputs:
    inputs = make_inputs(case)
    inputs.fill()
    return inputs


def read_back(values: Tensor, tensor: TensorFormat) -> Tensor:
    """Return *values* [kv_heads, tokens, head_dim] as they are once all are quantized."""
    if not tensor.quantized:
        return values
    coded = quantize(values, tensor)
    return dequantize_codes(coded.codes, coded.scale, coded.minimum, tensor)


def positions_of(inputs: Inputs, queries: int) -> Tensor:
    if inputs.positions is not None:
        return inputs.positions
    return inputs.batch.lengths[:, None] - queries + torch.arange(queries)


def quantization_error(inputs: Inputs, row: int) -> float:
    """Return the norm of what quantizing all of one sequence's tokens does to its output."""
    form, length = inputs.cache.layout.format, int(inputs.batch.lengths[row])
    dtype = TORCH_FLOAT[inputs.cache.layout.float_type]
    key, value = (t[:length].to(dtype).float().transpose(0, 1) for t in (inputs.key, inputs.value))
    query, positions = inputs.query[row].float(), positions_of(inputs, inputs.query.shape[1])[row]
    exact = attend(query, key, value, positions, inputs.options, inputs.sink_logits)[0]
    key, value = read_back(key, form.key), read_back(value, form.value)
    return float((attend(query, key, value, positions, inputs.options, inputs.sink_logits)[0] - exact).norm())


def assert_decode_agrees(case: Case, inputs: Inputs, found: DecodeResult, definition: DecodeResult, note: str) -> None:
    for row, sequence in enumerate(sequences(inputs.cache, inputs.batch)):
        key, value, query = sequence.dense("k"), sequence.dense("v"), inputs.query[row].float()
        error = found.output[row] - definition.output[row]
        bound = output_bound(query, key, value, inputs.options)
        assert float(error.abs().max()) <= bound, (note, row, float(error.abs().max()), bound)
        if definition.received is not None:
            assert found.received is not None
            gap = float((found.received[row] - definition.received[row]).abs().max())
            assert gap <= received_bound(query, key, inputs.options), (note, row, gap)
        if sequence.length and sequence.cache.layout.format.quantized and case.data is not Data.NEGATIVE:
            share, own = float(error.norm()), quantization_error(inputs, row)
            assert share <= QUANTIZATION_SHARE * own, (note, row, share, own)


@pytest.mark.parametrize("case", SIDE_BY_SIDE)
def test_append_leaves_the_same_bytes(case: Case, variants: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_inputs(case)
    caches = {variant: copied(inputs.cache) for variant in variants}
    for batch, key, value, counts in inputs.appends():
        poisoned = append(inputs.cache, batch, key, value, counts)
        for variant, cache in caches.items():
            monkeypatch.setenv(VARIANT, variant)
            assert append_cpu.append(cache, batch, key, value, counts, threads=case.threads) == poisoned
            for name in ("pages", "ring", "sinks"):
                assert torch.equal(getattr(cache, name), getattr(inputs.cache, name)), (variant, name)


@pytest.mark.parametrize("case", SIDE_BY_SIDE)
def test_decode_agrees(case: Case, variants: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = filled(case)
    definition = decode(
        inputs.cache,
        inputs.batch,
        inputs.query,
        inputs.options,
        sink_logits=inputs.sink_logits,
        positions=inputs.positions,
        received=case.received,
    )
    for variant in variants:
        monkeypatch.setenv(VARIANT, variant)
        found = decode_cpu.decode(
            inputs.cache,
            inputs.batch,
            inputs.query,
            inputs.options,
            sink_logits=inputs.sink_logits,
            positions=inputs.positions,
            received=case.received,
            threads=case.threads,
        )
        assert found.output.shape == definition.output.shape
        assert (found.received is None) == (definition.received is None)
        assert_decode_agrees(case, inputs, found, definition, variant)


@pytest.mark.parametrize("case", SIDE_BY_SIDE)
def test_dequantize_agrees(case: Case, variants: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = filled(case)
    definition = dequantize(inputs.cache, inputs.batch)
    for variant in variants:
        monkeypatch.setenv(VARIANT, variant)
        found = dequantize_cpu.dequantize(inputs.cache, inputs.batch, threads=case.threads)
        for one, other in zip(found, definition, strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one, other), (variant, float((one.float() - other.float()).abs().max()))
