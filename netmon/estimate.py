"""What is known of a link at one moment. Does not know how it was found out."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import msgspec

MAX_BACKLOG_S: Final = 3600.0
"""Longer waits are not told apart: the link does not move."""


class LinkCondition(StrEnum):
    """From good to bad. Values are stable: they are metric labels and cross the wire."""

    CLEAR = "clear"
    RISING = "rising"
    CONGESTED = "congested"
    DOWN = "down"

    @property
    def severity(self) -> int:
        """0 for clear; the worse, the higher."""
        return _SEVERITIES[self]


_SEVERITIES: Final = {condition: severity for severity, condition in enumerate(LinkCondition)}


class Limit(StrEnum):
    """What kept the link from carrying more. Values are stable: they are metric labels."""

    LINK = "link"
    RECEIVER_WINDOW = "receiver_window"
    SEND_BUFFER = "send_buffer"
    IDLE = "idle"
    """Nothing waited: the link could have carried more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkEstimate:
    """All numbers are finite and none but `trend` is negative. Rates count transfers' bytes, before
    coding.

    A link that was never measured has `available_bytes_per_s` 0 and `age_s` None: nothing is
    assumed.
    """

    available_bytes_per_s: float = 0.0
    """What this sender's transfers get together when they ask for more; what waits already
    (`backlog_s`) goes first. 0 while the link is down. Kept while the link is idle, see `age_s`.
    """
    is_floor: bool = False
    """The link carried this without a backlog: it may well carry more than what is said here."""
    age_s: float | None = None
    """Time since the available rate was last measured or confirmed; None before the first time."""
    full_age_s: float | None = None
    """Time since it was last measured with a backlog all the time: only then is it known that the
    link carried no more. None before the first time.
    """
    sample_age_s: float | None = None
    """Time since the last sample; None before the first. Estimates of a silent link say nothing."""
    achieved_bytes_per_s: float = 0.0
    """Carried in the last second or so."""
    utilisation: float = 0.0
    """Achieved / available, at most 1."""
    rtt_s: float = 0.0
    base_rtt_s: float = 0.0
    """Least round-trip time of the last minutes; 0 before the first sample."""
    queueing_delay_s: float = 0.0
    """What queues inside the network add to the round trip; 0 when nothing was heard lately."""
    backlog_bytes: int = 0
    backlog_s: float = 0.0
    """Time to send what waits at the sender; 0 while the rate is unknown, at most MAX_BACKLOG_S."""
    loss: float = 0.0
    """Retransmitted share of the bytes sent in the last second or so."""
    trend: float = 0.0
    """Change of the available rate over the trend window, relative to the greater of both ends:
    -1 (stopped) to 1 (started).
    """
    limited_by: Limit = Limit.IDLE
    is_up: bool = True
    stalled_s: float = 0.0
    """Bytes have waited this long and none was acknowledged."""
    interface_bytes_per_s: float | None = None
    """What everybody on this host sends through the link's interface; None where not known."""


@dataclass(frozen=True, slots=True)
class LinkTotals:
    """Counters since the estimator began, over all connections there were. They never fall."""

    acked_bytes: int = 0
    sent_bytes: int = 0
    retransmitted_bytes: int = 0
    num_samples: int = 0
    num_ignored_samples: int = 0
    """Older than, or too close to, the one before."""


class PathReport(msgspec.Struct, frozen=True, kw_only=True):
    """One sender's link to one endpoint at one moment: the one shape in which an agent tells of it,
    to Prometheus and to the gateway (msgpack).

    `endpoint` is where the sender connects to, "host:port". `condition_s`: how long it has had this
    condition; `reason` says why, with numbers. `reference_bytes_per_s`: what it carried in the last
    minutes when it carried most. `num_changes`: how often each condition was entered.

    The sender fills in the rest. `oldest_queued_s`: how long, at most, a transfer has had bytes to
    send without a break. `probe_bytes`: send a probe of this size now; 0 for none.
    """

    endpoint: str
    condition: LinkCondition
    reason: str
    condition_s: float
    reference_bytes_per_s: float
    estimate: LinkEstimate
    totals: LinkTotals = LinkTotals()
    num_changes: dict[LinkCondition, int] = {}
    num_connections: int = 0
    num_transfers: int = 0
    oldest_queued_s: float | None = None
    probe_bytes: int = 0
