import pytest

from kvplan.errors import InputError
from kvplan.units import format_limit, parse_seconds


@pytest.mark.parametrize(
    ("text", "seconds"), [("500ms", 0.5), ("90s", 90), (" 1.5 min ", 90), ("30min", 1800), ("2h", 7200)]
)
def test_a_length_of_time_has_a_unit(text: str, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "30", "0s", "-3s", "3 parsecs", "1h30", "inf", "nan s", "90S"])
def test_what_is_no_length_of_time_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(InputError, match="write it as 90s, 30min or 2h"):
        parse_seconds(text)


@pytest.mark.parametrize("text", ["500 ms", "90 s", "90 min", "2 h"])
def test_a_limit_reads_back_as_it_was_set(text: str) -> None:
    seconds = parse_seconds(text)

    assert parse_seconds(format_limit(seconds)) == seconds
