"""The ways to a receiver with several addresses, and which of them a connection takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from transport.endpoint import Endpoint

RETURN_S: Final = 60.0
"""A connection that took another path because its own failed tries that again after so long."""


@dataclass(frozen=True, slots=True)
class LinkPath:
    """An address of a receiver, and the address of this host to leave from; "": the kernel's
    choice.
    """

    to: Endpoint
    source: str = ""


class PathChoice:
    """Spreads the connections of a link over its paths: connection `index` has a path of its own,
    and takes the next ones in turn while that cannot be connected.
    """

    def __init__(self, paths: Sequence[LinkPath], index: int) -> None:
        self._paths = paths
        self._own = index % len(paths)
        self._num_failed = 0

    @property
    def path(self) -> LinkPath:
        """The one to try now."""
        return self._paths[(self._own + self._num_failed) % len(self._paths)]

    @property
    def is_away(self) -> bool:
        """Whether this is not the connection's own path."""
        return self._num_failed % len(self._paths) != 0

    @property
    def num_rounds(self) -> int:
        """How often each path has failed since a connection stood."""
        return self._num_failed // len(self._paths)

    def failed(self) -> None:
        """There was no connection; the next path is tried."""
        self._num_failed += 1

    def lost(self) -> None:
        """An established connection ended: its own path comes first again."""
        self._num_failed = 0
