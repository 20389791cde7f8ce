"""The versions of a protocol that a process speaks, and the one that two processes use together."""

from __future__ import annotations

from dataclasses import dataclass


class NoCommonVersion(Exception):
    """Two sides speak no version that is the same. The message names the versions of both."""


@dataclass(frozen=True, slots=True)
class Versions:
    """Every version from `oldest` to `newest`, both included."""

    oldest: int
    newest: int

    def common(self, theirs: Versions, who: str) -> int:
        """The newest version that this side and the peer `who` speak. Raises NoCommonVersion."""
        version = min(self.newest, theirs.newest)
        if version < max(self.oldest, theirs.oldest):
            raise NoCommonVersion(
                f"the {who} speaks version {theirs}, this side speaks {self}; "
                "a release of prfaas works with the one before it and the one after it"
            )
        return version

    def __str__(self) -> str:
        return str(self.newest) if self.oldest == self.newest else f"{self.oldest} to {self.newest}"
