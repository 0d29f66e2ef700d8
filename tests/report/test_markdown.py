import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan.core.comparisons import Comparison, FigureVerdict, Standing
from kvplan.report.markdown import comparison_markdown, markdown_text

HOSTILE = "a|b <script>alert(1)</script> `x` [l](http://e) *y*\n# head\x1b[31m\u202e @team"


def comparison(text: str) -> Comparison:
    verdicts = tuple(FigureVerdict(cell=text, figure="tpot_s", standing=standing, reason=text) for standing in Standing)
    return Comparison(verdicts, text, 0.1)


def test_a_hostile_name_stays_in_its_cell_and_says_nothing_in_html() -> None:
    text = comparison_markdown(comparison(HOSTILE))
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert [len(re.findall(r"(?<!\\)\|", row)) for row in rows] == [5] * 4
    assert not re.search(r"<[a-z/!]", text)
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "\\@team" in text


def test_what_held_is_counted_and_not_listed() -> None:
    text = comparison_markdown(comparison("cell"))
    assert "1 held, 1 regressed, 1 undecided, 1 not comparable" in text
    assert text.count("| held") == 0
    assert text.index("| regressed") < text.index("| undecided") < text.index("| not comparable")


@given(st.text())
def test_any_text_is_one_line_of_valid_utf8_without_open_marks(text: str) -> None:
    shown = markdown_text(text)
    assert len(shown.splitlines()) <= 1
    shown.encode()
    assert not re.search(r"(?<!\\)(?:\\\\)*[|`*_<\[]", shown.replace("\\\\", ""))


@pytest.mark.parametrize("text", ["int8/b64/chatx23+longx10", "tpot 1.5"])
def test_plain_text_reads_the_same_once_rendered(text: str) -> None:
    assert re.sub(r"\\(.)", r"\1", markdown_text(text)) == text
