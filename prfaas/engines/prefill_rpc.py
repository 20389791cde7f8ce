"""The gRPC messages that both kinds of front share, and how a caller asks a remote front.

The outcome of a prefill crosses as a value, because gRPC's status codes are too coarse. This module
does not know which service carries the calls.
"""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
from msgspec import structs

from prfaas.engines.errors import PrefillCode, PrefillFailed, UnknownInstance
from prfaas.engines.members import MemberOrder, MemberRefused, MemberRequest
from prfaas.engines.ownership import cancel_requested
from prfaas.jobs import PrefillResult
from scheduler.reports import ClusterReport
from transport.health import WhyNotReady, remembered
from transport.plain import plain_message, printable
from transport.rpc import RpcClient, RpcError


class PrefillReply(msgspec.Struct, frozen=True, kw_only=True):
    """`result`, or, if that is None, why there is none: `code` and `message`."""

    result: PrefillResult | None = None
    code: PrefillCode = "engine_failed"
    message: str = ""


class Empty(msgspec.Struct, frozen=True):
    """A request or reply that says nothing."""


class InstanceName(msgspec.Struct, frozen=True):
    """The instance a call is about."""

    name: str


async def to_reply(outcome: Awaitable[PrefillResult]) -> PrefillReply:
    """Await the outcome and pack it, at the server."""
    try:
        return PrefillReply(result=await outcome)
    except PrefillFailed as error:
        return PrefillReply(code=error.code, message=error.message)


async def from_reply(call: Awaitable[PrefillReply], front: str) -> PrefillResult:
    """Await the call and unpack its outcome, at the client. Raises PrefillFailed only.

    Cancelling cancels the job at the remote front.
    """
    try:
        reply = await call
    except RpcError as error:
        code: PrefillCode = "timeout" if error.code == "TIMEOUT" else "unreachable"
        raise PrefillFailed(code, f"front {front}: {error.message}") from error
    except asyncio.CancelledError:
        # grpc.aio cancels a channel's calls when it closes, and the await then raises
        # CancelledError, although nobody cancelled this task.
        if cancel_requested():
            raise
        raise PrefillFailed("closed", f"cluster {front} is shutting down") from None
    if reply.result is None:
        raise PrefillFailed(reply.code, printable(reply.message, lines=True))
    return plain_message(reply.result)


def front_readiness(report: Callable[[], Awaitable[ClusterReport]]) -> WhyNotReady:
    """The answer to probes of a front with this report: whether an instance serves."""

    async def why_not_ready() -> str:
        return "" if (await report()).healthy else "no instance serves"

    return remembered(why_not_ready)


async def remote_report(client: RpcClient, front: str, timeout_s: float) -> ClusterReport:
    """The front's own report, or one that says why it could not be reached. Never raises.

    It is of the cluster `front`, whatever name it has in it: who answers says the connection. Its
    texts come to logs and terminals, and its numbers into decisions about all requests.
    """
    try:
        report = await client.call("Report", Empty(), ClusterReport, timeout_s)
        return structs.replace(plain_message(report), name=front)
    except RpcError as error:
        return ClusterReport(
            name=front,
            healthy=False,
            queue_depth=0,
            running=0,
            instances=(),
            heard=False,
            reason=f"front not reachable: {error.message}",
        )


async def order_members(
    client: RpcClient, front: str, order: MemberOrder, timeout_s: float
) -> None:
    """Give an order to a front elsewhere. Raises MemberRefused, UnknownInstance, and RpcError when
    the front cannot be reached.
    """
    try:
        await client.call("Members", MemberRequest(order), Empty, timeout_s)
    except RpcError as error:
        if error.code == "NOT_FOUND":
            raise UnknownInstance(front, order.name) from error
        if error.code == "REFUSED":
            raise MemberRefused(error.message) from error
        raise
