from hypothesis import given
from hypothesis import strategies as st

from kvplan.engines import find_engine, read_log
from kvplan.engines.logs import clean_lines, printed

ESCAPES = ("\x1b[1;36m", "\x1b[0;0m", "^[[1;36m", "^[[0;0m", "#033[1;36m", "[0;36m", "[0m")


@given(
    parts=st.lists(st.sampled_from(["Available", " KV ", "82.42 GiB", "(pid=1)", "[utils.py:1]"]), min_size=1),
    escapes=st.lists(st.sampled_from(ESCAPES)),
)
def test_colours_leave_no_trace_in_whichever_spelling(parts: list[str], escapes: list[str]) -> None:
    mixed = "".join(part + (escapes[index] if index < len(escapes) else "") for index, part in enumerate(parts))
    assert [line.text for line in clean_lines(mixed)] == [text for text in ["".join(parts).strip()] if text]


def test_what_a_carriage_return_overwrites_is_a_line_of_its_own() -> None:
    lines = clean_lines("Loading:   0%|  | 0/36\rLoading: 100%\r[TM][INFO] budget: 5 MB\nnext^M\n\n")
    assert [(line.number, line.text) for line in lines] == [
        (1, "Loading:   0%|  | 0/36"), (1, "Loading: 100%"), (1, "[TM][INFO] budget: 5 MB"), (2, "next"),
    ]  # fmt: skip


@given(value=st.integers(0, 10**6), decimals=st.integers(0, 4), unit=st.sampled_from(["MiB", "GiB"]))
def test_a_printed_figure_holds_all_that_rounds_to_it(value: int, decimals: int, unit: str) -> None:
    exact = value / 1000
    figure = printed(f"{exact:.{decimals}f}", unit, 1)
    factor = 2.0 ** {"MiB": 20, "GiB": 30}[unit]
    if decimals:
        assert figure.low - 1e-3 <= exact * factor <= figure.high + 1e-3
        assert not figure.holds((exact + 2 * 10.0**-decimals) * factor)
    else:
        assert figure.low == figure.high == round(exact) * factor or abs(exact - round(exact)) == 0.5


def test_counts_have_commas_and_are_exact() -> None:
    figure = printed("1,391,552", "tokens", 7)
    assert (figure.value, figure.low, figure.high, figure.line) == (1391552, 1391552, 1391552, 7)


@given(st.text(max_size=300))
def test_any_text_is_read_without_a_fault(text: str) -> None:
    facts = read_log(text)
    assert facts is None or find_engine(facts.engine).read_log
