"""What a checkpoint says of its cache, in the spellings of the libraries that quantize."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvplan.core.specs import StatedCache
from kvplan.errors import UnsupportedModelError
from kvplan.store.models import load_model_spec
from kvplan.store.stated_cache import read_stated_cache

SCALES = {"dynamic": False, "num_bits": 8, "type": "float"}
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 2048,
    "intermediate_size": 512, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_scheme": SCALES}, ("fp8_e4m3", "modelopt")),
        ({"quant_method": "modelopt_fp4", "kv_cache_quant_algo": "FP8"}, ("fp8_e4m3", "modelopt")),
        ({"quant_algo": "FP8", "kv_cache_scheme": "FP8"}, ("fp8_e4m3", "modelopt")),
        ({"quant_method": "modelopt", "quantization": {"kv_cache_quant_algo": "NVFP4"}}, ("nvfp4", "modelopt")),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": SCALES | {"strategy": "tensor"}},
         ("fp8_e4m3", "compressed-tensors")),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": None}, None),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "none"}, None),
        ({"quant_method": "fp8"}, None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("nested", [False, True])
def test_each_spelling_is_one_format(said: dict[str, Any], found: tuple[str, str] | None, nested: bool) -> None:
    config: dict[str, Any] = {"quantization_config": said}
    expected = found and StatedCache(format=found[0], library=found[1])
    assert read_stated_cache({"text_config": config} if nested else config, "config.json") == expected


@pytest.mark.parametrize("value", ["FP3", {"num_bits": 6, "type": "float"}, SCALES | {"dynamic": True}, 8])
def test_what_is_not_known_is_refused_by_its_key(value: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=r"kv_cache_scheme.*config\.json|config\.json.*kv_cache_scheme"):
        read_stated_cache(
            {"quantization_config": {"quant_method": "modelopt", "kv_cache_scheme": value}}, "config.json"
        )


def test_model_optimizers_own_file_counts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert load_model_spec(str(tmp_path)).stated_cache is None
    said = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(said))
    assert load_model_spec(str(tmp_path)).stated_cache == StatedCache(format="fp8_e4m3", library="modelopt")
