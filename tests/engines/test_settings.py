"""An engine's formats as settings of a plan, and the plan that is made of them."""

from dataclasses import replace
from typing import Any

import pytest

from kvplan.core.allocation import Setup
from kvplan.core.assessments import Measurements
from kvplan.core.planner import make_plan
from kvplan.core.plans import Outcome, Plan
from kvplan.core.specs import ModelSpec
from kvplan.core.workloads import Bucket, Search, Target, Workload
from kvplan.engines import allocate, find_engine
from kvplan.engines.launching import launch_text
from kvplan.engines.settings import engine_settings, plan_notes
from kvplan.errors import UnsupportedFormatError, UnsupportedModelError

GIB = 1 << 30
LLAMA_8B = {"layers": 32, "heads": 32, "kv": 8, "hidden": 4096}
GEMMA = {"layers": 12, "heads": 8, "kv": 4, "hidden": 512, "model_type": "gemma3_text", "head_dim": 64,
         "sliding_window": 96, "sliding_window_pattern": 6}  # fmt: skip


def workload(**changes: Any) -> Workload:
    bucket = Bucket(name="chat", prompt_tokens=4000, generate_tokens=96)
    made = Workload(
        model="org/m", buckets=(bucket,), target=Target(concurrency=16), memory_bytes=24 * GIB, engine="vllm",
        prefix_caching=False,
    )  # fmt: skip
    return replace(made, **changes)


@pytest.fixture
def model(spec: Any) -> ModelSpec:
    made: ModelSpec = replace(spec(**LLAMA_8B), weight_bytes=15 * GIB, parameters=8_000_000_000)
    return made


def planned(model: ModelSpec, asked: Workload, device: str = "", known: Measurements | None = None) -> Plan:
    settings, refused = engine_settings(find_engine("vllm"), asked, model, device)
    return make_plan(asked, model, known or Measurements(), settings=settings, refused=refused, engine="vllm")


def test_sessions_are_those_that_the_engines_allocator_holds(model: ModelSpec) -> None:
    plan = planned(model, workload())
    sixteen = next(option for option in plan.options if option.format == "bf16")
    free = sixteen.memory.free_for_cache_bytes
    per_sequence = 256 * 16 * 131072  # blocks of 16 tokens
    assert sixteen.sessions == pytest.approx(free / per_sequence, abs=1)
    assert sixteen.memory.cache_bytes == 16 * per_sequence
    assert plan.outcome is Outcome.QUANTIZE


def test_a_window_is_charged_for_the_tokens_in_flight(spec: Any) -> None:
    model = replace(spec(**GEMMA), weight_bytes=GIB, parameters=10**9)
    wide, narrow = (
        planned(model, workload(max_batched_tokens=tokens)).options[0].memory.cache_bytes for tokens in (2048, 512)
    )
    assert wide > narrow


def test_a_shared_prefix_is_held_once(model: ModelSpec) -> None:
    shared = replace(workload().buckets[0], shared_prefix_tokens=1000)
    apart, together = (
        planned(model, workload(buckets=(shared,), prefix_caching=caching)).options[0].memory.cache_bytes
        for caching in (False, True)
    )
    assert apart - together == 15 * 62 * 16 * 131072  # 62 whole blocks, once instead of sixteen times


def test_ranks_share_weights_and_heads(model: ModelSpec) -> None:
    one, two = (planned(model, workload(tensor_parallel=ranks)).options[0].memory for ranks in (1, 2))
    assert two.weights.bytes == one.weights.bytes / 2
    assert two.cache_bytes == one.cache_bytes / 2


@pytest.mark.parametrize(
    ("device", "lacking"),
    [("NVIDIA A100-SXM4-80GB", {"fp8_e4m3", "nvfp4"}), ("NVIDIA L4", {"nvfp4"}), ("NVIDIA B200", set())],
)
def test_a_format_that_the_device_lacks_is_refused(model: ModelSpec, device: str, lacking: set[str]) -> None:
    plan = planned(model, workload(), device)
    refused = dict(plan.refused)
    assert lacking <= set(refused)
    assert all("compute capability" in refused[name] for name in lacking)
    assert not lacking & {option.format for option in plan.options}
    assert ("fp8_e4m3" in {option.format for option in plan.options}) == ("fp8_e4m3" not in lacking)


def test_a_format_of_another_engine_is_refused_with_its_name(model: ModelSpec) -> None:
    plan = planned(model, workload(search=Search(formats=("int8", "kivi-k4v4-g64-r128"))))
    assert {option.format for option in plan.options} == {"bf16", "int8_per_token_head"}
    ((name, reason),) = plan.refused
    assert name == "kivi-k4v4-g64-r128"
    assert "kvplan's runtime has it" in reason


def test_times_and_quality_of_the_nearest_format_stand_in_and_say_so(make: Any, model: ModelSpec) -> None:
    profile = make.profile(make.workload())
    known = Measurements(cells=profile.cells, quality=profile.quality, device=profile.device)
    asked = workload(search=Search(formats=("bf16", "int8")), buckets=make.buckets(), target=Target(concurrency=32),
                     memory_bytes=22 * GIB)  # fmt: skip
    plan = planned(model, asked, known=known)
    eight = next(option for option in plan.options if option.format == "int8_per_token_head")
    assert eight.quality is not None
    assert eight.tpot.value_s is not None
    assert plan.pick is eight
    assert any("stores other codes than int8" in remark for remark in plan.remarks)


def test_the_command_starts_what_was_picked(model: ModelSpec) -> None:
    asked = workload(search=Search(formats=("fp8_e4m3",)), tensor_parallel=2, memory_bytes=12 * GIB)
    plan = planned(model, asked)
    assert plan.pick is not None
    assert plan.pick.format == "fp8_e4m3"
    command = launch_text(plan, asked).command
    assert command.startswith("vllm serve org/m --kv-cache-dtype fp8_e4m3 --block-size 16 --max-model-len 4096")
    assert "--max-num-seqs 16" in command
    assert "--tensor-parallel-size 2" in command
    assert "--no-enable-prefix-caching" in command


def test_k_and_v_have_formats_of_their_own_where_the_engine_takes_them_so(model: ModelSpec) -> None:
    asked = workload(engine="llama.cpp", search=Search(formats=("q8_0/q4_0", "q8_0/q8_0", "int4")))
    settings, refused = engine_settings(find_engine("llama.cpp"), asked, model, "")
    assert [setting.format for setting in settings] == ["f16", "q8_0/q4_0", "q8_0", "q4_0"]
    pair = settings[1]
    assert (pair.bits, pair.measured_as) == ((8, 4), None)  # nobody measured both
    assert refused == []


def test_another_engine_takes_no_pair(model: ModelSpec) -> None:
    asked = workload(engine="lmdeploy", search=Search(formats=("int8/int4",)))
    _, refused = engine_settings(find_engine("lmdeploy"), asked, model, "")
    assert [name for name, _ in refused] == ["int8/int4"]


@pytest.mark.parametrize(
    ("config", "name", "hint"),
    [
        (LLAMA_8B, "fp8", "vLLM"),  # those that have it
        (LLAMA_8B | {"hidden": 2560}, "q8_0", "use f16 or bf16"),  # llama.cpp has it, and not for heads of 80
        (LLAMA_8B | {"hidden": 2560}, "k4v4-g32", "use f16 or bf16"),
    ],
)
def test_what_an_engine_has_is_not_looked_for_elsewhere(
    spec: Any, config: dict[str, Any], name: str, hint: str
) -> None:
    with pytest.raises(UnsupportedFormatError) as refusal:
        allocate(find_engine("llama.cpp"), spec(**config), name, Setup(context_tokens=100))
    assert hint in str(refusal.value)


def memory_of(engine: str, asked: Workload, model: ModelSpec) -> Any:
    settings, _ = engine_settings(find_engine(engine), asked, model, "")
    return make_plan(asked, model, Measurements(), settings=settings, engine=engine).options[0].memory


@pytest.mark.parametrize(("tokens", "passes"), [(None, 512), (8192, 512), (512, 512), (300, 300)])
def test_llama_cpp_computes_a_batch_in_passes_of_512_tokens(spec: Any, tokens: int | None, passes: int) -> None:
    """`--ubatch-size` is 512 whatever `--batch-size` is (ggml-org/llama.cpp common/common.h, 0c1e570)."""
    model = replace(spec(**GEMMA), weight_bytes=GIB, parameters=10**9)
    found, alike = (memory_of("llama.cpp", workload(max_batched_tokens=each), model) for each in (tokens, passes))
    assert (found.cache_bytes, found.free_for_cache_bytes) == (alike.cache_bytes, alike.free_for_cache_bytes)
    halved = memory_of("llama.cpp", workload(max_batched_tokens=passes // 2), model)
    assert halved.free_for_cache_bytes > found.free_for_cache_bytes  # activations and logits of fewer tokens
    assert halved.cache_bytes < found.cache_bytes  # windows have cells for fewer


@pytest.mark.parametrize("engine", ["vllm", "trtllm", "lmdeploy"])
def test_an_engine_is_not_planned_for_files_that_it_does_not_read(model: ModelSpec, engine: str) -> None:
    file = replace(model, stored_weight_bytes=5 * GIB)
    with pytest.raises(UnsupportedModelError, match="reads no GGUF files"):
        engine_settings(find_engine(engine), workload(engine=engine), file, "")
    settings, _ = engine_settings(find_engine("llama.cpp"), workload(engine="llama.cpp"), file, "")
    assert settings


@pytest.mark.parametrize(
    ("engine", "name", "stored", "says"),
    [
        ("vllm", "/m/config.json", None, "/m/config.json is a config without weights"),
        ("vllm", "/m", None, ""),
        ("llama.cpp", "/m", None, "llama.cpp reads GGUF files: convert /m"),
        ("llama.cpp", "/m/a.gguf", 5 * GIB, ""),
    ],
)
def test_what_an_engine_cannot_be_started_with_is_said(
    model: ModelSpec, engine: str, name: str, stored: int | None, says: str
) -> None:
    asked, held = workload(engine=engine, model=name), replace(model, stored_weight_bytes=stored)
    settings, _ = engine_settings(find_engine(engine), asked, held, "")
    plan = make_plan(asked, held, Measurements(), settings=settings, engine=engine)
    notes = plan_notes(find_engine(engine), asked, held, plan)
    assert [note.startswith(says) for note in notes] == ([True] if says else [])


def test_a_plan_carries_the_notes_of_its_allocation(spec: Any) -> None:
    model = replace(spec(**GEMMA), weight_bytes=GIB, parameters=10**9)
    notes = plan_notes(find_engine("vllm"), workload(), model, planned(model, workload()))
    assert any(note.startswith("vLLM: windows are counted with") for note in notes)
    assert any("kvplan size --engine-version" in note for note in notes)  # a workload has no such key


def test_where_nothing_is_picked_nothing_is_said_of_starting_it(model: ModelSpec) -> None:
    asked = workload(model="/m/config.json", memory_bytes=17 * GIB)
    plan = planned(model, asked)
    assert plan.pick is None
    assert plan_notes(find_engine("vllm"), asked, model, plan) == ()


def test_formats_that_need_a_gpu_are_refused_on_a_cpu(model: ModelSpec) -> None:
    plan = planned(model, workload(), "cpu")
    assert {"nvfp4", "fp8_e4m3"} <= dict(plan.refused).keys()
    assert "bf16" in {option.format for option in plan.options}
