"""What a node agent says of the links that its sender has: more structs of service
`prfaas.NodeAgent`.

They do not know how they travel. A link is named by the endpoint that the sender connects to,
"host:port". Ages and durations are counted back from the moment of the reply.

| method | request -> reply | errors beside UNAVAILABLE, INTERNAL, TIMEOUT |
|---|---|---|
| WatchLinks | WatchLinks -> LinkFeed | INVALID |
| SendLinkProbe | SendLinkProbe -> SendLinkProbeReply | INVALID (also: probes are off), NO_ROOM |
"""

from __future__ import annotations

import msgspec

from netmon.detector import Condition
from netmon.estimate import LinkEstimate, LinkTotals
from netmon.history import LinkPoint
from netmon.monitor import LinkReport


class WatchLinks(msgspec.Struct, frozen=True):
    """All links, as soon as there is news after `after_seq`, at the latest after `timeout_s`.

    News is a change of any link's condition, and new numbers of links with traffic about twice a
    second. `num_points`: how much history to tell of each link. `sends_probes`: the caller will
    see to the probes that a reply asks for.
    """

    after_seq: int = 0
    timeout_s: float = 0.0
    num_points: int = 0
    sends_probes: bool = False


class LinkStep(msgspec.Struct, frozen=True, kw_only=True):
    """One step of a link's history: see `netmon.history.LinkPoint`. `age_s`: since it began."""

    age_s: float
    achieved_bytes_per_s: float
    available_bytes_per_s: float
    queueing_delay_s: float
    backlog_s: float
    loss: float
    condition: str

    @classmethod
    def of(cls, point: LinkPoint, now_s: float) -> LinkStep:
        return cls(
            age_s=max(0.0, now_s - point.start_s),
            achieved_bytes_per_s=point.achieved_bytes_per_s,
            available_bytes_per_s=point.available_bytes_per_s,
            queueing_delay_s=point.queueing_delay_s,
            backlog_s=point.backlog_s,
            loss=point.loss,
            condition=point.condition.label,
        )


class LinkView(msgspec.Struct, frozen=True, kw_only=True):
    """One link now. `condition` is a label of `netmon.detector.Condition`; `num_changes` counts by
    label how often each was entered.

    `oldest_queued_s`: how long, at most, a transfer has had bytes to send without a break.
    `probe_bytes`: send a probe of this size now; 0 for none.
    """

    endpoint: str
    condition: str
    reason: str
    condition_s: float
    reference_bytes_per_s: float
    estimate: LinkEstimate
    totals: LinkTotals = LinkTotals()
    num_changes: dict[str, int] = {}
    num_connections: int = 0
    num_transfers: int = 0
    oldest_queued_s: float | None = None
    points: list[LinkStep] = []
    probe_bytes: int = 0

    @classmethod
    def of(cls, report: LinkReport) -> LinkView:
        """What the monitor knows; the rest is the sender's to add."""
        return cls(
            endpoint=report.link,
            condition=report.condition.label,
            reason=report.reason,
            condition_s=report.condition_s,
            reference_bytes_per_s=report.reference_bytes_per_s,
            estimate=report.estimate,
            totals=report.totals,
            num_changes={item.label: count for item, count in report.num_changes.items()},
        )


class LinkFeed(msgspec.Struct, frozen=True):
    """All links of an agent. `data_endpoint` is where it receives itself: what others' links to it
    are named, unless they take a detour.
    """

    seq: int
    data_endpoint: str
    links: list[LinkView]


class SendLinkProbe(msgspec.Struct, frozen=True):
    """Send a probe to the landing that a `ProbeLanding` has opened, and say how it went when it is
    over. The link's estimate takes it in. After `lease_s` what was not acknowledged is given up.
    """

    transfer_id: str
    token: str
    fingerprint: str
    nbytes: int
    host: str
    port: int
    lease_s: float


class SendLinkProbeReply(msgspec.Struct, frozen=True):
    """`duration_s`: from the first byte sent; 0 when none was. `error` "": all was acknowledged."""

    acked_bytes: int
    duration_s: float
    error: str = ""


CONDITIONS: dict[str, Condition] = {item.label: item for item in Condition}
"""By label."""
