"""Typed request/reply calls between our processes: msgspec structs carried by gRPC, no protoc.

It does not know what any service means, keeps no state between calls and never retries: only the
caller knows whether a call may be repeated.

A service is a mapping from method name to `Method`. Requests and replies are `msgspec.Struct` types
encoded as msgpack, and both ends name the versions that they speak (`transport.rpc_versions`). A
handler fails by raising `RpcError`; the code travels as a gRPC status plus a trailer that names it.

With `Credentials` both ends show who they are, `transport.access` says what that allows, and one
place, `transport.rpc_handling`, asks it for every call. New connections use certificate and key
files that were replaced on disk, as in the rest of the transport.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any, Final, TypeVar

import grpc
import grpc.aio
import msgspec

from transport import LocalError, TlsFiles
from transport.access import ACCESS
from transport.health import WhyNotReady, always_ready, health_handler
from transport.plain import printable
from transport.region_key import Credentials, RegionKey
from transport.rotating import Rotating
from transport.rpc_auth import (
    LOOK_S,
    PROOF,
    CallSigner,
    ServerLook,
    WrongServer,
    caller_auth,
    channel_credentials,
    server_credentials,
)
from transport.rpc_errors import CODE_OF, CODE_TRAILER, OK, STATUS_OF, ErrorCode, RpcError
from transport.rpc_handling import Method, adapt
from transport.rpc_versions import announced, check_versions
from transport.tasks import start_task
from transport.versions import NoCommonVersion

logger = logging.getLogger("prfaas.transport.rpc")

MAX_MESSAGE_BYTES: Final = 64 << 20
"""Bound on one request or reply; a million token ids take about 5 MB."""

_CHANNEL_OPTIONS: Final[tuple[tuple[str, int | str], ...]] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Our targets are cluster-internal: an http_proxy meant for the internet must not swallow them.
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
    # In spite of its name this is the time that one connection attempt may take.
    ("grpc.min_reconnect_backoff_ms", 5000),
    # A peer whose host vanished is noticed during a long call, not at its deadline.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
)

_SERVER_OPTIONS: Final = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Clients ping every 10 s. By default a gRPC server closes a connection that pings more often
    # than every 5 minutes without data (GOAWAY, "too_many_pings").
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    # With SO_REUSEPORT a second process could share our port and take half of the calls.
    ("grpc.so_reuseport", 0),
)

MAX_TRIES: Final = 3
"""Tries of one signed call: the first may lack a challenge, and the next one's may be replaced."""
_RETIRE_S: Final = 300.0
"""Most time that calls on a channel of replaced certificates get to end."""

ReplyT = TypeVar("ReplyT", bound=msgspec.Struct)


class RpcServer:
    """Serves `services` (service name -> method name -> Method) on one TCP port.

    With `credentials`, callers must show a certificate that their CA signed, or sign each call with
    a key of the region.
    """

    def __init__(
        self,
        bind: str,
        services: Mapping[str, Mapping[str, Method[Any, Any]]],
        credentials: Credentials | None = None,
        *,
        why_not_ready: WhyNotReady = always_ready,
    ) -> None:
        """`bind` is "host:port"; port 0 picks a free one. Without credentials anybody may call.
        `why_not_ready` answers grpc.health.v1, for which nobody has to show a role.
        """
        self._bind = bind
        self._services = services
        self._credentials = credentials
        self._ask_why_not_ready = why_not_ready
        self._server: Any = None

    async def start(self) -> int:
        """Begin to serve on the running loop; returns the port that is really bound.

        Raises RpcError: UNAVAILABLE when the port cannot be bound, INVALID when the files for TLS
        or the keys cannot be used.
        """
        server = grpc.aio.server(options=_SERVER_OPTIONS)
        server.add_generic_rpc_handlers((health_handler(self.why_not_ready),))
        try:
            auth = caller_auth(self._credentials)
        except LocalError as error:
            raise RpcError("INVALID", error.message) from error
        for name, methods in self._services.items():
            handlers = {
                # As a stream of one request, because gRPC takes a whole unary body into memory
                # before anybody is asked who sends it.
                method_name: grpc.stream_unary_rpc_method_handler(
                    adapt(name, method_name, method, auth)
                )
                for method_name, method in methods.items()
            }
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))
        try:
            port = self._add_port(server)
        except RuntimeError as error:
            raise RpcError("UNAVAILABLE", f"cannot bind {self._bind}: {error}") from error
        except LocalError as error:
            raise RpcError("INVALID", error.message) from error
        # Some versions of gRPC return 0 where others raise RuntimeError.
        if port == 0:
            raise RpcError("UNAVAILABLE", f"cannot bind {self._bind}")
        await server.start()
        self._server = server
        return port

    async def stop(self, grace_s: float = 1.0) -> None:
        """Refuse new calls, give running ones `grace_s`, then cancel them. Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop(grace_s)

    async def why_not_ready(self) -> str:
        """A `WhyNotReady`: this server's own, and outside `start` and `stop` always a reason."""
        return "stopping" if self._server is None else await self._ask_why_not_ready()

    def _add_port(self, server: Any) -> int:
        if not isinstance(self._credentials, TlsFiles):
            return int(server.add_insecure_port(self._bind))
        credentials = server_credentials(self._credentials)
        return int(server.add_secure_port(self._bind, credentials))


class RpcClient:
    """Calls one service at one target.

    The channel is opened by the first call and reconnects by itself.
    """

    def __init__(self, target: str, service: str, credentials: Credentials | None = None) -> None:
        """`target` is "host:port".

        With TLS the server's certificate must name that host (or address), or `server_name`, and
        like the signature of a region's key a role that serves `service`.
        """
        self.target = target
        self._service = service
        self._tls = credentials if isinstance(credentials, TlsFiles) else None
        self._key = credentials if isinstance(credentials, RegionKey) else None
        self._signer: CallSigner | None = None
        self._look: ServerLook | None = None
        self._looking = asyncio.Lock()
        self._channel_credentials: Rotating[TlsFiles, Any] | None = None
        self._used_credentials: Any = None
        self._channel: Any = None
        self._retiring: set[asyncio.Task[None]] = set()

    async def call(
        self, method: str, request: msgspec.Struct, reply_type: type[ReplyT], timeout_s: float
    ) -> ReplyT:
        """Make one call. Raises RpcError, also when the connection fails (UNAVAILABLE) or
        `timeout_s` is over (TIMEOUT).

        Cancelling the awaiting task cancels the handler at the server.
        """
        body = msgspec.msgpack.encode(request)
        deadline_s = time.monotonic() + timeout_s
        try:
            if self._key is not None:
                raw = await self._call_signed(self._key, method, body, deadline_s)
            else:
                if self._tls is not None:
                    await self._look_at_server(self._tls, timeout_s)
                call = self._begin(method, body, deadline_s)
                raw = await call
                await _check_answer(call)
        except grpc.aio.AioRpcError as error:
            raise self._explain(method, error) from error
        except NoCommonVersion as error:
            raise RpcError("REFUSED", f"{self.target}: {error}") from error
        except grpc.aio.UsageError as error:
            raise RpcError("UNAVAILABLE", f"{self.target}: client is closed") from error
        except WrongServer as error:
            raise RpcError("REFUSED", f"{self.target}: {error}") from error
        except LocalError as error:
            raise RpcError("INVALID", error.message) from error
        try:
            return msgspec.msgpack.decode(raw, type=reply_type)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise RpcError(
                "INTERNAL", f"{self.target}: bad reply to {self._service}.{method}: {error}"
            ) from error

    async def close(self) -> None:
        """Close the channel; running calls fail. Idempotent, and a later call opens a fresh one."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()
        for task in self._retiring:
            task.cancel()
        await asyncio.gather(*self._retiring, return_exceptions=True)

    def _begin(
        self, method: str, body: bytes, deadline_s: float, *metadata: tuple[str, str]
    ) -> Any:
        invoke = self._current_channel().unary_unary(f"/{self._service}/{method}")
        return invoke(body, timeout=_left_s(deadline_s), metadata=(announced(), *metadata))

    async def _call_signed(
        self, key: RegionKey, method: str, body: bytes, deadline_s: float
    ) -> bytes:
        """One call and its answer, both signed. A server that wants another challenge has done
        nothing yet, so that the call may be made again.
        """
        if self._signer is None:
            self._signer = CallSigner(key, self._service)
        signer = self._signer
        for num_left in reversed(range(MAX_TRIES)):
            proof = signer.sign(method, body)
            call = self._begin(method, body, deadline_s, (PROOF, str(proof)))
            try:
                raw: bytes = await call
            except grpc.aio.AioRpcError as error:
                trailers = dict(error.trailing_metadata() or ())
                if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                    if num_left and signer.is_worth_again(proof, trailers):
                        continue
                elif (code := trailers.get(CODE_TRAILER)) in STATUS_OF:
                    signer.check(proof, code, (error.details() or "").encode(), trailers)
                raise
            signer.check(proof, OK, raw, await _check_answer(call))
            return raw
        raise AssertionError("the last try returns or raises")

    async def _look_at_server(self, tls: TlsFiles, timeout_s: float) -> None:
        """Before a connection is made, and made again: is the server who it should be?"""
        if self._service not in ACCESS:
            return
        try:
            # Calls wait here for each other's looks at a host that does not answer, so that the
            # wait counts as well.
            async with asyncio.timeout(min(timeout_s, LOOK_S)), self._looking:
                if self._current_channel().get_state() is grpc.ChannelConnectivity.READY:
                    return
                if self._look is None:
                    self._look = ServerLook(tls, self.target, self._service)
                await self._look.check()
        except (OSError, TimeoutError) as error:
            reason = str(error) or "no answer"
            raise RpcError("UNAVAILABLE", f"{self.target} {self._service}: {reason}") from error

    def _current_channel(self) -> Any:
        """The channel with the present certificates. Running calls end on the channel that they
        began on.
        """
        if self._tls is None:
            if self._channel is None:
                self._channel = grpc.aio.insecure_channel(self.target, options=_CHANNEL_OPTIONS)
            return self._channel
        credentials = self._current_credentials(self._tls)
        # A gRPC channel keeps the credentials it was made with, for reconnects as well, so new
        # certificates need a new channel.
        if self._channel is None or credentials is not self._used_credentials:
            self._retire()
            self._used_credentials = credentials
            options = _CHANNEL_OPTIONS
            if self._tls.server_name is not None:
                options = (*options, ("grpc.ssl_target_name_override", self._tls.server_name))
            self._channel = grpc.aio.secure_channel(self.target, credentials, options=options)
        return self._channel

    def _current_credentials(self, tls: TlsFiles) -> Any:
        try:
            if self._channel_credentials is None:
                self._channel_credentials = Rotating(tls, channel_credentials)
        except LocalError as error:
            raise RpcError("INVALID", error.message) from error
        return self._channel_credentials.current(time.monotonic())

    def _retire(self) -> None:
        """Close the channel in the background once its calls are done."""
        channel, self._channel = self._channel, None
        if channel is not None:
            start_task(
                channel.close(_RETIRE_S), f"closing a channel to {self.target}", self._retiring
            )

    def _explain(self, method: str, error: Any) -> RpcError:
        named = dict(error.trailing_metadata() or ()).get(CODE_TRAILER)
        # Nobody signs a refusal, so that it must not pass for an answer of a handler.
        if error.code() is grpc.StatusCode.UNAUTHENTICATED:
            named = "REFUSED"
        # Only our handlers set the trailer; without it the status comes from gRPC or from the
        # network.
        if named in STATUS_OF:
            return RpcError(named, printable(error.details() or "", lines=True))
        code = CODE_OF.get(error.code(), "INTERNAL")
        details = printable(error.details() or "", lines=True)
        return RpcError(code, f"{self.target} {self._service}.{method}: {details}")


async def _check_answer(call: Any) -> dict[str, Any]:
    """The metadata of an answer that has come. Raises NoCommonVersion."""
    metadata = dict(await call.trailing_metadata() or ())
    check_versions(metadata, "server")
    return metadata


def _left_s(deadline_s: float) -> float:
    return max(0.0, deadline_s - time.monotonic())


__all__ = ["ErrorCode", "Method", "RpcClient", "RpcError", "RpcServer"]
