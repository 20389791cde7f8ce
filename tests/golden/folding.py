"""Many files that are much alike, as one text that people can read: what repeats is left out.

A file is shown whole, or as one shown before, with the words of that which have another name here,
and then the lines that differ: `~` stands in place of one line there, `-` and `+` are as in diffs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from difflib import SequenceMatcher
from heapq import nsmallest
from typing import Final

_WORTH: Final = 0.8
"""A file is shown by what differs if that is shorter than this share of it."""
_ENOUGH: Final = 40
"""So many characters of a line that is left out say which one it is."""
_FIRST_LINES: Final = 3
"""So many of consecutive lines that are left out are shown."""
_CANDIDATES: Final = 4
"""Of so many files with the most similar lines, and as many more with the most similar shapes, the
one by which a file is shown in the fewest characters is taken.
"""
_WORD: Final = re.compile(r"[\w.-]+")
_IS_NAME: Final = re.compile(r"[A-Za-z]|\d{4}|\d+\.\d+\.")
"""Small numbers and options stand for many things."""
_FIRST: Final = re.compile(r"\w+[.-](?=.)")
_LAST: Final = re.compile(r"(?<=.)[.-]\w+$")
_NAME: Final = re.compile(r'"[^"]*"|[\w.-]*\d[\w.-]*|(?<=: )\S+')


def folded(files: Mapping[str, str], known: Mapping[str, str] | None = None) -> str:
    """All files in their order. `known` are files that are shown elsewhere."""
    seen = {name: _File(text) for name, text in (known or {}).items()}
    parts = []
    for name, text in files.items():
        file = _File(text)
        parts.append(_shown(name, file, seen))
        seen[name] = file
    return "\n".join(parts)


class _File:
    """A text, how often it has each line, and the same for its lines without names and numbers."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.lines = Counter(text.splitlines())
        self.shapes = Counter(_NAME.sub("_", text).splitlines())


def _shown(name: str, file: _File, seen: Mapping[str, _File]) -> str:
    others = [other for other in seen if _suffix(other) == _suffix(name)]
    # Of equals the first, whatever comes later.
    near = nsmallest(_CANDIDATES, others, lambda other: _apart(file.lines, seen[other].lines))
    near += nsmallest(_CANDIDATES, others, lambda other: _apart(file.shapes, seen[other].shapes))
    ways = [
        f"{name}: as {_short(other, name)}{_changes(seen[other].text, file.text)}" for other in near
    ]
    best = min(ways, key=len, default="")
    if not best or len(best) - len(name) > _WORTH * len(file.text):
        return f"== {name}\n{file.text}"
    return f"== {best}"


def _suffix(name: str) -> str:
    return name[name.rfind(".") :] if re.search(r"\.\w+$", name) else ""


def _short(other: str, name: str) -> str:
    """The name of another file, or just where it is if it has the same name there."""
    place = other.removesuffix(f": {name}")
    return other if place == other else f"in {place}"


def _changes(before: str, text: str) -> str:
    """What makes `text` of `before`: other names, then other lines."""
    names = _other_names(before, text)
    renamed = _renamed(before, names)
    words = ", ".join(f"{old} -> {new}" for old, new in names.items())
    words = f" with {words}" if words else ""
    lines = "".join(_diff(renamed.splitlines(), text.splitlines()))
    return f"{words}, but\n{lines}" if lines else f"{words}\n"


def _diff(before: list[str], text: list[str]) -> Iterator[str]:
    # Without numbers of lines, which would change with every line above.
    for tag, start, end, other, other_end in _opcodes(before, text):
        if tag == "equal":
            continue
        yield "@@\n"
        same = end - start == other_end - other
        if not same:
            # Their whole text is where the other file is shown.
            yield from (f"-{_shorten(line)}\n" for line in before[start:end][:_FIRST_LINES])
            if (num_more := end - start - _FIRST_LINES) > 0:
                yield f"- and {num_more} more\n"
        yield from (f"{'~' if same else '+'}{line}\n" for line in text[other:other_end])


def _shorten(line: str) -> str:
    return line if len(line) <= _ENOUGH else f"{line[:_ENOUGH]}…"


def _opcodes(before: list[str], text: list[str]) -> list[tuple[str, int, int, int, int]]:
    return SequenceMatcher(None, before, text, autojunk=False).get_opcodes()


def _other_names(before: str, text: str) -> dict[str, str]:
    """Words of `before` that have another name in `text`, where that explains several lines."""
    wanted = Counter(text.splitlines())
    names: dict[str, str] = {}
    apart = _apart(Counter(before.splitlines()), wanted)
    for old, new in _pairs(before.splitlines(), text.splitlines()):
        if old in names:
            continue
        more = names | {old: new}
        now = _apart(Counter(_renamed(before, more).splitlines()), wanted)
        # One line that differs counts twice, and it is read more easily than a rule.
        if now <= apart - 2:
            names, apart = more, now
    return names


def _pairs(before: list[str], text: list[str]) -> list[tuple[str, str]]:
    """Words in the same place of lines that differ, the most frequent first."""
    found: Counter[tuple[str, str]] = Counter()
    for tag, start, end, other, other_end in _opcodes(before, text):
        if tag != "replace" or end - start != other_end - other:
            continue
        for one, two in zip(before[start:end], text[other:other_end], strict=True):
            words, others = _WORD.findall(one), _WORD.findall(two)
            if len(words) == len(others):
                pairs = zip(words, others, strict=True)
                found.update(_part(old, new) for old, new in pairs if old != new)
    return [pair for pair, _ in found.most_common() if all(map(_IS_NAME.match, pair))]


def _part(old: str, new: str) -> tuple[str, str]:
    """What differs of two words of parts: demo-agent.a1, demo-agent.b1 gives a1, b1."""
    while (cut := _FIRST.match(old)) and new.startswith(cut[0]) and not cut[0][0].isdigit():
        old, new = old.removeprefix(cut[0]), new.removeprefix(cut[0])
    while (cut := _LAST.search(old)) and new.endswith(cut[0]) and not cut[0][1].isdigit():
        old, new = old.removesuffix(cut[0]), new.removesuffix(cut[0])
    return old, new


def _renamed(text: str, names: Mapping[str, str]) -> str:
    if not names:
        return text
    # The longest first, since one may begin with another one.
    words = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    return re.sub(rf"(?<![^\W_])(?:{words})(?![^\W_])", lambda word: names[word[0]], text)


def _apart(one: Counter[str], other: Counter[str]) -> int:
    return ((one - other) + (other - one)).total()
