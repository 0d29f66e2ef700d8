import os
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import triton.language as tl
from torch import Tensor

from kvplan_kernels.cache import TORCH_FLOAT
from kvplan_kernels.cases import Case, Data
from kvplan_kernels.decode.op import ACCURACY, QUANTIZATION_SHARE, lse_bound, output_bound, received_bound
from kvplan_kernels.decode.reference import attend
from kvplan_kernels.decode.result import DecodeResult
from kvplan_kernels.format import TensorFormat
from kvplan_kernels.inputs import Inputs
from kvplan_kernels.native import loader
from kvplan_kernels.quantize import dequantize_codes, quantize
from kvplan_kernels.sequence import sequences
from kvplan_kernels.tensor_format import Levels

NEAR_EXACT = {"cpu": {Data.NEGATIVE}, "triton": {Data.NEGATIVE, Data.EXTREME, Data.TIES}}
"""Data that quantizing hardly changes, so that the operands' rounding is more than a tenth of it."""


@pytest.fixture(scope="session")
def variants() -> tuple[str, ...]:
    """The compiled variants that this machine runs."""
    reason = loader.missing()
    if reason is not None:
        assert "KVPLAN_REQUIRE_NATIVE" not in os.environ, reason
        pytest.skip(reason)
    return loader.variants()


@pytest.fixture(autouse=True)
def _memory_full_of_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `torch.empty` return NaN, so that an output left unwritten fails."""
    plain = torch.empty

    def filled(*shape: Any, **options: Any) -> Tensor:
        tensor = plain(*shape, **options)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", filled)


@pytest.fixture(autouse=True, scope="session")
def _language_patched_once_a_launch() -> Iterator[None]:
    """Keep Triton's interpreter from patching its language at every call of a function: a third of the time."""
    from triton.runtime import interpreter

    plain = interpreter._patch_lang

    def patched(function: Any) -> Any:
        languages = [
            value for value in function.__globals__.values() if isinstance(value, ModuleType) and value in (tl, tl.core)
        ]
        return plain(function) if any(tl.core.is_builtin(language.load) for language in languages) else None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", patched)
        yield


def read_back(values: Tensor, tensor: TensorFormat, levels: Levels | None) -> Tensor:
    """Return *values* [kv_heads, tokens, head_dim] as they are once all are quantized."""
    if not tensor.quantized:
        return values
    coded = quantize(values, tensor, levels)
    return dequantize_codes(coded.codes, coded.metadata, tensor, levels, coded.boosts)


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
    levels = inputs.cache.learned_levels
    key, value = read_back(key, form.key, levels.get("k")), read_back(value, form.value, levels.get("v"))
    return float((attend(query, key, value, positions, inputs.options, inputs.sink_logits)[0] - exact).norm())


def assert_decode_agrees(
    case: Case, inputs: Inputs, found: DecodeResult, definition: DecodeResult, note: str, kernel: str
) -> None:
    for row, sequence in enumerate(sequences(inputs.cache, inputs.batch)):
        key, value, query = sequence.dense("k"), sequence.dense("v"), inputs.query[row].float()
        error = found.output[row] - definition.output[row]
        bound = output_bound(query, key, value, inputs.options, ACCURACY[kernel])
        assert float(error.abs().max()) <= bound, (note, row, float(error.abs().max()), bound)
        if definition.lse is not None:
            assert found.lse is not None
            seen = definition.lse[row].isfinite()
            assert torch.equal(found.lse[row].isfinite(), seen), (note, row)
            gap = float((found.lse[row] - definition.lse[row])[seen].abs().max()) if seen.any() else 0.0
            assert gap <= lse_bound(query, key, inputs.options, ACCURACY[kernel]), (note, row, gap)
        if definition.received is not None:
            assert found.received is not None
            gap = float((found.received[row] - definition.received[row]).abs().max())
            assert gap <= received_bound(query, key, inputs.options, ACCURACY[kernel]), (note, row, gap)
        if sequence.length and sequence.cache.layout.format.quantized and case.data not in NEAR_EXACT[kernel]:
            share, own = float(error.norm()), quantization_error(inputs, row)
            assert not own or share <= QUANTIZATION_SHARE * own, (note, row, share, own)  # codes may lose nothing


@pytest.fixture(name="assert_decode_agrees")
def _assert_decode_agrees() -> Callable[..., None]:
    return assert_decode_agrees
