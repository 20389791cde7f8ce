"""Each command's help ends with an example; exit status and colours are as documented."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands_of_pages import command_of
from rich.console import Console
from typer.testing import CliRunner

from deploy.cli import _COMMANDS, _load, app
from deploy.command_line import EXIT_CODES, ExitCode
from deploy.gateway.serving.records import RequestRecord
from deploy.gateway.serving.ttft_parts import TtftParts
from deploy.help_examples import EXAMPLES
from deploy.region import client
from deploy.region.client import CannotAsk

run = CliRunner().invoke
PAGE = Path(__file__).parents[2] / "docs" / "command-line.md"
NOBODY = "http://127.0.0.1:9"
COLOUR = re.compile(r"\x1b\[[\d;]*3\d")


def names(command: Any, words: str) -> Iterator[str]:
    below = getattr(command, "commands", {})
    for name, each in below.items():
        yield from names(each, f"{words} {name}")
    if not below:
        yield words


ALL = [found for name, entry in _COMMANDS.items() for found in names(_load(name, entry), name)]


def test_every_command_has_an_example() -> None:
    assert sorted(ALL) == sorted(EXAMPLES)


@pytest.mark.parametrize("words", ALL)
def test_the_help_of_a_command_ends_with_an_example_and_its_output(words: str) -> None:
    typed, *output = EXAMPLES[words].splitlines()
    assert typed.startswith("$ ")
    assert command_of(shlex.split(typed)[1:], is_whole=True) == f"prfaas {words}"
    assert output
    shown = [line.strip() for line in run(app, [*words.split(), "--help"]).output.splitlines()]
    wanted = [line.strip() for line in ("For example:", typed, *output)]
    assert shown[-len(wanted) :] == wanted


def test_the_page_has_every_exit_status() -> None:
    rows = dict(re.findall(r"^\| (\d+) \| (.*) \|$", PAGE.read_text(), re.MULTILINE))
    assert rows == {str(int(status)): meaning for status, meaning in EXIT_CODES.items()}
    assert set(EXIT_CODES) == set(ExitCode)
    for status, meaning in rows.items():
        assert f"{status:>3}  {meaning}" in run(app, ["--help"]).output


@pytest.mark.parametrize(
    ("status", "code"),
    [(None, ExitCode.UNREACHABLE), (401, 4), (403, ExitCode.REFUSED), (404, 1), (503, 1)],
)
def test_what_the_gateway_does_decides_the_status(
    monkeypatch: pytest.MonkeyPatch, status: int | None, code: int
) -> None:
    def ask(*_: Any, **__: Any) -> None:
        raise CannotAsk("why", status)

    monkeypatch.setattr(client, "ask", ask)
    assert run(app, ["clusters", "--gateway", NOBODY]).exit_code == code


def test_a_gateway_that_is_not_there_is_named() -> None:
    result = run(app, ["requests", "--gateway", NOBODY])
    assert result.exit_code == 3
    assert NOBODY in result.output
    assert "--gateway URL" in result.output


@pytest.mark.parametrize(
    "url", ["localhost:8000", "10.0.0.5", "http://", "ftp://host", "http://host:x", "http://[1::"]
)
@pytest.mark.parametrize("command", [["requests"], ["role", "ls"], ["explain", "id"]])
def test_a_gateway_that_is_no_url_is_a_wrong_argument(command: list[str], url: str) -> None:
    result = run(app, [*command, "--gateway", url])
    assert result.exit_code == ExitCode.USAGE
    assert f"'{url}' is no URL like http://" in result.output


def test_ctrl_c_before_the_end_has_a_status_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(client, "ask", ask)
    assert run(app, ["clusters", "--gateway", NOBODY]).exit_code == ExitCode.INTERRUPTED


@pytest.mark.parametrize(("is_terminal", "no_colour"), [(True, ""), (True, "1"), (False, "")])
def test_colours_are_for_terminals_that_want_them(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool, no_colour: str
) -> None:
    monkeypatch.setattr(Console, "is_terminal", is_terminal)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", no_colour)
    monkeypatch.setenv("COLUMNS", "140")
    parts = TtftParts(queue_s=0.5, prefill_s=1.0)
    record = RequestRecord(request_id="r", started_s=0.0, endpoint="chat", parts=parts)
    monkeypatch.setattr(client, "ask", lambda *_, **__: {"requests": [record]})
    result = run(app, ["requests", "--gateway", NOBODY])
    assert result.exit_code == 0, result.output
    assert bool(COLOUR.search(result.output)) is (is_terminal and not no_colour)
