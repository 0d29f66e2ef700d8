"""Profiles made up for tests: every figure follows from a few numbers, so that a test can say what it expects."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings

# Before anything imports Triton: but for `make test-gpu`, its kernels run in its interpreter.
if "KVPLAN_TEST_GPU" not in os.environ:
    os.environ.setdefault("TRITON_INTERPRET", "1")

from kvplan.core.layouts import lay_out
from kvplan.core.records import (
    Cell,
    CellKey,
    CellStatus,
    DocumentScore,
    Figure,
    Load,
    Profile,
    Quality,
    QualityKey,
    RetrievalTrial,
)  # fmt: skip
from kvplan.core.specs import DeviceInfo, DeviceKind, LayerKind, LayerSpec, ModelSpec
from kvplan.core.workloads import Bucket, Prefill, QualityBudget, Search, Target, Workload
from kvplan_kernels.layer_formats import parse_formats

# A gate gives the same answer to the same code; new examples are looked for where people work.
settings.register_profile("gate", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("gate")

VERSION = "0.1.0"
STEP_REST_S = 0.010
"""A step's time outside attention, of a made-up model."""
DAMAGE = {"bf16": 0.0, "fp16": 0.0, "int8": 0.0004, "k8v4": 0.004, "int4": 0.05, "int2": 1.5}
"""Made-up rise of the negative log-likelihood of a position."""


@dataclass(frozen=True, kw_only=True)
class Maker:
    """Makes records.

    Attributes:
        seconds_per_byte: Of attention, by which every made-up time follows from the bytes read.
        noise: Relative spread of repeats.
    """

    seconds_per_byte: float = 1e-10
    noise: float = 0.01
    repeats: int = 5
    seed: int = 1
    damage: dict[str, float] = field(default_factory=lambda: dict(DAMAGE))

    def model(self, **changes: object) -> ModelSpec:
        layer = LayerSpec(kind=LayerKind.FULL, kv_heads=2, head_dim=64)
        model = ModelSpec(
            name="made-up", digest="d" * 64, architecture="LlamaForCausalLM", layers=(layer,) * 4, query_heads=8,
            hidden_size=512, vocab_size=1000, context_tokens=8192, weight_bytes=50_000_000, parameters=25_000_000,
        )  # fmt: skip
        return replace(model, **changes)  # type: ignore[arg-type]

    def device(self, **changes: object) -> DeviceInfo:
        device = DeviceInfo(
            name="Made-up CPU", uuid="cpu-1", kind=DeviceKind.CPU, cores=2, memory_bytes=1 << 30,
            last_level_cache_bytes=1 << 20, kernel_variant="portable",
        )  # fmt: skip
        return replace(device, **changes)  # type: ignore[arg-type]

    def buckets(self) -> tuple[Bucket, ...]:
        return (
            Bucket(name="chat", prompt_tokens=1024, generate_tokens=128, share=0.7),
            Bucket(name="long", prompt_tokens=1800, generate_tokens=128, share=0.3),
        )

    def workload(self, **changes: object) -> Workload:
        workload = Workload(
            model="made-up", buckets=self.buckets(), target=Target(concurrency=32, tpot_ms={95: 50.0}),
            quality=QualityBudget(max_perplexity_increase=0.01),
            search=Search(formats=("bf16", "int8", "k8v4", "int4", "int2"), block_tokens=(64,)),
        )  # fmt: skip
        return replace(workload, **changes)  # type: ignore[arg-type]

    def key(self, form: str, loads: Sequence[tuple[Bucket, int]], block_tokens: int = 64) -> CellKey:
        return CellKey(
            model_digest="d" * 64, format=form, block_tokens=block_tokens,
            loads=tuple(Load(bucket=bucket, sequences=count) for bucket, count in loads), prefill=Prefill.EXACT,
            device_uuid="cpu-1", threads=2, kernel="cpu/portable", kvplan_version=VERSION,
        )  # fmt: skip

    def cell(self, form: str, loads: Sequence[tuple[Bucket, int]], block_tokens: int = 64, times: float = 1.0) -> Cell:
        """Return a cell whose attention takes *times* as long as its bytes say."""
        read, reference = (self._bytes(name, loads, block_tokens) for name in (form, "bf16"))
        attention, whole = (read * self.seconds_per_byte * times, reference * self.seconds_per_byte)
        draw = Random(f"{self.seed}/{form}/{block_tokens}/{[(b.name, n) for b, n in loads]}")
        sequences = sum(count for _, count in loads)
        prompt = max(bucket.prompt_tokens for bucket, _ in loads)
        seconds = {
            "decode_fused_s": attention,
            "decode_16bit_s": whole,
            "tpot_s": STEP_REST_S + attention,
            "tpot_16bit_s": STEP_REST_S + whole,
            "append_s": 1e-4,
            "prefill_s": prompt * 1e-3,
            "ttft_s": prompt * 1e-3 + 0.01,
            "pack_s": 0.01,
        }
        exact = {
            "allocated_bytes_per_sequence": self._allocated(form, loads, block_tokens) / sequences,
            "cache_bytes": float(self._allocated(form, loads, block_tokens)),
            "read_bytes_per_step": read,
        }
        figures = {name: Figure.exact("bytes", value) for name, value in exact.items()}
        figures |= {name: Figure.measured("s", self._samples(draw, value)) for name, value in seconds.items()}
        return Cell(key=self.key(form, loads, block_tokens), status=CellStatus.OK, figures=figures)

    def _samples(self, draw: Random, value: float) -> tuple[tuple[float, ...], ...]:
        repeats = []
        for _ in range(self.repeats):
            level = value * max(0.1, 1 + draw.gauss(0, self.noise))
            repeats.append(tuple(level * (1 + abs(draw.gauss(0, self.noise / 2))) for _ in range(5)))
        return tuple(repeats)

    def _bytes(self, form: str, loads: Sequence[tuple[Bucket, int]], block_tokens: int) -> float:
        layout = lay_out(self.model(), parse_formats(form), block_tokens)
        return sum(count * layout.logical_bytes(bucket.total_tokens) for bucket, count in loads)

    def _allocated(self, form: str, loads: Sequence[tuple[Bucket, int]], block_tokens: int) -> int:
        layout = lay_out(self.model(), parse_formats(form), block_tokens)
        return sum(count * layout.sequence_bytes(bucket.total_tokens) for bucket, count in loads)

    def quality(self, form: str, block_tokens: int = 64, documents: int = 12, trials: int = 0) -> Quality:
        """Return a result whose documents scatter around the format's damage."""
        draw = Random(form)  # the same text gives the same scores in every run
        damage = self.damage.get(form, 0.01)
        scores = []
        for index in range(documents):
            positions = 200 + 10 * index
            rise = damage * max(0.1, draw.gauss(1, 0.1)) * positions
            scores.append(
                DocumentScore(
                    positions=positions,
                    quantized_positions=positions,
                    nll_16bit=3.0 * positions,
                    nll=3.0 * positions + rise,
                    kl=rise,
                    flips=round(min(1.0, damage * 2) * positions),
                    kl_values=(rise / positions,) * positions,
                )
            )
        hits = tuple(RetrievalTrial(context_tokens=512, hit_16bit=True, hit=damage < 0.5) for _ in range(trials))
        return Quality(
            key=QualityKey(
                model_digest="d" * 64, format=form, block_tokens=block_tokens, prefill=Prefill.EXACT,
                chunk_tokens=32, data_digest="t" * 64, kernel="cpu/portable", kvplan_version=VERSION,
            ),
            documents=tuple(scores), trials=hits,
        )  # fmt: skip

    def profile(self, workload: Workload | None = None, **changes: object) -> Profile:
        """Return what profiling *workload* would have written: every bucket alone and the mix, every format."""
        asked = workload or self.workload()
        held = [(bucket, bucket.sequences(asked.target.concurrency)) for bucket in asked.buckets]
        loads = [held, *([one] for one in held)] if len(held) > 1 else [held]
        settings = [(form, block) for form in asked.search.formats for block in asked.search.block_tokens]
        profile = Profile(
            created="2026-01-01T00:00:00Z", kvplan_version=VERSION, device=self.device(), model=self.model(),
            versions={"python": "3.11.7", "torch": "2.13.0"}, how={"repeats": "5"},
            cells=tuple(self.cell(form, some, block) for form, block in settings for some in loads),
            quality=tuple(self.quality(form) for form in asked.search.formats),
        )  # fmt: skip
        return replace(profile, **changes)  # type: ignore[arg-type]


@pytest.fixture
def make() -> Maker:
    return Maker()


@pytest.fixture
def maker() -> Callable[..., Maker]:
    return Maker


@pytest.fixture
def quanto_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets quanto unpack codes in Python: the C++ that does it otherwise takes a minute to compile at its first use."""
    pytest.importorskip("hqq", reason="kvplan[transformers-cache] is not installed")
    extension = pytest.importorskip(
        "optimum.quanto.library.extensions.cpp", reason="kvplan[transformers-cache] is not installed"
    ).ext

    def unpack(codes: Any, bits: int) -> Any:
        import torch

        return torch.cat([(codes >> shift) & (2**bits - 1) for shift in range(0, 8, bits)])

    monkeypatch.setattr(extension, "_lib", SimpleNamespace(unpack=unpack))
