"""What vLLM prints of its cache when it starts, from 0.4 to 0.29.

Wordings are those of vllm-project/vllm `vllm/worker/worker.py` and `vllm/executor/executor_base.py` (V0),
`vllm/v1/worker/gpu_worker.py`, `vllm/utils/mem_utils.py` and `vllm/v1/core/kv_cache_utils.py` (V1), and of public logs
of 0.6 to 0.29, read 2026-11-30.
"""

import re
from collections.abc import Sequence
from typing import Final

from kvplan.core.allocation import Setup
from kvplan.engines.log_fields import (
    COUNT,
    RELEASE,
    field,
    figure_at,
    first_match,
    highest_rank,
    last_count,
    last_match,
    last_numbers,
    read_version,
)
from kvplan.engines.logs import Line, LogFacts, Measured, Printed, find_figures

PATTERNS: Final = (
    figure_at("available", r"Available KV cache memory: SIZE"),
    figure_at("available", r"the rest of the memory reserved for KV Cache is SIZE"),
    figure_at("tokens", r"GPU KV cache size: NUMBER tokens", "tokens"),
    figure_at("concurrency", r"Maximum concurrency for [\d,]{1,30} tokens(?: per request)?: NUMBERx", "x"),
    figure_at("concurrency_context", r"Maximum concurrency for NUMBER tokens", "tokens"),
    figure_at("blocks", r"# (?:GPU|cuda|CUDA) blocks: NUMBER", "blocks"),
    figure_at("blocks", r"num_gpu_blocks is: NUMBER", "blocks"),
    figure_at("needed", r"SIZE KV cache is needed"),
    figure_at("needed_context", r"model'?s'? max seq len \(NUMBER\)", "tokens"),
    figure_at("available", r"larger than the available KV cache memory \(SIZE\)"),
    figure_at("longest", r"estimated maximum model length is NUMBER", "tokens"),
    figure_at("block_tokens", r"Setting attention block size to NUMBER tokens", "tokens"),
    figure_at("padding_layers", r"Add NUMBER padding layers", "layers"),
    figure_at("override", r"num_gpu_blocks_override=NUMBER", "blocks"),
    figure_at("blocks_before", r"Overriding num_gpu_blocks=NUMBER", "blocks"),
    figure_at("counted_page", r"KV cache page size calculated by vLLM \(NUMBER Bytes\)", "bytes"),
    figure_at("kernel_page", r"actual page size used by Attention kernel \(NUMBER Bytes\)", "bytes"),
    figure_at("weights", r"Model loading took SIZE"),
    figure_at("weights", r"[Ll]oading model weights took GIGABYTES"),
    figure_at("weights", r"[Mm]odel weights take SIZE"),
    figure_at("weights", r"Actual usage(?: is|:) SIZE for weights?\b"),
    figure_at("consumed", r"Actual usage is SIZE for consumed memory"),
    figure_at("context", r"non_torch_memory takes SIZE"),
    figure_at("context", r"SIZE for non-torch memory"),
    figure_at("activations", r"PyTorch activation peak memory takes SIZE"),
    figure_at("activations", r"SIZE for peak activation"),
    figure_at("graphs", r"SIZE for CUDAGraph memory"),
    figure_at("graphs", r"Graph capturing finished in .*?took SIZE"),
    figure_at("graphs", r"CUDA graph pool memory: SIZE \(actual\)"),
    figure_at("graphs_estimated", r"Estimated CUDA graph memory: SIZE"),
    figure_at("usable", r"gpu_memory_utilization \([\d.]{1,30}\) = SIZE"),
    figure_at("usable", r"Desired GPU memory utilization is \([\d.]{1,30}, SIZE\)"),
    figure_at("usable", r"Requested memory: [\d.]{1,30} \(util\), SIZE"),
    figure_at("activations", r"torch peak memory increase: SIZE"),
    figure_at("context", r"non-torch forward increase memory: SIZE"),
    figure_at("total", r"total_gpu_memory \(SIZE\)"),
    figure_at("total", r"Free memory on device \([\d.]{1,30}/SIZE\)"),
)
_RANK: Final = re.compile(r"\((?:Worker|VllmWorker|EngineCore)[^()]{0,99}\)")
_TP_RANK: Final = re.compile(r"Worker_?TP(\d{1,6})(?!\d)")
_VERSIONS: Final = (
    re.compile(rf"LLM engine \({RELEASE}\)"),
    re.compile(rf"API server version {RELEASE}"),
    re.compile(rf"[█▄▀ ]version {RELEASE}"),
)
"""The banner and the engine's own line; other versions in a log are those of features."""
_MODEL: Final = re.compile(r"(?<![\w-])model(?:_tag)?['\"]?\s*[=:]\s*['\"]([^'\"]+)['\"]")
_FORMAT: Final = field("kv_cache_dtype", r"(?:torch\.)?([a-z]\w*)", "kv-cache-dtype")
_NUMBER_FIELDS: Final = {
    "context_tokens": field("max_(?:seq|model)_len", COUNT, "max-model-len"),
    "tensor_parallel": field("tensor_parallel_size", COUNT, "tensor-parallel-size", "tp"),
    "pipeline_parallel": field("pipeline_parallel_size", COUNT, "pipeline-parallel-size", "pp"),
    "max_batched_tokens": field("max_num_batched_tokens", COUNT, "max-num-batched-tokens"),
    "block_tokens": field("block_size", COUNT, "block-size"),
    "draft_tokens": field("num_spec(?:ulative)?_tokens", COUNT),
}
_CACHING: Final = re.compile(r"\benable_prefix_caching['\"]?\s*[=:]\s*(True|False)")
_HYBRID_OFF: Final = re.compile(
    r"disable_hybrid_kv_cache_manager['\"]?\s*[=:]\s*True|Hybrid KV cache manager is disabled"
)
_GRAPHS_WITHIN: Final = (0, 21)
"""The release from which the memory of graphs is estimated before the pool is made."""


def read_log(lines: Sequence[Line]) -> LogFacts | None:
    """Return what a log of vLLM says; None where nothing in it is vLLM's."""
    found = find_figures(lines, PATTERNS, _RANK)
    if not found:
        return None
    version = _version(lines)
    fields, stated = _fields(lines, found)
    form = last_match(lines, _FORMAT)
    figures = {name: tuple(items) for name, items in found.items()}
    return LogFacts(
        engine="vllm",
        version=version,
        model=first_match(lines, _MODEL),
        format="" if form in ("auto", "") else form,
        setup=fields,
        stated=stated | ({"format"} if form else set()),
        figures=figures,
        measured=_measured(figures, version),
    )


def _fields(lines: Sequence[Line], found: dict[str, list[Printed]]) -> tuple[Setup, frozenset[str]]:
    numbers = last_numbers(lines, _NUMBER_FIELDS)
    printed = last_count(found.get("concurrency_context") or found.get("needed_context") or ())
    if printed:
        numbers["context_tokens"] = printed
    ranks = highest_rank(lines, _TP_RANK)
    if ranks and "tensor_parallel" not in numbers:
        numbers["tensor_parallel"] = ranks + 1
    caching = last_match(lines, _CACHING)
    off = any(_HYBRID_OFF.search(line.text) for line in lines)
    setup = Setup(
        context_tokens=numbers.get("context_tokens", 0),
        tensor_parallel=numbers.get("tensor_parallel", 1),
        pipeline_parallel=numbers.get("pipeline_parallel", 1),
        max_batched_tokens=numbers.get("max_batched_tokens"),
        block_tokens=numbers.get("block_tokens"),
        draft_tokens=numbers.get("draft_tokens", 0),
        prefix_caching=None if not caching else caching == "True",
        version=read_version(_version(lines)),
        options=frozenset({"disable-hybrid-kv-cache-manager"} if off else set()),
    )
    return setup, frozenset(numbers) | ({"prefix_caching"} if caching else set()) | ({"options"} if off else set())


def _version(lines: Sequence[Line]) -> str:
    """Return the release that a line which is only about it names."""
    found = (first_match(lines, pattern) for pattern in _VERSIONS)
    return next((version for version in found if version), "")


def _measured(figures: dict[str, tuple[Printed, ...]], version: str) -> Measured:
    def last(name: str) -> Printed | None:
        return figures[name][-1] if name in figures else None

    return Measured(
        pool=min(figures.get("available", ()), key=lambda figure: figure.value, default=None),
        usable=last("usable"),
        weights=last("weights"),
        activations=last("activations"),
        context=last("context"),
        graphs=last("graphs") or last("graphs_estimated"),
        graphs_within="graphs_estimated" in figures or (read_version(version) or ()) >= _GRAPHS_WITHIN,
    )
