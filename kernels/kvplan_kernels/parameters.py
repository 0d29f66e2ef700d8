"""What a format has learned of one layer of a model: tensors by name, as the caches of that layer take them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from kvplan_kernels.format import CacheFormat, CodeTable, Lesson, TensorFormat, Transform, UnsupportedError
from kvplan_kernels.layout import KVLayout
from kvplan_kernels.tensor_format import LEVEL_MOST

KEY_OFFSET: Final = "k_offset"
KEY_DIVISOR: Final = "k_divisor"
KEY_ORDER: Final = "k_order"
VALUE_ORDER: Final = "v_order"
KEY_LARGEST: Final = "k_largest"
VALUE_LARGEST: Final = "v_largest"
KEY_MIDDLE: Final = "k_middle"
KEY_REACH: Final = "k_reach"
VALUE_REACH: Final = "v_reach"
KEY_LEVELS: Final = "k_levels"
VALUE_LEVELS: Final = "v_levels"
ROPE_FREQUENCY: Final = "rope_frequency"
ROPE_PARTNER: Final = "rope_partner"

LEARNED: Final[Mapping[Lesson, tuple[str, ...]]] = {
    Transform.UNBIAS: (KEY_OFFSET,),
    Transform.SMOOTH: (KEY_DIVISOR,),
    Transform.ORDER: (KEY_ORDER, VALUE_ORDER),
    Transform.SCALED_TENSOR: (KEY_LARGEST, VALUE_LARGEST),
    Transform.SCALED_CHANNEL: (KEY_MIDDLE, KEY_REACH, VALUE_REACH),
    Transform.SCALED: (KEY_LARGEST, VALUE_LARGEST),
    CodeTable.LEVELS: (KEY_LEVELS, VALUE_LEVELS),
}
"""The tensors that each lesson is about.

Those of `rope` are no lesson: the model has them, float64 and int64 [head_dim]. Orders are int64 [kv_heads, head_dim]:
which channel is stored at a place. Levels are int64, one for each code, ascending from 0 to 255. Largest numbers are
float32 [kv_heads]. All else is float32 [kv_heads, head_dim], by channel.
"""
_OF_HEADS: Final = (KEY_LARGEST, VALUE_LARGEST)
_OF_PLACES: Final = (KEY_ORDER, VALUE_ORDER)
_OF_CODES: Final = (KEY_LEVELS, VALUE_LEVELS)
_OF_ANY_SIGN: Final = (KEY_OFFSET, KEY_MIDDLE)
_CODES: Final = (4, 8, 16)
_BASE: Final = 10_000.0
"""Of the frequencies of RoPE, where no model says another."""


@dataclass(frozen=True, eq=False, slots=True)
class LayerParameters:
    """Tensors by name; none where a format learns nothing."""

    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Tensor:
        """Return the tensor called *name*; UnsupportedError where it was never learned."""
        if name not in self.tensors:
            raise UnsupportedError(
                f"{name}: the format needs this tensor, learned from the model, and the cache has none"
            )
        return self.tensors[name]

    def __or__(self, more: "LayerParameters") -> "LayerParameters":
        """Return these and *more*."""
        return LayerParameters({**self.tensors, **more.tensors})

    def to(self, device: str) -> "LayerParameters":
        """Return the same on *device*."""
        return LayerParameters({name: tensor.to(device) for name, tensor in self.tensors.items()})


NOTHING_LEARNED: Final = LayerParameters()


def learned_names(form: CacheFormat) -> tuple[str, ...]:
    """Return the names of the tensors that caches of *form* need."""
    tensors = {KEY_LEVELS: form.key, VALUE_LEVELS: form.value}
    names = (name for lesson in form.calibrated for name in LEARNED[lesson])
    return tuple(name for name in names if name not in tensors or tensors[name].learned)


def check_learned(name: str, tensor: Tensor, kv_heads: int, head_dim: int) -> None:
    """Refuse what could not have been learned of a layer: another shape or type, or a number that undoes attention.

    Raises:
        UnsupportedError: It says which tensor and why.
    """
    if name in _OF_CODES:
        _check_levels(name, tensor)
        return
    shape = (kv_heads,) if name in _OF_HEADS else (kv_heads, head_dim)
    dtype = torch.int64 if name in _OF_PLACES else torch.float32
    if tensor.dtype != dtype or tuple(tensor.shape) != shape:
        wanted = f"{str(dtype).removeprefix('torch.')} {list(shape)}"
        found = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        raise UnsupportedError(f"{name}: {wanted} is needed, got {found}")
    if name in _OF_PLACES:
        if not torch.equal(tensor.sort(-1).values, torch.arange(head_dim, device=tensor.device).expand(shape)):
            raise UnsupportedError(f"{name}: not every channel stands in it once")
    elif not bool(tensor.isfinite().all()) or (name not in _OF_ANY_SIGN and bool((tensor <= 0).any())):
        raise UnsupportedError(f"{name}: a number is not finite" + ("" if name in _OF_ANY_SIGN else ", or not above 0"))


def _check_levels(name: str, tensor: Tensor) -> None:
    if tensor.dtype != torch.int64 or tensor.ndim != 1 or len(tensor) not in _CODES:
        raise UnsupportedError(f"{name}: int64 with a level for each of 4, 8 or 16 codes is needed")
    if int(tensor[0]) < 0 or int(tensor[-1]) > LEVEL_MOST or bool((tensor.diff() <= 0).any()):
        raise UnsupportedError(f"{name}: levels ascend from 0 to {LEVEL_MOST}, each once")


def neutral(layout: KVLayout, device: str = "cpu") -> LayerParameters:
    """Return numbers that change nothing, to time a format on made-up keys and values: it takes as long with others."""
    channels = torch.ones(layout.kv_heads, layout.head_dim, device=device)
    places = torch.arange(layout.head_dim, device=device).repeat(layout.kv_heads, 1)
    form = layout.format
    of = {
        KEY_OFFSET: channels * 0,
        KEY_DIVISOR: channels,
        KEY_ORDER: places,
        VALUE_ORDER: places,
        KEY_LARGEST: channels[:, 0] * (form.key.most or 1.0),
        VALUE_LARGEST: channels[:, 0] * (form.value.most or 1.0),
        KEY_MIDDLE: channels * 0,
        KEY_REACH: channels * (form.key.most or 1.0),
        VALUE_REACH: channels * (form.value.most or 1.0),
        KEY_LEVELS: _even_levels(form.key, device),
        VALUE_LEVELS: _even_levels(form.value, device),
    }
    learned = LayerParameters({name: of[name] for name in learned_names(form)})
    return learned | usual(layout.head_dim).to(device) if Transform.PREROPE in form.transforms else learned


def _even_levels(tensor: TensorFormat, device: str) -> Tensor:
    return torch.linspace(0, LEVEL_MOST, 1 << min(tensor.bits, 8), device=device).round().to(torch.int64)


def usual(head_dim: int, base: float = _BASE) -> LayerParameters:
    """Return the embedding of most models: pairs (i, i + head_dim / 2) with frequencies base^(-2 i / head_dim)."""
    frequency = base ** (-2.0 * torch.arange(head_dim // 2, dtype=torch.float64, device="cpu") / head_dim)
    return rope_parameters(frequency, head_dim, interleaved=False)


def rope_parameters(frequency: Tensor, head_dim: int, *, interleaved: bool) -> LayerParameters:
    """Return what caches need to know of an embedding.

    Args:
        frequency: float64 [pairs], rad a token.
        head_dim: Head size; channels behind the pairs' are not turned.
        interleaved: Whether a pair is (2 i, 2 i + 1), and not (i, i + pairs).
    """
    pairs = frequency.numel()
    places = torch.arange(2 * pairs, device="cpu")
    first, second = places.view(-1, 2).T if interleaved else places.view(2, -1)
    every, partner = torch.zeros(head_dim, dtype=torch.float64, device="cpu"), torch.arange(head_dim, device="cpu")
    every[first], every[second] = frequency, -frequency
    partner[first], partner[second] = second, first
    return LayerParameters({ROPE_FREQUENCY: every, ROPE_PARTNER: partner})
