"""What a server does with one call: it asks who calls, reads the request, has it handled, answers.

It does not know what a method means. `transport.rpc` serves on a port what `adapt` returns.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, TypeVar

import grpc
import grpc.aio
import msgspec

from transport.rpc_auth import Admission, CallerAuth, NotAdmitted, Seal
from transport.rpc_errors import CODE_TRAILER, OK, STATUS_OF, ErrorCode, RpcError
from transport.rpc_versions import announced, check_versions
from transport.versions import NoCommonVersion

logger = logging.getLogger("prfaas.transport.rpc")

RequestT = TypeVar("RequestT", bound=msgspec.Struct)
ReplyT = TypeVar("ReplyT", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class Method(Generic[RequestT, ReplyT]):
    """One callable method: the request is decoded as `request_type` before the handler sees it.

    `reply_type` says what the handler returns. The handler is cancelled when the caller goes away.
    """

    request_type: type[RequestT]
    reply_type: type[ReplyT]
    handler: Callable[[RequestT], Awaitable[ReplyT]]


def adapt(
    service: str, name: str, method: Method[Any, Any], auth: CallerAuth | None
) -> Callable[[Any, Any], Awaitable[bytes]]:
    """The handler that gRPC calls before it takes the body. It turns every failure into a readable
    status.

    It is the only place that lets a call in.
    """
    decoder = msgspec.msgpack.Decoder(method.request_type)

    async def handle(_: Any, context: Any) -> bytes:
        try:
            admission = Admission() if auth is None else auth.admit(service, name, context)
            read = await context.read()
            raw: bytes = b"" if read is grpc.aio.EOF else read  # no request decodes from nothing
            admission.take(raw)
        except NotAdmitted as error:
            await _refuse(context, error)
        seal = admission.seal
        try:
            check_versions(dict(context.invocation_metadata() or ()), "caller")
            request = decoder.decode(raw)
        except NoCommonVersion as error:
            await _abort(context, "REFUSED", str(error), seal)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            message = f"bad {method.request_type.__name__}: {error}"
            await _abort(context, "INVALID", message, seal)
        try:
            reply = await method.handler(request)
        except RpcError as error:
            await _abort(context, error.code, error.message, seal)
        # The caller went away: gRPC has to see the cancellation, and nobody would read a status.
        except asyncio.CancelledError:
            raise
        except Exception as error:
            logger.exception("handler of %s failed", method.request_type.__name__)
            await _abort(context, "INTERNAL", f"{type(error).__name__}: {error}", seal)
        answer: bytes = msgspec.msgpack.encode(reply)
        context.set_trailing_metadata((announced(), *seal(OK, answer)))
        return answer

    return handle


async def _abort(context: Any, code: ErrorCode, message: str, seal: Seal) -> NoReturn:
    details = message or code
    trailers = ((CODE_TRAILER, code), announced(), *seal(code, details.encode()))
    await context.abort(STATUS_OF[code], details, trailing_metadata=trailers)
    raise AssertionError("abort returned")


async def _refuse(context: Any, error: NotAdmitted) -> NoReturn:
    await context.abort(
        grpc.StatusCode.UNAUTHENTICATED, error.message, trailing_metadata=error.metadata
    )
    raise AssertionError("abort returned")
