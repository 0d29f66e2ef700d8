import json
import struct

import numpy as np
import pytest
from gguf import GGUFWriter
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from kvplan.errors import InputError, UnsupportedModelError
from kvplan.store.configs import read_geometry
from kvplan.store.gguf import read_gguf_header
from kvplan.store.models import load_model_spec
from kvplan.store.safetensors import read_safetensors_header

SETTINGS = settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def gguf_bytes(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_head_count(2)
    writer.add_key_length(16)
    writer.add_value_length(16)
    writer.add_array("tokenizer.ggml.tokens", ["a", "bc", "d"])
    writer.add_tensor("token_embd.weight", np.zeros((3, 32), np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


@st.composite
def damage(draw, data):
    """The bytes cut short, with bits flipped, or with a length or count overwritten."""
    kind = draw(st.sampled_from(("cut", "flip", "count")))
    if kind == "cut":
        return data[: draw(st.integers(0, len(data) - 1))]
    found = bytearray(data)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(found) - 8))
        if kind == "flip":
            found[at] ^= 1 << draw(st.integers(0, 7))
        else:
            found[at : at + 8] = struct.pack("<Q", draw(st.integers(0, 2**64 - 1) | st.sampled_from((0, 1, 2**63))))
    return bytes(found)


def outcome(read, *args, also=InputError):
    """What was read, and the complaint; any exception but an InputError and *also* ends the test."""
    try:
        return read(*args), ""
    except (InputError, also) as error:
        return None, str(error)


@SETTINGS
@given(data=st.data())
def test_no_damage_to_a_gguf_file_gives_anything_but_a_header_or_one_line(tmp_path, gguf_bytes, data):
    path = tmp_path / "m.gguf"
    hurt = data.draw(damage(gguf_bytes))
    path.write_bytes(hurt)
    header, line = outcome(read_gguf_header, path)
    if header is None:
        assert line.startswith(str(path))
    else:
        assert sum(tensor.nbytes for tensor in header.tensors) <= len(hurt)
    _, line = outcome(load_model_spec, path, also=UnsupportedModelError)
    assert "\n" not in line


@SETTINGS
@given(data=st.data())
def test_no_damage_to_a_safetensors_file_gives_anything_but_a_header_or_one_line(tmp_path, data):
    path = tmp_path / "m.safetensors"
    whole = save({"a": np.zeros((2, 3), np.float16), "b": np.zeros(4, np.float32)})
    path.write_bytes(data.draw(damage(whole)))
    header, line = outcome(read_safetensors_header, path)
    assert "\n" not in line
    if header is None:
        assert line.startswith(str(path))
    else:
        assert len(path.read_bytes()) == len(whole)
        assert sum(tensor.nbytes for tensor in header.tensors) <= len(whole)


CONFIG = {
    "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "hidden_size": 512, "head_dim": 64, "vocab_size": 1000, "max_position_embeddings": 4096,
    "torch_dtype": "float16", "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2,
    "layer_types": ["full_attention"] * 4, "text_config": None, "tie_word_embeddings": False,
}  # fmt: skip
values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(sorted(CONFIG)), inner, max_size=4),
)
types = st.sampled_from(("llama", "gemma3_text", "falcon", "mistral", "smollm3", "gpt_bigcode", "gpt2"))


@SETTINGS
@given(model_type=types, changes=st.dictionaries(st.sampled_from(sorted(CONFIG)), values, max_size=4))
def test_no_value_in_a_config_gives_anything_but_a_geometry_or_one_line(model_type, changes):
    config = {**CONFIG, "model_type": model_type, **changes}
    found, line = outcome(read_geometry, config, "config.json", also=UnsupportedModelError)
    assert "\n" not in line
    if found is None:
        assert line.startswith("config.json: ")
    else:
        assert 1 <= len(found.layers) <= 10_000
        assert all(layer.kv_heads >= 1 and layer.head_dim >= 1 for layer in found.layers)
        assert all(layer.window_tokens is None or layer.window_tokens >= 1 for layer in found.layers)
        json.dumps([found.query_heads, found.hidden_size, found.vocab_size, found.context_tokens])
