"""What holds of every engine's allocation: the terms are the whole difference, and figures never turn back."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplan.core.allocation import Setup
from kvplan.core.logical import logical_size
from kvplan.engines import ENGINES, allocate
from kvplan.errors import KvplanError, UnsupportedFormatError, UnsupportedModelError
from kvplan_kernels.format import parse


def shape(layers: int, heads: int, kv: int, hidden: int, **more: Any) -> dict[str, Any]:
    return {"layers": layers, "heads": heads, "kv": kv, "hidden": hidden, **more}


MODELS: dict[str, dict[str, Any]] = {
    "full": shape(4, 8, 2, 256),
    "window": shape(6, 8, 4, 512, model_type="gemma3_text", head_dim=64, sliding_window=96, sliding_window_pattern=3),
    "unlike": shape(
        6, 8, 8, 512, model_type="gemma4_text", head_dim=64, global_head_dim=128, num_global_key_value_heads=2,
        sliding_window=64, layer_types=(["sliding_attention"] * 2 + ["full_attention"]) * 2,
    ),
    "latent": shape(
        3, 16, 16, 512, model_type="deepseek_v3", kv_lora_rank=128, qk_rope_head_dim=32, qk_nope_head_dim=64,
        v_head_dim=64,
    ),
    "compressed": shape(
        7, 8, 1, 512, model_type="deepseek_v4", head_dim=512, qk_rope_head_dim=64, sliding_window=128,
        index_head_dim=128, index_topk=512, index_n_heads=8, compress_ratios=[0, 4, 128, 4, 128, 4, 0],
    ),
    "states": shape(
        8, 8, 2, 512, model_type="qwen3_5_text", head_dim=64, linear_conv_kernel_dim=4, linear_key_head_dim=32,
        linear_value_head_dim=32, linear_num_key_heads=4, linear_num_value_heads=8, mamba_ssm_dtype="float32",
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 2,
    ),
}  # fmt: skip


@settings(deadline=None)
@given(
    name=st.sampled_from(sorted(MODELS)), engine=st.sampled_from(sorted(ENGINES)), tokens=st.integers(1, 5000),
    ranks=st.sampled_from([1, 2, 4]), batched=st.sampled_from([None, 64, 1024]), caching=st.sampled_from([None, True]),
)  # fmt: skip
def test_terms_are_the_whole_difference(
    spec: Any, name: str, engine: str, tokens: int, ranks: int, batched: int | None, caching: bool | None
) -> None:
    chosen, model = ENGINES[engine], spec(**MODELS[name])
    setup = Setup(
        context_tokens=8192, tensor_parallel=ranks, max_batched_tokens=batched, prefix_caching=caching, sequences=3
    )
    try:
        allocation = allocate(chosen, model, chosen.default_format(model), setup)
    except KvplanError:
        return
    difference = allocation.sequence_bytes(tokens) - allocation.logical_bytes(tokens)
    assert sum(term.bytes for term in allocation.terms(tokens)) == pytest.approx(difference, abs=1e-6)
    assert allocation.sequence_bytes(tokens) <= allocation.sequence_bytes(tokens + 1)
    if ranks == 1 and name != "compressed":  # the states of compressors are no part of the geometry
        geometry = logical_size(model, parse("bf16"), tokens).bytes_per_sequence
        assert allocation.logical_bytes(tokens) == pytest.approx(geometry)


@pytest.mark.parametrize("engine", sorted(ENGINES))
@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_larger_pool_holds_no_less(spec: Any, name: str, engine: str) -> None:
    chosen, model = ENGINES[engine], spec(**MODELS[name])
    try:
        allocation = allocate(chosen, model, chosen.default_format(model), Setup(context_tokens=4096))
    except (UnsupportedModelError, UnsupportedFormatError):
        return
    found = [allocation.capacity(size << 20) for size in (64, 128, 1024)]
    for figure in ("blocks", "tokens", "max_concurrency", "max_context"):
        figures: list[Any] = [getattr(capacity, figure) for capacity in found]
        assert figures == sorted(figures)
