"""The version of the installed package."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def program_version() -> str:
    """ "unknown" for a source tree that is not installed."""
    try:
        return version("prfaas")
    except PackageNotFoundError:
        return "unknown"
