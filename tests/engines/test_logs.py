import re
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplan.engines import explain_log, find_engine, read_log
from kvplan.engines.log_fields import DIGITS, last_count, read_version
from kvplan.engines.logs import Pattern, clean_lines, printed

READERS = ("vllm", "sglang", "trtllm", "lmdeploy", "llama_cpp")

ESCAPES = ("\x1b[1;36m", "\x1b[0;0m", "^[[1;36m", "^[[0;0m", "#033[1;36m", "[0;36m", "[0m")


@given(
    parts=st.lists(st.sampled_from(["Available", " KV ", "82.42 GiB", "(pid=1)", "[utils.py:1]"]), min_size=1),
    escapes=st.lists(st.sampled_from(ESCAPES)),
)
def test_colours_leave_no_trace_in_whichever_spelling(parts: list[str], escapes: list[str]) -> None:
    mixed = "".join(part + (escapes[index] if index < len(escapes) else "") for index, part in enumerate(parts))
    assert [line.text for line in clean_lines(mixed)] == [text for text in ["".join(parts).strip()] if text]


def test_what_a_carriage_return_overwrites_is_a_line_of_its_own() -> None:
    lines = clean_lines("Loading:   0%|  | 0/36\rLoading: 100%\r[TM][INFO] budget: 5 MB\nnext^M\n\n")
    assert [(line.number, line.text) for line in lines] == [
        (1, "Loading:   0%|  | 0/36"), (1, "Loading: 100%"), (1, "[TM][INFO] budget: 5 MB"), (2, "next"),
    ]  # fmt: skip


@given(value=st.integers(0, 10**6), decimals=st.integers(0, 4), unit=st.sampled_from(["MiB", "GiB"]))
def test_a_printed_figure_holds_all_that_rounds_to_it(value: int, decimals: int, unit: str) -> None:
    exact = value / 1000
    figure = printed(f"{exact:.{decimals}f}", unit, 1)
    factor = 2.0 ** {"MiB": 20, "GiB": 30}[unit]
    if decimals:
        assert figure.low - 1e-3 <= exact * factor <= figure.high + 1e-3
        assert not figure.holds((exact + 2 * 10.0**-decimals) * factor)
    else:
        assert figure.low == figure.high == round(exact) * factor or abs(exact - round(exact)) == 0.5


def test_counts_have_commas_and_are_exact() -> None:
    figure = printed("1,391,552", "tokens", 7)
    assert (figure.value, figure.low, figure.high, figure.line) == (1391552, 1391552, 1391552, 7)


@given(st.text(max_size=300))
def test_any_text_is_read_without_a_fault(text: str) -> None:
    facts = read_log(text)
    assert facts is None or find_engine(facts.engine).read_log


NUMBERS = ("0", "-1", "1", "3", "16", "8192", "99999999999", "1.2.3", ".", "nan", "0.0", "0.5", "1e9", "9" * 30, "",
           "True", "1,,2", "0x10", "9" * 5000)  # fmt: skip
LINES = (
    "LLM engine (v0.#) with config: model='m', max_seq_len=#, tensor_parallel_size=#, pipeline_parallel_size=#",
    "block_size=#, max_num_batched_tokens=#, num_spec_tokens=#, num_gpu_blocks_override=#",
    "(Worker_TP# pid=1) INFO Available KV cache memory: # GiB",
    "GPU KV cache size: # tokens",
    "Maximum concurrency for # tokens per request: #x",
    "Setting attention block size to # tokens",
    "# GiB KV cache is needed, larger than the available KV cache memory (# GiB). estimated maximum model length is #",
    "server_args=ServerArgs(model_path='m', tp_size=#, pp_size=#, page_size=#, dp_size=#, mem_fraction_static=#)",
    "ServerArgs(swa_full_tokens_ratio=#, context_length=#, enable_dp_attention=True, chunked_prefill_size=#)",
    "[TP#] Load weight begin. avail mem=# GB",
    "[TP#] Load weight end. type=m, avail mem=# GB, mem usage=# GB.",
    "[TP#] KV Cache is allocated. #tokens: #, K size: # GB, V size: # GB",
    "[TP#] KV Cache is allocated. #tokens: #, KV size: # GB",
    "full_layer_tokens=#, swa_layer_tokens=#",
    "Mamba Cache is allocated. max_mamba_cache_size: #, conv_state size: #GB, ssm_state size: #GB",
    "max_total_num_tokens=#, max_running_requests=#, context_len=#",
    "[TensorRT-LLM][INFO] Number of tokens per block: #.",
    "[TensorRT-LLM] version: #.#.#, fraction is set #, kv size is #. device total memory # GiB",
    "Number of blocks in KV cache primary pool: #",
    "Max KV cache blocks per sequence: # [window size=#], tokens per block=#, primary blocks=#",
    "calculating max tokens in paged kv cache: total: # GiB, available: # GiB",
    "[MemUsageChange] Allocated # GiB for max tokens in paged KV cache (#).",
    "Allocate # bytes for k/v cache. Using # tokens in paged KV cache. max_seq_len=#, max_num_requests=#",
    "[TM][INFO] [BlockManager] block_size = # MB",
    "[TM][INFO] [BlockManager] max_block_count = #",
    "[TM][INFO] Object cache budget: # MB from free # MB and ratio #",
    "llama_context: n_seq_max = #",
    "llama_context: n_ctx = #",
    "llama_context: n_ubatch = #",
    "build: # (abc)",
    "llama_kv_cache_iswa: creating     SWA KV cache, size = # cells",
    "llama_kv_cache: CPU KV buffer size = # MiB",
    "llama_kv_cache: size = # MiB ( # cells, # layers, #/# seqs), K (f16): # MiB, V (f16): # MiB",
    "llama_memory_recurrent: size = # MiB ( # cells, # layers, # seqs # rs_seq)",
    'KvSize:# KvCacheType: msg="kv cache" device=CUDA0 size="# GiB"',
)
MODELS: tuple[dict[str, Any], ...] = (
    {"layers": 32, "heads": 32, "kv": 8, "hidden": 4096},
    {"layers": 24, "heads": 64, "kv": 8, "hidden": 2880, "head_dim": 64, "model_type": "gpt_oss", "sliding_window": 128,
     "layer_types": ["sliding_attention", "full_attention"] * 12},
    {"layers": 4, "heads": 16, "kv": 2, "hidden": 2048, "head_dim": 256, "model_type": "qwen3_next",
     "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
     "linear_num_value_heads": 32, "layer_types": ["linear_attention"] * 3 + ["full_attention"]},
)  # fmt: skip


@st.composite
def filled(draw: st.DrawFn) -> str:
    """Lines of logs with numbers that no engine prints."""
    lines = draw(st.lists(st.sampled_from(LINES), min_size=1, max_size=6))
    return re.sub(r"#(?!tokens:)", lambda _: draw(st.sampled_from(NUMBERS)), "\n".join(lines))


@settings(deadline=None, max_examples=150)
@given(text=filled(), engine=st.sampled_from(["vllm", "sglang", "trtllm", "lmdeploy", "llama.cpp"]))
def test_no_number_is_a_fault(spec: Any, text: str, engine: str) -> None:
    facts = read_log(text, engine)
    if facts is not None:
        for config in MODELS:
            explain_log(facts, spec(**config))


def patterns(reader: str) -> Iterator[str]:
    """The patterns of a log reader."""
    found: list[Any] = list(vars(import_module(f"kvplan.engines.{reader}_log")).values())
    while found:
        item = found.pop()
        if isinstance(item, Pattern | re.Pattern):
            yield item.regex.pattern if isinstance(item, Pattern) else item.pattern
        elif isinstance(item, dict):
            found += item.values()
        elif isinstance(item, tuple):
            found += item


@pytest.mark.parametrize("reader", READERS)
def test_digits_are_bounded(reader: str) -> None:
    """Twelve thousand of them took 16 s: a pattern of any number of digits begins anew at each."""
    assert not [text for text in patterns(reader) if re.search(r"\\d[+*]|\[[^\]]*\\d[^\]]*\][+*](?!\)['\"])", text)]


@pytest.mark.parametrize("reader", READERS)
def test_figures_are_found_by_the_one_pattern_of_numbers(reader: str) -> None:
    figures = [text for text in patterns(reader) if "(?P<number>" in text]
    assert figures
    assert all(f"(?P<number>{DIGITS})" in text for text in figures)


@pytest.mark.parametrize(
    ("text", "found"),
    [("1,391,552", "1,391,552"), ("86720", "86720"), ("-0.17", "-0.17"), ("1.2.3", None), (".", None), ("9" * 19, None),
     ("1,2345", None), ("12.", "12")],
)  # fmt: skip
def test_what_is_no_number_is_not_read(text: str, found: str | None) -> None:
    match = re.search(DIGITS, text)
    assert (match and match[0]) == found


def test_counts_are_of_something() -> None:
    figures = [printed(text, "tokens", 1) for text in ("4096", "0", "-1", "0.5")]
    assert [last_count([figure]) for figure in figures] == [4096, 0, 0, 0]
    assert (last_count([]), read_version("9" * 5000)) == (0, None)
