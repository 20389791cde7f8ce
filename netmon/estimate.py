"""The value types for a link's present state. Does not know how the numbers were measured."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Final

import msgspec

MAX_BACKLOG_S: Final = 3600.0
"""The longest wait that is reported. A link with a longer one does not move."""


def backlog_s(backlog_bytes: int, bytes_per_s: float) -> float:
    """The time to send what waits."""
    if not backlog_bytes:
        return 0.0
    return min(MAX_BACKLOG_S, backlog_bytes / bytes_per_s) if bytes_per_s > 0 else MAX_BACKLOG_S


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
    """All numbers are finite and none is negative. Rates count transfers' bytes, before coding.

    A link that was never measured has `available_bytes_per_s` 0 and `age_s` None: nothing is
    assumed. The last five are counters since the estimator began, which never fall.
    """

    available_bytes_per_s: float = 0.0
    """What this sender's transfers get together when they ask for more; what waits already
    (`backlog_s`) goes first. 0 while the link is down. Kept while the link is idle, see `age_s`.
    """
    is_floor: bool = False
    """Whether the link carried this rate without a backlog, so that it may carry more."""
    age_s: float | None = None
    """Time since the available rate was last measured or confirmed; None before the first time."""
    full_age_s: float | None = None
    """Time since it was last measured with a backlog all the time, or None. Only such a measurement
    shows that the link could not carry more.
    """
    sample_age_s: float | None = None
    """Time since the last sample; None before the first. Estimates of a silent link say nothing."""
    achieved_bytes_per_s: float = 0.0  # in about the last second
    utilisation: float = 0.0  # achieved / available, at most 1
    rtt_s: float = 0.0
    base_rtt_s: float = 0.0  # the least of the last minutes; 0 before the first sample
    queueing_delay_s: float = 0.0
    """The time that queues in the network add to the round trip; 0 without a recent round trip."""
    backlog_bytes: int = 0
    backlog_s: float = 0.0  # the time to send them; 0 while the rate is unknown
    loss: float = 0.0
    """Retransmitted share of the bytes sent in the last second or so."""
    limited_by: Limit = Limit.IDLE
    is_up: bool = True
    stalled_s: float = 0.0
    """Time for which bytes have waited and none was acknowledged."""
    acked_bytes: int = 0  # before coding; the next two count bytes on the wire
    sent_bytes: int = 0
    retransmitted_bytes: int = 0
    num_samples: int = 0
    num_ignored_samples: int = 0  # older than the one before, or too close to it


class PathReport(msgspec.Struct, frozen=True, kw_only=True):
    """One sender's link to one endpoint at one moment, as an agent reports it to Prometheus and to
    the gateway (msgpack).

    `endpoint` is the "host:port" that the sender connects to. `condition_s` is the time since the
    condition began; `reason` says why, with numbers. `reference_bytes_per_s` is the highest rate of
    the last minutes. `num_changes` counts how often each condition began.

    The sender fills in the rest. `oldest_queued_s` is the longest time for which a transfer has had
    bytes to send without a break. `probe_bytes`: send a probe of this size now; 0: none.
    """

    endpoint: str
    condition: LinkCondition
    reason: str
    condition_s: float
    reference_bytes_per_s: float
    estimate: LinkEstimate
    num_changes: dict[LinkCondition, int] = {}
    num_connections: int = 0
    num_transfers: int = 0
    oldest_queued_s: float | None = None
    probe_bytes: int = 0

    def check(self) -> None:
        """ValueError: a number of another process's report is none that routing can count with."""
        numbers = msgspec.structs.asdict(self) | asdict(self.estimate)
        for name, value in numbers.items():
            if isinstance(value, int | float) and not 0 <= value < math.inf:
                raise ValueError(f"{name} is {value!r}; it must be finite and not negative")
