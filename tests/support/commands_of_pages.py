"""The commands in the fenced blocks of the documentation, and the command line's parser."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typer.main import get_command

from deploy.cli import app

ROOT = Path(__file__).parents[2]
SHELLS = ("bash", "console")
OPTIONS_OF_ALL = {"--help", "--version", "--install-completion"}
NOT_RUN = "Not run by a test"
"""So begins the sentence behind a block whose commands no test runs; it gives the reason."""

_BLOCK = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^(?P=indent)```[ ]*\n"
    r"(?=\s*(?P<next>[^\n]*))",
    re.DOTALL | re.MULTILINE,
)
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_SEPARATORS = frozenset("|&;()")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page. `mark` is why no test runs its commands, "" where tests do."""

    page: str
    line: int
    language: str
    text: str
    mark: str

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"

    def script(self) -> str:
        """What is typed: of a console's block only what stands behind the prompt."""
        if self.language != "console":
            return self.text
        lines = self.text.splitlines()
        return "\n".join(line.lstrip()[2:] for line in lines if line.lstrip().startswith("$ "))

    def commands(self) -> list[list[str]]:
        """Each command's words, without variables before it and without redirections."""
        return [words for line in _joined(self.script()) for words in _commands(line)]


def pages() -> list[Path]:
    """README and all pages of the site."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page."""
    text = page.read_text() + "\nend\n"
    for found in _BLOCK.finditer(text):
        mark = found["next"] if found["next"].startswith(NOT_RUN) else ""
        yield Block(
            page=str(page.relative_to(ROOT)),
            line=text.count("\n", 0, found.start()) + 1,
            language=found["language"],
            text=re.sub(rf"(?m)^{found['indent']}", "", found["text"]),
            mark=mark,
        )


def inline_commands(page: Path) -> Iterator[list[str]]:
    """`prfaas ...` in sentences. They may leave arguments out."""
    prose = re.sub(r"(?ms)^ *```.*?^ *```", "", page.read_text())
    for code in re.findall(r"`(prfaas [^`]+)`", prose):
        yield shlex.split(" ".join(code.split()))


def _joined(script: str) -> Iterator[str]:
    """Lines, with those that a backslash continues."""
    yield from script.replace("\\\n", " ").splitlines()


def _commands(line: str) -> Iterator[list[str]]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;()<>")
    lexer.whitespace_split = True
    words: list[str] = []
    is_target = False
    for token in [*lexer, ";"]:
        if is_target:
            is_target = False
        elif set(token) <= set("<>&") and set(token) & set("<>"):
            is_target = True
        elif set(token) <= _SEPARATORS:
            if words:
                yield words
            words = []
        elif words or not _ASSIGNMENT.fullmatch(token):
            words.append(token)


def command_of(words: Sequence[str], *, is_whole: bool) -> str:
    """The name of the `prfaas` command that takes these words; an error of the parser if none does.

    With `is_whole` no argument may be missing: ValueError.
    """
    command: Any = get_command(app)
    context = command.context_class(command, info_name="prfaas")
    name, rest = "prfaas", list(words[1:])
    while hasattr(command, "commands"):
        if not rest or (rest[0].startswith("--") and name != "prfaas simulate"):
            assert {word for word in rest if word != "X"} <= OPTIONS_OF_ALL, words
            return name
        if name == "prfaas simulate" and rest[0] not in command.commands:
            rest = ["recording" if "--recording" in rest else "run", *rest]
        _, command, rest = command.resolve_command(context, rest)
        context = command.context_class(command, info_name=command.name, parent=context)
        name += f" {command.name}"
    values, _, _ = command.make_parser(context).parse_args(rest)
    missing = [item.name for item in command.params if item.required and not values.get(item.name)]
    if is_whole and missing and "--help" not in rest:
        raise ValueError(f"{name} without {missing}")
    return name
