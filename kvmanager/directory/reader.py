"""The interface by which the rest of the region asks a directory, wherever it is.

Does not know how it is fed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final, Protocol

from kvmanager.directory.messages import NodeCoverage, NodeName, NodeState, ResumeRule

logger = logging.getLogger("prfaas.kvmanager.directory")

_QUIET_S: Final = 1.0


class DirectoryReader(Protocol):
    """Calls never fail. A directory that cannot be reached answers that it knows nothing, and logs
    that. Routing goes on as if nothing were cached.
    """

    async def match(self, rule: ResumeRule, keys: Sequence[bytes]) -> list[NodeCoverage]:
        """How much each node holds of the prompt with these block keys (whole keys, in order).
        Nodes that hold nothing useful are left out; the longest usable prefix comes first.
        """

    async def embedding_holders(self, keys: Sequence[bytes]) -> list[list[NodeName]]:
        """The nodes that have each of these embeddings (`kvmanager.embedding_keys`)."""

    async def nodes(self) -> list[NodeState]:
        """The nodes that are known, by name."""

    async def close(self) -> None:
        """Idempotent."""


class Outage:
    """After a failed call no other is tried for a while, so that requests do not all wait for the
    same timeout. Logs the beginning and the end of an outage.
    """

    def __init__(self, name: str, quiet_s: float = _QUIET_S) -> None:
        self._name = name
        self._quiet_s = quiet_s
        self._until_s: float | None = None

    def quiet(self, now_s: float) -> bool:
        """Whether calls must be answered at once, without trying."""
        return self._until_s is not None and now_s < self._until_s

    def failed(self, reason: object, now_s: float) -> None:
        level = logging.WARNING if self._until_s is None else logging.DEBUG
        logger.log(level, "%s: no answer, going on without: %s", self._name, reason)
        self._until_s = now_s + self._quiet_s

    def worked(self) -> None:
        if self._until_s is not None:
            logger.info("%s: answers again", self._name)
            self._until_s = None
