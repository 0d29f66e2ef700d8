"""The compiled kernels, each variant that this machine runs, against the reference."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kvplan_kernels.append import cpu as append_cpu
from kvplan_kernels.append.reference import append
from kvplan_kernels.cache import LayerCache
from kvplan_kernels.cases import (
    Case,
    covering_cases,
    float_code_cases,
    hard_cases,
    long_cases,
    speed_cases,
    stored_cases,
)
from kvplan_kernels.decode import cpu as decode_cpu
from kvplan_kernels.decode.op import DECODE
from kvplan_kernels.decode.reference import decode
from kvplan_kernels.decode.result import DecodeResult
from kvplan_kernels.dequantize import cpu as dequantize_cpu
from kvplan_kernels.dequantize.reference import dequantize
from kvplan_kernels.inputs import Inputs, make_inputs

VARIANT = "KVPLAN_CPU_VARIANT"
Agree = Callable[[Case, Inputs, DecodeResult, DecodeResult, str, str], None]
NEWER = float_code_cases() + stored_cases() + tuple(case for case in long_cases() if case.format == "fp8_e4m3")
"""Of these every third is compared each time, the others with the slow tests."""
OFTEN = NEWER[::3]
RARELY = tuple(case for case in NEWER if case not in OFTEN) + speed_cases()
SIDE_BY_SIDE = [
    *(
        pytest.param(case, id=str(case))
        for case in dict.fromkeys((*covering_cases(), *OFTEN, *long_cases(), *hard_cases()))
        if DECODE.implementations["cpu"].refusal(case) is None and case not in RARELY
    ),
    *(pytest.param(case, id=str(case), marks=pytest.mark.slow) for case in RARELY),
]


def copied(cache: LayerCache) -> LayerCache:
    return replace(cache, pages=cache.pages.clone(), ring=cache.ring.clone(), sinks=cache.sinks.clone())


def filled(case: Case) -> Inputs:
    inputs = make_inputs(case)
    inputs.fill()
    return inputs


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
def test_decode_agrees(
    case: Case, variants: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, assert_decode_agrees: Agree
) -> None:
    inputs = filled(case)
    definition = decode(
        inputs.cache,
        inputs.batch,
        inputs.query,
        inputs.options,
        sink_logits=inputs.sink_logits,
        positions=inputs.positions,
        received=case.received,
        lse=True,
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
            lse=True,
            threads=case.threads,
        )
        assert found.output.shape == definition.output.shape
        assert (found.received is None) == (definition.received is None)
        assert_decode_agrees(case, inputs, found, definition, variant, "cpu")


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
