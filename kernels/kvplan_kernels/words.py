"""Codes in and out of 32-bit words, as `layout.Order.LANES` places them.

Codes are int32 [..., tokens, head_dim]; a 16-bit value's code is its bit pattern.
"""

from typing import Final

import torch
from torch import Tensor

from kvplan_kernels.cache import TORCH_FLOAT
from kvplan_kernels.format import FloatType
from kvplan_kernels.layout import LANES, WORD_BITS

_BYTE_BITS: Final = 8
_BYTES_PER_WORD: Final = 4


def element_shifts(bits: int) -> list[int]:
    """Return the bit at which each element of a word starts.

    >>> element_shifts(4)
    [0, 8, 16, 24, 4, 12, 20, 28]
    >>> element_shifts(16)
    [0, 16]
    """
    elements = WORD_BITS // bits
    if bits > _BYTE_BITS:
        return [bits * element for element in range(elements)]
    return [_BYTE_BITS * (e % _BYTES_PER_WORD) + bits * (e // _BYTES_PER_WORD) for e in range(elements)]


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """Return int32 words [...] of *codes* [..., elements of a word]."""
    shifts = torch.tensor(element_shifts(bits), dtype=torch.int64, device=codes.device)
    return (codes.to(torch.int64) << shifts).sum(-1).to(torch.int32)


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """Return int32 codes [..., elements of a word] of int32 *words* [...]."""
    shifts = torch.tensor(element_shifts(bits), dtype=torch.int32, device=words.device)
    return (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)


def read_key_codes(words: Tensor, bits: int, head_dim: int) -> Tensor:
    """Return the codes [..., tokens, head_dim] of K words [..., tokens / 16, words of a token, 16]."""
    by_lane = unpack_words(words, bits).transpose(-3, -2)  # [..., runs, 16, words, elements]
    return by_lane.flatten(-2).flatten(-3, -2)[..., :head_dim]


def write_key_codes(words: Tensor, tokens: Tensor, codes: Tensor, bits: int) -> None:
    """Store *codes* [..., n, head_dim] at the token indices *tokens*, int64 [n], of K *words*."""
    elements = WORD_BITS // bits
    padded = torch.nn.functional.pad(codes, (0, words.shape[-2] * elements - codes.shape[-1]))
    by_lane = words.transpose(-2, -1)  # [..., runs, 16, words]
    by_lane[..., tokens // LANES, tokens % LANES, :] = pack_words(torch.unflatten(padded, -1, (-1, elements)), bits)


def read_value_codes(words: Tensor, bits: int) -> Tensor:
    """Return the codes [..., tokens, head_dim] of V words [..., tokens of a word apart, head_dim]."""
    return unpack_words(words, bits).transpose(-2, -1).flatten(-3, -2)


def write_value_codes(words: Tensor, tokens: Tensor, codes: Tensor, bits: int) -> None:
    """Store *codes* [..., n, head_dim] at the token indices *tokens*, int64 [n], of V *words*.

    A word's other tokens keep their bits.
    """
    held = read_value_codes(words, bits)
    held[..., tokens, :] = codes
    by_word = torch.unflatten(held, -2, (-1, WORD_BITS // bits)).transpose(-2, -1)
    words.copy_(pack_words(by_word, bits))


def float_codes(values: Tensor, float_type: FloatType) -> Tensor:
    """Return the bit patterns, int32, of *values* rounded to *float_type*."""
    return values.to(TORCH_FLOAT[float_type]).view(torch.int16).to(torch.int32) & 0xFFFF


def float_values(codes: Tensor, float_type: FloatType) -> Tensor:
    """Return the float32 values of the bit patterns *codes* of *float_type*."""
    return codes.to(torch.int16).view(TORCH_FLOAT[float_type]).to(torch.float32)
