"""What is known of a link at one moment. Knows not how it was found out."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

MAX_BACKLOG_S = 3600.0
"""Longer waits are not told apart: the link does not move."""


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
    """Since the available rate was last measured or confirmed; None before the first time."""
    full_age_s: float | None = None
    """Since it was last measured with a backlog all the time: only then is it known that the link
    carried no more. None before the first time.
    """
    confidence: float = 0.0
    """1 when just measured, halved with every half-life of `age_s`, 0 when never measured."""
    sample_age_s: float | None = None
    """Since the last sample; None before the first. Estimates of a silent link say nothing."""
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
    """Since the estimator began, whatever became of the connections. Never falls."""

    acked_bytes: int = 0
    sent_bytes: int = 0
    retransmitted_bytes: int = 0
    num_samples: int = 0
    num_ignored_samples: int = 0
    """Older than, or too close to, the one before."""
