"""An error is one line, whatever a file put into it."""

import pytest

from kvplan.errors import InputError


@pytest.mark.parametrize("smuggled", ["a\nb", "a\x1b[31mb", "a\udc80b", "a\u2028b"])
def test_what_a_file_says_stays_on_the_line(smuggled: str) -> None:
    line = str(InputError(f"unknown key {smuggled}", where="m.gguf", hint="mend it"))

    assert line.isprintable()
    assert line.startswith("m.gguf: unknown key a")
