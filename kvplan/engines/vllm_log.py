"""What vLLM prints of its cache when it starts, from 0.4 to 0.29.

Wordings are those of vllm-project/vllm `vllm/worker/worker.py` and `vllm/executor/executor_base.py` (V0),
`vllm/v1/worker/gpu_worker.py` and `vllm/v1/core/kv_cache_utils.py` (V1), and of public logs of 0.6 to 0.29, read
2026-11-30.
"""

import re
from collections.abc import Sequence
from typing import Final

from kvplan.core.allocation import Setup
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
_TEXT_FIELDS: Final = {"format": re.compile(r"\bkv_cache_dtype['\"]?\s*[=:]\s*['\"]?(?:torch\.)?([a-z]\w*)")}
_NUMBER_FIELDS: Final = {
    "context_tokens": re.compile(r"\bmax_(?:seq|model)_len['\"]?\s*[=:]\s*(\d+)"),
    "tensor_parallel": re.compile(r"\btensor_parallel_size['\"]?\s*[=:]\s*(\d+)"),
    "pipeline_parallel": re.compile(r"\bpipeline_parallel_size['\"]?\s*[=:]\s*(\d+)"),
    "max_batched_tokens": re.compile(r"\bmax_num_batched_tokens['\"]?\s*[=:]\s*(\d+)"),
    "block_tokens": re.compile(r"\bblock_size['\"]?\s*[=:]\s*(\d+)"),
    "draft_tokens": re.compile(r"\bnum_spec(?:ulative)?_tokens['\"]?\s*[=:]\s*(\d+)"),
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
    version = _first(lines, _VERSIONS)
    fields, stated = _fields(lines, found)
    form = _last(lines, _TEXT_FIELDS["format"])
    figures = {name: tuple(items) for name, items in found.items()}
    return LogFacts(
        engine="vllm",
        version=version,
        model=_first(lines, (_MODEL,)),
        format="" if form in ("auto", "") else form,
        setup=fields,
        stated=stated | ({"format"} if form else set()),
        figures=figures,
        measured=_measured(figures, version),
    )


def _fields(lines: Sequence[Line], found: dict[str, list[Printed]]) -> tuple[Setup, frozenset[str]]:
    numbers: dict[str, int] = {}
    for name, regex in _NUMBER_FIELDS.items():
        if value := _last(lines, regex):
            numbers[name] = int(value)
    printed = found.get("concurrency_context") or found.get("needed_context")
    if printed:
        numbers["context_tokens"] = round(printed[-1].value)
    ranks = max((int(match[1]) for line in lines for match in _TP_RANK.finditer(line.text)), default=0)
    if ranks and "tensor_parallel" not in numbers:
        numbers["tensor_parallel"] = ranks + 1
    caching = _last(lines, _CACHING)
    off = any(_HYBRID_OFF.search(line.text) for line in lines)
    setup = Setup(
        context_tokens=numbers.get("context_tokens", 0),
        tensor_parallel=numbers.get("tensor_parallel", 1),
        pipeline_parallel=numbers.get("pipeline_parallel", 1),
        max_batched_tokens=numbers.get("max_batched_tokens"),
        block_tokens=numbers.get("block_tokens"),
        draft_tokens=numbers.get("draft_tokens", 0),
        prefix_caching=None if not caching else caching == "True",
        version=_version(_first(lines, _VERSIONS)),
        options=frozenset({"disable-hybrid-kv-cache-manager"} if off else set()),
    )
    return setup, frozenset(numbers) | ({"prefix_caching"} if caching else set()) | ({"options"} if off else set())


def _version(text: str) -> tuple[int, ...] | None:
    numbers = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(part) for part in numbers[0].split(".")) if numbers else None


def _first(lines: Sequence[Line], patterns: Sequence[re.Pattern[str]]) -> str:
    for pattern in patterns:
        for line in lines:
            if match := pattern.search(line.text):
                return match[1]
    return ""


def _last(lines: Sequence[Line], pattern: re.Pattern[str]) -> str:
    found = [match[1] for line in lines for match in pattern.finditer(line.text)]
    return found[-1] if found else ""


def _measured(figures: dict[str, tuple[Printed, ...]], version: str) -> Measured:
    def last(name: str) -> Printed | None:
        return figures[name][-1] if name in figures else None

    return Measured(
        usable=last("usable"),
        weights=last("weights"),
        activations=last("activations"),
        context=last("context"),
        graphs=last("graphs") or last("graphs_estimated"),
        graphs_within="graphs_estimated" in figures or (_version(version) or ()) >= _GRAPHS_WITHIN,
    )
