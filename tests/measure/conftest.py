"""A tiny model's spec, its cells, and a measuring process that says what a test tells it to."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field

import pytest

from kvplan.core.records import CellKey, CellStatus, Conditions
from kvplan.core.specs import FloatType, LayerKind, LayerSpec, ModelSpec
from kvplan.core.workloads import Bucket, Prefill, Target, Workload
from kvplan.measure.jobs import Job, Measured, Message, Started

LAYER = LayerSpec(kind=LayerKind.FULL, kv_heads=2, head_dim=32)
QUIET = Conditions(load_average=1, steal_share=0.0, foreign_cpu_share=0.01)
NOISY = Conditions(load_average=1, steal_share=0.0, foreign_cpu_share=0.5)


@pytest.fixture
def spec() -> ModelSpec:
    return ModelSpec(
        name="tiny", digest="d", architecture="LlamaForCausalLM", layers=(LAYER, LAYER), query_heads=4,
        hidden_size=128, vocab_size=99, context_tokens=512, weight_bytes=1000, float_type=FloatType.BF16,
    )  # fmt: skip


@pytest.fixture
def workload() -> Workload:
    chat = Bucket(name="chat", prompt_tokens=100, generate_tokens=20, share=0.75)
    long = Bucket(name="long", prompt_tokens=300, generate_tokens=20, share=0.25)
    return Workload(model="tiny", buckets=(chat, long), target=Target(concurrency=8))


@pytest.fixture
def measured() -> Callable[..., Measured]:
    """Makes one repeat of a cell."""

    def build(key: CellKey, value: float = 1.0, conditions: Conditions = QUIET) -> Measured:
        figures = {"decode_fused_s": (value, value), "tpot_s": (2 * value,)}
        return Measured(
            key=key, status=CellStatus.OK, figures=figures, missing={"pack_s": "a mix"}, conditions=conditions,
            kernel_16bit="cpu/x", cold_bytes=2**22,
        )  # fmt: skip

    return build


@dataclass
class FakeWorker:
    """Stands in for measuring processes.

    Attributes:
        script: Called before each cell with the number of the process, from 1, and the cell; returns what the machine
            was like, or raises what the process dies of.
        ran: The cells of each process, in order, as labels.
        limits_s: How long each process may be silent.
    """

    measured: Callable[..., Measured]
    script: Callable[[int, CellKey], Conditions] = lambda process, key: QUIET
    first: Sequence[Message] = (Started(base={"read_bandwidth_bytes_per_s": (1e9, 2e9)}),)
    ran: list[list[str]] = field(default_factory=list)
    limits_s: list[float] = field(default_factory=list)

    def launch(self, job: Job, limit_s: float) -> Generator[Message, None, None]:
        self.ran.append([])
        self.limits_s.append(limit_s)
        number = len(self.ran)
        yield from self.first
        for group in job.groups:
            found = []
            for key in group:
                conditions = self.script(number, key)
                self.ran[-1].append(key.label)
                found.append(self.measured(key, float(number), conditions))
            yield from found


@pytest.fixture
def worker(measured: Callable[..., Measured]) -> FakeWorker:
    return FakeWorker(measured)


@pytest.fixture
def key(spec: ModelSpec, workload: Workload) -> CellKey:
    from kvplan.core.records import Load

    return CellKey(
        model_digest="d", format="int8", block_tokens=32, loads=(Load(bucket=workload.buckets[0], sequences=6),),
        prefill=Prefill.EXACT, device_uuid="fake-0", threads=1, kernel="cpu/x", kvplan_version="0.1.0",
    )  # fmt: skip
