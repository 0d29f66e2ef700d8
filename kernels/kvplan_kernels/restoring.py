"""What a GPU's decode needs to read keys back that lie as they were before RoPE; `decode.restored_gpu_kernels`."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kvplan_kernels.folding import Side
from kvplan_kernels.rope import Rope
from kvplan_kernels.rotation import hadamard


@dataclass(frozen=True, kw_only=True, eq=False)
class Restoring:
    """Queries and tables for keys as they are stored, channels in their order.

    Attributes:
        rope: The embedding that was undone.
        side: What was done to keys afterwards.
        kv_heads: KV heads.
        head_dim: Head size.
    """

    rope: Rope
    side: Side
    kv_heads: int
    head_dim: int

    def asked(self, query: Tensor) -> Tensor:
        """Return what is asked for *query* [..., query_heads, head_dim]: itself, then that of the partners.

        Returns:
            float32 [..., query_heads, 2 * head_dim].
        """
        query = query.to(torch.float32)
        return torch.cat([self._of_heads(query), self._of_heads(query[..., self.rope.partner])], dim=-1)

    @cached_property
    def near(self) -> Tensor:
        """`Rope.near`, [256, 2, head_dim]; [kv_heads, 256, 2, head_dim] where heads have orders of their own."""
        return self._ordered(self.rope.near)

    def far(self, tokens: int) -> Tensor:
        """Return `Rope.far` in the same way."""
        far = self.rope.far(tokens)
        return far if self.side.order is None else self._ordered(far)

    @cached_property
    def shift(self) -> Tensor:
        """What was taken from each channel as it is stored, float32 [kv_heads, head_dim]."""
        nothing = torch.zeros(self.kv_heads, self.head_dim, device=self.rope.partner.device)
        return -self.side.stored(nothing).contiguous()

    @cached_property
    def rotation(self) -> tuple[Tensor, Tensor]:
        """The signs of H, bf16 [head_dim, head_dim], and what each of its columns is times, float32 [head_dim]."""
        device = str(self.rope.partner.device)
        whole = hadamard(self.head_dim, device)
        return whole.sign().to(torch.bfloat16).contiguous(), whole.abs().amax(0)

    def _of_heads(self, query: Tensor) -> Tensor:
        by_head = torch.unflatten(query, -2, (self.kv_heads, -1)).transpose(-3, -2)
        return self.side.asked(by_head).transpose(-3, -2).flatten(-3, -2)

    def _ordered(self, table: Tensor) -> Tensor:
        """Return a table [rows, 2, head_dim] of each KV head, its channels in their order."""
        if self.side.order is None:
            return table
        return torch.stack([table[..., order] for order in self.side.order]).contiguous()
