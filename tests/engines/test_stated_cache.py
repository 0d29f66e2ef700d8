"""Engines that take the checkpoint's word for the cache's format, and those that do not."""

from dataclasses import replace
from typing import Any

import pytest

from kvplan.core.allocation import Setup
from kvplan.core.specs import ModelSpec, StatedCache
from kvplan.core.workloads import Bucket, Search, Target, Workload
from kvplan.engines import allocate, find_engine
from kvplan.engines.settings import engine_settings
from kvplan.errors import UnsupportedFormatError

LLAMA_8B = {"layers": 32, "heads": 32, "kv": 8, "hidden": 4096}
DEEPSEEK_V32 = {
    "layers": 61, "heads": 128, "kv": 128, "hidden": 7168, "model_type": "deepseek_v32", "kv_lora_rank": 512,
    "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "index_head_dim": 128, "index_topk": 2048,
    "index_n_heads": 64,
}  # fmt: skip
SETUP = Setup(context_tokens=64)


def workload(**changes: Any) -> Workload:
    bucket = Bucket(name="chat", prompt_tokens=1000, generate_tokens=100, share=1.0)
    return replace(Workload(model="m", buckets=(bucket,), target=Target(concurrency=4)), **changes)


@pytest.fixture
def llama(spec: Any) -> ModelSpec:
    return spec(**LLAMA_8B)


@pytest.mark.parametrize(
    ("engine", "library", "stated", "default"),
    [
        ("vllm", "modelopt", "fp8_e4m3", "fp8_e4m3"),
        ("vllm", "modelopt", "nvfp4", "nvfp4"),
        ("vllm", "compressed-tensors", "fp8_e4m3", "fp8_e4m3"),
        ("vllm", "fp8", "fp8_e4m3", "bf16"),
        ("sglang", "modelopt", "fp8_e4m3", "fp8_e4m3"),
        ("sglang", "modelopt", "nvfp4", "bf16"),
        ("sglang", "compressed-tensors", "fp8_e4m3", "bf16"),
        ("trtllm", "modelopt", "fp8_e4m3", "fp8"),
        ("trtllm", "compressed-tensors", "fp8_e4m3", "fp8"),
        ("transformers", "modelopt", "fp8_e4m3", "bf16"),
        ("llama.cpp", "modelopt", "fp8_e4m3", "f16"),
    ],
)
def test_the_default_is_what_the_engine_goes_by(
    llama: ModelSpec, engine: str, library: str, stated: str, default: str
) -> None:
    model = replace(llama, stated_cache=StatedCache(format=stated, library=library))
    row = find_engine(engine)
    assert row.default_format(model) == default
    if row.name in ("vllm", "sglang", "trtllm"):  # each has `auto` of its own
        taken = allocate(row, model, "auto", SETUP).sequence_bytes(64)
        assert taken == allocate(row, model, default, SETUP).sequence_bytes(64)
        assert taken != allocate(row, model, "fp8_e4m3" if default == "bf16" else "bf16", SETUP).sequence_bytes(64)


def test_a_default_that_is_quantized_is_planned_beside_16_bits(llama: ModelSpec) -> None:
    model = replace(llama, stated_cache=StatedCache(format="fp8_e4m3", library="modelopt"))
    for search in (Search(), Search(formats=("int8_per_token_head",))):
        settings, _ = engine_settings(find_engine("vllm"), workload(engine="vllm", search=search), model, "")
        assert [setting.format for setting in settings[:2]] == ["bf16", "fp8_e4m3"]


def test_sparse_attention_is_in_16_bits_or_in_its_own_layout(spec: Any) -> None:
    model = spec(**DEEPSEEK_V32)
    settings, _ = engine_settings(find_engine("vllm"), workload(engine="vllm"), model, "")
    assert [setting.format for setting in settings] == ["bf16", "fp8_ds_mla", "fp8_e4m3"]
    with pytest.raises(UnsupportedFormatError, match="sparse"):
        allocate(find_engine("vllm"), model, "int4_per_token_head", SETUP)
