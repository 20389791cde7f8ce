"""The version of the gRPC messages: both ends of every call name the versions that they speak.

A new field with a default, a new message and a new method need no new version: peers ignore what
they do not know, and a caller learns from UNIMPLEMENTED that a method is missing. A field or method
that goes away, or means something else, needs one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from transport.versions import NoCommonVersion, Versions

VERSIONS: Final = Versions(oldest=1, newest=1)
"""1: 0.1.0, whose processes do not name it."""

_FIRST: Final = Versions(1, 1)
_KEY: Final = "prfaas-versions"


def announced(versions: Versions = VERSIONS) -> tuple[str, str]:
    """The metadata of each call and each answer: the versions that its sender speaks."""
    return _KEY, f"{versions.oldest}-{versions.newest}"


def check_versions(metadata: Mapping[str, Any], who: str) -> None:
    """Raise NoCommonVersion unless the peer that sent `metadata` can be understood."""
    try:
        VERSIONS.common(_versions_in(metadata), who)
    except NoCommonVersion as error:
        raise NoCommonVersion(f"version mismatch of the gRPC messages: {error}") from error


def _versions_in(metadata: Mapping[str, Any]) -> Versions:
    text = metadata.get(_KEY)
    if text is None:
        return _FIRST
    oldest, _, newest = str(text).partition("-")
    if not (oldest.isdecimal() and newest.isdecimal() and len(str(text)) <= 20):
        raise NoCommonVersion(f"the other side names no versions: {str(text)[:20]!r}")
    return Versions(int(oldest), int(newest))
