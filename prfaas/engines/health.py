"""Whether an instance is usable, from probes and from requests that failed on it.

Pure: time is not even needed. It does not know what a probe asks.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HealthConfig:
    """`num_failures` failed probes in a row make a healthy instance unhealthy."""

    num_failures: int = 3


class HealthTracker:
    """One instance's health; starts unhealthy.

    A slow probe on a busy machine must not take an instance away, so several have to fail. A
    request that lost its engine is proof and counts at once. One good probe brings it back.
    """

    def __init__(self, config: HealthConfig) -> None:
        self._config = config
        self._num_failed = 0
        self.healthy = False
        self.reason = "not probed yet"

    @property
    def gone(self) -> bool:
        """Probes agree that it is unhealthy: work on it will not end by itself."""
        return not self.healthy and self._num_failed >= self._config.num_failures

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
        if self._num_failed < self._config.num_failures:
            return False
        return self.mark_lost(reason)

    def mark_lost(self, reason: str) -> bool:
        """A request proved that the instance is gone; True when that changed `healthy`."""
        self.reason = reason
        changed, self.healthy = self.healthy, False
        return changed
