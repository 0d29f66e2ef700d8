from xml.etree import ElementTree as ET

from hypothesis import given
from hypothesis import strategies as st

from kvplan.core.comparisons import Comparison, FigureVerdict, Standing
from kvplan.report.junit import comparison_junit


def comparison(text: str) -> Comparison:
    return Comparison(
        (
            *(FigureVerdict(cell=text, figure="tpot_s", standing=standing, reason=text) for standing in Standing),
            FigureVerdict(cell="other", figure="cache_bytes", standing=Standing.HELD, current=1, baseline=1),
        ),
        "the baseline",
        0.1,
    )


def test_a_suite_a_cell_and_a_case_a_figure() -> None:
    root = ET.fromstring(comparison_junit(comparison("int8/b64/longx10")))  # noqa: S314
    assert root.attrib["tests"] == "5"
    assert root.attrib["failures"] == "1"
    assert root.attrib["skipped"] == "2"
    assert [suite.attrib["name"] for suite in root] == ["int8/b64/longx10", "other"]
    assert [[child.tag for child in case] for case in root[0]] == [[], ["failure"], ["skipped"], ["skipped"]]


@given(st.text())
def test_any_text_gives_a_document_that_can_be_read(text: str) -> None:
    document = comparison_junit(comparison(text))
    root = ET.fromstring(document.encode())  # noqa: S314
    assert len(root.findall("testsuite/testcase")) == 5
