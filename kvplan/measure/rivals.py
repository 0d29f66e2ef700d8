"""Other makers' 16-bit decode attention, to compare with: torch's own, and on a GPU FlashInfer and flash-attn."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from itertools import cycle
from typing import Any, Final

import torch
from torch import Tensor

from kvplan.core.specs import DeviceKind
from kvplan.errors import MismatchError
from kvplan.measure.beds import DenseBed, attend_folded
from kvplan.measure.faults import last_words
from kvplan.measure.timing import Call
from kvplan_kernels.cache import AttentionOptions
from kvplan_kernels.layout import ceil_div

PAGE_TOKENS: Final = 16
"""Of FlashInfer's pages, the size that engines take by default."""
WORKSPACE_BYTES: Final = 128 * 2**20
"""What FlashInfer's documentation recommends."""
DIFFERENCE_MAX: Final = 0.02
"""Of the output's norm: a rival that differs by more was not called rightly."""

Decode = Callable[[], Tensor]
"""Attends to the next copy and returns [sequences, query_heads, head_dim] or a shape that views as it."""


@dataclass(frozen=True, slots=True)
class Rival:
    """One implementation.

    Attributes:
        name: What records call it.
        build: Returns its decode call of one query token a sequence, [sequences, query_heads, head_dim], over a bed of
            one group.
        package: What has to be installed; empty where torch is enough.
        copies_cache: Whether it takes the cache in a layout of its own, and so as many bytes once more.
        kinds: Devices that it runs on.
    """

    name: str
    build: Callable[[DenseBed, Tensor, AttentionOptions], Decode]
    package: str = ""
    copies_cache: bool = False
    kinds: tuple[DeviceKind, ...] = (DeviceKind.CPU, DeviceKind.CUDA)

    def missing(self) -> str:
        """Return why it cannot run here, or nothing."""
        return f"{self.package} is not installed" if self.package and find_spec(self.package) is None else ""


def _torch_folded(bed: DenseBed, query: Tensor, options: AttentionOptions) -> Decode:
    def call() -> Tensor:
        ((key, value),) = bed.next_tensors()
        return attend_folded(query, key, value, options)

    return call


def _torch_gqa(bed: DenseBed, query: Tensor, options: AttentionOptions) -> Decode:
    def call() -> Tensor:
        ((key, value),) = bed.next_tensors()
        return torch.nn.functional.scaled_dot_product_attention(
            query.unsqueeze(2).to(key.dtype), key, value, scale=options.scale, enable_gqa=True
        )

    return call


def _flash_attn(bed: DenseBed, query: Tensor, options: AttentionOptions) -> Decode:
    """Call `flash_attn_with_kvcache`: q [batch, 1, heads, dim], caches [batch, tokens, kv_heads, dim]."""
    attend: Any = import_module("flash_attn").flash_attn_with_kvcache
    sequences, tokens = query.shape[0], bed.groups[0].tokens
    lengths = torch.full((sequences,), tokens, dtype=torch.int32, device=query.device)

    def call() -> Tensor:
        ((key, value),) = bed.next_tensors()
        found: Tensor = attend(
            query.unsqueeze(1).to(key.dtype), key.transpose(1, 2), value.transpose(1, 2), cache_seqlens=lengths,
            softmax_scale=options.scale, causal=True,
        )  # fmt: skip
        return found

    return call


def _flashinfer(bed: DenseBed, query: Tensor, options: AttentionOptions) -> Decode:
    """Call `BatchDecodeWithPagedKVCacheWrapper` on tensor cores, which its grouped-query decode takes, planned once."""
    flashinfer: Any = import_module("flashinfer")
    copies = [tuple(_paged(tensor) for tensor in copy[0]) for copy in bed.copies]
    sequences, tokens, device = query.shape[0], bed.groups[0].tokens, query.device
    pages = ceil_div(tokens, PAGE_TOKENS)
    kv_heads, dtype = copies[0][0].shape[1], copies[0][0].dtype
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
    wrapper.plan(
        torch.arange(sequences + 1, dtype=torch.int32, device=device) * pages,
        torch.arange(sequences * pages, dtype=torch.int32, device=device),
        torch.full((sequences,), tokens - (pages - 1) * PAGE_TOKENS, dtype=torch.int32, device=device),
        query.shape[1], kv_heads, query.shape[2], PAGE_TOKENS, q_data_type=dtype, kv_data_type=dtype,
        sm_scale=options.scale,
    )  # fmt: skip
    turn = cycle(copies)
    return lambda: wrapper.run(query.to(dtype), next(turn))


def _paged(tensor: Tensor) -> Tensor:
    """Return [sequences, kv_heads, tokens, dim] as pages [sequences * pages, kv_heads, PAGE_TOKENS, dim]."""
    spare = -tensor.shape[2] % PAGE_TOKENS
    padded = torch.nn.functional.pad(tensor, (0, 0, 0, spare))
    pages = torch.unflatten(padded, 2, (-1, PAGE_TOKENS)).transpose(1, 2)
    return pages.flatten(0, 1).contiguous()


TORCH_FOLDED: Final = "torch-sdpa-folded"
RIVALS: Final = (
    Rival(name=TORCH_FOLDED, build=_torch_folded),
    Rival(name="torch-sdpa-gqa", build=_torch_gqa),
    Rival(name="flash-attn", build=_flash_attn, package="flash_attn", kinds=(DeviceKind.CUDA,)),
    Rival(
        name="flashinfer", build=_flashinfer, package="flashinfer", copies_cache=True, kinds=(DeviceKind.CUDA,)
    ),
)  # fmt: skip
"""The first is the one that others are held against."""


def rivals_on(kind: DeviceKind) -> tuple[tuple[Rival, ...], dict[str, str]]:
    """Return who can be compared with on a device, and why others cannot."""
    there = [rival for rival in RIVALS if kind in rival.kinds]
    missing = {rival.name: reason for rival in there if (reason := rival.missing())}
    return tuple(rival for rival in there if rival.name not in missing), missing


def build_rivals(
    rivals: Sequence[Rival], bed: DenseBed, query: Tensor, options: AttentionOptions
) -> tuple[dict[str, Call], dict[str, str]]:
    """Return the call of each that was seen to compute what torch's attention does, and why others are left out.

    A package may be installed and not work: built for another torch, or without the compiler that it needs.

    Args:
        rivals: Whom to call.
        bed: One group of sequences.
        query: [sequences, query_heads, head_dim].
        options: Scale alone.

    Raises:
        MismatchError: Torch's own attention differs from itself.
    """
    ((key, value),) = bed.copies[0]
    expected = attend_folded(query, key, value, options).float().reshape(query.shape)
    found: dict[str, Call] = {}
    failed: dict[str, str] = {}
    for rival in rivals:
        try:
            call = rival.build(bed, query, options)
            error = float((call().float().reshape(query.shape) - expected).norm() / expected.norm())
        except Exception as fault:
            if not rival.package:
                raise
            failed[rival.name] = last_words(fault)
            continue
        if error <= DIFFERENCE_MAX:
            found[rival.name] = call
        elif rival.package:
            failed[rival.name] = f"it differs from torch's attention by {error:.1%}: another interface than is called"
        else:
            raise MismatchError(f"{rival.name} differs from torch's folded attention by {error:.1%}")
    return found, failed
