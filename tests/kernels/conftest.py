import pytest

from kvplan_kernels.native import loader


@pytest.fixture(scope="session")
def variants() -> tuple[str, ...]:
    """The compiled variants that this machine runs."""
    reason = loader.missing()
    if reason is not None:
        pytest.skip(reason)
    return loader.variants()
