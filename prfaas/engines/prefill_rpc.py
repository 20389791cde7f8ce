"""How the outcome of a prefill leg crosses gRPC: as a value, because RPC's codes are too coarse.

It does not know which service carries it.
"""

from collections.abc import Awaitable

import msgspec

from prfaas.engines.errors import PrefillCode, PrefillFailed
from prfaas.jobs import PrefillResult
from transport.rpc import RpcError


class PrefillReply(msgspec.Struct, frozen=True, kw_only=True):
    """`result`, or why there is none."""

    result: PrefillResult | None = None
    code: PrefillCode = "engine_failed"
    message: str = ""


class Empty(msgspec.Struct, frozen=True):
    """A request or reply that says nothing."""


class InstanceName(msgspec.Struct, frozen=True):
    """The instance a call is about."""

    name: str


async def to_reply(outcome: Awaitable[PrefillResult]) -> PrefillReply:
    """At the server: await the outcome and pack it."""
    try:
        return PrefillReply(result=await outcome)
    except PrefillFailed as error:
        return PrefillReply(code=error.code, message=error.message)


async def from_reply(call: Awaitable[PrefillReply], front: str) -> PrefillResult:
    """At the client: await the call and unpack it. Raises PrefillFailed only."""
    try:
        reply = await call
    except RpcError as error:
        code: PrefillCode = "timeout" if error.code == "TIMEOUT" else "unreachable"
        raise PrefillFailed(code, f"front {front}: {error.message}") from error
    if reply.result is None:
        raise PrefillFailed(reply.code, reply.message)
    return reply.result
