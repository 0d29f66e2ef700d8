"""How an engine is started with the setting that a plan picked."""

from kvplan.core.plans import Plan
from kvplan.core.records import Load
from kvplan.core.workloads import Workload
from kvplan.engines import find_engine
from kvplan.engines.engine import Launch, LaunchText


def launch_text(plan: Plan, workload: Workload) -> LaunchText:
    """Return how the engine is started with the setting that was picked."""
    pick = plan.pick
    assert pick is not None
    return find_engine(plan.engine).launch(
        Launch(
            model=workload.model,
            format=pick.format,
            block_tokens=pick.block_tokens,
            context_tokens=max(bucket.total_tokens for bucket in workload.buckets),
            sequences=pick.slots,
            loads=tuple(Load(bucket=b, sequences=b.sequences(workload.target.concurrency)) for b in workload.buckets),
            blocks=pick.blocks,
            tensor_parallel=workload.tensor_parallel,
            pipeline_parallel=workload.pipeline_parallel,
            max_batched_tokens=workload.max_batched_tokens,
            prefix_caching=workload.prefix_caching,
            memory_utilization=workload.memory_utilization,
            kernel=plan.kernels[0] if plan.kernels else "",
        )
    )
