"""The header of a GGUF file: metadata and tensor shapes, read without touching the weights.

Layout after the format's specification (ggml, docs/gguf.md), versions 2 and 3, little-endian. Every count and length
is held against the bytes that are left before anything is read, and arrays that nothing here needs are stepped over.
"""

import mmap
from dataclasses import dataclass
from math import prod
from pathlib import Path
from struct import Struct
from typing import Final

from kvplan.errors import InputError
from kvplan.store.files import file_error

Scalar = int | float | bool | str
MetadataValue = Scalar | tuple[int | float | bool, ...]

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_HEAD: Final = Struct("<4sIQQ")
_U32: Final = Struct("<I")
_U64: Final = Struct("<Q")
_NUMBERS: Final = {code: Struct("<" + form) for code, form in enumerate("BbHhIif?")} | {
    10: Struct("<Q"),
    11: Struct("<q"),
    12: Struct("<d"),
}
"""Metadata types of fixed size, by their code in the file."""
_STRING: Final = 8
_ARRAY: Final = 9
_KEY_BYTES_MAX: Final = 2**16 - 1
_KEPT_STRING_BYTES_MAX: Final = 2**20
_KEPT_ITEMS_MAX: Final = 2**14
_STRINGS_MAX: Final = 2**22
"""Strings in one array; vocabularies have under 2^19."""
_KEYS_MAX: Final = 2**16
_TENSORS_MAX: Final = 2**20
_DIMENSIONS_MAX: Final = 4
_ALIGNMENT_DEFAULT: Final = 32
_ALIGNMENT_MAX: Final = 2**16

_BLOCKS: Final = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 9: (32, 40), 10: (256, 84),
    11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 15: (256, 292), 16: (256, 66), 17: (256, 74),
    18: (256, 98), 19: (256, 50), 20: (32, 18), 21: (256, 110), 22: (256, 82), 23: (256, 136), 24: (1, 1), 25: (1, 2),
    26: (1, 4), 27: (1, 8), 28: (1, 8), 29: (256, 56), 30: (1, 2), 34: (256, 54), 35: (256, 66), 39: (32, 17),
    40: (64, 36),
}  # fmt: skip
"""Elements and bytes of one block of each tensor type, by its code in the file (ggml.h, GGML_TYPE_*)."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor as stored.

    Attributes:
        shape: Fastest dimension first.
        offset_bytes: From the start of the tensor data.
    """

    name: str
    shape: tuple[int, ...]
    type_code: int
    offset_bytes: int

    @property
    def elements(self) -> int:
        """The number of its elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Its bytes in the file."""
        block_elements, block_bytes = _BLOCKS[self.type_code]
        return self.elements // block_elements * block_bytes


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What a GGUF file says before its weights.

    Attributes:
        metadata: Scalars and short lists of numbers by key.
        lengths: Items of each array by key, those not kept in metadata included.
        header_bytes: The file up to the tensor data: what names the model.
    """

    metadata: dict[str, MetadataValue]
    lengths: dict[str, int]
    tensors: tuple[GgufTensor, ...]
    header_bytes: bytes


def read_gguf_header(path: Path | str) -> GgufHeader:
    """Return the header of the GGUF file *path*.

    Raises:
        InputError: It is no GGUF file, is cut short, or holds a count or length that cannot be.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            if not file.read(1):
                raise InputError("is empty, not a GGUF file", where=str(path))
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(path, data).header()
    except OSError as error:
        raise file_error(path, error) from error


class _Reader:
    """A position in the bytes of one file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._end = len(data)
        self._at = 0

    def _refuse(self, message: str) -> InputError:
        return InputError(message, where=f"{self._path}, byte {self._at}")

    def _need(self, count: int, what: str) -> None:
        if count > self._end - self._at:
            missing = f"{what} needs {count} bytes and {self._end - self._at} are left"
            raise self._refuse(f"GGUF file is cut short or corrupt: {missing}")

    def _number(self, form: Struct, what: str) -> int:
        self._need(form.size, what)
        (number,) = form.unpack_from(self._data, self._at)
        self._at += form.size
        return int(number)

    def _text(self, limit: int, what: str) -> str:
        length = self._number(_U64, what)
        self._need(length, what)
        if length > limit:
            raise self._refuse(f"{what} of {length} bytes; at most {limit} can be")
        raw = self._data[self._at : self._at + length]
        try:
            text = raw.decode()
        except UnicodeDecodeError as error:
            raise self._refuse(f"{what} is not UTF-8") from error
        self._at += length
        return text

    def header(self) -> GgufHeader:
        """Read everything before the tensor data."""
        tensor_count, key_count = self._opening()
        metadata: dict[str, MetadataValue] = {}
        lengths: dict[str, int] = {}
        seen: set[str] = set()
        for _ in range(key_count):
            key = self._text(_KEY_BYTES_MAX, "a metadata key")
            if key in seen:
                raise self._refuse(f"metadata key {key!r} is given twice")
            seen.add(key)
            self._entry(key, metadata, lengths)
        tensors = tuple(self._tensor() for _ in range(tensor_count))
        start = self._data_start(metadata)
        for tensor in tensors:
            if start + tensor.offset_bytes + tensor.nbytes > self._end:
                missing = f"tensor {tensor.name!r} ends at byte {start + tensor.offset_bytes + tensor.nbytes}"
                raise InputError(f"GGUF file is cut short at {self._end} bytes: {missing}", where=str(self._path))
        return GgufHeader(metadata, lengths, tensors, self._data[: self._at])

    def _opening(self) -> tuple[int, int]:
        if self._end < _HEAD.size or self._data[:4] != _MAGIC:
            raise InputError("is no GGUF file", where=str(self._path))
        _, version, tensor_count, key_count = _HEAD.unpack_from(self._data, 0)
        if version not in _VERSIONS:
            raise InputError(
                f"GGUF version {version}; versions 2 and 3, little-endian, are read", where=str(self._path)
            )
        self._at = _HEAD.size
        if key_count > _KEYS_MAX or tensor_count > _TENSORS_MAX:
            raise self._refuse(f"GGUF file is corrupt: it counts {key_count} keys and {tensor_count} tensors")
        return tensor_count, key_count

    def _entry(self, key: str, metadata: dict[str, MetadataValue], lengths: dict[str, int]) -> None:
        code = self._number(_U32, f"the type of {key!r}")
        if code == _STRING:
            metadata[key] = self._text(_KEPT_STRING_BYTES_MAX, f"the value of {key!r}")
        elif code == _ARRAY:
            lengths[key], kept = self._array(key)
            if kept is not None:
                metadata[key] = kept
        else:
            metadata[key] = self._scalar(code, key)

    def _scalar(self, code: int, key: str) -> int | float | bool:
        form = _NUMBERS.get(code)
        if form is None:
            raise self._refuse(f"GGUF file is corrupt: {key!r} has unknown type {code}")
        self._need(form.size, f"the value of {key!r}")
        (value,) = form.unpack_from(self._data, self._at)
        self._at += form.size
        found: int | float | bool = value
        return found

    def _array(self, key: str) -> tuple[int, tuple[int | float | bool, ...] | None]:
        code = self._number(_U32, f"the item type of {key!r}")
        count = self._number(_U64, f"the length of {key!r}")
        if code == _STRING:
            self._skip_strings(count, key)
            return count, None
        form = _NUMBERS.get(code)
        if form is None:
            raise self._refuse(f"GGUF file is corrupt: items of {key!r} have unknown type {code}")
        self._need(count * form.size, f"{key!r}, {count} items,")
        start, self._at = self._at, self._at + count * form.size
        if count > _KEPT_ITEMS_MAX:
            return count, None
        return count, tuple(value for (value,) in form.iter_unpack(self._data[start : self._at]))

    def _skip_strings(self, count: int, key: str) -> None:
        self._need(count * _U64.size, f"{key!r}, {count} strings,")
        if count > _STRINGS_MAX:
            raise self._refuse(f"GGUF file is corrupt: {key!r} counts {count} strings")
        at, data, last, length_at = self._at, self._data, self._end - _U64.size, _U64.unpack_from
        for _ in range(count):
            if at > last:
                self._at = self._end
                raise self._refuse(f"GGUF file is cut short or corrupt: {key!r} runs past its end")
            at += _U64.size + length_at(data, at)[0]
        self._at = at
        self._need(0, f"{key!r}")

    def _tensor(self) -> GgufTensor:
        name = self._text(_KEY_BYTES_MAX, "a tensor's name")
        dimensions = self._number(_U32, f"the dimensions of {name!r}")
        if not 1 <= dimensions <= _DIMENSIONS_MAX:
            raise self._refuse(f"GGUF file is corrupt: tensor {name!r} has {dimensions} dimensions")
        shape = tuple(self._number(_U64, f"the shape of {name!r}") for _ in range(dimensions))
        code = self._number(_U32, f"the type of {name!r}")
        offset = self._number(_U64, f"the offset of {name!r}")
        if code not in _BLOCKS:
            raise self._refuse(f"tensor {name!r} has type {code}, which kvplan does not know")
        if 0 in shape or shape[0] % _BLOCKS[code][0]:
            raise self._refuse(f"GGUF file is corrupt: tensor {name!r} of type {code} has shape {shape}")
        return GgufTensor(name, shape, code, offset)

    def _data_start(self, metadata: dict[str, MetadataValue]) -> int:
        alignment = metadata.get("general.alignment", _ALIGNMENT_DEFAULT)
        if not isinstance(alignment, int) or not 1 <= alignment <= _ALIGNMENT_MAX or alignment % 8:
            raise self._refuse(f"GGUF file is corrupt: general.alignment is {alignment!r}")
        return -(-self._at // alignment) * alignment
