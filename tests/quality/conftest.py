"""The demo model, loaded once in float32: there rounding is too small to hide what a test looks for."""

from collections.abc import Iterator

import pytest
import torch

from kvplan.runtime.loading import LoadedModel, load_model


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def demo() -> LoadedModel:
    return load_model("demo", dtype=torch.float32)
