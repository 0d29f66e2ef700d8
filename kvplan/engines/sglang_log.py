"""What SGLang prints of its pools when it starts, from 0.4 to 0.5.23.

Wordings are those of `srt/mem_cache/memory_pool.py`, `srt/model_executor/pool_configurator.py`, `model_runner.py` and
`model_runner_components/kv_pool_runtime.py` of PyPI `sglang` 0.4.6 to 0.5.23, and of public logs, read 2026-11-30. What
SGLang calls GB are GiB throughout.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from kvplan.core.allocation import Setup
from kvplan.engines.checks import GIB
from kvplan.engines.log_fields import field, first_match, last_match, last_numbers, read_version
from kvplan.engines.logs import Line, LogFacts, Measured, Pattern, Printed, find_figures

HINT: Final = "SGLang prints its pools at --log-level info, which is its default"
DRAFTED: Final = "speculative-num-draft-tokens"
REQUESTS: Final = "max-running-requests"
STATIC: Final = "mem-fraction-static"

_NUMBER: Final = r"(?P<number>-?\d{1,18}(?:,\d{3}){0,6}(?:\.\d{1,9})?)"
_INTEGER: Final = r"(\d{1,12})\b"
_SHARE: Final = r"(\d{0,3}\.?\d{1,9})"
_POOL: Final = r"(?<!Virtual)KV Cache (?:is allocated\.|limits by --mem-fraction-static:)"
_RESERVED: Final = r"(?:VirtualKV Cache is allocated\.|KV Cache VA upper bound\.)"


def _count(name: str, text: str, unit: str) -> Pattern:
    return Pattern(name, re.compile(text.replace("NUMBER", _NUMBER)), unit)


def _size(name: str, text: str) -> Pattern:
    return Pattern(name, re.compile(text.replace("SIZE", _NUMBER + r"\s?(?P<unit>GB)")), scale=GIB)


PATTERNS: Final = (
    _count("pool_tokens", _POOL + r".*?#tokens: NUMBER", "tokens"),
    _size("k_size", _POOL + r".*?\bK size: SIZE"),
    _size("v_size", _POOL + r".*?\bV size: SIZE"),
    _size("kv_size", _POOL + r".*?\bKV size: SIZE"),
    _count("reserved_tokens", _RESERVED + r".*?#tokens: NUMBER", "tokens"),
    _count("full_tokens", r"full_layer_tokens=NUMBER", "tokens"),
    _count("window_tokens", r"swa_layer_tokens=NUMBER", "tokens"),
    _size("both_pools", r"SWAKVPool mem usage: SIZE"),
    _count("captured_tokens", r"KV sizing: KV cache allocated\..*?#tokens: NUMBER", "tokens"),
    _size("captured_size", r"KV sizing: KV cache allocated\..*?\bKV size: SIZE"),
    _count("slots", r"Mamba Cache is allocated\. max_mamba_cache_size: NUMBER", "slots"),
    _size("conv_size", r"\bconv_state size: SIZE"),
    _size("state_size", r"\bssm_state size: SIZE"),
    _size("drafted_state_size", r"\bintermediate_ssm_state_cache size: SIZE"),
    _count("tokens", r"\bmax_total_num_tokens=NUMBER", "tokens"),
    _count("requests", r"\bmax_total_num_tokens=.*?\bmax_running_requests=NUMBER", "requests"),
    _count("context", r"\bmax_total_num_tokens=.*?\bcontext_len=NUMBER", "tokens"),
    _size("before_load", r"Load weight begin\. avail mem=SIZE"),
    _size("after_load", r"Load weight end\..*?\bavail mem=SIZE"),
    _size("weights", r"Load weight end\..*?\bmem usage=SIZE"),
    _size("after_pool", r"Memory pool end\. avail mem=SIZE"),
    _size("graphs", r"Capture .*?(?:cuda|CUDA) graph end\..*?\bmem usage=SIZE"),
    _size("left", r"\bavailable_gpu_mem=SIZE"),
)
_RANK: Final = re.compile(r"(?:\b(?:DP|PP|TP|EP|CP|ATTN_CP|MOE_DP)\d+ ?)+")
_TP_RANK: Final = re.compile(r"\bTP(\d+)")
_START: Final = re.compile(r"\bserver_args=")
_MARKS: Final = re.compile(r"\bserver_args=ServerArgs|\bsglang(?:\.launch_server| serve)\b")
_VERSION: Final = re.compile(r"(?i)\bsglang(?:[ _-]version)?\s?(?:[:=]{1,2}|\()?\s?v?(\d+\.\d+\.\d+[\w.]*)")
_MODEL: Final = field("model_path", r"([^'\",\s)]+)", "model-path", "model")
_NUMBERS: Final = {
    "tensor_parallel": field("tp_size", _INTEGER, "tp", "tp-size", "tensor-parallel-size"),
    "pipeline_parallel": field("pp_size", _INTEGER, "pp", "pp-size", "pipeline-parallel-size"),
    "block_tokens": field("page_size", _INTEGER, "page-size"),
    "max_batched_tokens": field("chunked_prefill_size", r"([1-9]\d*)", "chunked-prefill-size"),
    "context_tokens": field("context_length", _INTEGER, "context-length"),
}
_FORMAT: Final = field("kv_cache_dtype", r"([a-z]\w*)", "kv-cache-dtype")
_TYPE: Final = re.compile(r"(?:KV Cache [^#]*?dtype: |Using KV cache dtype: )torch\.(\w+)")
_TYPES: Final = {
    "bfloat16": "bf16", "float16": "fp16", "float8_e4m3fn": "fp8_e4m3", "float8_e4m3fnuz": "fp8_e4m3",
    "float8_e5m2": "fp8_e5m2",
}  # fmt: skip
_NO_RADIX: Final = re.compile(r"(?<![\w-])disable_radix_cache['\"]?\s*[=:]\s*(True|False)|(--disable-radix-cache)\b")
_FLAGS: Final = ("enable_dp_attention", "disable_hybrid_swa_memory")
_OPTIONS: Final = {
    "dp-size": _INTEGER, "swa-full-tokens-ratio": _SHARE, "mamba-full-memory-ratio": _SHARE,
    "mamba-ssm-dtype": r"(float32|bfloat16|float16)", "max-mamba-cache-size": _INTEGER, "max-total-tokens": _INTEGER,
    "mamba-radix-cache-strategy": r"(no_buffer|extra_buffer_lazy|extra_buffer)", "dsa-prefill-backend": r"(\w+)",
    "dsa-decode-backend": r"(\w+)", STATIC: r"(0\.\d{1,18})", REQUESTS: _INTEGER,
}  # fmt: skip
_FORMER: Final = {
    "mamba-radix-cache-strategy": "mamba-scheduler-strategy", "dsa-prefill-backend": "nsa-prefill-backend",
    "dsa-decode-backend": "nsa-decode-backend",
}  # fmt: skip
_DRAFTED: Final = field(DRAFTED.replace("-", "_"), _INTEGER, DRAFTED)
_ALGORITHM: Final = field("speculative_algorithm", r"([A-Z]\w+)", "speculative-algorithm")


def read_log(lines: Sequence[Line]) -> LogFacts | None:
    """Return what a log of SGLang says of its last start that it printed figures of; None where nothing is SGLang's."""
    start, found = _last_start(lines)
    if not found and not any(_MARKS.search(line.text) for line in lines):
        return None
    version = first_match(start, _VERSION)
    setup, stated = _setup(start, found, version)
    form, told = _format(start)
    figures = {name: tuple(items) for name, items in found.items()}
    return LogFacts(
        engine="sglang", version=version, model=_named(first_match(start, _MODEL)), format=form, setup=setup,
        stated=stated | ({"format"} if told else set()), figures=figures, measured=_measured(figures, setup), hint=HINT,
    )  # fmt: skip


def first_of_ranks(figures: Sequence[Printed]) -> list[Printed]:
    """Return the first of each rank's: what is printed after it is of a draft model."""
    found: dict[str, Printed] = {}
    for figure in figures:
        found.setdefault(figure.rank, figure)
    return list(found.values())


def _last_start(lines: Sequence[Line]) -> tuple[Sequence[Line], dict[str, list[Printed]]]:
    """Return the lines of the last start with figures, and those."""
    starts = [index for index, line in enumerate(lines) if _START.search(line.text)]
    for begin in reversed(starts[1:]):
        found = find_figures(lines[begin:], PATTERNS, _RANK)
        if "pool_tokens" in found or "tokens" in found:
            return lines[begin:], found
    return lines, find_figures(lines, PATTERNS, _RANK)


def _named(model: str) -> str:
    return "" if model in ("None", "") else model


def _format(lines: Sequence[Line]) -> tuple[str, bool]:
    """Return what the cache is in, and whether the log settles it: `auto` may be what a checkpoint asks for."""
    kind = first_match(lines, _TYPE)
    if kind:
        return _TYPES.get(kind, kind), True
    word = last_match(lines, _FORMAT)
    return ("", False) if word in ("auto", "") else (word, True)


def _setup(lines: Sequence[Line], found: dict[str, list[Printed]], version: str) -> tuple[Setup, frozenset[str]]:
    numbers = last_numbers(lines, _NUMBERS)
    if "context" in found:
        numbers["context_tokens"] = round(found["context"][-1].value)
    ranks = max((int(match[1]) for line in lines for match in _TP_RANK.finditer(line.text)), default=0)
    if ranks and "tensor_parallel" not in numbers:
        numbers["tensor_parallel"] = ranks + 1
    radix = last_match(lines, _NO_RADIX)
    options = _options(lines)
    setup = Setup(
        context_tokens=numbers.get("context_tokens", 0),
        tensor_parallel=max(1, numbers.get("tensor_parallel", 1)),
        pipeline_parallel=max(1, numbers.get("pipeline_parallel", 1)),
        max_batched_tokens=numbers.get("max_batched_tokens"),
        block_tokens=numbers.get("block_tokens") or None,
        prefix_caching=None if not radix else radix == "False",
        version=read_version(version),
        options=options,
    )
    arguments = any(_START.search(line.text) for line in lines)
    stated = frozenset(numbers) | ({"prefix_caching"} if radix else set())
    return setup, stated | ({"arguments"} if arguments else set())


def _options(lines: Sequence[Line]) -> frozenset[str]:
    found: set[str] = set()
    for name in _FLAGS:
        word = last_match(lines, field(name, "(True|False)"))
        dashed = name.replace("_", "-")
        if word == "True" or (not word and any(f"--{dashed}" in line.text for line in lines)):
            found.add(dashed)
    for name, value in _OPTIONS.items():
        former = _FORMER.get(name, name)
        words = f"(?:{name.replace('-', '_')}|{former.replace('-', '_')})"
        text = last_match(lines, field(words, value, name, former))
        if text and text not in ("None", "auto"):
            found.add(f"{name}={text}")
    drafted = last_match(lines, _DRAFTED)
    if drafted and last_match(lines, _ALGORITHM):
        found.add(f"{DRAFTED}={drafted}")
    return frozenset(found)


def _measured(figures: dict[str, tuple[Printed, ...]], setup: Setup) -> Measured:
    def least(name: str) -> Printed | None:
        return min(first_of_ranks(figures.get(name, ())), key=lambda figure: figure.value, default=None)

    weights = figures.get("weights", ())
    part = usable(least("before_load"), setup)
    return Measured(
        usable=part,
        activations=part
        and replace(part, value=0.0, low=0.0, high=0.0, text="none of it: they are in what mem-fraction-static leaves"),
        weights=max(first_of_ranks(weights), key=lambda figure: figure.value, default=None),
        graphs=figures["graphs"][-1] if "graphs" in figures else None,
        graphs_within="captured_tokens" in figures,
    )


def usable(before: Printed | None, setup: Setup) -> Printed | None:
    """Return what weights and pools may take: a part of what was free before loading."""
    share = setup.option(STATIC)
    if before is None or share is None:
        return None
    part = float(share)
    text = f"{before.text} x {share}"
    return Printed(before.value * part, before.low * part, before.high * part, text, before.line, before.rank)
