"""One link's monitor: it joins the estimator, the detector and the planner of probes.

It decides nothing itself. Pure: the caller brings samples and the time.
"""

from __future__ import annotations

from netmon.detector import CongestionDetector, DetectorConfig
from netmon.estimate import LinkCondition, LinkEstimate, PathReport
from netmon.estimator import LinkEstimator
from netmon.probing import ProbePlanner
from netmon.samples import LinkSample


class LinkMonitor:
    """Watches one link. Not thread-safe."""

    def __init__(self, endpoint: str, config: DetectorConfig | None = None) -> None:
        self._endpoint = endpoint
        self._estimator = LinkEstimator()
        self._detector = CongestionDetector(config or DetectorConfig())
        self._planner = ProbePlanner()

    @property
    def condition(self) -> LinkCondition:
        return self._detector.condition

    @property
    def reason(self) -> str:
        """Why the link has its condition, with numbers."""
        return self._detector.reason

    def observe(self, sample: LinkSample, now_s: float) -> None:
        """Take in a sample that was read at `now_s`."""
        self._estimator.observe(sample, now_s)
        self._detector.observe(self.estimate(now_s), now_s)

    def observe_probe(self, acked_bytes: int, duration_s: float, now_s: float) -> None:
        """Take in a probe: `acked_bytes` were acknowledged within `duration_s` (above 0) of the
        first byte sent. They are less than was sent if the probe was given up.
        """
        self._estimator.observe_probe(acked_bytes, duration_s, now_s)
        self._detector.observe(self.estimate(now_s), now_s)

    def due_probe_bytes(self, now_s: float) -> int:
        """The size of the probe that is due now, 0 if none is. It counts as sent. Ask about once a
        second.
        """
        return self._planner.due_bytes(self.estimate(now_s), self.condition, now_s)

    def estimate(self, now_s: float) -> LinkEstimate:
        return self._estimator.estimate(now_s)

    def report(self, now_s: float) -> PathReport:
        """The report, but for what only the sender knows."""
        detector = self._detector
        return PathReport(
            endpoint=self._endpoint,
            condition=detector.condition,
            reason=detector.reason,
            condition_s=0.0 if detector.since_s is None else max(0.0, now_s - detector.since_s),
            reference_bytes_per_s=detector.reference_bytes_per_s,
            estimate=self.estimate(now_s),
            num_changes=dict(detector.num_changes),
        )
