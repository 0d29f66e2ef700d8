from inspect import signature
from typing import Any

import pytest

from kvplan_kernels.cases import Case
from kvplan_kernels.native import loader
from kvplan_kernels.op import Implementation
from kvplan_kernels.ops import OPS


@pytest.mark.parametrize("name", ["append", "decode", "dequantize"])
def test_implementations_are_called_like_the_definition(name: str) -> None:
    op = OPS[name]
    assert {"reference", "cpu"} <= set(op.implementations) <= {"reference", "cpu", "triton"}
    assert op.implementations["reference"].call is op.reference
    expected = dict(signature(op.reference).parameters)
    for kernel in set(op.implementations) - {"reference"}:
        found = dict(signature(op.implementations[kernel].call).parameters)
        assert kernel != "cpu" or found.pop("threads").default is None
        assert list(found) == list(expected)
        for parameter, definition in expected.items():
            assert (found[parameter].kind, found[parameter].default) == (definition.kind, definition.default)
            assert found[parameter].annotation == definition.annotation


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_the_reference_takes_every_case(op: Any) -> None:
    assert len(op.cases()) > 450
    assert {op.implementations["reference"].unsupported(case) for case in op.cases()} == {None}


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_a_case_without_a_layout_is_unsupported_with_the_reason(op: Any) -> None:
    case = Case(format="kivi-k4v4-g64", block_tokens=96, lengths=(1,))
    for implementation in op.implementations.values():
        assert "use block size 128" in (implementation.unsupported(case) or "") or loader.missing() is not None


def test_what_is_missing_comes_before_what_does_not_fit() -> None:
    case = Case(format="int4", head_dim=300, lengths=(1,))
    absent = Implementation(call=len, missing=lambda: "no compiler")
    assert absent.unsupported(case) == "no compiler"
