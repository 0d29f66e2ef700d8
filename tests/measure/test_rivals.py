"""Whom the benchmark compares with. The packages for GPUs are stood in for by their documented interfaces."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from kvplan.core.specs import DeviceKind
from kvplan.measure import rivals
from kvplan.measure.beds import DenseBed, Group
from kvplan.measure.rivals import RIVALS, build_rivals, rivals_on
from kvplan_kernels.cache import AttentionOptions
from kvplan_kernels.format import parse
from kvplan_kernels.layout import KVLayout

LAYOUT = KVLayout(format=parse("bf16"), kv_heads=2, head_dim=32, block_tokens=16)
OPTIONS = AttentionOptions(scale=0.2)
QUERY = torch.randn(3, 8, 32, generator=torch.Generator().manual_seed(1)).bfloat16()


def attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Return attention of [heads, dim] to [tokens, kv_heads, dim]."""
    ratio = query.shape[0] // key.shape[1]
    keys, values = (tensor.float().repeat_interleave(ratio, dim=1) for tensor in (key, value))
    weights = (torch.einsum("hd,thd->ht", query.float(), keys) * scale).softmax(-1)
    return torch.einsum("ht,thd->hd", weights, values)


def flash_attn() -> Any:
    def flash_attn_with_kvcache(
        q: Tensor, k_cache: Tensor, v_cache: Tensor, *, cache_seqlens: Tensor, softmax_scale: float, causal: bool
    ) -> Tensor:
        assert causal
        assert q.shape[1] == 1
        return torch.stack(
            [
                attention(q[row, 0], k_cache[row, :tokens], v_cache[row, :tokens], softmax_scale)[None]
                for row, tokens in enumerate(cache_seqlens.tolist())
            ]
        )

    module: Any = ModuleType("flash_attn")
    module.flash_attn_with_kvcache = flash_attn_with_kvcache
    return module


def flashinfer() -> Any:
    class Wrapper:
        def __init__(self, workspace: Tensor, kv_layout: str, *, use_tensor_cores: bool) -> None:
            assert (kv_layout, use_tensor_cores, workspace.dtype) == ("HND", True, torch.uint8)

        def plan(
            self, indptr: Tensor, indices: Tensor, last_page_len: Tensor, heads: int, kv_heads: int, dim: int,
            page_size: int, *, q_data_type: torch.dtype, kv_data_type: torch.dtype, sm_scale: float,
        ) -> None:  # fmt: skip
            self.indptr, self.indices, self.last, self.scale = indptr, indices, last_page_len, sm_scale
            self.shape = (kv_heads, page_size, dim)

        def run(self, q: Tensor, cache: tuple[Tensor, Tensor]) -> Tensor:
            assert tuple(cache[0].shape[1:]) == self.shape
            rows = []
            for row, last in enumerate(self.last.tolist()):
                pages = self.indices[self.indptr[row] : self.indptr[row + 1]].long()
                tokens = (len(pages) - 1) * self.shape[1] + last
                key, value = (part[pages].transpose(1, 2).flatten(0, 1)[:tokens] for part in cache)
                rows.append(attention(q[row], key, value, self.scale))
            return torch.stack(rows)

    module: Any = ModuleType("flashinfer")
    module.BatchDecodeWithPagedKVCacheWrapper = Wrapper
    return module


@pytest.mark.parametrize("tokens", [1, 16, 70])
def test_every_rival_computes_what_torch_does(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", flash_attn())
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer())
    bed = DenseBed(LAYOUT, (Group(sequences=3, tokens=tokens),), copies=2)

    calls, failed = build_rivals(RIVALS, bed, QUERY, OPTIONS)

    assert failed == {}
    assert list(calls) == ["torch-sdpa-folded", "torch-sdpa-gqa", "flash-attn", "flashinfer"]
    for call in calls.values():
        call()


def test_a_rival_that_was_called_wrongly_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    module = flash_attn()
    right = module.flash_attn_with_kvcache
    module.flash_attn_with_kvcache = lambda *args, **named: right(*args, **{**named, "softmax_scale": 1.0})
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    bed = DenseBed(LAYOUT, (Group(sequences=3, tokens=50),), copies=1)

    calls, failed = build_rivals([rival for rival in RIVALS if rival.name == "flash-attn"], bed, QUERY, OPTIONS)

    assert calls == {}
    assert failed["flash-attn"].startswith("it differs from torch's attention by")


def test_a_package_that_does_not_work_is_left_out_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> object:
        raise ImportError(f"{name}.so: undefined symbol: _ZN3c10")

    monkeypatch.setattr(rivals, "import_module", broken)
    bed = DenseBed(LAYOUT, (Group(sequences=3, tokens=50),), copies=1)

    calls, failed = build_rivals(RIVALS, bed, QUERY, OPTIONS)

    assert list(calls) == ["torch-sdpa-folded", "torch-sdpa-gqa"]
    assert failed["flash-attn"] == "ImportError: flash_attn.so: undefined symbol: _ZN3c10"


def test_what_is_not_installed_is_left_out_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rivals, "find_spec", lambda name: None)

    there, missing = rivals_on(DeviceKind.CUDA)

    assert [rival.name for rival in there] == ["torch-sdpa-folded", "torch-sdpa-gqa"]
    assert missing == {"flash-attn": "flash_attn is not installed", "flashinfer": "flashinfer is not installed"}


def test_a_processor_is_compared_with_torch_alone() -> None:
    there, missing = rivals_on(DeviceKind.CPU)

    assert [rival.name for rival in there] == ["torch-sdpa-folded", "torch-sdpa-gqa"]
    assert missing == {}
