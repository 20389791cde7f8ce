"""Decides when an idle link is due for a probe, and how big it may be. Sends nothing itself.

Traffic measures better than any probe. So a link is probed only when nothing flows and the last
measurement has grown old, or when the link was slow and may have recovered. Probes are paid from a
budget of their own, so they never cost more than what fills it, plus what it holds at the start.

A probe lasts as long as connections need to find their speed at the known rate. When the link turns
out to be faster, the next probe is bigger. `LinkMonitor.observe_probe` takes the result.
"""

from __future__ import annotations

import math
from typing import Final

from netmon.estimate import LinkCondition, LinkEstimate

SHARE: Final = 0.001
"""Share of the link's rate that fills the budget. Chosen: nobody notices it beside KVCache."""
LEAST_BYTES_PER_S: Final = 32 * 1024
"""What fills the budget in any case: the largest probe every two minutes. On a fast or long link a
probe is over before it has found the rate, and a share of what it found would pay for the next one
only after a quarter of an hour.
"""
BUDGET_BYTES: Final = 8 * 1024 * 1024
"""Most bytes in the budget, and its bytes at the start. Chosen: two of the largest probes."""
LEAST_PROBE_BYTES: Final = 64 * 1024
"""Chosen: more than the initial windows of four connections, which leave at once at any rate."""
FIRST_PROBE_BYTES: Final = 256 * 1024
"""The size for a link that was never measured. Chosen: 0.2 s at 10 Mbit/s."""
MOST_PROBE_BYTES: Final = 4 * 1024 * 1024
"""Chosen: 34 ms of a link of 1 Gbit/s, for which a first token may have to wait."""
RAMP_ROUND_TRIPS: Final = 8.0
"""Round trips with a backlog after which connections have found their speed. Slow start doubles its
10 segments (RFC 6928) in each: after 8 a connection has 3.7 MB under way.
"""
DURATION_S: Final = 0.1
"""Least time that a probe should last at the known rate. Chosen: twice `samples.LEAST_BUSY_S`."""
IDLE_S: Final = 2.0
"""A link counts as idle after this long without traffic. Chosen: two looks at an idle link."""
QUIET_BYTES_PER_S: Final = 1000.0
"""A lower rate is no traffic: keep-alive messages, or the tail of a fading average."""
FRESH_S: Final = 10.0
"""A clear link is probed again when its measurement is this old. Chosen: other traffic of a shared
link changes within minutes.
"""
RECHECK_S: Final = 5.0
"""The same for a link that is not clear or whose rate is only a floor; also the least time between
two probes. Chosen: the detector's dwell time, so that each step down has seen a probe.
"""


class ProbePlanner:
    """Plans the probes of one link. Ask it about once a second, because it sees only then whether
    the link is idle. Send as much as it says.
    """

    def __init__(self) -> None:
        self._budget_bytes = float(BUDGET_BYTES)
        self._asked_s: float | None = None
        self._used_s = 0.0  # traffic was seen, or a probe was due
        self._probed_s = -math.inf

    def due_bytes(self, estimate: LinkEstimate, condition: LinkCondition, now_s: float) -> int:
        """The size of the probe that is due now, 0 if none is. It counts as sent."""
        share_bytes_per_s = SHARE * estimate.available_bytes_per_s
        if self._asked_s is None:
            self._asked_s = self._used_s = now_s
        filled = max(LEAST_BYTES_PER_S, share_bytes_per_s) * max(0.0, now_s - self._asked_s)
        self._budget_bytes = min(BUDGET_BYTES, self._budget_bytes + filled)
        self._asked_s = now_s
        # Traffic measures the link by itself: a probe would only be in its way.
        quiet_bytes_per_s = max(QUIET_BYTES_PER_S, share_bytes_per_s)
        if estimate.backlog_bytes or estimate.achieved_bytes_per_s >= quiet_bytes_per_s:
            self._used_s = now_s
        if not estimate.is_up or now_s - self._used_s < IDLE_S or not _is_old(estimate, condition):
            return 0
        # The next probe waits even if the last one failed, so that a dead path costs little. The
        # budget is saved up: a smaller probe would be over before it has measured anything.
        size = _probe_bytes(estimate)
        if now_s - self._probed_s < RECHECK_S or size > self._budget_bytes:
            return 0
        self._budget_bytes -= size
        self._probed_s = self._used_s = now_s
        return size


def _is_old(estimate: LinkEstimate, condition: LinkCondition) -> bool:
    is_doubtful = estimate.is_floor or condition is not LinkCondition.CLEAR
    return estimate.age_s is None or estimate.age_s >= (RECHECK_S if is_doubtful else FRESH_S)


def _probe_bytes(estimate: LinkEstimate) -> int:
    if estimate.age_s is None:
        # No rate is known by which a duration could be turned into bytes.
        return FIRST_PROBE_BYTES
    duration_s = max(DURATION_S, RAMP_ROUND_TRIPS * estimate.base_rtt_s)
    wanted = int(duration_s * estimate.available_bytes_per_s)
    return min(MOST_PROBE_BYTES, max(LEAST_PROBE_BYTES, wanted))
