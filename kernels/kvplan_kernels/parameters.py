"""What a format has learned of one layer of a model: tensors by name, as the caches of that layer take them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from kvplan_kernels.format import CacheFormat, Transform, UnsupportedError
from kvplan_kernels.layout import KVLayout

KEY_OFFSET: Final = "k_offset"
KEY_DIVISOR: Final = "k_divisor"
KEY_ORDER: Final = "k_order"
VALUE_ORDER: Final = "v_order"
KEY_LARGEST: Final = "k_largest"
VALUE_LARGEST: Final = "v_largest"

LEARNED: Final[Mapping[Transform, tuple[str, ...]]] = {
    Transform.UNBIAS: (KEY_OFFSET,),
    Transform.SMOOTH: (KEY_DIVISOR,),
    Transform.ORDER: (KEY_ORDER, VALUE_ORDER),
    Transform.SCALED_TENSOR: (KEY_LARGEST, VALUE_LARGEST),
    Transform.SCALED: (KEY_LARGEST, VALUE_LARGEST),
}
"""The tensors that each transform learns.

Orders are int64 [kv_heads, head_dim]: which channel is stored at a place. Largest numbers are float32 [kv_heads]. All
else is float32 [kv_heads, head_dim], by channel.
"""
_OF_HEADS: Final = (KEY_LARGEST, VALUE_LARGEST)
_OF_PLACES: Final = (KEY_ORDER, VALUE_ORDER)


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

    def to(self, device: str) -> "LayerParameters":
        """Return the same on *device*."""
        return LayerParameters({name: tensor.to(device) for name, tensor in self.tensors.items()})


NOTHING_LEARNED: Final = LayerParameters()


def learned_names(form: CacheFormat) -> tuple[str, ...]:
    """Return the names of the tensors that caches of *form* need."""
    return tuple(name for transform in form.calibrated for name in LEARNED[transform])


def check_learned(name: str, tensor: Tensor, kv_heads: int, head_dim: int) -> None:
    """Refuse what could not have been learned of a layer: another shape or type, or a number that undoes attention.

    Raises:
        UnsupportedError: It says which tensor and why.
    """
    shape = (kv_heads,) if name in _OF_HEADS else (kv_heads, head_dim)
    dtype = torch.int64 if name in _OF_PLACES else torch.float32
    if tensor.dtype != dtype or tuple(tensor.shape) != shape:
        wanted = f"{str(dtype).removeprefix('torch.')} {list(shape)}"
        found = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        raise UnsupportedError(f"{name}: {wanted} is needed, got {found}")
    if name in _OF_PLACES:
        if not torch.equal(tensor.sort(-1).values, torch.arange(head_dim, device=tensor.device).expand(shape)):
            raise UnsupportedError(f"{name}: not every channel stands in it once")
    elif not bool(tensor.isfinite().all()) or (name != KEY_OFFSET and bool((tensor <= 0).any())):
        raise UnsupportedError(f"{name}: a number is not finite" + ("" if name == KEY_OFFSET else ", or not above 0"))


def neutral(layout: KVLayout, device: str = "cpu") -> LayerParameters:
    """Return numbers that change nothing, to time a format on made-up keys and values: it takes as long with others."""
    channels = torch.ones(layout.kv_heads, layout.head_dim, device=device)
    places = torch.arange(layout.head_dim, device=device).repeat(layout.kv_heads, 1)
    of = {
        KEY_OFFSET: channels * 0,
        KEY_DIVISOR: channels,
        KEY_ORDER: places,
        VALUE_ORDER: places,
        KEY_LARGEST: channels[:, 0] * (layout.format.key.most or 1.0),
        VALUE_LARGEST: channels[:, 0] * (layout.format.value.most or 1.0),
    }
    return LayerParameters({name: of[name] for name in learned_names(layout.format)})
