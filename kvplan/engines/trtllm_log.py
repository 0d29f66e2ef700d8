"""What TensorRT-LLM prints of its cache when it starts, from 0.5 to 1.4.

Wordings are those of NVIDIA/TensorRT-LLM `cpp/tensorrt_llm/batch_manager/kvCacheManager.cpp` and
`tensorrt_llm/_torch/pyexecutor/_util.py`, `resource_manager.py` and `mamba_cache_manager.py`, and of public logs, read
2026-11-30.
"""

import re
from collections.abc import Sequence
from typing import Final

from kvplan.core.allocation import Setup
from kvplan.engines.checks import GIB
from kvplan.engines.log_fields import (
    COUNT,
    RELEASE,
    SHARE,
    field,
    figure_at,
    first_match,
    last_count,
    last_match,
    last_numbers,
    read_version,
)
from kvplan.engines.logs import Line, LogFacts, Measured, Printed, find_figures

HINT: Final = "TensorRT-LLM prints its pools with TLLM_LOG_LEVEL=INFO"
FRACTION: Final = "free-gpu-memory-fraction"
DEFAULT_FRACTION: Final = 0.9

_AVAILABLE: Final = r"available KV cache memory when calculating max tokens: SIZE"

PATTERNS: Final = (
    figure_at("allocated", r"Allocated SIZE for max tokens in paged KV cache \(\d"),
    figure_at("tokens", r"for max tokens in paged KV cache \(NUMBER\)", "tokens"),
    figure_at("placeholder_pages", r"Using fake cache manager .*?num pages: NUMBER", "pages"),
    figure_at("block_tokens", r"Number of tokens per block: NUMBER", "tokens"),
    figure_at("block_tokens", r"\btokens per block=NUMBER", "tokens"),
    figure_at("blocks", r"Number of blocks in KV cache primary pool: NUMBER", "blocks"),
    figure_at("window_blocks", r"Max KV cache blocks per sequence: .*?\bprimary blocks=NUMBER", "blocks"),
    figure_at("window", r"Max KV cache blocks per sequence: .*?\[window size=NUMBER\]", "tokens"),
    figure_at("token_bytes", r"kv size(?: per token)? is NUMBER", "bytes"),
    figure_at("budget", _AVAILABLE),
    figure_at("peak", r"Peak memory during memory usage profiling \(torch \+ non-torch\): SIZE"),
    figure_at("device", r"device total memory SIZE"),
    figure_at("profiled", r"(?:tmp kv_mem|temporary kv cache memory during profiling) SIZE"),
    figure_at("estimated", r"Estimated max memory in KV cache ?: SIZE"),
    figure_at("device", r"calculating max tokens in paged kv cache: total: SIZE"),
    figure_at("free", r"calculating max tokens in paged kv cache: total: .*?available: SIZE"),
    figure_at("quota", r"KV cache manager v2 device quota set to SIZE"),
    figure_at("max_tokens", r"max_tokens are set \(to [\d.]{1,30} and NUMBER", "tokens"),
    figure_at("asked", r"Attention window size NUMBER exceeds upper bound", "tokens"),
    figure_at("reduced", r"exceeds upper bound \d{1,18} for available blocks\. Reducing to NUMBER", "tokens"),
    figure_at("cut", r"to fit in kvCache\. they are reduced to NUMBER", "tokens"),
    figure_at("longest", r"\bmax_seq_len=NUMBER, max_num_requests=", "tokens"),
    figure_at("requests", r"\bmax_seq_len=\d{1,18}, max_num_requests=NUMBER", "requests"),
    figure_at("bytes", r"Allocate NUMBER bytes for k/v cache", "bytes"),
    figure_at("used_tokens", r"Using NUMBER tokens in paged KV cache", "tokens"),
    figure_at("slots", r"Mamba Cache is allocated\. max_mamba_cache_size: NUMBER", "slots"),
    figure_at("conv_size", r"max_mamba_cache_size: .*?\bconv_state size: GIGABYTES"),
    figure_at("state_size", r"max_mamba_cache_size: .*?\bssm_state size: GIGABYTES"),
    figure_at("weights", r"after loading model weights \(inside torch\) in memory usage profiling: SIZE"),
    figure_at(
        "activations", r"dynamically allocated during inference \(inside torch\) in memory usage profiling: SIZE"
    ),
)
_OWN: Final = frozenset(pattern.name for pattern in PATTERNS) - {"slots", "conv_size", "state_size"}
"""Figures that no other engine prints in the same words."""
_RANK: Final = re.compile(r"\[RANK \d{1,6}\]")
_MARKS: Final = re.compile(r"\[TensorRT-LLM\]|\[TRT-LLM\b|\btrtllm-serve\b")
_BUILT: Final = re.compile(r"TRTGptModel|Loaded engine size|\bEngine version \d|MpiComm|MPI size:")
_VERSION: Final = re.compile(r"TensorRT[- ]LLM\]? (?:TensorRT[- ]LLM )?version:? " + RELEASE)
_MODEL: Final = re.compile(
    r"(?<![\w-])model(?:_path)?['\"]?\s*[=:]\s*(?:PosixPath\()?['\"]([^'\"]+)['\"]|trtllm-serve (?:serve )?([\w./-]+)"
)
_NUMBERS: Final = {
    "tensor_parallel": field("(?:tensor_parallel_size|tp_size)", COUNT, "tp_size", "tensor_parallel_size"),
    "pipeline_parallel": field("(?:pipeline_parallel_size|pp_size)", COUNT, "pp_size", "pipeline_parallel_size"),
    "max_batched_tokens": field("max_num_tokens", COUNT, "max_num_tokens"),
}
_ASKED: Final = re.compile(
    rf"(?<![\w.-])max_seq_len['\"]?\s*[=:]\s*{COUNT}(?!, max_num_requests)|--max_seq_len[ =]{COUNT}"
)
_FORMAT: Final = field("(?:kv_cache_dtype|kv_cache_quant_algo)", r"([A-Za-z]\w*)", "kv_cache_dtype")
_CONFIG_FORMAT: Final = re.compile(
    r"KvCacheConfig\([^)]{0,2000}?\bdtype=['\"](\w+)['\"]|kv_cache_config.{0,300}?'dtype': '(\w+)'"
)
_FRACTIONS: Final = (
    re.compile(r"fraction is set " + SHARE),
    field("(?:kv_cache_)?free_gpu_mem(?:ory)?_fraction", SHARE, "kv_cache_free_gpu_memory_fraction"),
)
_REUSE: Final = field("enable_block_reuse", "(?i:(true|false))")
_PARALLEL_ATTENTION: Final = field("enable_attention_dp", "(?i:(true|false))")
_FORMATS: Final = {
    "float16": "fp16",
    "bfloat16": "bf16",
    "half": "fp16",
    "FP8": "fp8",
    "NVFP4": "nvfp4",
    "INT8": "int8",
}


def read_log(lines: Sequence[Line]) -> LogFacts | None:
    """Return what a log of TensorRT-LLM says; None where nothing in it is TensorRT-LLM's."""
    found = find_figures(lines, PATTERNS, _RANK)
    if not found.keys() & _OWN:
        if not any(_MARKS.search(line.text) for line in lines):
            return None
        found = {name: items for name, items in found.items() if name not in _OWN}
    version = first_match(lines, _VERSION)
    setup, stated = _setup(lines, found, version)
    form = _format(lines)
    figures = {name: tuple(items) for name, items in found.items()}
    return LogFacts(
        engine="trtllm", version=version, model=first_match(lines, _MODEL), format=form, setup=setup,
        stated=stated | ({"format"} if form else set()), figures=figures, measured=_measured(figures, setup), hint=HINT,
    )  # fmt: skip


def fraction(setup: Setup) -> float:
    """Return the part of free memory that the pool takes."""
    return float(setup.option(FRACTION) or DEFAULT_FRACTION)


def asked_context(lines: Sequence[Line]) -> int:
    """Return the longest sequence that was asked for; 0 where the log does not say."""
    text = first_match(lines, _ASKED)
    return int(text) if text else 0


def _format(lines: Sequence[Line]) -> str:
    word = last_match(lines, _FORMAT) or last_match(lines, _CONFIG_FORMAT)
    return "" if word in ("auto", "None", "") else _FORMATS.get(word, word)


def _setup(lines: Sequence[Line], found: dict[str, list[Printed]], version: str) -> tuple[Setup, frozenset[str]]:
    numbers = last_numbers(lines, _NUMBERS)
    asked = asked_context(lines) or last_count(found.get("asked", ()))
    context = last_count(found.get("longest", ())) or asked
    if context:
        numbers["context_tokens"] = context
    block = last_count(found.get("block_tokens", ()))
    if block:
        numbers["block_tokens"] = block
    reuse = last_match(lines, _REUSE).lower()
    options = _options(lines, found)
    if asked > context:
        options |= {f"max-seq-len={asked}"}
    setup = Setup(
        context_tokens=context,
        tensor_parallel=numbers.get("tensor_parallel", 1),
        pipeline_parallel=numbers.get("pipeline_parallel", 1),
        max_batched_tokens=numbers.get("max_batched_tokens"),
        block_tokens=block or None,
        prefix_caching=None if not reuse else reuse == "true",
        version=read_version(version),
        options=options,
    )
    return setup, frozenset(numbers) | ({"prefix_caching"} if reuse else set())


def _options(lines: Sequence[Line], found: dict[str, list[Printed]]) -> frozenset[str]:
    options: set[str] = set()
    shares = [text for text in (last_match(lines, pattern) for pattern in _FRACTIONS) if text]
    if shares:
        options.add(f"{FRACTION}={shares[0]}")
    if ("free" in found and "budget" not in found) or any(_BUILT.search(line.text) for line in lines):
        options.add("backend=tensorrt")
    if last_match(lines, _PARALLEL_ATTENTION).lower() == "true":
        options.add("enable-attention-dp")
    if len({figure.value for figure in found.get("window", ())}) > 1 and "profiled" not in found:
        options.add("max-attention-window")
    return frozenset(options)


def _measured(figures: dict[str, tuple[Printed, ...]], setup: Setup) -> Measured:
    """Return what the run took: of what is free after it the pool has a part, and the rest is not usable."""

    def last(name: str) -> Printed | None:
        return figures[name][-1] if name in figures else None

    pool = _pool(figures, setup)
    device, peak, profiled, free = last("device"), last("peak"), last("profiled"), last("free")
    if device is None or (peak is None and free is None):
        return Measured(weights=last("weights"), activations=last("activations"), pool=pool)
    if peak is not None:
        cache = 0.0 if profiled is None else profiled.value
        taken, text = (
            peak.value - cache,
            f"{peak.text} at the peak less {profiled.text if profiled else '0 GiB'} of cache",
        )
        line = peak.line
    else:
        assert free is not None
        taken, text, line = device.value - free.value, f"{device.text} less {free.text} that are free", free.line
    left = (1 - fraction(setup)) * (device.value - taken)
    usable = _derived(device.value - left, f"{device.text} less {left / GIB:.2f} GiB that are left free", device.line)
    weights, activations = last("weights"), last("activations")
    if weights is not None and activations is not None:
        beside = taken - weights.value - activations.value
        context = _derived(beside, f"{text}, less weights and activations", line)
        return Measured(usable=usable, weights=weights, activations=activations, context=context, pool=pool)
    return Measured(usable=usable, taken=_derived(taken, text, line), pool=pool)


def _pool(figures: dict[str, tuple[Printed, ...]], setup: Setup) -> Printed | None:
    """Return what the tokens of the pool that serves take: its own size is printed rounded, to fewer tokens than those.

    None where a line that says so is missing, is of the pass that measures memory, or is of several windows.
    """
    tokens, each = figures.get("tokens", ()), figures.get("token_bytes", ())
    peaks = figures.get("peak", ())
    if not tokens or not each or setup.option("max-attention-window") is not None:
        return None
    last = tokens[-1]
    if last.value <= 0 or any(peak.line > last.line for peak in peaks):
        return None
    return _derived(last.value * each[-1].value, f"{last.text} of {each[-1].text} each", last.line)


def _derived(value: float, text: str, line: int) -> Printed:
    return Printed(value, value, value, text, line)
