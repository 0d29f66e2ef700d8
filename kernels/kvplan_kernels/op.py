"""An operation: its definition, the implementations held to it, and the cases on which they are held."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvplan_kernels.cases import Case
from kvplan_kernels.format import kernel_refusal, parse

Call = TypeVar("Call")


@dataclass(frozen=True, kw_only=True, slots=True)
class Implementation(Generic[Call]):
    """One way to run an operation.

    Attributes:
        call: The function; every implementation of an operation takes the same arguments.
        missing: Returns why it cannot run on this machine at all, or None.
        kernel: The name under which `format.kernel_refusal` knows it.
    """

    call: Call
    missing: Callable[[], str | None]
    kernel: str = "reference"

    def unsupported(self, case: Case) -> str | None:
        """Return why it does not take *case* here, or None."""
        return self.missing() or self.refusal(case)

    def refusal(self, case: Case) -> str | None:
        """Return why it takes *case* on no machine, or None."""
        return case.unsupported() or kernel_refusal(self.kernel, parse(case.format))


@dataclass(frozen=True, kw_only=True, slots=True)
class Op(Generic[Call]):
    """An operation.

    Attributes:
        reference: Plain PyTorch in float32: the definition.
        implementations: By name; "reference" is the definition itself.
        cases: Returns the cases that tests and benchmarks take.
    """

    reference: Call
    implementations: Mapping[str, Implementation[Call]]
    cases: Callable[[], tuple[Case, ...]]


def nothing_missing() -> str | None:
    """Return None: plain PyTorch runs wherever torch does."""
    return None
