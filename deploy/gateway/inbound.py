"""One request body: what routing must know of it, and the body an engine gets.

The body is parsed for a handful of top-level fields and otherwise stays the client's own bytes.
Field types are left to the engine, which coerces some and words its own errors: whatever looks
unusual here is served whole by one engine. As in the engine's own parser the last of duplicate keys
counts, so the parameters appended by `with_kv_transfer_params` win over anything before them.

Does not know routes, tokenizers or HTTP.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, Raw, UnsetType

from deploy.gateway.errors import ApiError
from scheduler.routing import RequestShape

Kind = Literal["completion", "chat"]

_WHITESPACE: Final = b" \t\r\n"
_POSITION: Final = re.compile(r"\(byte (\d+)\)")
_TEXT_PARTS: Final = frozenset({"text", "refusal", "thinking", "input_text", "output_text"})

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class _Body(msgspec.Struct):
    """The top-level fields of both endpoints that matter here, undecoded."""

    model: Raw | UnsetType = UNSET
    prompt: Raw | UnsetType = UNSET
    messages: Raw | UnsetType = UNSET
    n: Raw | UnsetType = UNSET
    echo: Raw | UnsetType = UNSET
    prompt_logprobs: Raw | UnsetType = UNSET
    prompt_embeds: Raw | UnsetType = UNSET
    use_beam_search: Raw | UnsetType = UNSET
    truncate_prompt_tokens: Raw | UnsetType = UNSET
    kv_transfer_params: Raw | UnsetType = UNSET
    cache_salt: Raw | UnsetType = UNSET
    priority: Raw | UnsetType = UNSET
    request_id: Raw | UnsetType = UNSET


class _Part(msgspec.Struct):
    type: str | None = None


class _Message(msgspec.Struct):
    content: str | list[_Part | str] | None = None


_body_decoder: Final = msgspec.json.Decoder(_Body)
_ids_decoder: Final = msgspec.json.Decoder(list[TokenId])
_items_decoder: Final = msgspec.json.Decoder(list[Raw])
_messages_decoder: Final = msgspec.json.Decoder(list[_Message])
_str_decoder: Final = msgspec.json.Decoder(str)
_int_decoder: Final = msgspec.json.Decoder(int)


class InboundRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed request. `token_ids` are set when the client sent ids itself: no need to render."""

    kind: Kind
    body: bytes
    model: str
    shape: RequestShape
    token_ids: list[int] | None
    cache_salt: str | None
    priority: int
    request_id: str | None


def parse_request(kind: Kind, body: bytes, *, template_tokens: int) -> InboundRequest:
    """Read what routing needs.

    Raises `ApiError` 400 for what is not a JSON object, with the byte position, and for
    kv_transfer_params sent by the client: those name memory on our nodes.
    """
    try:
        fields = _body_decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise _invalid_json(body, error) from None
    if _is_set(fields.kv_transfer_params):
        raise ApiError(
            400,
            "unsupported_parameter",
            "kv_transfer_params is set by the gateway and cannot be sent by a client.",
            param="kv_transfer_params",
        )
    token_ids = _client_token_ids(kind, fields)
    return InboundRequest(
        kind=kind,
        body=body,
        model=_model(fields.model),
        shape=_shape(kind, fields, token_ids, bound=len(body) + template_tokens),
        token_ids=token_ids,
        cache_salt=_optional(_str_decoder, fields.cache_salt),
        priority=_optional(_int_decoder, fields.priority) or 0,
        request_id=_optional(_str_decoder, fields.request_id),
    )


def kind_of(body: bytes) -> Kind:
    """The endpoint that `body` is for: a chat has messages. What is no JSON object at all is left
    for `parse_request` to refuse.
    """
    try:
        fields = _body_decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return "completion"
    return "chat" if _is_set(fields.messages) else "completion"


def with_kv_transfer_params(body: bytes, params: dict[str, Any]) -> bytes:
    """`body`, a JSON object, with kv_transfer_params appended; all other bytes stay."""
    head = body.rstrip(_WHITESPACE)[:-1].rstrip(_WHITESPACE)
    comma = b"" if head.endswith(b"{") else b","
    return b"".join((head, comma, b'"kv_transfer_params":', msgspec.json.encode(params), b"}"))


def _shape(kind: Kind, fields: _Body, token_ids: list[int] | None, *, bound: int) -> RequestShape:
    """A byte of JSON text never becomes more than one token, so the body's length bounds them."""
    num_prompts, is_unusual = 1, False
    if kind == "completion" and token_ids is None:
        num_prompts, is_unusual = _count_prompts(fields.prompt)
    return RequestShape(
        num_prompt_tokens=bound if token_ids is None else len(token_ids),
        is_exact=token_ids is not None,
        num_prompts=num_prompts,
        num_choices=1 if _is_one_of(fields.n, b"1", b"null") else 2,
        has_prompt_logprobs=_is_set(fields.prompt_logprobs),
        # In chat the field only shapes the template, which rendering sees.
        has_echo=kind == "completion" and not _is_one_of(fields.echo, b"false", b"null"),
        has_beam_search=not _is_one_of(fields.use_beam_search, b"false", b"null"),
        has_prompt_embeds=_is_set(fields.prompt_embeds),
        is_multimodal=kind == "chat" and _has_other_than_text(fields.messages),
        is_unusual=is_unusual or (kind == "chat" and not _starts_with(fields.messages, b"[")),
    )


def _client_token_ids(kind: Kind, fields: _Body) -> list[int] | None:
    """The ids of a prompt given as one flat list, unless the engine would still cut it."""
    if kind == "chat" or _is_set(fields.truncate_prompt_tokens):
        return None
    if not _starts_with(fields.prompt, b"["):
        return None
    return _optional(_ids_decoder, fields.prompt) or None


def _count_prompts(prompt: Raw | UnsetType) -> tuple[int, bool]:
    """How many prompts, and whether the field is something only the engine can judge."""
    if _starts_with(prompt, b'"'):
        return 1, False
    items = _optional(_items_decoder, prompt)
    if not items:
        return 1, True
    first = bytes(items[0])[:1]
    return len(items), first not in (b'"', b"[")


def _has_other_than_text(messages: Raw | UnsetType) -> bool:
    """Whether a message holds anything but text, or cannot be told from that."""
    try:
        decoded = _messages_decoder.decode(messages) if isinstance(messages, Raw) else []
    except (msgspec.MsgspecError, RecursionError):
        return True
    return any(
        not isinstance(part, str) and part.type not in _TEXT_PARTS
        for message in decoded
        if isinstance(message.content, list)
        for part in message.content
    )


def _model(value: Raw | UnsetType) -> str:
    if not _is_set(value):
        return ""
    name: str | None = _optional(_str_decoder, value)
    if name is None:
        raise ApiError(400, "invalid_type", "model must be a string.", param="model")
    return name


def _optional(decoder: msgspec.json.Decoder[Any], value: Raw | UnsetType) -> Any:
    """The decoded field, or None when it is absent, null or of another type."""
    if not isinstance(value, Raw):
        return None
    try:
        return decoder.decode(value)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None


def _is_set(value: Raw | UnsetType) -> bool:
    # Length first: the field may be megabytes long.
    return isinstance(value, Raw) and (memoryview(value).nbytes != 4 or bytes(value) != b"null")


def _is_one_of(value: Raw | UnsetType, *spellings: bytes) -> bool:
    return not isinstance(value, Raw) or bytes(memoryview(value)[:16]) in spellings


def _starts_with(value: Raw | UnsetType, prefix: bytes) -> bool:
    return isinstance(value, Raw) and bytes(memoryview(value)[:1]) == prefix


def _invalid_json(body: bytes, error: Exception) -> ApiError:
    if isinstance(error, msgspec.ValidationError):
        return ApiError(400, "invalid_body", "The body must be a JSON object.")
    if isinstance(error, RecursionError):
        return ApiError(400, "invalid_json", "The body is not usable JSON: nested too deeply.")
    message = f"The body is not valid JSON: {error}"
    match = _POSITION.search(str(error))
    if match is not None:
        line = body.count(b"\n", 0, int(match[1])) + 1
        message += f", line {line}"
    elif "position" not in message:
        message += f" (byte {len(body)})"
    return ApiError(400, "invalid_json", message)
