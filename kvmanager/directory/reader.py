"""How the rest of the region asks a directory, wherever it lies.

Does not know how it is fed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final, Protocol

from kvmanager.directory.messages import NodeCoverage, NodeState, ResumeRule

logger = logging.getLogger("prfaas.kvmanager.directory")

_QUIET_S: Final = 1.0


class DirectoryReader(Protocol):
    """Answers never fail: a directory that cannot be asked knows nothing, and says so in the log.

    Routing goes on without it, as if nothing were cached.
    """

    async def match(self, rule: ResumeRule, keys: Sequence[bytes]) -> list[NodeCoverage]:
        """Who holds how much of the prompt with these block keys (whole keys, in order): nodes that
        hold anything of use, the longest usable prefix first.
        """

    async def nodes(self) -> list[NodeState]:
        """The nodes that are known, by name."""

    async def close(self) -> None:
        """Idempotent."""


class Outage:
    """After a failed call, for how long no other is tried, so that requests do not all wait for
    the same silence. Logs the beginning and the end of it.
    """

    def __init__(self, name: str, quiet_s: float = _QUIET_S) -> None:
        self._name = name
        self._quiet_s = quiet_s
        self._until_s: float | None = None

    def quiet(self, now_s: float) -> bool:
        """Whether to answer at once that nothing is known."""
        return self._until_s is not None and now_s < self._until_s

    def failed(self, reason: object, now_s: float) -> None:
        level = logging.WARNING if self._until_s is None else logging.DEBUG
        logger.log(level, "%s: no answer, going on without: %s", self._name, reason)
        self._until_s = now_s + self._quiet_s

    def worked(self) -> None:
        if self._until_s is not None:
            logger.info("%s: answers again", self._name)
            self._until_s = None
