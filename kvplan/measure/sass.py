"""What NVIDIA's disassembly says of a kernel: its loops, and the instructions in them."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(.*?);")
_PREDICATE = re.compile(r"^@!?U?P\w+\s+")
_TARGET = re.compile(r"0x([0-9a-f]+)")
_WIDTH = re.compile(r"\.(\d+)\b")
_GLOBAL_LOADS = ("LDG", "LDGSTS")
_PADDING = ("NOP", "BRA")
"""Without a predicate, what stands after the last instruction: a branch to itself, and nothing."""
_SHAPES = {"16816": (16, 8, 16), "1688": (16, 8, 8)}
"""Extents of a warp's matrix product, as its name has them."""
_GROUP_SHAPE = re.compile(r"(\d+)x(\d+)x(\d+)")
_GROUP_WARPS = 4
_SPILLS = ("STL", "LDL")
_WORD_BYTES = 4


@dataclass(frozen=True, slots=True)
class Loop:
    """The instructions of one loop, or of a whole kernel, in order, without their predicates."""

    body: tuple[str, ...]

    def count(self, *names: str) -> int:
        """Return how many instructions have one of *names*, whatever follows a dot in them."""
        return sum(instruction.split()[0].split(".")[0] in names for instruction in self.body)

    @property
    def tensor_core(self) -> int:
        """Matrix instructions."""
        return sum(_multiplies_matrices(instruction.split()[0]) for instruction in self.body)

    def matrix_flops(self) -> float | None:
        """Return the multiplications and additions of the matrix instructions of one warp; None where unknown."""
        found = [_matrix_flops(name) for text in self.body if _multiplies_matrices(name := text.split()[0])]
        return sum(flops for flops in found if flops is not None) if None not in found else None

    @property
    def conversions(self) -> int:
        """Conversions of integers to floats."""
        return self.count("I2F", "I2FP")

    @property
    def spills(self) -> int:
        """Moves of registers to or from memory for want of them."""
        return self.count(*_SPILLS)

    def classes(self) -> Counter[str]:
        """Return the instructions by name, without what follows a dot."""
        return Counter(instruction.split()[0].split(".")[0] for instruction in self.body)

    def widest_load_bytes(self) -> int:
        """Return the widest access to global memory."""
        loads = [text.split()[0] for text in self.body if text.split()[0].split(".")[0] in _GLOBAL_LOADS]
        widths = [int(found[-1]) // 8 if (found := _WIDTH.findall(name)) else _WORD_BYTES for name in loads]
        return max(widths, default=0)


def _multiplies_matrices(name: str) -> bool:
    """Return whether an instruction is one of tensor cores; HFMA2.MMA is none, for all its name."""
    return name.split(".")[0].endswith("MMA")


def _matrix_flops(name: str) -> float | None:
    """Return those of an instruction; one of a group of four warps is shared by them."""
    for part in name.split("."):
        if part in _SHAPES:
            return 2.0 * prod(_SHAPES[part])
        if group := _GROUP_SHAPE.fullmatch(part):
            return 2.0 * prod(int(extent) for extent in group.groups()) / _GROUP_WARPS
    return None


def whole_kernel(sass: str) -> Loop:
    """Return all instructions but for the padding after the last."""
    body = [text for _, text in _INSTRUCTION.findall(sass)]
    while body and body[-1].split()[0] in _PADDING:
        body.pop()
    return Loop(tuple(_PREDICATE.sub("", text) for text in body))


def parse_loops(sass: str) -> list[Loop]:
    """Return the loops of a kernel, in the order of their ends: each is closed by a branch backwards."""
    found = [(int(address, 16), text) for address, text in _INSTRUCTION.findall(sass)]
    place = {address: index for index, (address, _) in enumerate(found)}
    loops = []
    for index, (_, text) in enumerate(found):
        plain = _PREDICATE.sub("", text)
        target = _TARGET.search(plain) if plain.startswith("BRA") else None
        start = place.get(int(target[1], 16)) if target else None
        if start is not None and start < index:
            loops.append(Loop(tuple(_PREDICATE.sub("", line) for _, line in found[start : index + 1])))
    return loops


def main_loop(loops: Sequence[Loop]) -> Loop | None:
    """Return the loop that most tokens go through: of those with matrix products, the one that spends least on each."""
    working = [loop for loop in loops if loop.tensor_core]
    return min(working, key=lambda loop: len(loop.body) / loop.tensor_core, default=None)


def spills(sass: str) -> int:
    """Return how many instructions move registers to or from memory for want of them."""
    return whole_kernel(sass).spills
