"""The messages between a gateway and a local PD cluster front; plain values.

Fields may be added with defaults. They do not know gRPC.
"""

from typing import Literal

import msgspec

from kvmanager.agent.messages import TransferReport
from kvmanager.landing import ReservedLanding
from kvmanager.load_times import LoadTimes
from scheduler.live.long_term.conversion import RoleChange, RoleStatus
from transport.rpc_errors import ErrorCode


class DecodeSlot(msgspec.Struct, frozen=True, kw_only=True):
    """A decode instance and memory on its node for one request's KVCache.

    The decode request names the landing (`kvmanager.landing.consumer_params`), and the engine takes
    it over. If nothing has landed yet, it waits while it goes on with other requests. The slot
    lives until `PdCluster.release`, or until its lease of `lease_s` seconds ends without a renewal.
    `reason` says in which order instances were asked.
    """

    landing: ReservedLanding
    instance: str
    engine_url: str
    lease_s: float
    reason: str = ""


class LandingReport(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a slot's landing. `error` explains the last two states.

    "unknown": its node agent is gone or does not know it any more. Only the decode engine may know.
    """

    state: Literal["open", "landed", "failed", "unknown"]
    error: str = ""


def landing_report(report: TransferReport) -> LandingReport:
    """The landing's state in a node agent's report."""
    if report.state == "open":
        return LandingReport(state="open")
    if report.state == "complete":
        return LandingReport(state="landed")
    return LandingReport(state="failed", error=f"{report.state}: {report.error}")


class ReleaseReply(msgspec.Struct, frozen=True):
    """`times` is what the decode engine says of the slot's KVCache; None: it has said nothing."""

    times: LoadTimes | None = None


class DirectTarget(msgspec.Struct, frozen=True, kw_only=True):
    """An engine that serves a request from its first to its last token. `reason` explains the
    choice.
    """

    instance: str
    engine_url: str
    reason: str = ""


class ReserveRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The argument of `PdCluster.reserve`: room for the KVCache of `num_tokens` tokens."""

    num_tokens: int
    token_digest: str
    request_id: str
    model: str = ""
    block_keys: bytes = b""
    """With them the node leaves cached KVCache out of the transfer; their format is that of
    `kvmanager.agent.messages.Reserve`.
    """
    prefer_nodes: tuple[str, ...] = ()
    """Control addresses of node agents, which are asked first, in this order, unless their
    instances have much more to do than others.
    """
    tenant: str = ""
    """The owner of the KVCache. Nodes may bound the landings of one tenant."""
    grant: bytes = b""
    """It lets a node reserve the landing; see `kvmanager.agent.grants`."""
    hands_off: bool = False
    """Whether an instance of this cluster is to prefill for the one that decodes."""
    adapter: str = ""
    """The identity of the LoRA adapter that the KVCache is computed with; "": none."""
    layouts: tuple[str, ...] = ()
    """The fingerprints of the KVCache layouts of whoever may prefill elsewhere, if they are known.
    An instance with another layout is not asked.
    """
    traceparent: str = ""
    """A W3C trace context header, or ""."""
    has_media: bool = False
    """Whether the prompt has images or other media."""


class DirectRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The argument of `PdCluster.direct`. `prefer_nodes` and `has_media` are as in
    `ReserveRequest`.
    """

    request_id: str
    model: str = ""
    exclude: tuple[str, ...] = ()
    """Instances that are chosen only if there is no other."""
    prefer_nodes: tuple[str, ...] = ()
    has_media: bool = False


class PlaceRequest(msgspec.Struct, frozen=True):
    """Several arguments of `PdCluster.direct`, and of `PdCluster.request_ended`."""

    direct: tuple[DirectRequest, ...] = ()
    ended: tuple[str, ...] = ()


class Placed(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to one `DirectRequest`; without a target `code` and `message` are the error's."""

    target: DirectTarget | None = None
    code: ErrorCode = "REFUSED"
    message: str = ""


class PlaceReply(msgspec.Struct, frozen=True):
    """The answers to a `PlaceRequest`, in its order."""

    placed: tuple[Placed, ...] = ()


class AwaitLandingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of `PdCluster.await_landing`."""

    transfer_id: str
    instance: str
    timeout_s: float


class InstanceOrder(msgspec.Struct, frozen=True):
    """The arguments of `PdCluster.drain` and `PdCluster.resume`."""

    name: str
    leader: int = 0


class RoleRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of `PdCluster.set_role`."""

    instance: str
    change: RoleChange
    leader: int = 0


class RoleReply(msgspec.Struct, frozen=True, kw_only=True):
    """The role an instance has now."""

    status: RoleStatus


class SlotRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Renew or release the slot of this transfer at this instance."""

    transfer_id: str
    instance: str
    reason: str = ""
