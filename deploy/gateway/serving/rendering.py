"""Turns a request into token ids with an engine's own render endpoint.

The engine is the one source of truth for chat templates and tokenizers. Does not judge requests:
what the engine refuses to render it is asked to serve, and words its own error.
"""

from __future__ import annotations

import logging

import msgspec

from deploy.gateway.errors import EngineLost
from deploy.gateway.proxy.engine import EngineDoor
from deploy.gateway.serving.exchange import Exchange
from kvmanager.token_ids import TokenIds, in_turns, parsing
from scheduler.routing.decision import Reason

logger = logging.getLogger("prfaas.deploy.gateway")


class _Rendered(msgspec.Struct):
    token_ids: msgspec.Raw
    features: msgspec.Raw | None = None


_one_decoder = msgspec.json.Decoder(_Rendered)
_list_decoder = msgspec.json.Decoder(list[_Rendered])


class NotRendered(Exception):
    """There are no ids to route by; `reason` says why the request is served whole."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason.value)
        self.reason = reason


async def render(door: EngineDoor, instance: str, engine_url: str, exchange: Exchange) -> TokenIds:
    """The prompt's token ids. Raises `NotRendered`."""
    try:
        status, body = await door.render(
            instance, engine_url, exchange.path, exchange.inbound.body, exchange.headers
        )
    except EngineLost as error:
        logger.warning("%s: not rendered: %s", exchange.request_id, error)
        raise NotRendered(Reason.RENDER_UNAVAILABLE) from error
    if status != 200:
        reason = Reason.RENDER_REFUSED if 400 <= status < 500 else Reason.RENDER_UNAVAILABLE
        raise NotRendered(reason)
    rendered = parse_rendered(body, is_list=exchange.inbound.kind == "completion")
    if len(rendered) != 1:
        raise NotRendered(Reason.SEVERAL_PROMPTS)
    if rendered[0].features is not None:
        raise NotRendered(Reason.MULTIMODAL)
    try:
        return await in_turns(parsing(bytes(rendered[0].token_ids)))
    except ValueError as error:
        logger.warning("an engine's rendering is not understood: %s", error)
        raise NotRendered(Reason.RENDER_UNAVAILABLE) from error


def parse_rendered(body: bytes, *, is_list: bool) -> list[_Rendered]:
    """The answer of a render endpoint. Raises `NotRendered` when it is none."""
    try:
        return _list_decoder.decode(body) if is_list else [_one_decoder.decode(body)]
    except msgspec.MsgspecError as error:
        logger.warning("an engine's rendering is not understood: %s", error)
        raise NotRendered(Reason.RENDER_UNAVAILABLE) from error
