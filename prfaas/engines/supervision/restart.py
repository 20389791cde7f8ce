"""When a process that ended is started again: exponential backoff with memory of failures.

Pure: time is an argument, nothing is started here, and what the process does is not known.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RestartConfig:
    """First delay, growth, and ceiling, all of one process.

    A process that was healthy for `forgive_after_s` starts with a clean record. After
    `max_failures` consecutive failures it is given up; None means never.
    """

    initial_backoff_s: float = 1.0
    factor: float = 2.0
    max_backoff_s: float = 60.0
    forgive_after_s: float = 60.0
    max_failures: int | None = None

    def __post_init__(self) -> None:
        if self.initial_backoff_s <= 0 or self.factor < 1:
            raise ValueError("initial_backoff_s must be positive and factor at least 1")
        if self.max_backoff_s < self.initial_backoff_s:
            raise ValueError("max_backoff_s must not be below initial_backoff_s")


@dataclass(frozen=True, slots=True)
class RestartDecision:
    """`delay_s` until the next start, None: give up. `reason` is meant for a log line."""

    delay_s: float | None
    reason: str


class RestartPolicy:
    """The record of one process. Feed it `healthy` and `ended`; ask `ended` what to do."""

    def __init__(self, config: RestartConfig) -> None:
        self._config = config
        self._healthy_since_s: float | None = None
        self.num_failures = 0
        self.num_restarts = 0

    def healthy(self, now_s: float) -> None:
        """A probe succeeded; the first success after a start begins the healthy time."""
        if self._healthy_since_s is None:
            self._healthy_since_s = now_s

    def process_ended(self, now_s: float) -> RestartDecision:
        """The process ended without being asked to, or had to be killed."""
        config = self._config
        since_s, self._healthy_since_s = self._healthy_since_s, None
        if since_s is not None and now_s - since_s >= config.forgive_after_s:
            self.num_failures = 0
        self.num_failures += 1
        if config.max_failures is not None and self.num_failures >= config.max_failures:
            return RestartDecision(None, f"given up after {self.num_failures} failures in a row")
        self.num_restarts += 1
        delay_s = self._backoff_s()
        return RestartDecision(
            delay_s, f"failure {self.num_failures} in a row, next start in {delay_s:g} s"
        )

    def _backoff_s(self) -> float:
        config = self._config
        delay_s = config.initial_backoff_s
        for _ in range(self.num_failures - 1):
            delay_s *= config.factor
            if delay_s >= config.max_backoff_s:
                return config.max_backoff_s
        return delay_s
