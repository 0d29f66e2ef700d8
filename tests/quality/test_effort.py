"""How much is scored follows from the workload."""

from kvplan.core.quality_bounds import trials_needed
from kvplan.core.workloads import Bucket, QualityBudget, Target, Workload
from kvplan.quality import effort


def _workload(prompt: int, *, drop: float | None = None) -> Workload:
    return Workload(
        model="m",
        buckets=(Bucket(name="b", prompt_tokens=prompt, generate_tokens=100),),
        target=Target(concurrency=1),
        quality=QualityBudget(max_retrieval_drop=drop),
    )


def test_documents_are_as_long_as_the_longest_request() -> None:
    assert effort.context_tokens(_workload(500), 8192, quick=False) == 600


def test_documents_stay_within_the_model_and_the_time() -> None:
    assert effort.context_tokens(_workload(5000), 1024, quick=False) == 1023
    assert effort.context_tokens(_workload(5000), 8192, quick=True) == effort.QUICK_CONTEXT_TOKENS


def test_trials_can_decide_the_budget() -> None:
    assert effort.trials(_workload(500, drop=0.1), quick=True) == trials_needed(0.1, 0.95)


def test_trials_are_few_where_nothing_hangs_on_them() -> None:
    assert effort.trials(_workload(500), quick=True) == effort.QUICK_TRIALS
    assert effort.trials(_workload(500, drop=1e-6), quick=True) == effort.TRIALS_MAX
