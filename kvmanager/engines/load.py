"""How loaded an engine is between two looks at its metrics.

Pure. It does not know HTTP, agents, or what a request does in the engine.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class LoadEstimate:
    """Requests in one engine: those it reported, plus those given to it since.

    The front is never told when a decode ends, so its own count would only grow; the engine's
    metrics know, but are some seconds old and blind to requests on their way.
    """

    reported: int = 0
    _given: int = 0
    _given_at_poll: int = 0

    @property
    def num_requests(self) -> int:
        """The estimate."""
        return self.reported + self._given - self._given_at_poll

    def given(self) -> None:
        """One more request is on its way to the engine."""
        self._given += 1

    def poll_starts(self) -> int:
        """To be handed to `polled`: what the answer of a poll that starts now may contain."""
        return self._given

    def polled(self, num_requests: int, started: int) -> None:
        """The engine reports `num_requests` to the poll for which `poll_starts` gave `started`."""
        self.reported = num_requests
        self._given_at_poll = started
