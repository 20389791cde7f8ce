"""Carries a stream from an engine to the client, byte for byte but for its usage.

A stream that ends without its end mark never looks whole: the client gets an SSE error event and
then a broken connection instead of the end of the body. This file does not know routes or records.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

import aiohttp
from aiohttp import web

from deploy.gateway.errors import ApiError
from deploy.gateway.intake.endpoints import Kind
from deploy.gateway.proxy.engine import EngineAnswer
from deploy.gateway.proxy.engine_connection import AnswerBroken
from deploy.gateway.proxy.slow_client import ClientPatience, SlowClientWatch
from deploy.gateway.proxy.sse import EventGate, error_event
from deploy.gateway.proxy.usage import Correction, in_events
from deploy.gateway.series.histograms import Observations

logger = logging.getLogger("prfaas.deploy.gateway")

_NOT_FORWARDED: Final = frozenset(
    {
        "connection",
        "content-length",
        "date",
        "keep-alive",
        "proxy-authenticate",
        "server",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "x-request-id",
    }
)
"""Hop-by-hop headers (RFC 9110, 7.6.1) and those the gateway sets itself."""

_END_MARK_BYTES: Final = len(b"data: [DONE]\r\n\r\n")

StreamOutcome = Literal["ok", "engine_lost", "client_gone"]


@dataclass(frozen=True, slots=True)
class StreamEnd:
    """How a stream ended, and how many bytes of it went to the client. `last_data` is the JSON of
    its last event if the stream is whole.
    """

    outcome: StreamOutcome
    nbytes: int
    error: str = ""
    last_data: bytes = b""


class TokenPace:
    """Observes the time between two pieces of one stream. Make it when the first piece is there."""

    __slots__ = ("_clock", "_intervals", "_last_s")

    def __init__(
        self,
        intervals: Observations,
        kind: Kind,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._intervals, self._clock = intervals, clock
        # A chat begins with an event that names the role, and others with several. The first token
        # follows at once.
        self._last_s = clock() if kind == "completion" else math.nan

    def piece(self) -> None:
        """Note that the next piece is there."""
        now_s = self._clock()
        interval_s = now_s - self._last_s
        self._last_s = now_s
        if interval_s >= 0:  # not so for nan
            self._intervals.observe(interval_s)


class ClientGone(Exception):
    """The client closed its connection or stopped reading."""


def forwarded_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers of an engine's response that the client gets."""
    return {key: value for key, value in headers.items() if key.lower() not in _NOT_FORWARDED}


async def relay_stream(
    answer: EngineAnswer,
    request: web.Request,
    client: web.StreamResponse,
    patience: ClientPatience,
    pace: TokenPace,
) -> StreamEnd:
    """Forward `answer` until it ends; `client` must be prepared. Always closes `answer`.

    When the engine breaks off, the client gets an error event and the connection is closed without
    the end-of-body mark. Cancelling (the client went away) closes the connection to the engine.
    """
    gate, engine = answer.gate, answer.connection
    if gate is None or engine is None:
        raise ValueError("not a stream")
    watch = SlowClientWatch(request, patience)
    relay = _Relay(gate, request, client, watch, answer.correction, pace)
    relay.held, error = answer.begun, ""
    try:
        # The first piece goes out with the head; later ones come here only if they have to wait.
        while relay.held:
            await relay.send_held()
            try:
                await engine.read(relay.take)
            except AnswerBroken as broken:
                error = str(broken)
        # A clean end of the body is not enough: a dying engine may close its connection cleanly.
        if not gate.is_done:
            error = error or "the stream ended without its end mark"
            await _break_off(answer.instance, gate, request, client, error)
            return StreamEnd("engine_lost", relay.num_bytes, error)
        if not error:
            # Bytes after the end mark without a blank line are forwarded as well.
            await _write(client, gate.rest())
        return StreamEnd("ok", relay.num_bytes, last_data=gate.last_data())
    except ClientGone as gone:
        return StreamEnd("client_gone", relay.num_bytes, str(gone))
    finally:
        watch.stop()
        answer.close()


class _Relay:
    """Passes events on within the callback that received them, as long as nothing has to wait.

    It writes past aiohttp's response, which would cost a coroutine for each event, in the framing
    that this response has announced.
    """

    def __init__(
        self,
        gate: EventGate,
        request: web.Request,
        client: web.StreamResponse,
        watch: SlowClientWatch,
        correction: Correction | None,
        pace: TokenPace,
    ) -> None:
        self.held = b""
        """Whole events that must wait: for a slow client, or for a number in them."""
        self.num_bytes = 0
        """Bytes of the body that were given to the client."""
        self._gate = gate
        self._request = request
        self._client = client
        self._watch = watch
        self._correction = correction
        self._pace = pace
        self._is_chunked = client.headers.get("Transfer-Encoding") == "chunked"

    def take(self, piece: bytes) -> bool:
        """Pass on the events that end in `piece`; False if they are held instead."""
        events = self._gate.feed(piece)
        if not events:
            return True
        # The end mark is no token, and often comes by itself.
        if len(events) > _END_MARK_BYTES or not self._gate.is_done:
            self._pace.piece()
        transport = self._request.transport
        if (
            transport is None
            or transport.is_closing()
            or self._request.protocol.writing_paused
            or (self._correction is not None and in_events(events))
        ):
            self.held = events
            return False
        num_bytes = len(events)
        self._watch.given(num_bytes)
        self.num_bytes += num_bytes
        transport.write(b"%x\r\n%b\r\n" % (num_bytes, events) if self._is_chunked else events)
        return True

    async def send_held(self) -> None:
        """Send what is held once it can be sent. Raises `ClientGone`."""
        events, self.held = self.held, b""
        if self._correction is not None and (places := in_events(events)):
            events = await self._correction.apply(events, places)
        self._watch.given(len(events))
        await _write(self._client, events)
        self.num_bytes += len(events)
        try:
            await self._request.writer.drain()
        except (aiohttp.ClientError, OSError) as error:
            raise ClientGone(str(error) or type(error).__name__) from None


async def _write(client: web.StreamResponse, data: bytes) -> None:
    # aiohttp raises the same errors for a lost client as for a lost engine.
    try:
        await client.write(data)
    except (aiohttp.ClientError, OSError) as error:
        raise ClientGone(str(error) or type(error).__name__) from None


async def _break_off(
    instance: str, gate: EventGate, request: web.Request, client: web.StreamResponse, error: str
) -> None:
    """Tell the client that the answer is not whole, and close the connection without ending the
    body.
    """
    logger.warning("engine %s broke off a stream: %s", instance, error)
    told = ApiError(502, "engine_lost", "The engine broke off while answering.")
    transport = request.transport
    if transport is None:
        return
    try:
        await _write(client, error_event(told, gate))
    finally:
        # close() sends what is buffered, but not the mark that would end the body.
        transport.close()
