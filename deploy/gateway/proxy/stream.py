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

from deploy.gateway.errors import ApiError
from deploy.gateway.intake.endpoints import Kind
from deploy.gateway.proxy.client_stream import ClientGone, ClientStream
from deploy.gateway.proxy.engine import EngineAnswer
from deploy.gateway.proxy.engine_connection import AnswerBroken
from deploy.gateway.proxy.slow_client import SlowClientWatch
from deploy.gateway.proxy.sse import EventGate
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

StreamOutcome = Literal["ok", "engine_error", "engine_lost", "client_gone"]


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


def forwarded_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers of an engine's response that the client gets."""
    return {key: value for key, value in headers.items() if key.lower() not in _NOT_FORWARDED}


async def relay_stream(answer: EngineAnswer, client: ClientStream, pace: TokenPace) -> StreamEnd:
    """Forward `answer` until it ends; `client` must be started. Always closes `answer`.

    When the engine breaks off, the client gets an error event and the connection is closed without
    the end-of-body mark. Cancelling (the client went away) closes the connection to the engine.
    """
    gate, engine = answer.gate, answer.connection
    if gate is None or engine is None:
        raise ValueError("not a stream")
    watch = SlowClientWatch(client.request, client.patience)
    client.is_between_events = lambda: gate.is_between_events and not relay.held
    relay = _Relay(gate, client, watch, answer.correction, pace)
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
            logger.warning("engine %s broke off a stream: %s", answer.instance, error)
            client.num_events = gate.num_events
            client.break_off(ApiError(502, "engine_lost", "The engine broke off while answering."))
            return StreamEnd("engine_lost", client.num_bytes, error)
        if not error:
            # Bytes after the end mark without a blank line are forwarded as well.
            await client.write(gate.rest())
        # A whole stream may be no answer: vLLM tells that its core died, and then ends in order.
        outcome: StreamOutcome = "ok" if gate.error is None else "engine_error"
        return StreamEnd(outcome, client.num_bytes, gate.error or "", gate.last_data())
    except ClientGone as gone:
        return StreamEnd("client_gone", client.num_bytes, str(gone))
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
        client: ClientStream,
        watch: SlowClientWatch,
        correction: Correction | None,
        pace: TokenPace,
    ) -> None:
        self.held = b""
        """Whole events that must wait: for a slow client, or for a number in them."""
        self._gate = gate
        self._client = client
        self._request = client.request
        self._watch = watch
        self._correction = correction
        self._pace = pace

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
        self._client.num_bytes += num_bytes
        self._client.write_now(events)
        return True

    async def send_held(self) -> None:
        """Send what is held once it can be sent. Raises `ClientGone`."""
        if self._correction is not None and (places := in_events(self.held)):
            self.held = await self._correction.apply(self.held, places)
        events, self.held = self.held, b""
        self._watch.given(len(events))
        await self._client.write(events)
        await self._client.drain()
