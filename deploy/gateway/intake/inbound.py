"""One request body: what routing must know of it, and the body that an engine gets.

The body is parsed for a handful of top-level fields and otherwise stays the client's own bytes. The
engine judges the types of fields: it coerces some and words its own errors. Whatever looks unusual
here is served whole by one engine. As in the engine's own parser the last of duplicate keys counts,
so the parameters that `with_kv_transfer_params` appends win over anything before them.

This file does not know routes, tokenizers or HTTP.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any, Final, Literal

import msgspec
from msgspec import UNSET, Raw, UnsetType

from deploy.gateway.errors import ApiError
from kvmanager.token_ids import Steps, TokenIds, parsing
from scheduler.live.learning.prompt_length import LengthEstimator, Media, PromptContent
from scheduler.routing.decision import RequestShape

Kind = Literal["completion", "chat"]

_WHITESPACE: Final = b" \t\r\n"
_POSITION: Final = re.compile(r"\(byte (\d+)\)")
_TEXT_PARTS: Final = frozenset({"text", "refusal", "thinking", "input_text", "output_text"})
_ESCAPE: Final = rb"\u"
_ESCAPED_MORE_BYTES: Final = 3
"""An escape takes six bytes; most of the escaped characters take three in UTF-8."""


class _Body(msgspec.Struct):
    """The top-level fields of both endpoints that routing needs, undecoded."""

    model: Raw | UnsetType = UNSET
    prompt: Raw | UnsetType = UNSET
    messages: Raw | UnsetType = UNSET
    tools: Raw | UnsetType = UNSET
    documents: Raw | UnsetType = UNSET
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
    content: Raw | UnsetType = UNSET


_body_decoder: Final = msgspec.json.Decoder(_Body)
_items_decoder: Final = msgspec.json.Decoder(list[Raw])
_messages_decoder: Final = msgspec.json.Decoder(list[_Message])
_part_decoder: Final = msgspec.json.Decoder(_Part)
_str_decoder: Final = msgspec.json.Decoder(str)
_int_decoder: Final = msgspec.json.Decoder(int)
_PART_TYPE: Final = re.compile(rb'\{\s*"type"\s*:\s*"(\w+)"')
"""Clients write the type first, so the megabytes that follow need not be parsed."""
_IDS: Final = re.compile(rb"[\s\[]*\d")
_NOTHING_LEARNT: Final = LengthEstimator()


class InboundRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed request. `token_ids` is set if the client sent ids, so that no rendering is needed.

    A length in `shape` that is not exact is estimated from `content`, without anything that was
    learnt of the model.
    """

    kind: Kind
    body: bytes
    model: str
    shape: RequestShape
    content: PromptContent
    token_ids: TokenIds | None
    cache_salt: str | None
    priority: int
    request_id: str | None


def parsing_request(kind: Kind, body: bytes, *, template_tokens: int) -> Steps[InboundRequest]:
    """Read what routing needs, a long list of ids in short steps.

    Raises `ApiError` 400 with the byte position for what is not a JSON object.
    """
    try:
        fields = _body_decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise _invalid_json(body, error) from None
    # These parameters name memory on the region's nodes, so no client may send them.
    if _is_set(fields.kv_transfer_params):
        raise ApiError(
            400,
            "unsupported_parameter",
            "kv_transfer_params is set by the gateway and cannot be sent by a client.",
            param="kv_transfer_params",
        )
    token_ids = yield from _client_token_ids(kind, fields)
    content = _content(kind, body, fields, token_ids)
    return InboundRequest(
        kind=kind,
        body=body,
        model=_model(fields.model),
        shape=_shape(kind, fields, token_ids, content, bound=len(body) + template_tokens),
        content=content,
        token_ids=token_ids,
        cache_salt=_optional(_str_decoder, fields.cache_salt),
        priority=_optional(_int_decoder, fields.priority) or 0,
        request_id=_optional(_str_decoder, fields.request_id),
    )


def kind_of(body: bytes) -> Kind:
    """The endpoint that `body` is for: a chat has messages. `parsing_request` refuses a body that
    is no JSON object.
    """
    try:
        fields = _body_decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return "completion"
    return "chat" if _is_set(fields.messages) else "completion"


def with_kv_transfer_params(body: bytes, params: dict[str, Any]) -> bytes:
    """`body`, a JSON object, with kv_transfer_params appended; all other bytes stay."""
    head = body.rstrip(_WHITESPACE)[:-1].rstrip(_WHITESPACE)
    # Appended and not merged: the body is not parsed again, and the last duplicate counts.
    comma = b"" if head.endswith(b"{") else b","
    return b"".join((head, comma, b'"kv_transfer_params":', msgspec.json.encode(params), b"}"))


def _shape(
    kind: Kind,
    fields: _Body,
    token_ids: TokenIds | None,
    content: PromptContent,
    *,
    bound: int,
) -> RequestShape:
    """`bound` limits the tokens if all is text: a byte never becomes more than one token."""
    at_most = None if content.media else _truncated(fields, bound)
    num_prompts, is_unusual = 1, False
    if kind == "completion" and token_ids is None:
        num_prompts, is_unusual = _count_prompts(fields.prompt)
    return RequestShape(
        num_prompt_tokens=_NOTHING_LEARNT.num_tokens(content, at_most),
        is_exact=token_ids is not None,
        bound_tokens=at_most if token_ids is None else None,
        num_prompts=num_prompts,
        # Any other spelling of n, also a wrong one, goes to one engine, which judges it.
        num_choices=1 if _is_one_of(fields.n, b"1", b"null") else 2,
        has_prompt_logprobs=_is_set(fields.prompt_logprobs),
        # In chat the field only shapes the template, which rendering sees.
        has_echo=kind == "completion" and not _is_one_of(fields.echo, b"false", b"null"),
        has_beam_search=not _is_one_of(fields.use_beam_search, b"false", b"null"),
        has_prompt_embeds=_is_set(fields.prompt_embeds),
        is_multimodal=any(media is not Media.EMBEDS for media in content.media),
        is_unusual=is_unusual or (kind == "chat" and not _starts_with(fields.messages, b"[")),
    )


def _truncated(fields: _Body, bound: int) -> int:
    """The length to which the client lets the engine cut the prompt, at most `bound`."""
    most: int = _optional(_int_decoder, fields.truncate_prompt_tokens) or 0
    return min(bound, most) if most > 0 else bound


def _content(kind: Kind, body: bytes, fields: _Body, token_ids: TokenIds | None) -> PromptContent:
    """What the prompt is made of; the bytes of media do not count as text."""
    if token_ids is not None:
        return PromptContent(num_ids=len(token_ids))
    media: Counter[Media] = Counter()
    text_bytes = num_ids = 0
    if kind == "completion":
        if isinstance(fields.prompt, Raw) and _IDS.match(memoryview(fields.prompt)):
            # Several prompts of ids, or ids that the engine will cut or refuse: count the commas.
            num_ids = bytes(fields.prompt).count(b",") + 1
        else:
            text_bytes = _num_bytes(fields.prompt)
    else:
        media, media_bytes = _media_parts(fields.messages)
        prompt = (fields.messages, fields.tools, fields.documents)
        text_bytes = sum(map(_num_bytes, prompt)) - media_bytes
    if _is_set(fields.prompt_embeds):
        media[Media.EMBEDS] = _num_bytes(fields.prompt_embeds)
    # Megabytes of media would have to be searched for the escapes of the text beside them.
    num_escapes = 0 if media else body.count(_ESCAPE)
    text_bytes = max(text_bytes // 2, text_bytes - _ESCAPED_MORE_BYTES * num_escapes)
    return PromptContent(text_bytes, num_ids, media)


def _client_token_ids(kind: Kind, fields: _Body) -> Steps[TokenIds | None]:
    """The ids of a prompt given as one flat list, unless the engine would still cut it."""
    if kind == "chat" or _is_set(fields.truncate_prompt_tokens):
        return None
    if not (isinstance(fields.prompt, Raw) and _starts_with(fields.prompt, b"[")):
        return None
    try:
        return (yield from parsing(bytes(fields.prompt))) or None
    except ValueError:
        return None


def _count_prompts(prompt: Raw | UnsetType) -> tuple[int, bool]:
    """The number of prompts, and whether the field is something that only the engine can judge."""
    if _starts_with(prompt, b'"'):
        return 1, False
    items = _optional(_items_decoder, prompt)
    if not items:
        return 1, True
    first = bytes(items[0])[:1]
    return len(items), first not in (b'"', b"[")


def _media_parts(messages: Raw | UnsetType) -> tuple[Counter[Media], int]:
    """The media in messages, and how many bytes they take. What may be media counts as an image."""
    found: Counter[Media] = Counter()
    num_bytes = 0
    try:
        decoded = _messages_decoder.decode(messages) if isinstance(messages, Raw) else []
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return Counter({Media.IMAGE: 1}), _num_bytes(messages)
    for message in decoded:
        content = message.content
        if not _is_set(content) or _starts_with(content, b'"'):
            continue
        parts = _optional(_items_decoder, content)
        # Content that is neither a string nor a list counts as one part of unknown kind.
        for part in [content] if parts is None else parts:
            kind = Media.IMAGE if parts is None else _media_kind(part)
            if kind is not None:
                found[kind] += 1
                num_bytes += _num_bytes(part)
    return found, num_bytes


def _media_kind(part: Raw | UnsetType) -> Media | None:
    """The kind of media in a part of a message's content; None for text."""
    if _starts_with(part, b'"'):
        return None
    match = _PART_TYPE.match(memoryview(part)) if isinstance(part, Raw) else None
    if match is not None:
        name = match[1].decode()
    else:
        decoded: _Part | None = _optional(_part_decoder, part)
        name = "" if decoded is None or decoded.type is None else decoded.type
    if name in _TEXT_PARTS:
        return None
    return next((kind for kind in (Media.AUDIO, Media.VIDEO) if kind in name), Media.IMAGE)


def _num_bytes(value: Raw | UnsetType) -> int:
    return memoryview(value).nbytes if isinstance(value, Raw) else 0


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
