"""The problems of a user's file: the path and line of each, and what to write instead.

Values only; reads nothing.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem at `path` (keys and indices from the top). `message` includes the fix."""

    path: KeyPath
    message: str
    line: int | None = None

    @property
    def where(self) -> str:
        """The path as one would write it: clusters[0].nodes[1].agent."""
        text = ""
        for part in self.path:
            text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
        return text or "(top level)"

    def __str__(self) -> str:
        line = "" if self.line is None else f" (line {self.line})"
        return f"{self.where}{line}: {self.message}"


class FileError(Exception):
    """A file that cannot be used. `problems` has all reasons."""

    def __init__(self, source: str, problems: Sequence[Problem]) -> None:
        count = f"{len(problems)} problem{'s' if len(problems) != 1 else ''}"
        super().__init__("\n  ".join([f"{source}: {count}", *map(str, problems)]))
        self.source = source
        self.problems = problems


def suggestion(wrong: str, known: Iterable[str]) -> str:
    """ "; did you mean 'x'?" for a near miss, else the known words."""
    known = sorted(set(known))
    near = difflib.get_close_matches(wrong, known, n=1, cutoff=0.6)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; known here: {', '.join(known)}" if known else ""
