import struct

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader

from kvplan.errors import InputError
from kvplan.store import gguf
from kvplan.store.gguf import read_gguf_header


def test_the_header_is_what_the_formats_own_reader_finds(write_gguf):
    path = write_gguf(extra={"general.note": "zwölf", "general.sizes": [1, 2, 3], "general.flag": True})
    header = read_gguf_header(path)
    reader = GGUFReader(path)
    for key, value in header.metadata.items():
        found = reader.fields[key].contents()
        assert (list(value) if isinstance(value, tuple) else value) == found
    assert set(header.metadata) | set(header.lengths) == {k for k in reader.fields if not k.startswith("GGUF.")}
    assert header.lengths["tokenizer.ggml.tokens"] == 5
    assert [(t.name, t.shape, t.type_code, t.nbytes) for t in header.tensors] == [
        (t.name, tuple(map(int, t.shape)), int(t.tensor_type), t.n_bytes) for t in reader.tensors
    ]
    assert header.header_bytes == path.read_bytes()[: len(header.header_bytes)]
    assert -(-len(header.header_bytes) // 32) * 32 == reader.data_offset


def test_block_sizes_are_those_of_the_formats_own_library():
    for code, sizes in gguf._BLOCKS.items():
        assert GGML_QUANT_SIZES[GGMLQuantizationType(code)] == sizes


@pytest.mark.parametrize("size", range(0, 400, 7))
def test_a_file_cut_short_is_refused(write_gguf, size):
    path = write_gguf()
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(InputError, match=r"cut short|is empty|no GGUF"):
        read_gguf_header(path)


def test_weights_cut_short_are_refused_and_named(write_gguf):
    path = write_gguf()
    path.write_bytes(path.read_bytes()[:-64])
    with pytest.raises(InputError, match=r"cut short at .* tensor 'blk\.0\.attn_q\.weight' ends at byte"):
        read_gguf_header(path)


def _head(*, magic=b"GGUF", version=3, tensors=0, keys=0):
    return struct.pack("<4sIQQ", magic, version, tensors, keys)


def _key(name, code, payload):
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", code) + payload


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "is empty"),
        (b"GGML" + bytes(40), "is no GGUF file"),
        (_head(version=1), "version 1; versions 2 and 3"),
        (_head(version=3 << 24), "little-endian"),
        (_head(keys=2**40), "counts 1099511627776 keys"),
        (_head(tensors=2**62), "tensors"),
        (_head(keys=1), "needs 8 bytes and 0 are left"),
        (_head(keys=1) + struct.pack("<Q", 2**63), "needs 9223372036854775808 bytes"),
        (_head(keys=1) + _key(b"\xff", 4, bytes(4)), "not UTF-8"),
        (_head(keys=1) + _key(b"a", 99, bytes(8)), "'a' has unknown type 99"),
        (_head(keys=1) + _key(b"a", 9, struct.pack("<IQ", 4, 2**60)), "1152921504606846976 items"),
        (_head(keys=1) + _key(b"a", 9, struct.pack("<IQ", 8, 2**60)), "1152921504606846976 strings"),
        (_head(keys=1) + _key(b"a", 9, struct.pack("<IQ", 8, 2) + struct.pack("<Q", 2**62) + bytes(64)), "runs past"),
        (_head(keys=1) + _key(b"a", 9, struct.pack("<IQ", 8, 1) + struct.pack("<Q", 99) + bytes(64)), "'a' needs"),
        (_head(keys=1) + _key(b"a", 9, struct.pack("<IQ", 9, 1) + bytes(64)), "items of 'a' have unknown type 9"),
        (_head(keys=2) + _key(b"a", 4, bytes(4)) * 2, "'a' is given twice"),
        (_head(keys=1) + _key(b"general.alignment", 4, struct.pack("<I", 0)), "alignment is 0"),
        (_head(tensors=1) + struct.pack("<QsI", 1, b"t", 9) + bytes(64), "'t' has 9 dimensions"),
        (_head(tensors=1) + struct.pack("<QsIQIQ", 1, b"t", 1, 32, 77, 0), "type 77"),
        (_head(tensors=1) + struct.pack("<QsIQIQ", 1, b"t", 1, 33, 2, 0), "shape (33,)"),
        (_head(tensors=1) + struct.pack("<QsIQIQ", 1, b"t", 1, 0, 0, 0), "shape (0,)"),
        (_head(tensors=1) + struct.pack("<QsIQIQ", 1, b"t", 1, 2**62, 0, 0), "cut short at"),
        (_head(tensors=1) + struct.pack("<QsIQIQ", 1, b"t", 1, 32, 0, 2**63), "cut short at"),
    ],
)
def test_counts_and_lengths_that_cannot_be_are_refused_before_they_are_read(tmp_path, data, says):
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(InputError) as caught:
        read_gguf_header(path)
    assert says in str(caught.value)
    assert str(caught.value).startswith(str(path))


def test_long_lists_of_numbers_are_stepped_over(write_gguf):
    header = read_gguf_header(write_gguf(extra={"general.long": np.arange(2**15).tolist(), "general.short": [7]}))
    assert "general.long" not in header.metadata
    assert header.lengths["general.long"] == 2**15
    assert header.metadata["general.short"] == (7,)


def test_a_folder_or_nothing_is_named(tmp_path):
    with pytest.raises(InputError, match="is a folder"):
        read_gguf_header(tmp_path)
    with pytest.raises(InputError, match="no such file"):
        read_gguf_header(tmp_path / "m.gguf")
