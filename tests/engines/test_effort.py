"""A table of a thousand settings is made in a second: what an allocation costs is bounded by calls, not by a clock."""

import sys
from typing import Any

import pytest

from kvplan.core.allocation import Setup
from kvplan.engines import ENGINES, allocate
from kvplan.errors import UnsupportedFormatError, UnsupportedModelError

LAYERS = 60
CALLS_MAX = 5000
"""Of Python functions, for one setting with its bytes, terms and capacity."""
MODELS: dict[str, dict[str, Any]] = {
    "full": {"layers": LAYERS, "heads": 64, "kv": 8, "hidden": 8192},
    "windows": {
        "layers": LAYERS, "heads": 32, "kv": 16, "hidden": 5376, "model_type": "gemma4_text", "head_dim": 256,
        "global_head_dim": 512, "num_global_key_value_heads": 4, "sliding_window": 1024,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * (LAYERS // 6),
    },
    "sparse": {
        "layers": LAYERS, "heads": 64, "kv": 64, "hidden": 6144, "model_type": "glm_moe_dsa", "kv_lora_rank": 512,
        "qk_rope_head_dim": 64, "qk_nope_head_dim": 192, "v_head_dim": 256, "index_head_dim": 128, "index_topk": 2048,
        "index_n_heads": 32,
    },
    "compressed": {
        "layers": LAYERS + 1, "heads": 128, "kv": 1, "hidden": 7168, "model_type": "deepseek_v4", "head_dim": 512,
        "qk_rope_head_dim": 64, "sliding_window": 128, "index_head_dim": 128, "index_topk": 512, "index_n_heads": 64,
        "compress_ratios": [0, 0, *[4, 128] * 29, 4],
    },
}  # fmt: skip


def calls(work: Any) -> int:
    count = 0

    def seen(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.parametrize("engine", sorted(ENGINES))
@pytest.mark.parametrize("name", sorted(MODELS))
def test_alike_layers_are_counted_once(spec: Any, name: str, engine: str) -> None:
    chosen, model = ENGINES[engine], spec(**MODELS[name])

    def work() -> None:
        allocation = allocate(chosen, model, chosen.default_format(model), Setup(context_tokens=8192))
        allocation.sequence_bytes(8192), allocation.terms(8192), allocation.capacity(32 << 30)

    try:
        work()
    except (UnsupportedModelError, UnsupportedFormatError):
        return
    assert calls(work) <= CALLS_MAX
