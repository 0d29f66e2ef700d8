"""What vLLM prints of its cache when it starts, from 0.4 to 0.29.

Wordings are those of vllm-project/vllm `vllm/worker/worker.py` and `vllm/executor/executor_base.py` (V0),
`vllm/v1/worker/gpu_worker.py` and `vllm/v1/core/kv_cache_utils.py` (V1), and of public logs of 0.6 to 0.29, read
2026-11-30.
"""

import re
from collections.abc import Sequence
from typing import Final

from kvplan.core.allocation import Setup
from kvplan.engines.log_fields import field, first_match, last_match, last_numbers, read_version
from kvplan.engines.logs import Line, LogFacts, Measured, Pattern, Printed, find_figures

_NUMBER: Final = r"(?P<number>-?\d[\d,]*(?:\.\d+)?)"
_SIZE: Final = _NUMBER + r"\s*(?P<unit>[KMGT]iB)"
_GIB: Final = 2.0**30


def _pattern(name: str, text: str, unit: str = "", scale: float | None = None) -> Pattern:
    return Pattern(name, re.compile(text.replace("NUMBER", _NUMBER).replace("SIZE", _SIZE)), unit, scale)


PATTERNS: Final = (
    _pattern("available", r"Available KV cache memory: SIZE"),
    _pattern("available", r"the rest of the memory reserved for KV Cache is SIZE"),
    _pattern("tokens", r"GPU KV cache size: NUMBER tokens", "tokens"),
    _pattern("concurrency", r"Maximum concurrency for [\d,]+ tokens(?: per request)?: NUMBERx", "x"),
    _pattern("concurrency_context", r"Maximum concurrency for NUMBER tokens", "tokens"),
    _pattern("blocks", r"# (?:GPU|cuda|CUDA) blocks: NUMBER", "blocks"),
    _pattern("blocks", r"num_gpu_blocks is: NUMBER", "blocks"),
    _pattern("needed", r"SIZE KV cache is needed"),
    _pattern("needed_context", r"model'?s'? max seq len \(NUMBER\)", "tokens"),
    _pattern("available", r"larger than the available KV cache memory \(SIZE\)"),
    _pattern("longest", r"estimated maximum model length is NUMBER", "tokens"),
    _pattern("block_tokens", r"Setting attention block size to NUMBER tokens", "tokens"),
    _pattern("padding_layers", r"Add NUMBER padding layers", "layers"),
    _pattern("override", r"num_gpu_blocks_override=NUMBER", "blocks"),
    _pattern("blocks_before", r"Overriding num_gpu_blocks=NUMBER", "blocks"),
    _pattern("counted_page", r"KV cache page size calculated by vLLM \(NUMBER Bytes\)", "bytes"),
    _pattern("kernel_page", r"actual page size used by Attention kernel \(NUMBER Bytes\)", "bytes"),
    _pattern("weights", r"Model loading took SIZE"),
    _pattern("weights", r"[Ll]oading model weights took NUMBER GB", "GB", _GIB),
    _pattern("weights", r"[Mm]odel weights take SIZE"),
    _pattern("weights", r"Actual usage(?: is|:) SIZE for weights?\b"),
    _pattern("consumed", r"Actual usage is SIZE for consumed memory"),
    _pattern("context", r"non_torch_memory takes SIZE"),
    _pattern("context", r"SIZE for non-torch memory"),
    _pattern("activations", r"PyTorch activation peak memory takes SIZE"),
    _pattern("activations", r"SIZE for peak activation"),
    _pattern("graphs", r"SIZE for CUDAGraph memory"),
    _pattern("graphs", r"Graph capturing finished in .*?took SIZE"),
    _pattern("graphs", r"CUDA graph pool memory: SIZE \(actual\)"),
    _pattern("graphs_estimated", r"Estimated CUDA graph memory: SIZE"),
    _pattern("usable", r"gpu_memory_utilization \([\d.]+\) = SIZE"),
    _pattern("usable", r"Desired GPU memory utilization is \([\d.]+, SIZE\)"),
    _pattern("total", r"total_gpu_memory \(SIZE\)"),
    _pattern("total", r"Free memory on device \([\d.]+/SIZE\)"),
)
_RANK: Final = re.compile(r"\((?:Worker\w*|VllmWorker\w*|EngineCore\w*)[ _]?[^)]*\)")
_TP_RANK: Final = re.compile(r"Worker_?TP(\d+)")
_VERSIONS: Final = (
    re.compile(r"LLM engine \(v?(\d+\.\d+[\w.+-]*)\)"),
    re.compile(r"API server version (\d+\.\d+[\w.+-]*)"),
    re.compile(r"[█▄▀ ]version v?(\d+\.\d+[\w.+-]*)"),
)
"""The banner and the engine's own line; other versions in a log are those of features."""
_MODEL: Final = re.compile(r"(?<![\w-])model(?:_tag)?['\"]?\s*[=:]\s*['\"]([^'\"]+)['\"]")
_FORMAT: Final = field("kv_cache_dtype", r"(?:torch\.)?([a-z]\w*)", "kv-cache-dtype")
_NUMBER_FIELDS: Final = {
    "context_tokens": field("max_(?:seq|model)_len", r"(\d+)", "max-model-len"),
    "tensor_parallel": field("tensor_parallel_size", r"(\d+)", "tensor-parallel-size", "tp"),
    "pipeline_parallel": field("pipeline_parallel_size", r"(\d+)", "pipeline-parallel-size", "pp"),
    "max_batched_tokens": field("max_num_batched_tokens", r"(\d+)", "max-num-batched-tokens"),
    "block_tokens": field("block_size", r"(\d+)", "block-size"),
    "draft_tokens": field("num_spec(?:ulative)?_tokens", r"(\d+)"),
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
    printed = found.get("concurrency_context") or found.get("needed_context")
    if printed:
        numbers["context_tokens"] = round(printed[-1].value)
    ranks = max((int(match[1]) for line in lines for match in _TP_RANK.finditer(line.text)), default=0)
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
