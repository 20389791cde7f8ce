"""Decides when an idle link is due for a probe, and how big it may be. Sends nothing itself.

Traffic measures better than any probe. So a link is probed only when nothing flows and the last
measurement has grown old, or when the link was slow and may have recovered. A budget pays for
probes; it fills with a small share of the estimated rate, or with `least_bytes_per_s` where that is
more. So probes never cost more than that, plus what the budget holds at the start.

A probe lasts as long as connections need to find their speed at the known rate. When the link turns
out to be faster, the next probe is bigger. `LinkEstimator.observe_probe` takes the result.
"""

from __future__ import annotations

from dataclasses import dataclass

from netmon.estimate import LinkCondition, LinkEstimate


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeConfig:
    """Sizes in bytes, times in seconds."""

    share: float = 0.001
    """Share of the link's rate that probes may take in the long run."""
    least_bytes_per_s: int = 32 * 1024
    """Probes may take this much in any case. On a fast or long link a probe is over before it has
    found the rate, and a share of what it found would not pay for another one for many minutes.
    """
    budget_bytes: int = 8 * 1024 * 1024
    """Most bytes in the budget, and its bytes at the start."""
    least_bytes: int = 64 * 1024
    first_bytes: int = 256 * 1024
    """The size of a probe of a link that was never measured."""
    most_bytes: int = 4 * 1024 * 1024
    idle_s: float = 2.0
    """A link counts as idle after this long without traffic."""
    fresh_s: float = 10.0
    """A clear link is probed again when its measurement is older than this."""
    recheck_s: float = 5.0
    """The same for a link that is not clear or whose rate is only a floor."""
    duration_s: float = 0.1
    """Least seconds that a probe should last at the known rate."""
    round_trips: float = 8.0
    """Least round trips that a probe should last."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0: {getattr(self, name)}")
        if self.share > 0.1:
            raise ValueError(f"share must be at most 0.1, not to be traffic itself: {self.share}")
        if not self.least_bytes <= self.first_bytes <= self.most_bytes <= self.budget_bytes:
            raise ValueError("sizes must be in order: least, first, most, budget")


class ProbePlanner:
    """Plans the probes of one link. Ask it about once a second, because it sees only then whether
    the link is idle. Send as much as it says.
    """

    def __init__(self, config: ProbeConfig | None = None) -> None:
        self._config = config or ProbeConfig()
        self._budget_bytes = float(self._config.budget_bytes)
        self._filled_s: float | None = None
        self._used_s: float | None = None  # traffic was seen, or a probe was due
        self._probed_s: float | None = None

    def due_bytes(
        self,
        estimate: LinkEstimate,
        condition: LinkCondition,
        now_s: float,
    ) -> int | None:
        """The size of the probe that is due now, or None. It counts as sent."""
        self._fill(estimate.available_bytes_per_s, now_s)
        # Traffic measures the link by itself: a probe would only be in its way.
        if estimate.backlog_bytes or estimate.achieved_bytes_per_s >= self._quiet(estimate):
            self._used_s = now_s
        if not estimate.is_up or not self._is_idle(now_s) or not self._is_old(estimate, condition):
            return None
        # The next probe waits even if the last one failed, so that a dead path costs little.
        if self._probed_s is not None and now_s - self._probed_s < self._config.recheck_s:
            return None
        size = self._size(estimate)
        # The budget is saved up: a smaller probe would be over before it has measured anything.
        if size > self._budget_bytes:
            return None
        self._budget_bytes -= size
        self._probed_s = self._used_s = now_s
        return size

    def _fill(self, available_bytes_per_s: float, now_s: float) -> None:
        config = self._config
        if self._filled_s is not None:
            rate = max(config.least_bytes_per_s, config.share * available_bytes_per_s)
            gained = rate * max(0.0, now_s - self._filled_s)
            self._budget_bytes = min(config.budget_bytes, self._budget_bytes + gained)
        else:
            self._used_s = now_s
        self._filled_s = now_s

    def _quiet(self, estimate: LinkEstimate) -> float:
        """A lower rate comes from keep-alive messages or the tail of a decaying average."""
        return max(1000.0, self._config.share * estimate.available_bytes_per_s)

    def _is_idle(self, now_s: float) -> bool:
        return self._used_s is not None and now_s - self._used_s >= self._config.idle_s

    def _is_old(self, estimate: LinkEstimate, condition: LinkCondition) -> bool:
        if estimate.age_s is None:
            return True
        is_doubtful = estimate.is_floor or condition is not LinkCondition.CLEAR
        return estimate.age_s >= (self._config.recheck_s if is_doubtful else self._config.fresh_s)

    def _size(self, estimate: LinkEstimate) -> int:
        config = self._config
        if estimate.age_s is None:
            # No rate is known by which a duration could be turned into bytes.
            return config.first_bytes
        duration_s = max(config.duration_s, config.round_trips * estimate.base_rtt_s)
        wanted = int(duration_s * estimate.available_bytes_per_s)
        return min(config.most_bytes, max(config.least_bytes, wanted))
