"""The header of a safetensors file: names, types and shapes of its tensors, read without touching the weights."""

from dataclasses import dataclass
from math import prod
from pathlib import Path
from struct import Struct
from typing import Any, Final, TypeGuard

from kvplan.errors import InputError
from kvplan.store.files import decode_object, file_error

HEADER_BYTES_MAX: Final = 100_000_000
"""The format's own limit (safetensors README, "Format")."""
_LENGTH: Final = Struct("<Q")
_ITEM_BITS: Final = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor as stored."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """The number of its elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Its bytes in the file."""
        return self.elements * _ITEM_BITS[self.dtype] // 8


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """What a safetensors file says before its weights.

    Attributes:
        header_bytes: The header as it stands in the file: what names the weights.
    """

    tensors: tuple[StoredTensor, ...]
    header_bytes: bytes


def read_safetensors_header(path: Path | str) -> SafetensorsHeader:
    """Return the header of the safetensors file *path*.

    Raises:
        InputError: It is no safetensors file or is cut short.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            opening = file.read(_LENGTH.size)
            length = _LENGTH.unpack(opening)[0] if len(opening) == _LENGTH.size else 0
            size = path.stat().st_size
            if not 2 <= length <= HEADER_BYTES_MAX:
                raise InputError("is no safetensors file", where=str(path))
            if _LENGTH.size + length > size:
                raise InputError(f"is cut short: {size} bytes with a header of {length}", where=str(path))
            header = file.read(length)
    except OSError as error:
        raise file_error(path, error) from error
    return _parse(path, header, size - _LENGTH.size - length)


def _parse(path: Path, header: bytes, data_bytes: int) -> SafetensorsHeader:
    entries = decode_object(path, header)
    entries.pop("__metadata__", None)
    tensors: list[StoredTensor] = []
    end = 0
    for name, entry in entries.items():
        tensor, span = _tensor(path, name, entry)
        if span[1] > data_bytes:
            missing = f"tensor {name!r} ends at byte {span[1]} of {data_bytes} bytes of data"
            raise InputError(f"is cut short: {missing}", where=str(path))
        tensors.append(tensor)
        end = max(end, span[1])
    if end != data_bytes:
        raise InputError(f"is corrupt: {data_bytes} bytes of data and tensors for {end}", where=str(path))
    return SafetensorsHeader(tuple(tensors), header)


def _tensor(path: Path, name: str, entry: Any) -> tuple[StoredTensor, tuple[int, int]]:
    fault = InputError(f"is corrupt: tensor {name!r} has no sound type, shape and place", where=str(path))
    if not isinstance(entry, dict):
        raise fault
    dtype, shape, span = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not _counts(shape) or not _counts(span) or len(span) != 2 or not isinstance(dtype, str):
        raise fault
    if dtype not in _ITEM_BITS:
        raise InputError(f"tensor {name!r} has type {dtype!r}, which kvplan does not know", where=str(path))
    tensor = StoredTensor(name, dtype, tuple(shape))
    if span[1] - span[0] != tensor.nbytes:
        raise fault
    return tensor, (span[0], span[1])


def _counts(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)
