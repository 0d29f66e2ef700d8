"""How an engine stores the vector of one head of one token: the bytes, not the values."""

from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from kvplan_kernels.layout import ceil_div

_METADATA_BITS: Final = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """The bits of a vector.

    Attributes:
        bits: Of one element.
        group_elements: Elements that share a scale; None where the vector does.
        group_bits: Of what a group has beside its elements: scale, zero, minimum.
        vector_bits: Of what the vector has beside its groups.
    """

    bits: int
    group_elements: int | None = None
    group_bits: int = 0
    vector_bits: int = 0

    def vector_bytes(self, elements: int) -> Fraction:
        """Return the bytes of a vector of *elements*, exact; a fraction where vectors share a byte.

        >>> Packing(bits=4, group_elements=32, group_bits=16).vector_bytes(128)
        Fraction(72, 1)
        """
        if not elements:
            return Fraction(0)
        groups = ceil_div(elements, self.group_elements or elements)
        return Fraction(elements * self.bits + groups * self.group_bits + self.vector_bits, 8)


BITS_16: Final = Packing(bits=16)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineFormat:
    """A format that an engine caches in.

    Attributes:
        name: The engine's own word for it, as its flag takes it.
        latent: How a latent vector (MLA) is stored; None where the engine has none in this format.
        latent_rope: How the part of it that carries the position is stored, where that differs.
        same_as: kvplan's name of what stores the same bits; empty where it has none.
        like: kvplan's name of what is nearest where nothing stores the same; its figures stand for this, and say so.
        aliases: Other words for it that the engine takes.
        capability: The least CUDA compute capability that it runs on, as 89; None is any device.
        why: What older devices lack.
        since: The engine's first release with it.
        source: Where that is written, with its date.
    """

    name: str
    key: Packing
    value: Packing
    latent: Packing | None = None
    latent_rope: Packing | None = None
    same_as: str = ""
    like: str = ""
    aliases: tuple[str, ...] = ()
    capability: int | None = None
    why: str = ""
    since: str = ""
    source: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """Every word that stands for it."""
        return tuple(name for name in (self.name, self.same_as, *self.aliases) if name)

    @property
    def quantized(self) -> bool:
        """Whether anything takes fewer than 16 bits."""
        return min(self.key.bits, self.value.bits) < 16

    def latent_bytes(self, elements: int, rope_elements: int) -> float | None:
        """Return the bytes of a latent vector whose last *rope_elements* carry the position; None where it has none."""
        if self.latent is None:
            return None
        if self.latent_rope is None:
            return float(self.latent.vector_bytes(elements))
        rope = self.latent_rope.vector_bytes(rope_elements)
        return float(self.latent.vector_bytes(elements - rope_elements) + rope)

    def effective_bits(self, head_dim: int) -> float:
        """Return bits of an element of a head of *head_dim*, scales counted, K and V together."""
        return float(8 * (self.key.vector_bytes(head_dim) + self.value.vector_bytes(head_dim)) / (2 * head_dim))
