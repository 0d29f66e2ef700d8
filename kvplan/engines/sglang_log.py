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
from kvplan.engines.log_fields import (
    COUNT,
    END,
    RELEASE,
    SHARE,
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

HINT: Final = "SGLang prints its pools at --log-level info, which is its default"
DRAFTED: Final = "speculative-num-draft-tokens"
REQUESTS: Final = "max-running-requests"
STATIC: Final = "mem-fraction-static"

_POOL: Final = r"(?<!Virtual)KV Cache (?:is allocated\.|limits by --mem-fraction-static:)"
_RESERVED: Final = r"(?:VirtualKV Cache is allocated\.|KV Cache VA upper bound\.)"
PATTERNS: Final = (
    figure_at("pool_tokens", _POOL + r".*?#tokens: NUMBER", "tokens"),
    figure_at("k_size", _POOL + r".*?\bK size: GIGABYTES"),
    figure_at("v_size", _POOL + r".*?\bV size: GIGABYTES"),
    figure_at("kv_size", _POOL + r".*?\bKV size: GIGABYTES"),
    figure_at("reserved_tokens", _RESERVED + r".*?#tokens: NUMBER", "tokens"),
    figure_at("full_tokens", r"full_layer_tokens=NUMBER", "tokens"),
    figure_at("window_tokens", r"swa_layer_tokens=NUMBER", "tokens"),
    figure_at("both_pools", r"SWAKVPool mem usage: GIGABYTES"),
    figure_at("captured_tokens", r"KV sizing: KV cache allocated\..*?#tokens: NUMBER", "tokens"),
    figure_at("captured_size", r"KV sizing: KV cache allocated\..*?\bKV size: GIGABYTES"),
    figure_at("slots", r"Mamba Cache is allocated\. max_mamba_cache_size: NUMBER", "slots"),
    figure_at("conv_size", r"\bconv_state size: GIGABYTES"),
    figure_at("state_size", r"\bssm_state size: GIGABYTES"),
    figure_at("drafted_state_size", r"\bintermediate_ssm_state_cache size: GIGABYTES"),
    figure_at("tokens", r"\bmax_total_num_tokens=NUMBER", "tokens"),
    figure_at("requests", r"\bmax_total_num_tokens=.*?\bmax_running_requests=NUMBER", "requests"),
    figure_at("context", r"\bmax_total_num_tokens=.*?\bcontext_len=NUMBER", "tokens"),
    figure_at("before_load", r"Load weight begin\. avail mem=GIGABYTES"),
    figure_at("after_load", r"Load weight end\..*?\bavail mem=GIGABYTES"),
    figure_at("weights", r"Load weight end\..*?\bmem usage=GIGABYTES"),
    figure_at("after_pool", r"Memory pool end\. avail mem=GIGABYTES"),
    figure_at("graphs", r"Capture .*?(?:cuda|CUDA) graph end\..*?\bmem usage=GIGABYTES"),
    figure_at("left", r"\bavailable_gpu_mem=GIGABYTES"),
)
_RANK: Final = re.compile(r"(?:\b(?:DP|PP|TP|EP|CP|ATTN_CP|MOE_DP)\d{1,6}\b ?){1,9}")
_TP_RANK: Final = re.compile(r"\bTP(\d{1,6})\b")
_START: Final = re.compile(r"\bserver_args=")
_MARKS: Final = re.compile(r"\bserver_args=ServerArgs|\bsglang(?:\.launch_server| serve)\b")
_VERSION: Final = re.compile(r"(?i)\bsglang(?:[ _-]version)?\s?(?:[:=]{1,2}|\()?\s?" + RELEASE)
_MODEL: Final = field("model_path", r"([^'\",\s)]+)", "model-path", "model")
_NUMBERS: Final = {
    "tensor_parallel": field("tp_size", COUNT, "tp", "tp-size", "tensor-parallel-size"),
    "pipeline_parallel": field("pp_size", COUNT, "pp", "pp-size", "pipeline-parallel-size"),
    "block_tokens": field("page_size", COUNT, "page-size"),
    "max_batched_tokens": field("chunked_prefill_size", COUNT, "chunked-prefill-size"),
    "context_tokens": field("context_length", COUNT, "context-length"),
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
    "dp-size": COUNT, "swa-full-tokens-ratio": SHARE, "mamba-full-memory-ratio": SHARE,
    "mamba-ssm-dtype": r"(float32|bfloat16|float16)", "max-mamba-cache-size": COUNT, "max-total-tokens": COUNT,
    "mamba-radix-cache-strategy": r"(no_buffer|extra_buffer_lazy|extra_buffer)", "dsa-prefill-backend": r"(\w+)",
    "dsa-decode-backend": r"(\w+)", STATIC: r"(0\.\d{1,18})" + END, REQUESTS: COUNT,
}  # fmt: skip
_FORMER: Final = {
    "mamba-radix-cache-strategy": "mamba-scheduler-strategy", "dsa-prefill-backend": "nsa-prefill-backend",
    "dsa-decode-backend": "nsa-decode-backend",
}  # fmt: skip
_DRAFTED: Final = field(DRAFTED.replace("-", "_"), COUNT, DRAFTED)
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
    context = last_count(found.get("context", ()))
    if context:
        numbers["context_tokens"] = context
    ranks = highest_rank(lines, _TP_RANK)
    if ranks and "tensor_parallel" not in numbers:
        numbers["tensor_parallel"] = ranks + 1
    radix = last_match(lines, _NO_RADIX)
    options = _options(lines)
    setup = Setup(
        context_tokens=numbers.get("context_tokens", 0),
        tensor_parallel=numbers.get("tensor_parallel", 1),
        pipeline_parallel=numbers.get("pipeline_parallel", 1),
        max_batched_tokens=numbers.get("max_batched_tokens"),
        block_tokens=numbers.get("block_tokens"),
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
