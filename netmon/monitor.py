"""One link's monitor: it joins the estimator, the detector and the planner of probes.

It decides nothing itself. Pure: the caller brings samples and the time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from netmon.detector import Change, CongestionDetector, DetectorConfig
from netmon.estimate import LinkCondition, LinkEstimate, PathReport
from netmon.estimator import EstimatorConfig, LinkEstimator
from netmon.probing import ProbeConfig, ProbePlanner
from netmon.samples import LinkSample, ProbeResult


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorConfig:
    """Settings for watching links; all links of a process have the same."""

    estimator: EstimatorConfig = field(default_factory=EstimatorConfig)
    detector: DetectorConfig = field(default_factory=DetectorConfig)
    probing: ProbeConfig = field(default_factory=ProbeConfig)


class LinkMonitor:
    """Watches one link. Not thread-safe."""

    def __init__(self, endpoint: str, config: MonitorConfig | None = None) -> None:
        config = config or MonitorConfig()
        self._endpoint = endpoint
        self._estimator = LinkEstimator(config.estimator)
        self._detector = CongestionDetector(config.detector)
        self._planner = ProbePlanner(config.probing)
        self._num_changes = dict.fromkeys(LinkCondition, 0)
        self._judged: tuple[float, LinkEstimate] | None = None
        """The time of the last judgement, and its estimate, which `report` mostly needs again."""

    def observe(self, sample: LinkSample, now_s: float) -> Change | None:
        """Take in a sample. Returns the change of condition that it causes, or None."""
        self._estimator.observe(sample, now_s)
        return self._judge(now_s)

    def observe_probe(self, result: ProbeResult, now_s: float) -> Change | None:
        """Take in the result of a probe. Returns as `observe` does."""
        self._estimator.observe_probe(result, now_s)
        return self._judge(now_s)

    def due_probe_bytes(self, now_s: float) -> int | None:
        """The size of the probe that is due now, or None. The planner counts it as sent. Ask about
        once a second.
        """
        return self._planner.due_bytes(self.estimate(now_s), self._detector.condition, now_s)

    def estimate(self, now_s: float) -> LinkEstimate:
        if self._judged is not None and self._judged[0] == now_s:
            return self._judged[1]
        return self._estimator.estimate(now_s)

    def report(self, now_s: float) -> PathReport:
        """The monitor's part of the report. Fields that only the sender knows keep their
        defaults.
        """
        detector = self._detector
        since_s = now_s if detector.since_s is None else detector.since_s
        return PathReport(
            endpoint=self._endpoint,
            estimate=self.estimate(now_s),
            condition=detector.condition,
            reason=detector.reason,
            condition_s=max(0.0, now_s - since_s),
            reference_bytes_per_s=detector.reference_bytes_per_s,
            totals=self._estimator.totals(),
            num_changes=dict(self._num_changes),
        )

    def _judge(self, now_s: float) -> Change | None:
        estimate = self._estimator.estimate(now_s)
        self._judged = now_s, estimate
        change = self._detector.observe(estimate, now_s)
        if change is not None:
            self._num_changes[change.after] += 1
        return change
