"""Whether an instance is usable, from probes and from requests that failed on it.

Pure: it needs no time, and it does not know what a probe asks.
"""

from dataclasses import dataclass
from typing import Final

NUM_FAILURES: Final = 3
"""So many failed probes in a row make a healthy instance unhealthy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeTiming:
    """How often a process is asked whether it serves."""

    interval_s: float = 2.0
    """Between two probes of a process that serves, seconds."""
    start_interval_s: float = 0.25
    """Between two probes of a process that does not serve yet, seconds."""
    timeout_s: float = 5.0
    """A probe that takes longer has failed, seconds."""

    def __post_init__(self) -> None:
        for name in ("interval_s", "start_interval_s", "timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} {getattr(self, name):g} must be above 0")


class HealthTracker:
    """One instance's health; starts unhealthy.

    Several probes in a row have to fail before the instance counts as unhealthy, because a probe
    may be slow on a busy machine. A request that lost its engine is proof and counts at once. One
    good probe makes it healthy again.
    """

    def __init__(self) -> None:
        self._num_failed = 0
        self.healthy = False
        self.reason = "not probed yet"

    @property
    def gone(self) -> bool:
        """Whether enough probes failed in a row that work on it cannot be expected to end."""
        return not self.healthy and self._num_failed >= NUM_FAILURES

    def probe_succeeded(self) -> bool:
        """A probe was answered well; True when that changed `healthy`."""
        self._num_failed = 0
        self.reason = ""
        changed, self.healthy = not self.healthy, True
        return changed

    def probe_failed(self, reason: str) -> bool:
        """A probe failed; True when that changed `healthy`."""
        self._num_failed += 1
        if not self.healthy:
            self.reason = reason
            return False
        if self._num_failed < NUM_FAILURES:
            return False
        return self.mark_lost(reason)

    def mark_lost(self, reason: str) -> bool:
        """A request proved that the instance is gone; True when that changed `healthy`."""
        self.reason = reason
        changed, self.healthy = self.healthy, False
        return changed
