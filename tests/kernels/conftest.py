import os
from typing import Any

import pytest
import torch
from torch import Tensor

from kvplan_kernels.native import loader


@pytest.fixture(scope="session")
def variants() -> tuple[str, ...]:
    """The compiled variants that this machine runs."""
    reason = loader.missing()
    if reason is not None:
        assert "KVPLAN_REQUIRE_NATIVE" not in os.environ, reason
        pytest.skip(reason)
    return loader.variants()


@pytest.fixture(autouse=True)
def _memory_full_of_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `torch.empty` return NaN, so that an output left unwritten fails."""
    plain = torch.empty

    def filled(*shape: Any, **options: Any) -> Tensor:
        tensor = plain(*shape, **options)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", filled)
