"""The last minutes of one link in constant memory, for people to look at. Decides nothing."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from netmon.detector import Condition
from netmon.estimate import LinkEstimate


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkPoint:
    """One step of time. Rates are means, all else is the worst of the step."""

    start_s: float
    num_samples: int
    achieved_bytes_per_s: float
    available_bytes_per_s: float
    queueing_delay_s: float
    backlog_s: float
    loss: float
    condition: Condition


class LinkHistory:
    """The last `capacity` steps of `step_s`. Steps without samples leave no point."""

    def __init__(self, capacity: int = 240, step_s: float = 0.5) -> None:
        if capacity < 1 or not step_s > 0:
            raise ValueError(f"capacity and step_s must be above 0: {capacity}, {step_s}")
        self._step_s = step_s
        self._points: deque[LinkPoint] = deque(maxlen=capacity)

    def add(self, estimate: LinkEstimate, condition: Condition, now_s: float) -> None:
        """In order of time; what comes out of order counts for the latest step."""
        start_s = now_s // self._step_s * self._step_s
        point = LinkPoint(
            start_s=start_s,
            num_samples=1,
            achieved_bytes_per_s=estimate.achieved_bytes_per_s,
            available_bytes_per_s=estimate.available_bytes_per_s,
            queueing_delay_s=estimate.queueing_delay_s,
            backlog_s=estimate.backlog_s,
            loss=estimate.loss,
            condition=condition,
        )
        if self._points and self._points[-1].start_s >= start_s:
            self._points[-1] = _joined(self._points[-1], point)
        else:
            self._points.append(point)

    def points(self) -> tuple[LinkPoint, ...]:
        """Oldest first."""
        return tuple(self._points)


def _joined(old: LinkPoint, new: LinkPoint) -> LinkPoint:
    count = old.num_samples + 1

    def mean(earlier: float, now: float) -> float:
        return earlier + (now - earlier) / count

    return replace(
        old,
        num_samples=count,
        achieved_bytes_per_s=mean(old.achieved_bytes_per_s, new.achieved_bytes_per_s),
        available_bytes_per_s=mean(old.available_bytes_per_s, new.available_bytes_per_s),
        queueing_delay_s=max(old.queueing_delay_s, new.queueing_delay_s),
        backlog_s=max(old.backlog_s, new.backlog_s),
        loss=max(old.loss, new.loss),
        condition=max(old.condition, new.condition),
    )
