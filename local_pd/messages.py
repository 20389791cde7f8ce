"""What a gateway and a local PD cluster front say to each other; plain values.

Fields may be added with defaults. It does not know gRPC.
"""

from typing import Any, Literal

import msgspec

from kvmanager.agent.messages import TransferReport
from kvmanager.landing import ReservedLanding
from scheduler.live.long_term.conversion import RoleChange, RoleStatus


class DecodeSlot(msgspec.Struct, frozen=True, kw_only=True):
    """A decode instance and memory on its node for one request's KVCache.

    `kv_transfer_params` go into the decode request's body as they are. The engine then takes the
    landing over; should nothing have landed yet it waits by itself, stepping all the while.
    The slot lives until `PdCluster.release`, or until its lease of `lease_s` seconds runs out
    unrenewed. `reason` says in which order instances were asked.
    """

    landing: ReservedLanding
    instance: str
    engine_url: str
    kv_transfer_params: dict[str, Any]
    lease_s: float
    reason: str = ""


class LandingReport(msgspec.Struct, frozen=True, kw_only=True):
    """How a slot's landing is doing; `error` explains the last two states.

    "unknown": its node agent is gone or knows it no more, so only the decode engine can tell.
    """

    state: Literal["open", "landed", "failed", "unknown"]
    error: str = ""


def landing_report(report: TransferReport) -> LandingReport:
    """What a node agent says of a transfer that arrives there."""
    if report.state == "open":
        return LandingReport(state="open")
    if report.state == "complete":
        return LandingReport(state="landed")
    return LandingReport(state="failed", error=f"{report.state}: {report.error}")


class DirectTarget(msgspec.Struct, frozen=True, kw_only=True):
    """An engine that serves a request from its first to its last token; `reason` says why it."""

    instance: str
    engine_url: str
    reason: str = ""


class ReserveRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What `PdCluster.reserve` is asked for: room for the KVCache of `num_tokens` tokens."""

    num_tokens: int
    token_digest: str
    request_id: str
    model: str = ""
    block_keys: bytes = b""
    """They let the node leave out of the transfer what it has cached, as
    `kvmanager.agent.messages.Reserve` says.
    """
    prefer_nodes: tuple[str, ...] = ()
    """Control addresses of node agents, asked first in this order unless their instances have much
    more to do than others.
    """
    tenant: str = ""
    """Whose KVCache it is: nodes may bound what one tenant's landings take."""


class DirectRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What `PdCluster.direct` is asked for. `prefer_nodes` as in `ReserveRequest`."""

    request_id: str
    model: str = ""
    exclude: tuple[str, ...] = ()
    """Instances to be named only if there is no other."""
    prefer_nodes: tuple[str, ...] = ()


class AwaitLandingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of `PdCluster.await_landing`."""

    transfer_id: str
    instance: str
    timeout_s: float


class RoleRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of `PdCluster.set_role`."""

    instance: str
    change: RoleChange


class RoleReply(msgspec.Struct, frozen=True, kw_only=True):
    """The role an instance has now."""

    status: RoleStatus


class SlotRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Renew or release the slot of this transfer at this instance."""

    transfer_id: str
    instance: str
    reason: str = ""
