"""llama.cpp's buffers against what llama.cpp printed, to the hundredth of a MiB that it prints.

Each row names where it was printed; what a log says of cells and buffers is exact.
"""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplan.core.allocation import BEHIND_WINDOW, ROUNDING, Setup
from kvplan.engines import ENGINES
from kvplan.engines import allocate as checked
from kvplan.engines.engine import Launch
from kvplan.engines.llama_cpp import allocate
from kvplan.engines.llama_cpp_buffers import (
    DRAFT_TYPE,
    OTHER_SLOTS,
    OTHER_STATES,
    WIDE_STATES,
    WIDE_VALUES,
    BufferAllocation,
)
from kvplan.engines.llama_cpp_formats import FORMATS
from kvplan.engines.llama_cpp_launch import launch
from kvplan.errors import InputError, UnsupportedFormatError, UnsupportedModelError

MIB = 1 << 20
DISCUSSION = "https://huggingface.co/dranger003/c4ai-command-r-v01-iMat.GGUF/discussions/6"
LLAMA_8B = {"layers": 32, "heads": 32, "kv": 8, "hidden": 4096}
QWEN_STATES = {"linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
               "linear_num_key_heads": 16, "mamba_ssm_dtype": "float32", "max_position_embeddings": 262144}  # fmt: skip
QWEN_36_27B = {"layers": 64, "heads": 24, "kv": 4, "hidden": 5120, "head_dim": 256, "model_type": "qwen3_5_text",
               "linear_num_value_heads": 48, **QWEN_STATES}  # fmt: skip
QWEN_35_9B = {"layers": 32, "heads": 16, "kv": 4, "hidden": 4096, "head_dim": 256, "model_type": "qwen3_5_text",
              "linear_num_value_heads": 32, **QWEN_STATES}  # fmt: skip
QWEN_35_122B = {"layers": 48, "heads": 32, "kv": 2, "hidden": 3072, "head_dim": 256, "model_type": "qwen3_5_moe_text",
                "linear_num_value_heads": 64, **QWEN_STATES}  # fmt: skip
GPT_OSS = {"heads": 64, "kv": 8, "hidden": 2880, "head_dim": 64, "model_type": "gpt_oss", "sliding_window": 128}
GPT_OSS_20B = {"layers": 24, **GPT_OSS, "layer_types": ["sliding_attention", "full_attention"] * 12}
GPT_OSS_120B = {"layers": 36, **GPT_OSS, "layer_types": ["sliding_attention", "full_attention"] * 18}
GEMMA_4_12B = {"layers": 48, "heads": 16, "kv": 8, "hidden": 3840, "head_dim": 256, "global_head_dim": 512,
               "num_global_key_value_heads": 1, "attention_k_eq_v": True, "model_type": "gemma4_text",
               "sliding_window": 1024, "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 8}  # fmt: skip
GEMMA_3N_E4B = {"layers": 35, "heads": 8, "kv": 2, "hidden": 2048, "head_dim": 256, "model_type": "gemma3n_text",
                "sliding_window": 512, "num_kv_shared_layers": 15, "max_position_embeddings": 32768,
                "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7}  # fmt: skip
MAMBA_3B = {"layers": 64, "heads": None, "kv": None, "hidden": 2560, "model_type": "mamba", "state_size": 16,
            "conv_kernel": 4, "intermediate_size": 5120}  # fmt: skip
DEEPSEEK_R1 = {"layers": 61, "heads": 128, "kv": 128, "hidden": 7168, "model_type": "deepseek_v3", "kv_lora_rank": 512,
               "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}  # fmt: skip


def printed(allocation: BufferAllocation, tokens: int) -> dict[str, tuple[int, float]]:
    """The cells of each cache and the MiB of all its buffers, as the log has them."""
    slots, found = allocation.slots, {}
    for cache in allocation.caches:
        cells = cache.cells(slots, tokens)
        found[cache.name] = cells, round(float(slots.buffers * cells * cache.cell_bytes) / MIB, 2)
    return found


@pytest.mark.parametrize(
    ("config", "form", "tokens", "mib", "source"),
    [
        (LLAMA_8B | {"model_type": "mixtral", "sliding_window": None}, "f16", 2048, 128 + 128, DISCUSSION),
        (LLAMA_8B, "f16", 2048, 128 + 128, DISCUSSION),
        ({"layers": 80, "heads": 64, "kv": 8, "hidden": 8192}, "f16", 2048, 320 + 320, DISCUSSION),
        ({"layers": 60, "heads": 56, "kv": 8, "hidden": 7168}, "f16", 2048, 240 + 240, DISCUSSION),
        (QWEN_36_27B, "f16", 262144, 8192 + 8192, "https://github.com/lmstudio-ai/lmstudio-bug-tracker/issues/1862"),
        (QWEN_35_9B, "q8_0", 262144, 2176 + 2176, "public log of 2026, Qwen3.5-9B"),
        (QWEN_35_122B, "q8_0", 65536, 408 + 408, "public log of 2026, Qwen3.5-122B-A10B"),
        # bge-small's layers: llama.cpp of 2024 gave encoders a cache as well
        ({"layers": 12, "heads": 12, "kv": 12, "hidden": 384}, "f16", 512, 4.5 + 4.5, "llama.cpp's CI log of 2024"),
    ],
)
def test_cells_of_whole_contexts_take_what_was_printed(
    spec: Any, config: dict[str, Any], form: str, tokens: int, mib: float, source: str
) -> None:
    found = printed(allocate(spec(**config), form, Setup(context_tokens=tokens)), tokens)
    assert found == {"attention": (tokens, mib)}, source


@pytest.mark.parametrize(
    ("config", "form", "setup", "full", "window", "source"),
    [
        (GPT_OSS_20B, "q8_0", {"context_tokens": 8192, "sequences": 1, "max_batched_tokens": 128}, (8192, 102.0),
         (256, 3.19), "public log of 2026: K and V 1.59 MiB each, a window of 128 and a batch of 128"),
        (GPT_OSS_120B, "f16", {"context_tokens": 65535}, (65536, 2304.0), (1024, 36.0), "public log, -c 65535"),
        (GEMMA_4_12B, "q8_0", {"context_tokens": 8192}, (8192, 68.0), (4608, 765.0), "public log, -c 8192, 4/1 seqs"),
        (GEMMA_4_12B, "q8_0", {"context_tokens": 8192, "sequences": 1}, (8192, 68.0), (1536, 255.0), "the same, -np 1"),
        (GEMMA_3N_E4B, "f16", {"context_tokens": 32768, "sequences": 1}, (32768, 256.0), (1024, 32.0),
         "https://github.com/unslothai/unsloth/pull/5225"),
    ],
)  # fmt: skip
def test_windows_have_cells_of_their_own(
    spec: Any, config: dict[str, Any], form: str, setup: dict[str, Any], full: Any, window: Any, source: str
) -> None:
    asked = Setup(**setup)
    found = printed(allocate(spec(**config), form, asked), asked.context_tokens)
    assert found == {"attention": full, "attention with a window": window}, source


def test_advice_for_windows_is_fewer_slots_and_not_a_shorter_context(spec: Any) -> None:
    """A public log of Gemma 4 12B in q8_0: 833 MiB with 4 slots, 323 with one, and a shorter context saves little."""

    def mib(tokens: int, **more: int) -> float:
        asked = Setup(context_tokens=tokens, **more)
        return allocate(spec(**GEMMA_4_12B), "q8_0", asked).server_bytes(tokens) / MIB

    assert (mib(8192), mib(8192, sequences=1)) == (833.0, 323.0)
    assert mib(4608) == 833.0 - 68 * (1 - 4608 / 8192)


def test_states_are_float32_for_each_slot(spec: Any) -> None:
    """598.50 MiB for 4 slots of Qwen3.6-27B (lmstudio-ai/lmstudio-bug-tracker#1862), 100.50 MiB for 2 of Qwen3.5-9B (a
    public log of 2026), 23.75 MiB a sequence of Mamba 3B whatever its context (ggml-org/llama.cpp#5328)."""
    four = allocate(spec(**QWEN_36_27B), "f16", Setup(context_tokens=4096))
    two = allocate(spec(**QWEN_35_9B), "f16", Setup(context_tokens=4096, sequences=2))
    mamba = allocate(spec(**MAMBA_3B), "f16", Setup(context_tokens=512, sequences=1))
    assert 4 * four.state_bytes == 598.5 * MIB
    assert two.slots.count * two.state_bytes == 100.5 * MIB
    assert mamba.sequence_bytes(1) == mamba.sequence_bytes(1 << 20) == 23.75 * MIB
    terms = {term.name: term.bytes for term in four.terms(4096)}
    assert terms == {WIDE_STATES: 48 * 3 * 10240 * 2, OTHER_STATES: 3 * four.state_bytes}


@pytest.mark.parametrize(("version", "cells"), [(None, 768), ((6182,), 640), ((7079,), 768), ((0, 5, 0), 768)])
def test_windows_were_not_padded_to_256_before_november_2025(spec: Any, version: Any, cells: int) -> None:
    """b6182 printed 640 cells for a window of 128 and a batch of 512; ggml-org/llama.cpp#17046 pads them to 768."""
    options = frozenset({"flash-attn=off"})
    setup = Setup(context_tokens=8192, sequences=1, version=version, options=options)
    assert printed(allocate(spec(**GPT_OSS_20B), "f16", setup), 8192)["attention with a window"][0] == cells


def test_slots_of_ones_own_are_padded_each(spec: Any) -> None:
    """10 slots of a context of 4,096 are 5,120 cells: 409 tokens each, padded to 512 (src/llama-context.cpp)."""
    allocation = allocate(spec(**LLAMA_8B), "f16", Setup(context_tokens=409, sequences=10))
    assert allocation.server_bytes(409) == 5120 * 131072
    assert allocation.sequence_bytes(409) == 512 * 131072
    assert {term.name: term.bytes for term in allocation.terms(409)} == {ROUNDING: (512 - 409) * 131072}
    together = Setup(context_tokens=409, sequences=10, options=frozenset({"kv-unified"}))
    assert allocate(spec(**LLAMA_8B), "f16", together).server_bytes(409) == 4096 * 131072


@pytest.mark.parametrize(
    ("form", "block_bytes"),
    [("f32", 128), ("f16", 64), ("bf16", 64), ("q8_0", 34), ("q5_1", 24), ("q5_0", 22), ("q4_1", 20), ("q4_0", 18),
     ("iq4_nl", 18)],
)  # fmt: skip
def test_formats_take_what_ggmls_blocks_take(spec: Any, form: str, block_bytes: int) -> None:
    """Bytes of 32 elements: the `static_assert`s of ggml/src/ggml-common.h at 0c1e570."""
    allocation = allocate(spec(**LLAMA_8B), form, Setup(context_tokens=256, sequences=1))
    assert allocation.growth_bytes(256) == 32 * 2 * 8 * 128 / 32 * block_bytes


def test_every_value_of_the_flag_is_a_format() -> None:
    """`kv_cache_types` of common/arg.cpp at 0c1e570."""
    assert {form.name for form in FORMATS} == {
        "f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1",
    }  # fmt: skip


def test_k_and_v_have_formats_of_their_own(spec: Any) -> None:
    mixed = allocate(spec(**LLAMA_8B), "llama.cpp:q8_0/q4_0", Setup(context_tokens=256, sequences=1))
    assert mixed.growth_bytes(256) == 32 * 8 * (128 // 32) * (34 + 18)


def test_a_latent_vector_has_no_v_and_an_indexer_keys_beside_it(spec: Any) -> None:
    """K alone is kept of MLA (`has_v = !is_mla`, src/llama-kv-cache.cpp), the keys in K's format
    (src/llama-kv-cache-dsa.cpp)."""
    setup = Setup(context_tokens=1024, sequences=1)
    assert allocate(spec(**DEEPSEEK_R1), "f16", setup).growth_bytes(1024) == 61 * 576 * 2
    sparse = spec(**DEEPSEEK_R1 | {"model_type": "deepseek_v32", "index_head_dim": 128, "index_topk": 2048,
                                   "index_n_heads": 64})  # fmt: skip
    assert allocate(sparse, "q8_0", setup).growth_bytes(1024) == 61 * (576 + 128) // 32 * 34
    with pytest.raises(UnsupportedFormatError, match="one format"):
        allocate(sparse, "q8_0/q4_0", setup)


def test_windows_that_llama_cpp_does_not_keep_are_whole(spec: Any) -> None:
    """Mistral's windows have no cache of their own (src/models has no `swa_type` for it), nor has any `--swa-full`."""
    mistral = LLAMA_8B | {"model_type": "mistral", "sliding_window": 4096, "max_position_embeddings": 32768}
    found = allocate(spec(**mistral), "f16", Setup(context_tokens=32768, sequences=1))
    assert {term.name: term.bytes for term in found.terms(32768)} == {BEHIND_WINDOW: (32768 - 4096) * 131072}
    full = Setup(context_tokens=8192, options=frozenset({"swa-full"}))
    assert printed(allocate(spec(**GEMMA_4_12B), "q8_0", full), 8192)["attention with a window"] == (8192, 1360.0)


def test_v_is_as_wide_as_the_widest_without_flash_attention(spec: Any) -> None:
    """`v_trans` and `n_embd_v_gqa_max` of src/llama-kv-cache.cpp: 2,048 elements of V in the 8 layers that have 512."""
    off = Setup(context_tokens=8192, sequences=1, options=frozenset({"flash-attn=off"}))
    terms = {term.name: term.bytes for term in allocate(spec(**GEMMA_4_12B), "f16", off).terms(8192)}
    assert terms[WIDE_VALUES] == 8192 * 8 * (2048 - 512) * 2
    with pytest.raises(UnsupportedFormatError, match="flash attention"):
        allocate(spec(**GEMMA_4_12B), "f16/q4_0", off)


def test_devices_hold_whole_layers_and_the_output_is_one_more(spec: Any) -> None:
    """`get_layer_buft_list` of src/llama-model.cpp: floor(layer * devices / 33) for 32 layers and the output."""
    sizes = [allocate(spec(**LLAMA_8B), "f16", Setup(context_tokens=256, pipeline_parallel=n)).server_bytes(256) / MIB
             for n in (1, 2, 4, 32)]  # fmt: skip
    assert sizes == [32, 17, 9, 2]


def test_drafts_have_a_context_and_states_of_their_own(spec: Any) -> None:
    """A public log of 2026, Qwen3.6-27B, 4 slots and 2 tokens of a draft: 512, 1795.5 and 32 MiB."""
    config = QWEN_36_27B | {"mtp_num_hidden_layers": 1}
    asked = Setup(context_tokens=8192, draft_tokens=2)
    found = allocate(spec(**config), "f16", asked)
    assert printed(found, 8192) == {"attention": (8192, 512.0), "attention that drafts": (8192, 32.0)}
    assert found.slots.count * found.state_bytes / MIB == 1795.5
    assert printed(allocate(spec(**config), "q8_0", asked), 8192)["attention that drafts"] == (8192, 32.0)
    last = allocate(spec(**config), "f16", replace(asked, options=frozenset({"tensor-split=65,1"})))
    assert [cache.name for cache in last.caches] == ["attention", "attention that drafts"]  # 66 with the output


def test_drafts_of_latent_layers_have_no_indexer(spec: Any) -> None:
    """`create_memory` of src/llama-model.cpp at 0c1e570: a plain cache of the last layer, in f16."""
    config = DEEPSEEK_R1 | {"model_type": "deepseek_v32", "index_head_dim": 128, "num_nextn_predict_layers": 1}
    found = allocate(spec(**config), "q8_0", Setup(context_tokens=1024, sequences=1, draft_tokens=1))
    draft = next(cache for cache in found.caches if cache.name == "attention that drafts")
    assert (draft.cell_bytes, draft.logical_bytes) == (576 * 2, 576 * 34 / 32)
    assert {term.name: term.bytes for term in found.terms(1024)} == {DRAFT_TYPE: 1024 * (576 * 2 - 612)}


def test_a_split_gives_each_device_its_part_of_the_layers(spec: Any) -> None:
    """https://github.com/ggml-org/llama.cpp/pull/6122: Command R's 40 layers and output, 12 and 28 on two devices."""
    command_r = {"layers": 40, "heads": 64, "kv": 64, "hidden": 8192, "model_type": "cohere"}
    sizes = [
        allocate(spec(**command_r), "f16", Setup(context_tokens=4096, options=frozenset({split}))).server_bytes(4096)
        for split in ("tensor-split=12,29", "tensor-split=29/12", "tensor-split=0,1")
    ]
    assert [size / MIB for size in sizes] == [3584, 3712, 5120]  # the output is on the second, 29 layers on the first


@pytest.mark.parametrize(
    ("options", "mib", "note"),
    [
        ({"gpu-layers=20"}, 19, "13 layers keep 13.0 MiB of cache in main memory"),  # and the output
        ({"gpu-layers=20", "tensor-split=1,3"}, 14, "13 layers keep"),
        ({"gpu-layers=99"}, 32, ""),
        ({"gpu-layers=all"}, 32, ""),
        ({"gpu-layers=1"}, 32, "the cache is in main memory"),  # the output alone
        ({"gpu-layers=0"}, 32, "the cache is in main memory"),
        ({"no-kv-offload"}, 32, "the cache is in main memory"),
    ],
)
def test_the_last_layers_are_on_devices_and_the_others_in_main_memory(
    spec: Any, options: set[str], mib: int, note: str
) -> None:
    """`get_layer_buft_list` of src/llama-model.cpp at 0c1e570; `offload_kqv` of `llama_kv_cache`."""
    allocation = allocate(spec(**LLAMA_8B), "f16", Setup(context_tokens=256, options=frozenset(options)))
    assert allocation.server_bytes(256) / MIB == mib
    assert note in " ".join(allocation.notes)
    assert note or "memory" not in " ".join(allocation.notes)


def test_other_slots_windows_are_a_term(spec: Any) -> None:
    allocation = allocate(spec(**GEMMA_4_12B), "q8_0", Setup(context_tokens=8192))
    cell = 765 * MIB // 4608
    assert {term.name: term.bytes for term in allocation.terms(8192)} == {
        BEHIND_WINDOW: 512 * cell, OTHER_SLOTS: 3 * 1024 * cell,
    }  # fmt: skip


@settings(deadline=None)
@given(
    tokens=st.integers(1, 20000), sequences=st.sampled_from([None, 1, 2, 3, 8]), batch=st.sampled_from([None, 1, 2048]),
    options=st.sets(st.sampled_from(["swa-full", "kv-unified", "flash-attn=off", "no-kv-offload", "gpu-layers=12"])),
    config=st.sampled_from([GPT_OSS_20B, GEMMA_3N_E4B, GEMMA_4_12B, QWEN_35_9B, DEEPSEEK_R1, MAMBA_3B]),
    drafts=st.sampled_from([0, 0, 3]), form=st.sampled_from(["f16", "q8_0"]),
    devices=st.sampled_from([1, 3]), version=st.sampled_from([None, (6182,)]),
)  # fmt: skip
def test_terms_are_the_whole_difference_and_slots_make_the_server(
    spec: Any, tokens: int, sequences: int | None, batch: int | None, options: set[str], config: dict[str, Any],
    devices: int, version: tuple[int, ...] | None, drafts: int, form: str,
) -> None:  # fmt: skip
    setup = Setup(context_tokens=tokens, sequences=sequences, max_batched_tokens=batch, options=frozenset(options),
                  pipeline_parallel=devices, version=version)  # fmt: skip
    if drafts and config in (QWEN_35_9B, DEEPSEEK_R1):
        setup = replace(setup, draft_tokens=drafts)
        config = config | {"mtp_num_hidden_layers": 1, "num_nextn_predict_layers": 1}
    form = "f16" if "flash-attn=off" in options else form
    allocation = allocate(spec(**config), form, setup)
    terms = allocation.terms(tokens)
    difference = allocation.sequence_bytes(tokens) - allocation.logical_bytes(tokens)
    assert sum(term.bytes for term in terms) == pytest.approx(difference, abs=1e-3)
    assert all(term.bytes > 0 for term in terms)
    assert allocation.server_bytes(tokens) == pytest.approx((sequences or 1) * allocation.sequence_bytes(tokens))
    assert allocation.sequence_bytes(tokens) <= allocation.sequence_bytes(tokens + 1)


@pytest.mark.parametrize(
    ("config", "form", "setup", "error", "message"),
    [
        # https://github.com/ggml-org/llama.cpp/issues/4425: Zephyr 3B has heads of 80
        ({"layers": 32, "heads": 32, "kv": 32, "hidden": 2560, "model_type": "stablelm"}, "q8_0", {},
         UnsupportedFormatError, "multiples of 32, not 80"),
        # https://github.com/ggml-org/llama.cpp/issues/28524
        (LLAMA_8B, "f16/q4_0", {"options": frozenset({"flash-attn=off"})}, UnsupportedFormatError, "flash attention"),
        (LLAMA_8B, "fp8_e4m3", {}, UnsupportedFormatError, "no cache format"),
        (LLAMA_8B, "f16", {"tensor_parallel": 2}, InputError, "whole layers"),
        (LLAMA_8B, "f16", {"draft_tokens": 1}, InputError, "no draft layers"),
        (DEEPSEEK_R1 | {"model_type": "youtu", "num_nextn_predict_layers": 1}, "f16", {"draft_tokens": 1},
         UnsupportedModelError, "not known to draft"),
        (LLAMA_8B, "f16", {"pipeline_parallel": 33}, InputError, "33 devices"),
        (LLAMA_8B, "f16", {"options": frozenset({"gpu-layers=some"})}, InputError, "no number of layers"),
        (LLAMA_8B, "f16", {"options": frozenset({"tensor-split=1,-1"})}, InputError, "no list of parts"),
        (LLAMA_8B, "f16", {"options": frozenset({"tensor-split=0,0"})}, InputError, "no list of parts"),
        (LLAMA_8B, "f16", {"options": frozenset({"tensor-split=a"})}, InputError, "no list of parts"),
        (LLAMA_8B, "f16", {"pipeline_parallel": 3, "options": frozenset({"tensor-split=1,2"})}, InputError,
         "of 2 devices, not of 3"),
        (LLAMA_8B, "f16", {"block_tokens": 16}, InputError, "no blocks"),
        (LLAMA_8B, "f16", {"options": frozenset({"swa_full"})}, InputError, "swa_full"),
        (LLAMA_8B, "f16", {"version": (6183,)}, InputError, "b6183"),
        (LLAMA_8B, "f16", {"version": (7078,)}, InputError, "b7078"),
        (LLAMA_8B, "f16", {"version": (4000,)}, InputError, "b4000"),
        (LLAMA_8B | {"model_type": "gptj"}, "f16", {}, UnsupportedModelError, "GPTJForCausalLM"),
        (LLAMA_8B | {"model_type": "minicpm3", "kv_lora_rank": 256, "qk_rope_head_dim": 32}, "f16", {},
         UnsupportedModelError, "MiniCPM 3"),
        (GEMMA_3N_E4B | {"num_kv_shared_layers": 10}, "f16", {}, UnsupportedModelError, "first 20 layers"),
    ],
)  # fmt: skip
def test_what_llama_cpp_does_not_have_is_refused(
    spec: Any, config: dict[str, Any], form: str, setup: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        checked(ENGINES["llama.cpp"], spec(**config), form, Setup(context_tokens=64, **setup))


def test_a_pool_holds_slots_and_one_long_context(spec: Any) -> None:
    capacity = allocate(spec(**LLAMA_8B), "f16", Setup(context_tokens=2048)).capacity(1 << 30)
    assert (capacity.blocks, capacity.tokens, capacity.max_concurrency, capacity.max_context) == (32, 8192, 4, 8192)
    each = allocate(spec(**QWEN_35_9B), "f16", Setup(context_tokens=1024, sequences=1))
    slot = 1024 * 8 * 2 * 4 * 256 * 2 + each.state_bytes
    assert each.capacity(5 * slot).max_concurrency == 5
    assert each.capacity(5 * slot - 1).max_concurrency == 4


def test_the_command_has_llama_servers_own_flags() -> None:
    """Flags of common/arg.cpp and the presets of docs/preset.md (`--models-preset`), read 2026-11-30 at 0c1e570."""
    text = launch(
        Launch(
            model="m.gguf", format="q8_0/q4_0", block_tokens=256, context_tokens=8192, sequences=4,
            max_batched_tokens=1024, pipeline_parallel=2,
        )
    )  # fmt: skip
    assert text.command == (
        "llama-server --model m.gguf --ctx-size 32768 --parallel 4 --cache-type-k q8_0 --cache-type-v q4_0 "
        "--flash-attn on --batch-size 1024 --ubatch-size 512 --split-mode layer --gpu-layers all"
    )
    assert text.file_text.splitlines()[:4] == ["[m.gguf]", "model = m.gguf", "ctx-size = 32768", "parallel = 4"]
    plain = launch(Launch(model="m.gguf", format="f16", block_tokens=256, context_tokens=512, sequences=1))
    assert plain.command == (
        "llama-server --model m.gguf --ctx-size 512 --parallel 1 --cache-type-k f16 --cache-type-v f16"
    )


@pytest.mark.parametrize(
    ("model", "flag"),
    [
        ("ggml-org/gpt-oss-20b-GGUF", "--hf-repo ggml-org/gpt-oss-20b-GGUF"),
        ("models/m.gguf", "--model models/m.gguf"),
        ("./models", "--model ./models"),
        ("/models/m", "--model /models/m"),
        ("~/m", "--model ~/m"),
        ("demo", "--model demo"),
    ],
)
def test_a_repository_and_a_file_have_flags_of_their_own(model: str, flag: str) -> None:
    text = launch(Launch(model=model, format="f16", block_tokens=256, context_tokens=512, sequences=1))
    assert text.command.startswith(f"llama-server {flag} --ctx-size")
