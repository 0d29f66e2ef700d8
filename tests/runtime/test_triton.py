"""A model on the GPU's cache, its kernels in Triton's interpreter. Tensors made without a device would be on `meta`."""

from collections.abc import Callable

import pytest
import torch

from kvplan.core.workloads import Prefill
from kvplan.runtime.loading import LoadedModel
from kvplan.runtime.session import Runtime
from kvplan_kernels.format import parse
from kvplan_kernels.layout import Order

PROMPT = [int(token) for token in torch.randint(199, (15,), generator=torch.Generator().manual_seed(2))]
NEXT = torch.tensor([[7], [9]])


def logits(loaded: LoadedModel, name: str, kernel: str, mode: Prefill) -> torch.Tensor:
    runtime = Runtime(loaded, parse(name), block_tokens=32, blocks=8, slots=2, kernel=kernel)
    first = runtime.prefill(PROMPT, mode, max_batched_tokens=12).sequence
    twin = runtime.fork(first, 1, copy=True)[0]
    steps = [runtime.step([first, twin], NEXT) for _ in range(2)]
    assert runtime.spent.poisoned_groups == 0
    return torch.cat(steps, dim=1)


@pytest.mark.parametrize(
    ("family", "name", "mode"),
    [
        ("Gemma2", "kivi-k4v4-g32-r16", Prefill.EXACT),
        ("GptOss", "int8-r8-s3", Prefill.THROUGH_CACHE),
    ],
)
def test_a_model_on_the_gpus_cache_is_the_model_on_the_definitions(
    family: str, name: str, mode: Prefill, build: Callable[..., LoadedModel]
) -> None:
    loaded = build(family, torch.bfloat16, num_hidden_layers=2)
    defined = logits(loaded, name, "reference", mode)
    with torch.device("meta"):
        found = logits(loaded, name, "triton", mode)

    assert found.device.type == "cpu"
    difference = (found - defined).float().abs().max()
    assert difference <= 0.02 * defined.float().abs().max()


@pytest.mark.parametrize(("kernel", "order"), [("reference", Order.LANES), ("triton", Order.ROWS)])
def test_the_pool_lies_in_the_order_of_its_kernels(
    kernel: str, order: Order, build: Callable[..., LoadedModel]
) -> None:
    runtime = Runtime(build("Llama"), parse("int4"), block_tokens=32, blocks=2, slots=1, kernel=kernel)

    assert {cache.layout.order for cache in runtime.pool.caches} == {order}
