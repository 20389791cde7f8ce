"""One line of what `prfaas doctor region` found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "problem"]


@dataclass(frozen=True, slots=True)
class Check:
    """A thing that was looked at, its state, and what to do about it ("" where it is all right).

    A problem keeps the region, or a part of it, from working; a warning costs speed or safety, or
    will be a problem.
    """

    level: Level
    about: str
    what: str
    fix: str = ""


def ok(about: str, what: str) -> Check:
    return Check("ok", about, what)


def warning(about: str, what: str, fix: str) -> Check:
    return Check("warning", about, what, fix)


def problem(about: str, what: str, fix: str) -> Check:
    return Check("problem", about, what, fix)
