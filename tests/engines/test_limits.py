"""What engines take: releases, options, blocks and model classes, checked before anything is counted."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan.core.allocation import Setup
from kvplan.engines import ENGINES, allocate
from kvplan.engines.limits import Limits, check_setup, release, spelled
from kvplan.errors import UnsupportedModelError, UnsupportedSettingError
from kvplan.units import parse_version

LLAMA = {"layers": 4, "heads": 8, "kv": 2, "hidden": 512}
WINDOWS = {"layers": 6, "heads": 8, "kv": 4, "hidden": 512, "model_type": "gemma3_text", "head_dim": 64,
           "sliding_window": 96, "sliding_window_pattern": 3}  # fmt: skip
RWKV = {"layers": 4, "heads": 8, "kv": None, "hidden": 512, "model_type": "rwkv5", "head_size": 64}


def counted(spec: Any, engine: str, config: dict[str, Any] = LLAMA, architecture: str = "", **setup: Any) -> Any:
    model = spec(**config)
    model = replace(model, architecture=architecture or model.architecture)
    chosen = ENGINES[engine]
    return allocate(chosen, model, chosen.default_format(model), Setup(context_tokens=64, **setup))


@pytest.mark.parametrize("engine", [name for name in ENGINES if name != "kvplan"])
def test_the_rules_of_every_engine_are_of_its_newest_release_or_one_before(engine: str) -> None:
    row = ENGINES[engine]
    assert row.limits.oldest <= parse_version(row.rules) <= (*row.limits.newest, 1 << 20)


@pytest.mark.parametrize(
    ("engine", "version"),
    [("vllm", (0, 0, 1)), ("sglang", (0, 4, 6)), ("trtllm", (0, 1)), ("lmdeploy", (0, 1)), ("transformers", (4, 57)),
     ("llama.cpp", (0, 1)), ("kvplan", (7,))],
)  # fmt: skip
def test_releases_that_are_not_known_are_refused(spec: Any, engine: str, version: tuple[int, ...]) -> None:
    with pytest.raises(UnsupportedSettingError) as caught:
        counted(spec, engine, version=version)
    assert str(caught.value).startswith("--engine-version: ")


def test_builds_are_told_where_an_engine_has_them(spec: Any) -> None:
    with pytest.raises(UnsupportedSettingError, match=r"write 0\.5, or a build as b6182"):
        counted(spec, "llama.cpp", version=parse_version("0.4"))
    assert counted(spec, "llama.cpp", version=parse_version("b6182")).sequence_bytes(64)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm", "lmdeploy", "transformers"])
def test_a_newer_release_is_counted_by_the_newest_rules_with_a_remark(spec: Any, engine: str) -> None:
    newest = ENGINES[engine].limits.newest
    known, newer = (counted(spec, engine, version=version) for version in (newest, (99999,)))
    assert newer.sequence_bytes(64) == known.sequence_bytes(64)
    assert not [note for note in known.notes if "newest" in note]
    assert any(f"99999 is counted by the rules of {release(newest)}" in note for note in newer.notes)


def test_vllm_before_0_11_is_counted_for_full_attention_alone(spec: Any) -> None:
    counted(spec, "vllm", version=(0, 6, 6))
    with pytest.raises(UnsupportedSettingError, match=r"before 0\.11 keeps windows"):
        counted(spec, "vllm", WINDOWS, version=(0, 10, 2))


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_an_option_that_an_engine_does_not_have_is_refused(spec: Any, engine: str) -> None:
    with pytest.raises(UnsupportedSettingError, match="'banana' is no option of"):
        counted(spec, engine, options=frozenset({"banana"}))


@pytest.mark.parametrize(
    ("engine", "text", "hint"),
    [
        ("llama.cpp", "swa_full", "did you mean swa-full?"),
        ("sglang", "enable-dp-attn", "did you mean enable-dp-attention?"),
        ("llama.cpp", "swa-full=1", "write swa-full"),
        ("llama.cpp", "gpu-layers", "write gpu-layers=N"),
        ("trtllm", "backend=tensort", "write backend=pytorch|tensorrt|trt"),
        ("vllm", "mamba-ssm-cache-dtype=int8", "write mamba-ssm-cache-dtype=auto|float32"),
    ],
)
def test_an_option_that_is_nearly_right_is_mended(spec: Any, engine: str, text: str, hint: str) -> None:
    with pytest.raises(UnsupportedSettingError) as caught:
        counted(spec, engine, options=frozenset({text}))
    assert caught.value.hint.startswith(hint)


WORDS = st.text("abcd-", min_size=1, max_size=6)


@given(options=st.dictionaries(WORDS, st.sampled_from(["", "N", "on|off"]), max_size=4), text=WORDS)
def test_options_are_taken_as_they_are_spelled_and_no_others(options: dict[str, str], text: str) -> None:
    limits = Limits(options=options)
    right = {spelled(name, takes.partition("|")[0]) for name, takes in options.items()}
    check_setup("E", limits, Setup(context_tokens=1, options=frozenset(right)))
    if text not in right:
        with pytest.raises(UnsupportedSettingError):
            check_setup("E", limits, Setup(context_tokens=1, options=frozenset({text})))


@pytest.mark.parametrize(
    ("engine", "setup"),
    [
        ("vllm", {"block_tokens": 3}), ("trtllm", {"block_tokens": 3}), ("lmdeploy", {"block_tokens": 100}),
        ("sglang", {"block_tokens": 3}), ("transformers", {"block_tokens": 7}), ("llama.cpp", {"block_tokens": 16}),
        ("transformers", {"prefix_caching": True}), ("kvplan", {"draft_tokens": 3}),
        ("kvplan", {"prefix_caching": True}),
    ],
)  # fmt: skip
def test_what_an_engine_has_no_use_for_is_refused(spec: Any, engine: str, setup: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedSettingError):
        counted(spec, engine, **setup)


@pytest.mark.parametrize(
    ("engine", "tokens"), [("vllm", 48), ("trtllm", 64), ("lmdeploy", 96), ("sglang", 256), ("kvplan", 32)]
)
def test_blocks_that_an_engine_has_are_counted(spec: Any, engine: str, tokens: int) -> None:
    assert counted(spec, engine, block_tokens=tokens).blocks[0].block_tokens == tokens


@pytest.mark.parametrize("engine", sorted(set(ENGINES) - {"kvplan"}))
def test_a_model_that_an_engine_does_not_run_is_refused(spec: Any, engine: str) -> None:
    """RWKV 5 is in the registry of none: see the modules of their model classes."""
    with pytest.raises(UnsupportedModelError):
        counted(spec, engine, RWKV)
    with pytest.raises(UnsupportedModelError):
        counted(spec, engine, architecture="NobodysForCausalLM")


@pytest.mark.parametrize(
    ("engine", "architecture", "version"),
    [
        # vllm 0.29.0, registry.py, _PREVIOUSLY_SUPPORTED_MODELS: to 0.23
        ("vllm", "QWenLMHeadModel", (0, 23)),
        # sglang 0.5.23, srt/models/gpt_j.py
        ("sglang", "GPTJForCausalLM", None),
        ("trtllm", "Starcoder2ForCausalLM", None),
    ],
)
def test_classes_of_a_registry_are_counted(
    spec: Any, engine: str, architecture: str, version: tuple[int, ...] | None
) -> None:
    assert counted(spec, engine, architecture=architecture, version=version).sequence_bytes(64)


def test_a_class_that_vllm_gave_up_says_until_when(spec: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=r"vLLM ran it up to 0\.23"):
        counted(spec, "vllm", architecture="QWenLMHeadModel")


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_what_transformers_code_runs_for_an_engine_is_counted_with_a_remark(spec: Any, engine: str) -> None:
    plain = counted(spec, engine)
    allocation = counted(spec, engine, architecture="HeliumForCausalLM")
    assert allocation.sequence_bytes(64) == plain.sequence_bytes(64)
    assert any("transformers' modelling code" in note for note in allocation.notes)


def test_tensorrt_engines_and_autodeploy_run_classes_of_their_own(spec: Any) -> None:
    with pytest.raises(UnsupportedModelError, match="backend=tensorrt"):
        counted(spec, "trtllm", architecture="GPTJForCausalLM")
    assert counted(spec, "trtllm", architecture="GPTJForCausalLM", options=frozenset({"backend=tensorrt"}))
    with pytest.raises(UnsupportedModelError, match="AutoDeploy"):
        counted(spec, "trtllm", architecture="SmolLM3ForCausalLM")


def test_an_engine_without_a_reader_of_gguf_says_so(spec: Any) -> None:
    model = replace(spec(**LLAMA), stored_weight_bytes=1)
    notes = {
        name: allocate(ENGINES[name], model, "bf16", Setup(context_tokens=64)).notes for name in ("vllm", "sglang")
    }
    assert any("reads no GGUF" in note for note in notes["vllm"])
    assert not any("GGUF" in note for note in notes["sglang"])
