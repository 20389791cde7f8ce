"""How loaded an engine is between two looks at its metrics.

Pure. It does not know HTTP, agents, or what a request does in the engine.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class LoadEstimate:
    """Requests in one engine: the number it reported, corrected by what began and ended since.

    A front's own count alone would drift, because a caller that dies never reports an end. The
    engine's metrics alone are some seconds old and do not contain requests on their way to it.
    """

    reported: int = 0
    _change: int = 0
    """Requests given to the engine minus requests that ended, since the front started."""
    _change_at_poll: int = 0

    @property
    def num_requests(self) -> int:
        """The estimate."""
        return max(0, self.reported + self._change - self._change_at_poll)

    def given(self) -> None:
        """One more request is on its way to the engine."""
        self._change += 1

    def request_ended(self) -> None:
        """The engine has one request less to do."""
        self._change -= 1

    def poll_starts(self) -> int:
        """The count that belongs to a poll starting now; hand it to `polled`."""
        return self._change

    def polled(self, num_requests: int, started: int) -> None:
        """The engine reports `num_requests` to the poll for which `poll_starts` gave `started`."""
        self.reported = num_requests
        self._change_at_poll = started
