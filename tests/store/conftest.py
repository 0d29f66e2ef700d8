"""Small model files, written by the formats' own libraries."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter

LLAMA_GGUF = {
    "block_count": 3, "context_length": 256, "embedding_length": 64, "attention.head_count": 4,
    "attention.head_count_kv": 2, "feed_forward_length": 128, "attention.layer_norm_rms_epsilon": 1e-5,
}  # fmt: skip


@pytest.fixture
def write_gguf(tmp_path: Path) -> Callable[..., Path]:
    """Write a GGUF file of an architecture's keys, a vocabulary, and one tensor of 16 bits and one of 4 bits."""

    def write(keys=None, *, architecture="llama", tokens=5, extra=None, tensors=True):
        path = tmp_path / "m.gguf"
        writer = GGUFWriter(path, architecture)
        for key, value in (LLAMA_GGUF if keys is None else keys).items():
            _add(writer, f"{architecture}.{key}", value)
        for key, value in (extra or {}).items():
            _add(writer, key, value)
        writer.add_array("tokenizer.ggml.tokens", [f"t{n}é" * n for n in range(tokens)])
        writer.add_array("tokenizer.ggml.scores", [0.5] * tokens)
        if tensors:
            writer.add_tensor("token_embd.weight", np.zeros((5, 64), np.float16))
            blocks = np.zeros((64, 64 // 32 * 18), np.uint8)
            writer.add_tensor("blk.0.attn_q.weight", blocks, raw_dtype=GGMLQuantizationType.Q4_0)
            writer.add_tensor("rope_freqs.weight", np.zeros(8, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


def _add(writer: GGUFWriter, key: str, value: object) -> None:
    add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, bool: writer.add_bool,
           list: writer.add_array}  # fmt: skip
    add[type(value)](key, value)
