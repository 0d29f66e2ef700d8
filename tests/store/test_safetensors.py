import json
import struct

import numpy as np
import pytest
from safetensors.numpy import save_file

from kvplan.errors import InputError
from kvplan.store.safetensors import read_safetensors_header


@pytest.fixture
def path(tmp_path):
    return tmp_path / "m.safetensors"


def _raw(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def test_bytes_are_those_of_the_data(path):
    tensors = {"a": np.zeros((3, 5), np.float16), "b": np.zeros(7, np.float32), "c": np.zeros((), np.int8)}
    save_file(tensors, path, metadata={"format": "pt"})
    header = read_safetensors_header(path)
    assert {t.name: (t.shape, t.elements, t.nbytes) for t in header.tensors} == {
        name: (array.shape, array.size, array.nbytes) for name, array in tensors.items()
    }
    assert path.read_bytes()[8 : 8 + len(header.header_bytes)] == header.header_bytes


ONE = {"t": {"dtype": "F16", "shape": [2], "data_offsets": [0, 4]}}


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "is no safetensors file"),
        (b"abc", "is no safetensors file"),
        (struct.pack("<Q", 2**63), "is no safetensors file"),
        (struct.pack("<Q", 1000) + b"{}", "is cut short"),
        (_raw(b"[]"), "no object"),
        (_raw(b"{x}"), "is no JSON"),
        (_raw(b"\xff\xff"), "is no JSON"),
        (_raw(ONE, bytes(3)), "tensor 't' ends at byte 4 of 3"),
        (_raw(ONE, bytes(5)), "5 bytes of data and tensors for 4"),
        (_raw({"t": 5}), "no sound type"),
        (_raw({"t": {"dtype": "F16", "shape": [2], "data_offsets": [0, 5]}}, bytes(5)), "no sound type"),
        (_raw({"t": {"dtype": "F16", "shape": [-2], "data_offsets": [0, 4]}}, bytes(4)), "no sound type"),
        (_raw({"t": {"dtype": "F16", "shape": [2], "data_offsets": [4]}}, bytes(4)), "no sound type"),
        (_raw({"t": {"dtype": "X9", "shape": [2], "data_offsets": [0, 4]}}, bytes(4)), "type 'X9'"),
    ],
)
def test_a_file_that_is_cut_short_or_corrupt_is_refused(path, data, says):
    path.write_bytes(data)
    with pytest.raises(InputError) as caught:
        read_safetensors_header(path)
    assert says in str(caught.value)
