"""The fields of bodies that the gateway reads, and which endpoint has which.

An engine ignores a field that its endpoint does not have, so the gateway must not count by it. The
OpenAPI document has the table; a test compares it with the request models of vLLM. This file does
not know what fields mean.
"""

from __future__ import annotations

from typing import Final, cast, get_args

import msgspec
from msgspec import UNSET, Raw, UnsetType

from deploy.gateway.intake.endpoints import Kind
from deploy.gateway.intake.raw_fields import is_set
from deploy.gateway.openapi.bodies import body_schema


class Body(msgspec.Struct):
    """The top-level fields that the gateway reads, undecoded."""

    model: Raw | UnsetType = UNSET
    prompt: Raw | UnsetType = UNSET
    messages: Raw | UnsetType = UNSET
    input: Raw | UnsetType = UNSET
    query: Raw | UnsetType = UNSET
    queries: Raw | UnsetType = UNSET
    documents: Raw | UnsetType = UNSET
    items: Raw | UnsetType = UNSET
    text_1: Raw | UnsetType = UNSET
    text_2: Raw | UnsetType = UNSET
    data_1: Raw | UnsetType = UNSET
    data_2: Raw | UnsetType = UNSET
    instructions: Raw | UnsetType = UNSET
    system: Raw | UnsetType = UNSET
    tools: Raw | UnsetType = UNSET
    previous_response_id: Raw | UnsetType = UNSET
    previous_input_messages: Raw | UnsetType = UNSET
    conversation: Raw | UnsetType = UNSET
    background: Raw | UnsetType = UNSET
    n: Raw | UnsetType = UNSET
    max_tokens: Raw | UnsetType = UNSET
    max_completion_tokens: Raw | UnsetType = UNSET
    max_output_tokens: Raw | UnsetType = UNSET
    min_tokens: Raw | UnsetType = UNSET
    stream: Raw | UnsetType = UNSET
    stream_interval: Raw | UnsetType = UNSET
    stream_options: Raw | UnsetType = UNSET
    echo: Raw | UnsetType = UNSET
    logprobs: Raw | UnsetType = UNSET
    prompt_logprobs: Raw | UnsetType = UNSET
    prompt_embeds: Raw | UnsetType = UNSET
    mm_processor_kwargs: Raw | UnsetType = UNSET
    media_io_kwargs: Raw | UnsetType = UNSET
    use_beam_search: Raw | UnsetType = UNSET
    truncate_prompt_tokens: Raw | UnsetType = UNSET
    kv_transfer_params: Raw | UnsetType = UNSET
    ec_transfer_params: Raw | UnsetType = UNSET
    vllm_xargs: Raw | UnsetType = UNSET
    cache_salt: Raw | UnsetType = UNSET
    priority: Raw | UnsetType = UNSET
    request_id: Raw | UnsetType = UNSET


_TURNS: Final = frozenset(
    {
        "messages",
        "input",
        "query",
        "queries",
        "documents",
        "items",
        "text_1",
        "text_2",
        "data_1",
        "data_2",
    }
)
"""Fields with the turns of a conversation, or with what is to be embedded, scored or ranked."""
_HAS: Final[dict[Kind, frozenset[str]]] = {
    kind: frozenset(body_schema(kind)["properties"]) for kind in get_args(Kind)
}
TURNS: Final = {
    kind: tuple(name for name in Body.__struct_fields__ if name in names & _TURNS)
    for kind, names in _HAS.items()
}
"""The fields of each endpoint that may hold media."""


def _only(names: frozenset[str]) -> msgspec.json.Decoder[Body]:
    """Reads a `Body` in which every field but these is unset."""
    read = [(name, Raw | UnsetType, UNSET) for name in Body.__struct_fields__ if name in names]
    lacking = {name: UNSET for name in Body.__struct_fields__ if name not in names}
    return msgspec.json.Decoder(
        cast("type[Body]", msgspec.defstruct("Body", read, namespace=lacking))
    )


_decoder: Final = msgspec.json.Decoder(Body)
_decoders: Final = {kind: _only(names) for kind, names in _HAS.items()}


def fields_of(kind: Kind | None, body: bytes) -> tuple[Kind, Body]:
    """The endpoint that `body` is for, and the fields that this one has. If `kind` is None, the
    body tells: a chat has messages, a response an input. Raises what decoding raises.
    """
    if kind is None:
        fields = _decoder.decode(body)
        kind = "chat" if is_set(fields.messages) else "completion"
        kind = "responses" if is_set(fields.input) else kind
    return kind, _decoders[kind].decode(body)
