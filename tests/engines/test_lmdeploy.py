"""TurboMind's allocator against what it printed, its own documentation and its source."""

from typing import Any

import pytest

from kvplan.core.allocation import BEHIND_WINDOW, REPLICATED, ROUNDING, Setup
from kvplan.engines import ENGINES
from kvplan.engines import allocate as checked
from kvplan.engines.engine import Launch
from kvplan.engines.lmdeploy import EXTRA_INPUT, FLOAT_STATES, STATE_TYPE, allocate, launch, slab_bytes
from kvplan.errors import InputError, UnsupportedFormatError, UnsupportedModelError

MIB = 1 << 20
LLAMA_8B = {"layers": 32, "heads": 32, "kv": 8, "hidden": 4096}
LLAMA_2_7B = {"layers": 32, "heads": 32, "kv": 32, "hidden": 4096}
GPT_OSS = {"layers": 24, "heads": 64, "kv": 8, "hidden": 2880, "head_dim": 64, "model_type": "gpt_oss",
           "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 12}  # fmt: skip
GLM_FLASH = {"layers": 47, "heads": 20, "kv": 20, "hidden": 2048, "model_type": "glm4_moe_lite", "kv_lora_rank": 512,
             "qk_rope_head_dim": 64, "qk_nope_head_dim": 192, "v_head_dim": 256}  # fmt: skip
QWEN_35_9B = {"layers": 32, "heads": 16, "kv": 4, "hidden": 4096, "head_dim": 256, "model_type": "qwen3_5_text",
              "linear_num_value_heads": 32, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
              "linear_value_head_dim": 128, "linear_num_key_heads": 16, "mamba_ssm_dtype": "float32"}  # fmt: skip


def test_blocks_of_releases_to_0_14_are_those_that_were_printed(spec: Any) -> None:
    """A public log of InternLM-Chat-7B in fp16: block_size = 64 MB, max_block_count = 159; 20,352 tokens."""
    model = spec(**LLAMA_2_7B | {"model_type": "internlm"})
    allocation = allocate(model, "fp16", Setup(context_tokens=2048, block_tokens=128, version=(0, 2)))
    assert allocation.groups[0].bytes_per_block == 64 * MIB
    capacity = allocation.capacity(159 * 64 * MIB + 63 * MIB)
    assert (capacity.blocks, capacity.tokens, capacity.max_concurrency) == (159, 20352, 159 // 16)


@pytest.mark.parametrize(
    ("form", "bytes_a_token"),
    [("bf16", 131072), ("none", 131072), ("int8", 32 * 8 * 2 * (128 + 4)), ("4", 32 * 8 * 2 * (64 + 4))],
)
def test_a_token_of_a_head_has_a_scale_and_a_zero(spec: Any, form: str, bytes_a_token: int) -> None:
    """`token_data_size` and `token_param_size` of block.h: two numbers of 16 bits for each of K and V."""
    assert allocate(spec(**LLAMA_8B), form, Setup(context_tokens=64)).growth_bytes(64) == bytes_a_token


def test_a_slab_is_doubled_until_objects_fill_it() -> None:
    """`SlabAllocator` of src/turbomind/memory/slab.h: from 32 MiB on, until 95% are used or it is 1 GiB."""
    assert [slab_bytes(size * MIB) // MIB for size in (1, 8, 20, 22, 33, 700)] == [32, 32, 512, 512, 512, 1024]


def test_a_pool_is_whole_slabs(spec: Any) -> None:
    """Llama 3 8B has blocks of 8 MiB, four to a slab of 32 MiB; Qwen2.5 14B of 12 MiB, 21 to one of 256."""
    allocation = allocate(spec(**LLAMA_8B), "bf16", Setup(context_tokens=8192))
    capacity = allocation.capacity(1024 * MIB + 31 * MIB)
    assert (capacity.blocks, capacity.tokens, capacity.max_concurrency, capacity.max_context) == (128, 8192, 1, 8192)
    qwen = spec(48, 40, 8, 5120, model_type="qwen2", head_dim=128)
    assert allocate(qwen, "bf16", Setup(context_tokens=64)).capacity(511 * MIB).blocks == 21


def test_windows_are_kept_whole(spec: Any) -> None:
    terms = allocate(spec(**GPT_OSS), "bf16", Setup(context_tokens=4096)).terms(4000)
    token = 12 * 2 * 8 * 64 * 2
    assert {term.name: term.bytes for term in terms} == {
        BEHIND_WINDOW: (4000 - 128) * token, ROUNDING: (4032 - 4000) * 2 * token,
    }  # fmt: skip


def test_heads_are_repeated_and_a_latent_vector_is_on_every_rank(spec: Any) -> None:
    """`_repeat_kv_heads` of builders/attention.py and MLABuilder of builders/mla.py, in lmdeploy/turbomind."""
    wide = [allocate(spec(**LLAMA_8B), "bf16", Setup(context_tokens=64, tensor_parallel=n)).growth_bytes(64)
            for n in (1, 8, 16)]  # fmt: skip
    assert wide == [131072, 16384, 16384]
    latent = allocate(spec(**GLM_FLASH), "bf16", Setup(context_tokens=64, tensor_parallel=4))
    assert latent.growth_bytes(64) == 47 * 576 * 2
    assert {term.name for term in latent.terms(64)} == {REPLICATED}


def test_a_state_has_an_input_more_and_the_models_type(spec: Any) -> None:
    """`get_lc_state_size` of GatedDeltaNetLayer.cc, and docs/en/inference/turbomind_config.md on its type."""
    setup = Setup(context_tokens=64)
    allocation = allocate(spec(**QWEN_35_9B), "bf16", setup)
    recurrent, channels = 32 * 128 * 128, 2 * 16 * 128 + 32 * 128
    assert allocation.state_objects == {recurrent * 2: 24, 24 * channels * 4 * 2: 1}
    terms = {term.name: term.bytes for term in allocation.terms(64)}
    assert terms == {STATE_TYPE: -24 * recurrent * 2, EXTRA_INPUT: 24 * channels * 2}
    wide = allocate(spec(**QWEN_35_9B), "bf16", Setup(context_tokens=64, options=frozenset({FLOAT_STATES})))
    assert wide.state_bytes - allocation.state_bytes == 24 * recurrent * 2
    assert wide.blocks[1].bytes_per_block == wide.state_bytes
    assert allocation.capacity(64 * MIB).max_concurrency == 0  # three slabs: of blocks, of either part of a state


@pytest.mark.parametrize(
    ("config", "form", "setup", "error", "message"),
    [
        (LLAMA_8B, "fp8", {}, UnsupportedFormatError, "PyTorch engine"),
        (LLAMA_8B, "turbo_quant", {}, UnsupportedFormatError, "PyTorch engine"),
        (LLAMA_8B, "q8_0", {}, UnsupportedFormatError, "no cache format"),
        (LLAMA_8B, "bf16", {"pipeline_parallel": 2}, InputError, "no pipeline"),
        (LLAMA_8B, "bf16", {"tensor_parallel": 3}, InputError, "3 ranks"),
        (LLAMA_8B, "bf16", {"options": frozenset({"chunk"})}, InputError, "chunk"),
        (LLAMA_8B | {"model_type": "mistral", "sliding_window": None}, "bf16", {}, UnsupportedModelError, "Mistral"),
        (LLAMA_8B | {"head_dim": 96}, "bf16", {}, UnsupportedModelError, "head size of 96"),
        (QWEN_35_9B, "bf16", {"version": (0, 14)}, UnsupportedModelError, "states"),
    ],
)  # fmt: skip
def test_what_turbomind_does_not_have_is_refused(
    spec: Any, config: dict[str, Any], form: str, setup: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        checked(ENGINES["lmdeploy"], spec(**config), form, Setup(context_tokens=64, **setup))


def test_the_command_has_lmdeploys_own_flags() -> None:
    """Flags of lmdeploy/cli/utils.py and fields of TurbomindEngineConfig (lmdeploy/messages.py), read at 1263d5c."""
    text = launch(
        Launch(
            model="org/m", format="int8", block_tokens=64, context_tokens=8192, sequences=34, tensor_parallel=2,
            max_batched_tokens=4096, prefix_caching=True,
        )
    )  # fmt: skip
    assert text.command == (
        "lmdeploy serve api_server org/m --backend turbomind --quant-policy 8 --cache-block-seq-len 64 "
        "--session-len 8192 --max-batch-size 34 --tp 2 --max-prefill-token-num 4096 --enable-prefix-caching"
    )
    assert "TurbomindEngineConfig(quant_policy=8, cache_block_seq_len=64, session_len=8192" in text.file_text
    assert "enable_prefix_caching=True)" in text.file_text
    plain = launch(Launch(model="org/m", format="fp16", block_tokens=64, context_tokens=512, sequences=1))
    assert "--quant-policy 0" in plain.command
    assert plain.command.endswith("--dtype float16")
