import pytest

from kvplan.core.budget import Limits
from kvplan.core.workloads import QualityBudget
from kvplan.errors import InputError
from kvplan.store.budgets import load_budget

TEXT = """\
schema: 1
memory: 24GiB
memory_utilization: 80%
default:
  min_sessions: 16
  max_tpot_ms: {p95: 50}
  quality: {max_kl: 0.1, confidence: 90%}
formats:
  k8v8:
    max_bytes_per_sequence: 12MiB
    max_decode_ratio: 0.8
    quality: {max_top1_flips: 1%}
  int4: {min_sessions: 40}
"""


@pytest.fixture
def load(tmp_path):
    def load_text(text):
        path = tmp_path / "b.yaml"
        path.write_text(text, encoding="utf-8")
        return load_budget(path)

    return load_text


def test_a_format_takes_from_the_default_what_its_entry_leaves_out(load):
    budget = load(TEXT)
    assert (budget.memory_bytes, budget.memory_utilization) == (24 * 2**30, 0.8)
    assert budget.limits("int8") == Limits(
        max_bytes_per_sequence=12 * 2**20,
        min_sessions=16,
        max_decode_ratio=0.8,
        max_tpot_ms={95: 50.0},
        quality=QualityBudget(max_kl=0.1, max_top1_flips=0.01, confidence=0.9),
    )
    assert budget.limits("int4").min_sessions == 40
    assert budget.limits("k8v4") == budget.default


def test_a_format_by_layer_has_limits_under_any_of_its_names(load):
    budget = load(TEXT.replace("k8v8:", "int8@1,0=k4v4:"))
    assert budget.limits("int8@0,1=int4").max_decode_ratio == 0.8
    assert budget.limits("int8") == budget.default


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("memory: 24GiB\n", "", "min_sessions without memory; add memory: 24GiB"),
        ("int4:", "q4:", ":13: q4: unknown format 'q4'"),
        ("int4:", "int8:", ":13: int8: int8 has limits already"),
        ("int4:", "k8v8@0=int8:", ":13: k8v8@0=int8: int8 has limits already"),
        ("int4:", "int8@0,1:", "no format for layers '0,1'"),
        ("int4: {", "int4: {min_session: 3, ", ":13: unknown key 'min_session' in int4; did you mean min_sessions?"),
        ("min_sessions: 16", "min_sessions: 0", ":5: min_sessions: 0 is out of range"),
        ("max_decode_ratio: 0.8", "max_decode_ratio: 80%", ":11: max_decode_ratio: '80%' is no number"),
        ("12MiB", "12Mb", ":10: max_bytes_per_sequence: '12Mb' is no size"),
        ("schema: 1", "schema: 7", ":1: schema: version 7"),
        ("formats:", "format:", ":8: unknown key 'format'; did you mean formats?"),
    ],
)
def test_a_bad_budget_is_named_with_its_line_and_mend(load, old, new, says):
    assert old in TEXT
    with pytest.raises(InputError) as caught:
        load(TEXT.replace(old, new, 1))
    assert says in str(caught.value)


def test_a_budget_that_limits_nothing_is_an_error(load):
    with pytest.raises(InputError, match="limits nothing"):
        load("schema: 1\nmemory: 1GiB\n")
