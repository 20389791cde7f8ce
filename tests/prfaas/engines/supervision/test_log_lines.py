"""Lines of logs as people are shown them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.engines.errors import EngineStartFailed
from prfaas.engines.supervision.log_lines import shortened


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("Loading weights", "Loading weights"),
        ("  Loading\tweights \n", "Loading weights"),
        ("\x1b[1;32mINFO\x1b[0m done", "INFO done"),
        ("\x1b]0;title\x07text", "text"),
        ("10%\r20%", "10% 20%"),
        ("\x1b", ""),
        ("x" * 30, "x" * 30),
        ("x" * 31, "x" * 29 + "…"),
        ("", ""),
    ],
)
def test_a_line_is_shown_without_what_a_terminal_acts_upon(line: str, shown: str) -> None:
    assert shortened(line, 30) == shown


@given(st.text(), st.integers(1, 50))
def test_every_text_becomes_one_printable_line(text: str, max_chars: int) -> None:
    line = shortened(text, max_chars)
    assert len(line) <= max_chars
    assert len(line.splitlines()) <= 1
    assert "\x1b" not in line


def test_a_failed_start_shows_the_end_of_the_log_and_where_the_rest_is() -> None:
    log = [f"line {number} " + "x" * 4000 for number in range(30)] + ["ValueError: no such model"]
    error = EngineStartFailed("b1-decode", "ended with status 1", log, "/logs/b1-decode.log")
    lines = str(error).splitlines()
    assert lines[0] == "b1-decode: ended with status 1; last lines of /logs/b1-decode.log:"
    assert lines[-1] == "    ValueError: no such model"
    assert len(lines) == 32
    assert max(map(len, lines)) < 220
    assert error.log_tail == log
