"""Logs of vLLM, cut to the lines that matter, and what is said of each figure."""

from dataclasses import replace
from typing import Any

import pytest

from kvplan.core.specs import StatedCache
from kvplan.engines import explain_log, read_log
from kvplan.engines.logs import Finding, Verdict

LLAMA_8B = {"layers": 32, "heads": 32, "kv": 8, "hidden": 4096}
LLAMA_70B = {"layers": 80, "heads": 64, "kv": 8, "hidden": 8192}
DEEPSEEK_R1 = {"layers": 61, "heads": 128, "kv": 128, "hidden": 7168, "model_type": "deepseek_v3",
               "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}  # fmt: skip
QWEN_30B = {"layers": 48, "heads": 32, "kv": 4, "hidden": 2048, "head_dim": 128, "model_type": "qwen3_moe",
            "max_position_embeddings": 262144}  # fmt: skip
GEMMA_3_27B = {"layers": 62, "heads": 32, "kv": 16, "hidden": 5376, "head_dim": 128, "model_type": "gemma3_text",
               "sliding_window": 1024, "sliding_window_pattern": 6}  # fmt: skip
QWEN_36_35B = {"layers": 40, "heads": 16, "kv": 2, "hidden": 2048, "head_dim": 256, "model_type": "qwen3_5_moe_text",
               "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
               "linear_num_key_heads": 16, "linear_num_value_heads": 32, "mamba_ssm_dtype": "float32",
               "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 10,
               "max_position_embeddings": 262144}  # fmt: skip

HYBRID = """
(APIServer pid=1) INFO 05-03 17:10:31 [utils.py:299]  ▄▄ ▄█ █     █     █ ▀▄▀ █  version 0.20.0
(APIServer pid=1) INFO 05-03 17:10:31 [utils.py:233] non-default args: {'model': 'RedHatAI/Qwen3.6-35B-A3B-NVFP4', \
'max_model_len': 65536, 'gpu_memory_utilization': 0.9, 'kv_cache_dtype': 'fp8_e4m3', 'enable_prefix_caching': True, \
'max_num_batched_tokens': 8192, 'max_num_seqs': 1}
(EngineCore pid=125)
(EngineCore pid=125) Loading safetensors checkpoint shards: 100% Completed | 3/3 [00:23<00:00,  7.95s/it]
(EngineCore pid=125) INFO 05-03 17:13:12 [runner.py:4879] Model loading took 21.86 GiB memory and 121 seconds
(EngineCore pid=125) INFO 05-03 17:13:12 [interface.py:606] Setting attention block size to 2096 tokens to ensure that \
attention page size is >= mamba page size.
(EngineCore pid=125) INFO 05-03 17:14:32 [gpu_model_runner.py:6042] Estimated CUDA graph memory: 0.43 GiB total
(EngineCore pid=125) INFO 05-03 17:14:33 [gpu_worker.py:440] Available KV cache memory: 82.42 GiB
(EngineCore pid=125) INFO 05-03 17:14:33 [gpu_worker.py:455] CUDA graph memory profiling is enabled (default since \
v0.21.0). The current --gpu-memory-utilization=0.9000 is equivalent to --gpu-memory-utilization=0.8964 without it.
(EngineCore pid=125) INFO 05-03 17:14:33 [kv_cache_utils.py:1711] GPU KV cache size: 2,158,880 tokens
(EngineCore pid=125) INFO 05-03 17:14:33 [kv_cache_utils.py:1716] Maximum concurrency for 65,536 tokens per request: \
108.50x
(EngineCore pid=125) INFO 05-03 17:14:44 [gpu_worker.py:599] CUDA graph pool memory: 0.64 GiB (actual), 0.43 GiB \
(estimated), difference: 0.2 GiB (31.6%).
"""
"""A public log, Qwen3.6-35B-A3B-NVFP4 on a DGX Spark, vLLM 0.20.0."""

COLOURED = """
\x1b[1;36m(Worker_TP0 pid=415)\x1b[0;0m INFO 12-02 15:48:37 [gpu_model_runner.py:3338] Model loading took 16.9619 GiB
^[[1;36m(Worker_TP0 pid=415)^[[0;0m INFO 12-02 15:49:26 [gpu_worker.py:359] Available KV cache memory: 106.17 GiB^M
[0;36m(EngineCore_DP0 pid=279)[0;0m INFO 12-02 15:49:27 [kv_cache_utils.py:1229] GPU KV cache size: 1,391,552 tokens
\x1b[1;36m(EngineCore_DP0 pid=279)\x1b[0;0m INFO 12-02 [kv_cache_utils.py:1234] Maximum concurrency for 8,192 tokens \
per request: 169.87x
\x1b[1;36m(Worker_TP0 pid=415)\x1b[0;0m INFO Graph capturing finished in 8 secs, took -0.17 GiB
"""
"""A public log, a model of 70B in fp8 on four ranks."""


def explained(spec: Any, log: str, config: dict[str, Any] | None) -> dict[str, Finding]:
    facts = read_log(log)
    assert facts is not None
    return {finding.what: finding for finding in explain_log(facts, spec(**config) if config else None)}


def test_a_hybrid_prints_tokens_that_mislead(spec: Any) -> None:
    facts = read_log(HYBRID)
    assert facts is not None
    assert (facts.version, facts.model, facts.format) == ("0.20.0", "RedHatAI/Qwen3.6-35B-A3B-NVFP4", "fp8_e4m3")
    assert facts.measured.graphs is not None
    assert facts.measured.graphs.text == "0.64 GiB"
    found = explained(spec, HYBRID, QWEN_36_35B)
    assert found["GPU KV cache size"].verdict is Verdict.MISLEADS
    assert found["GPU KV cache size"].recomputed == "2,158,880"
    assert "7,110,656" in found["GPU KV cache size"].reason
    assert found["maximum concurrency"].verdict is Verdict.AGREES
    assert found["attention block size"].recomputed == "2,096"


def test_colours_of_every_spelling_hide_nothing(spec: Any) -> None:
    found = explained(spec, COLOURED, LLAMA_70B)
    assert found["GPU KV cache size"].verdict is Verdict.EXPLAINED
    assert found["GPU KV cache size"].reason == "4 tensor parallel ranks"


def test_a_model_that_was_not_served_is_a_contradiction(spec: Any) -> None:
    header = "INFO Initializing a V1 LLM engine (v0.11.2) with config: model='deepseek-ai/DeepSeek-R1', \
tensor_parallel_size=8, max_seq_len=8192\n"
    found = explained(spec, header + COLOURED, DEEPSEEK_R1)
    assert found["GPU KV cache size"].verdict is Verdict.UNEXPLAINED
    assert found["GPU KV cache size"].recomputed.startswith("1,62")


def test_the_parts_of_memory_make_the_pool(spec: Any) -> None:
    """https://github.com/vllm-project/vllm/issues/12330, 0.6.6, Meta-Llama-3-8B on an A100 of 40 GB."""
    log = """
INFO worker.py:241] the current vLLM instance can use total_gpu_memory (39.50GiB) x gpu_memory_utilization \
(0.90) = 35.55GiB
INFO worker.py:241] model weights take 14.96GiB; non_torch_memory takes 0.10GiB; PyTorch activation peak memory takes \
9.37GiB; the rest of the memory reserved for KV Cache is 11.12GiB.
INFO gpu_executor.py:76] # GPU blocks: 5691, # CPU blocks: 2048
INFO gpu_executor.py:80] Maximum concurrency for 8192 tokens per request: 11.12x
"""
    found = explained(spec, log, LLAMA_8B)
    assert found["available KV cache memory"].verdict is Verdict.AGREES
    assert found["available KV cache memory"].recomputed == "11.12 GiB"
    assert found["blocks"].verdict is Verdict.AGREES
    assert found["maximum concurrency"].verdict is Verdict.AGREES


def test_a_stage_is_charged_for_all_layers(spec: Any) -> None:
    """https://github.com/vllm-project/vllm/issues/34076, 0.15.2rc1."""
    log = """
INFO Initializing a V1 LLM engine (v0.15.2rc1.dev1) with config: model='Qwen/Qwen3-Coder-30B-A3B-Instruct-FP8', \
max_seq_len=262144, tensor_parallel_size=1, pipeline_parallel_size=2, kv_cache_dtype=auto
INFO [gpu_worker.py:359] Available KV cache memory: 3.18 GiB
ValueError: To serve at least one request with the models's max seq len (262144), (24.0 GiB KV cache is needed, which \
is larger than the available KV cache memory (3.18 GiB). Based on the available memory, the estimated maximum model \
length is 34736.
"""
    found = explained(spec, log, QWEN_30B)
    assert found["needed for a sequence"].verdict is Verdict.EXPLAINED
    assert "34076" in found["needed for a sequence"].reason
    assert found["estimated maximum model length"].verdict is Verdict.EXPLAINED


def test_padding_layers_and_an_older_formula(spec: Any) -> None:
    """A public log of 0.11.0rc2, gemma-3-27b-it."""
    log = """
INFO Initializing a V1 LLM engine (v0.11.0rc2.dev1) with config: model='google/gemma-3-27b-it', max_seq_len=4096, \
tensor_parallel_size=1, pipeline_parallel_size=1, kv_cache_dtype=auto, max_num_batched_tokens=8192
WARNING kv_cache_utils.py] Add 8 padding layers, may waste at most 15.38% KV cache memory
INFO gpu_worker.py] Available KV cache memory: 109.86 GiB
INFO kv_cache_utils.py] GPU KV cache size: 205,696 tokens
INFO kv_cache_utils.py] Maximum concurrency for 4,096 tokens per request: 50.05x
INFO core.py] num_gpu_blocks is: 89994
"""
    found = explained(spec, log, GEMMA_3_27B)
    assert found["padding layers"].verdict is Verdict.AGREES
    assert found["blocks"].verdict is Verdict.AGREES
    assert found["maximum concurrency"].verdict is Verdict.AGREES
    assert found["GPU KV cache size"].verdict is Verdict.MISLEADS
    assert "7 groups" in found["GPU KV cache size"].reason


def test_the_least_rank_binds(spec: Any) -> None:
    log = """
INFO config: model='m', max_seq_len=8192, tensor_parallel_size=2, kv_cache_dtype=auto
(Worker_TP0 pid=1) INFO Available KV cache memory: 11.90 GiB
(Worker_TP1 pid=2) INFO Available KV cache memory: 11.12 GiB
INFO GPU KV cache size: 182,144 tokens
"""
    found = explained(spec, log, LLAMA_8B)
    assert found["GPU KV cache size"].verdict is Verdict.AGREES
    assert found["available KV cache memory"].printed == "11.12 GiB"


def test_one_rank_of_several_is_no_explanation(spec: Any) -> None:
    """As https://github.com/vllm-project/vllm/issues/21348: 1.14% fewer tokens than the printed memory holds."""
    log = """
INFO config: model='m', max_seq_len=8192, tensor_parallel_size=2, block_size=16, kv_cache_dtype=auto
INFO Available KV cache memory: 11.12 GiB
INFO GPU KV cache size: 180,064 tokens
"""
    found = explained(spec, log, LLAMA_8B)["GPU KV cache size"]
    assert found.verdict is Verdict.UNEXPLAINED
    assert "least of the ranks'" in found.reason


def test_without_a_model_nothing_is_claimed(spec: Any) -> None:
    found = explained(spec, COLOURED, None)
    assert found["GPU KV cache size"].verdict is Verdict.NOT_CHECKED
    assert found["concurrency = tokens / max_model_len"].verdict is Verdict.AGREES


SINGLE = """
INFO Initializing a V1 LLM engine (v0.11.0) with config: model='m', max_seq_len=8192, tensor_parallel_size=1, \
speculative_config=None
INFO Available KV cache memory: 11.12 GiB
INFO GPU KV cache size: 91,056 tokens
INFO Maximum concurrency for 8,192 tokens per request: 11.12x
"""
"""Figures of https://github.com/vllm-project/vllm/issues/12330, Llama 3 8B."""
RATIO = "concurrency = tokens / max_model_len"


def test_tokens_that_are_not_concurrency_times_context_need_groups_of_layers(spec: Any) -> None:
    wrong = SINGLE.replace("11.12x", "22.24x")
    assert explained(spec, SINGLE, LLAMA_8B)[RATIO].verdict is Verdict.AGREES
    found = explained(spec, wrong, LLAMA_8B)[RATIO]
    assert (found.verdict, found.recomputed) == (Verdict.UNEXPLAINED, "11.12x")
    assert "one of the two is wrong" in found.reason
    unknown = explained(spec, wrong, None)[RATIO]
    assert unknown.verdict is Verdict.NOT_CHECKED
    assert "--model" in unknown.reason
    assert explained(spec, HYBRID, QWEN_36_35B)[RATIO].verdict is Verdict.MISLEADS
    contradicted = explained(spec, HYBRID.replace("2,158,880", "3,158,880"), QWEN_36_35B)[RATIO]
    assert contradicted.verdict is Verdict.UNEXPLAINED


def test_a_context_is_counted_in_whole_blocks(spec: Any) -> None:
    """1,000 tokens take 63 blocks of 16: 5,691 blocks are 90.33 times as many, and 91,056 tokens 91.06 times 1,000."""
    log = SINGLE.replace("11.12x", "90.33x").replace("8,192", "1,000").replace("8192", "1000")
    assert explained(spec, log, LLAMA_8B)[RATIO].verdict is Verdict.AGREES


@pytest.mark.parametrize(
    ("tokens", "ratio", "verdict", "reason"),
    [
        ("91,056", "11.12x", Verdict.AGREES, ""),
        ("88,288", "10.78x", Verdict.EXPLAINED, "a draft model of 1 layer with the model's KV heads has part of"),
        ("89,600", "10.94x", Verdict.UNEXPLAINED, "its geometry is not known"),
    ],
)
def test_a_draft_model_of_its_own_has_whole_layers_of_the_pool(
    spec: Any, tokens: str, ratio: str, verdict: Verdict, reason: str
) -> None:
    """Llama 3.1 8B: a head of one layer makes 33 of 32 layers."""
    draft = "SpeculativeConfig(method='eagle3', num_spec_tokens=3), block_size=16"
    log = SINGLE.replace("91,056", tokens).replace("11.12x", ratio).replace("speculative_config=None", draft)
    found = explained(spec, log, LLAMA_8B)["GPU KV cache size"]
    assert found.verdict is verdict
    assert reason in found.reason


def test_tokens_are_of_blocks_where_the_context_is_not(spec: Any) -> None:
    """https://github.com/vllm-project/vllm/issues/10517, 0.6: 1,478 blocks, and a context of 1,812.5."""
    log = SINGLE.replace("11.12 GiB", "2.89 GiB").replace("91,056", "23,648").replace("11.12x", "0.82x")
    log = log.replace("8,192", "29,000").replace("8192", "29000")
    assert {finding.verdict for finding in explained(spec, log, LLAMA_8B).values()} == {Verdict.AGREES}


def test_tokens_are_of_whole_blocks(spec: Any) -> None:
    found = explained(spec, SINGLE.replace("91,056", "91,057"), LLAMA_8B)["GPU KV cache size"]
    assert found.verdict is Verdict.UNEXPLAINED


def test_blocks_do_not_follow_from_themselves(spec: Any) -> None:
    found = explained(spec, "INFO gpu_executor.py:76] # GPU blocks: 5691, # CPU blocks: 2048", LLAMA_8B)["blocks"]
    assert found.verdict is Verdict.NOT_CHECKED


@pytest.mark.parametrize(("override", "verdict"), [("9533", Verdict.UNEXPLAINED), ("19067", Verdict.AGREES)])
def test_blocks_that_a_tpu_overrides_are_as_many_bytes(spec: Any, override: str, verdict: Verdict) -> None:
    """https://github.com/vllm-project/tpu-inference/pull/1285: pages are four times as large, not eight."""
    log = f"""
WARNING KV cache page size calculated by vLLM (524288 Bytes) does not match with actual page size used by Attention \
kernel (2097152 Bytes)
INFO Overriding num_gpu_blocks=76268 with num_gpu_blocks_override={override}
"""
    found = explained(spec, log, None)["blocks overridden"]
    assert (found.verdict, found.recomputed) == (verdict, "19,067")


@pytest.mark.parametrize("lines", range(1, 16))
def test_a_log_that_breaks_off_is_read_as_far_as_it_goes(spec: Any, lines: int) -> None:
    facts = read_log("\n".join(HYBRID.splitlines()[:lines]))
    if facts is not None:
        verdicts = {finding.verdict for finding in explain_log(facts, spec(**QWEN_36_35B))}
        assert Verdict.UNEXPLAINED not in verdicts


@pytest.mark.parametrize(("log", "config"), [(HYBRID, QWEN_36_35B), (COLOURED, LLAMA_70B), (SINGLE, LLAMA_8B)])
def test_no_other_figure_agrees(spec: Any, agreeing: Any, log: str, config: dict[str, Any]) -> None:
    assert agreeing(log, spec(**config)) == []


QWEN_35_27B = {"layers": 64, "heads": 24, "kv": 4, "hidden": 5120, "head_dim": 256, "model_type": "qwen3_5_text",
               "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
               "linear_num_key_heads": 16, "linear_num_value_heads": 48, "mamba_ssm_dtype": "float32",
               "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 16,
               "max_position_embeddings": 262144}  # fmt: skip


@pytest.mark.parametrize("concurrency", ["33.04x", "31.54x"])
def test_tokens_by_the_older_formula_tell_the_blocks_that_concurrency_is_held_against(
    spec: Any, concurrency: str
) -> None:
    """https://github.com/vllm-project/vllm/issues/40691, 0.19.0: 33.04x, with no word of the pool's memory."""
    log = f"""
INFO Initializing a V1 LLM engine (v0.19.0) with config: model='Qwen3.5-27B', max_seq_len=32768, tensor_parallel_size=1
INFO [kv_cache_utils.py:1319] GPU KV cache size: 290,864 tokens
INFO [kv_cache_utils.py:1324] Maximum concurrency for 32,768 tokens per request: {concurrency}
"""
    found = explained(spec, log, QWEN_35_27B)
    right = concurrency == "33.04x"
    assert found["maximum concurrency"].verdict is (Verdict.AGREES if right else Verdict.UNEXPLAINED)
    if right:
        assert found["GPU KV cache size"].verdict is Verdict.MISLEADS
        assert found[RATIO].verdict is Verdict.MISLEADS


def test_a_log_of_16_bits_is_explained_with_a_config_that_names_8(spec: Any) -> None:
    """The same log, held against the config of a quantized checkpoint of the model."""
    log = """
INFO Initializing a V1 LLM engine (v0.19.0) with config: model='Qwen3.5-27B', max_seq_len=32768, tensor_parallel_size=1
INFO [kv_cache_utils.py:1319] GPU KV cache size: 290,864 tokens
INFO [kv_cache_utils.py:1324] Maximum concurrency for 32,768 tokens per request: 33.04x
"""
    facts = read_log(log, "vllm")
    assert facts is not None
    model = replace(spec(**QWEN_35_27B), stated_cache=StatedCache(format="fp8_e4m3", library="modelopt"))
    found = {finding.what: finding for finding in explain_log(facts, model)}
    assert found["maximum concurrency"].verdict is Verdict.EXPLAINED
    assert "16 bits, whatever the checkpoint says" in found["maximum concurrency"].reason


@pytest.mark.parametrize(
    ("model", "said", "memory", "context", "tokens", "concurrency"),
    [
        # https://github.com/noonghunna/club-3090/issues/612, Qwen3.6-35B-A3B-NVFP4 on one RTX 5090
        (QWEN_36_35B, "'kv_cache_dtype': 'fp8', 'max_num_seqs': 1", "5.98", 131072, "567,978", "4.33"),
        # https://github.com/mitchross/talos-argocd-proxmox/pull/1995, Qwen3.8-27B-FP8 on two RTX 3090
        (QWEN_35_27B, "'kv_cache_dtype': 'fp8_e4m3', 'tensor_parallel_size': 2", "4.99", 131072, "302,921", "2.31"),
    ],
)
def test_hybrids_of_8_bits_are_followed_to_the_last_figure(
    spec: Any, model: Any, said: str, memory: str, context: int, tokens: str, concurrency: str
) -> None:
    log = f"""
INFO [api_utils.py:273] non-default args: {{'max_model_len': {context}, {said}, 'enable_prefix_caching': True, \
'max_num_batched_tokens': 8192}}
INFO [core.py:114] Initializing a V1 LLM engine (v0.24.0) with config: model='x'
INFO [gpu_worker.py:508] Available KV cache memory: {memory} GiB
INFO [kv_cache_utils.py:2146] GPU KV cache size: {tokens} tokens
INFO [kv_cache_utils.py:2147] Maximum concurrency for {context:,} tokens per request: {concurrency}x
"""
    found = explained(spec, log, model)
    assert found["maximum concurrency"].verdict is Verdict.AGREES
    assert found["GPU KV cache size"].verdict is Verdict.MISLEADS
