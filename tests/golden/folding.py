"""Many files that are much alike, as one text that people can read: what repeats is left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from difflib import unified_diff
from pathlib import PurePath

_WORTH = 0.6
"""A file is shown by what differs if that is shorter than this share of it."""


def folded(files: Mapping[str, str], known: Mapping[str, str] | None = None) -> str:
    """All files in their order: whole, or as what differs from the most similar one before it.
    `known` are files that are shown elsewhere.
    """
    seen = {name: (text, Counter(text.splitlines())) for name, text in (known or {}).items()}
    parts = []
    for name, text in files.items():
        lines = Counter(text.splitlines())
        parts.append(_shown(name, text, lines, seen))
        seen[name] = text, lines
    return "\n".join(parts)


def _shown(
    name: str, text: str, lines: Counter[str], seen: Mapping[str, tuple[str, Counter[str]]]
) -> str:
    suffix = PurePath(name).suffix
    others = [other for other in seen if PurePath(other).suffix == suffix]
    # The one with the fewest other lines; of equals the first, whatever comes later.
    like = min(others, key=lambda other: _apart(lines, seen[other][1]), default=None)
    if like is None:
        return f"== {name}\n{text}"
    before = seen[like][0]
    if before == text:
        return f"== {name}: as {like}\n"
    diff = list(unified_diff(before.splitlines(), text.splitlines(), lineterm="", n=0))[2:]
    # Numbers of lines would change with every line above.
    changes = "".join(f"{'@@' if line.startswith('@@') else line}\n" for line in diff)
    if len(changes) > _WORTH * len(text):
        return f"== {name}\n{text}"
    return f"== {name}: as {like}, but\n{changes}"


def _apart(one: Counter[str], other: Counter[str]) -> int:
    return ((one - other) + (other - one)).total()
