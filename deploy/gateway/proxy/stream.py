"""Carries a stream from an engine to the client, byte for byte but for its usage.

A stream that ends without `data: [DONE]` never looks whole: the client gets an SSE error event and
then a broken connection instead of the end of the body. This file does not know routes or records.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

import aiohttp
from aiohttp import web

from deploy.gateway.errors import ApiError
from deploy.gateway.proxy.engine import EngineAnswer
from deploy.gateway.proxy.slow_client import ClientPatience, SlowClientWatch
from deploy.gateway.proxy.sse import error_event
from deploy.gateway.proxy.usage import in_events

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
) -> StreamEnd:
    """Forward `answer` until it ends; `client` must be prepared. Always closes `answer`.

    When the engine breaks off, the client gets an error event and the connection is closed without
    the end-of-body mark. Cancelling (the client went away) closes the connection to the engine.
    """
    gate, response = answer.gate, answer.response
    if gate is None or response is None:
        raise ValueError("not a stream")
    watch = SlowClientWatch(request, patience)
    data, error, correction = answer.begun, "", answer.correction
    sent_bytes = 0
    try:
        while True:
            if correction is not None and (places := in_events(data)):
                data = await correction.apply(data, places)
            # Empty while an event is unfinished.
            if data:
                watch.given(len(data))
                await _write(client, data)
                sent_bytes += len(data)
            try:
                chunk = await response.content.readany()
            except (aiohttp.ClientError, OSError, TimeoutError) as broken:
                error = str(broken) or type(broken).__name__
                break
            if not chunk:
                break
            data = gate.feed(chunk)
        # A clean end of the body is not enough: a dying engine may close its connection cleanly.
        if not gate.is_done:
            error = error or "the stream ended without [DONE]"
            await _break_off(answer.instance, request, client, error)
            return StreamEnd("engine_lost", sent_bytes, error)
        if not error:
            # Bytes after the end mark without a blank line are forwarded as well.
            await _write(client, gate.rest())
            answer.response = None
        return StreamEnd("ok", sent_bytes, last_data=gate.last_data())
    except ClientGone as gone:
        return StreamEnd("client_gone", sent_bytes, str(gone))
    finally:
        watch.stop()
        answer.close()


async def _write(client: web.StreamResponse, data: bytes) -> None:
    # aiohttp raises the same errors for a lost client as for a lost engine.
    try:
        await client.write(data)
    except (aiohttp.ClientError, OSError) as error:
        raise ClientGone(str(error) or type(error).__name__) from None


async def _break_off(
    instance: str, request: web.Request, client: web.StreamResponse, error: str
) -> None:
    """Tell the client that the answer is not whole, and close the connection without ending the
    body.
    """
    logger.warning("engine %s broke off a stream: %s", instance, error)
    body = ApiError(502, "engine_lost", "The engine broke off while answering.").body()
    transport = request.transport
    if transport is None:
        return
    try:
        await _write(client, error_event(body))
    finally:
        # close() sends what is buffered, but not the mark that would end the body.
        transport.close()
