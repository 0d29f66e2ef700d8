"""Codes in and out of 16-bit words in rows, as `layout.Order.ROWS` places them.

Codes are int32 [..., tokens, head_dim]; a 16-bit value's code is its bit pattern.
"""

import torch
from torch import Tensor

from kvplan_kernels.layout import ROW_PLANES

_WORD_MASK = 0xFFFF


def plane_shifts(bits: int) -> list[list[int]]:
    """Return the bit at which the code of each channel of a word starts, for each of its tokens.

    >>> plane_shifts(2)
    [[0, 2, 4, 6], [8, 10, 12, 14]]
    """
    channels, tokens = ROW_PLANES[bits]
    return [[bits * (token * channels + channel) for channel in range(channels)] for token in range(tokens)]


def read_row_codes(words: Tensor, bits: int) -> Tensor:
    """Return the codes [..., tokens, head_dim] of int16 *words* [..., tokens / T, head_dim / C]."""
    unsigned, mask = words.to(torch.int32) & _WORD_MASK, (1 << bits) - 1
    by_token = [
        torch.cat([(unsigned >> shift) & mask for shift in of_token], dim=-1) for of_token in plane_shifts(bits)
    ]
    return torch.stack(by_token, dim=-2).flatten(-3, -2)


def write_row_codes(words: Tensor, tokens: Tensor, codes: Tensor, bits: int) -> None:
    """Store *codes* [..., n, head_dim] at the token indices *tokens*, int64 [n], of int16 *words*.

    A word's other tokens keep their bits.
    """
    held = read_row_codes(words, bits)
    held[..., tokens, :] = codes
    _, per_word = ROW_PLANES[bits]
    by_word = torch.unflatten(held, -2, (-1, per_word))
    packed = torch.zeros_like(words, dtype=torch.int32)
    for token, shifts in enumerate(plane_shifts(bits)):
        for part, shift in zip(by_word[..., token, :].chunk(len(shifts), dim=-1), shifts, strict=True):
            packed |= part << shift
    words.copy_(packed.to(torch.int16))
