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
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, Raw, UnsetType
from pydantic import TypeAdapter, ValidationError

from deploy.gateway.errors import ApiError
from deploy.gateway.intake.media_names import with_own_names
from kvmanager.token_ids import Steps, TokenIds, parsing
from scheduler.live.learning.prompt_length import LengthEstimator, Media, PromptContent
from scheduler.routing.decision import RequestShape

Kind = Literal["completion", "chat"]

_WHITESPACE: Final = b" \t\r\n"
_POSITION: Final = re.compile(r"\(byte (\d+)\)")
_TEXT_PARTS: Final = frozenset(
    {"text", "refusal", "thinking", "input_text", "output_text", "tool_reference"}
)
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
    best_of: Raw | UnsetType = UNSET
    max_tokens: Raw | UnsetType = UNSET
    max_completion_tokens: Raw | UnsetType = UNSET
    min_tokens: Raw | UnsetType = UNSET
    stream_interval: Raw | UnsetType = UNSET
    echo: Raw | UnsetType = UNSET
    prompt_logprobs: Raw | UnsetType = UNSET
    prompt_embeds: Raw | UnsetType = UNSET
    use_beam_search: Raw | UnsetType = UNSET
    truncate_prompt_tokens: Raw | UnsetType = UNSET
    kv_transfer_params: Raw | UnsetType = UNSET
    ec_transfer_params: Raw | UnsetType = UNSET
    vllm_xargs: Raw | UnsetType = UNSET
    cache_salt: Raw | UnsetType = UNSET
    priority: Raw | UnsetType = UNSET
    request_id: Raw | UnsetType = UNSET


class _Part(msgspec.Struct):
    type: str | None = None


class _Message(msgspec.Struct):
    content: Raw | UnsetType = UNSET


READ_FIELDS: Final = _Body.__struct_fields__
"""The names of the fields that the gateway reads."""
_body_decoder: Final = msgspec.json.Decoder(_Body)
_items_decoder: Final = msgspec.json.Decoder(list[Raw])
_messages_decoder: Final = msgspec.json.Decoder(list[_Message])
_part_decoder: Final = msgspec.json.Decoder(_Part)
_str_decoder: Final = msgspec.json.Decoder(str)
_int64_decoder: Final = msgspec.json.Decoder(
    Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
)
_engines_int: Final = TypeAdapter(int)
"""Engines read numbers with pydantic, which takes "1_000" and true for numbers, too."""
_names_decoder: Final = msgspec.json.Decoder(dict[str, Raw])
_TRANSFER_PARAMS: Final = frozenset({"kv_transfer_params", "ec_transfer_params"})
_IDS: Final = re.compile(rb"[\s\[]*\d")
_PLAIN_NUMBER: Final = re.compile(rb"\d{1,18}")
_LEAST_OUTPUT_TOKENS: Final = 16
"""The tokens of a completion, in vLLM, that does not say how many it wants."""
_MOST: Final = 1 << 40
"""Bounds numbers that clients send, and work made of them: recordings have integers of 64 bits."""
_NOTHING_LEARNT: Final = LengthEstimator()


class InboundRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed request. `token_ids` is set if the client sent ids, so that no rendering is needed.

    A length in `shape` that is not exact is estimated from `content`, without anything that was
    learnt of the model. `adapter` is the LoRA adapter of `model` that the client asks for, "" for
    the model itself; the name in `body` stays the client's.
    """

    kind: Kind
    body: bytes
    model: str
    shape: RequestShape
    content: PromptContent
    token_ids: TokenIds | None
    cache_salt: str | None
    priority: int
    may_go_first: bool
    """Whether an engine may read its priority as one before others."""
    num_choices: int
    """Answers that an engine computes for each prompt."""
    max_output_tokens: int
    """The tokens of one answer. Where the client does not say, the fewest that an engine makes."""
    has_long_events: bool
    """Whether an event of its stream may have many tokens."""
    request_id: str | None
    adapter: str = ""

    def work_tokens(self, num_prompt_tokens: int) -> int:
        """Tokens that engines compute for it at most, with so many in all its prompts together:
        prompt and output of each answer, and the prompt once more for its logprobs.
        """
        num_answers = self.num_choices * self.shape.num_prompts
        return self.work_of(num_prompt_tokens, num_answers * self.max_output_tokens)

    def work_of(self, num_prompt_tokens: int, num_output_tokens: int) -> int:
        """The same where all answers together have so many tokens."""
        # Each answer may prefill the prompt: nothing promises that it is cached. The logprobs of a
        # prompt are computed without the cache.
        wants_logprobs = self.shape.has_prompt_logprobs or self.shape.has_echo
        num_prefills = self.num_choices + wants_logprobs
        return min(num_prefills * num_prompt_tokens + num_output_tokens, _MOST)


def parsing_request(kind: Kind, body: bytes, *, template_tokens: int) -> Steps[InboundRequest]:
    """Read what routing needs, a long list of ids in short steps.

    Raises `ApiError` 400 with the byte position for what is not a JSON object.
    """
    try:
        fields = _body_decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise _invalid_json(body, error) from None
    _check_transfer_params(fields)
    token_ids = yield from _client_token_ids(kind, fields)
    content = _content(kind, body, fields, token_ids)
    return InboundRequest(
        kind=kind,
        body=body,
        model=_string("model", fields.model) or "",
        shape=_shape(kind, fields, token_ids, content, bound=len(body) + template_tokens),
        content=content,
        token_ids=token_ids,
        cache_salt=_string("cache_salt", fields.cache_salt),
        priority=_optional(_int64_decoder, fields.priority) or 0,
        may_go_first=_is_set(fields.priority) and not _is_plain_number(fields.priority),
        num_choices=max(_number(fields.n, 1), _number(fields.best_of, 1)),
        max_output_tokens=max(
            # Engines that know both take the second; counting the larger one suits all.
            _number(fields.max_tokens, _LEAST_OUTPUT_TOKENS),
            _number(fields.max_completion_tokens, 0),
            _number(fields.min_tokens, 0),
        ),
        has_long_events=_is_set(fields.stream_interval),
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
    return _with_field(body, b"kv_transfer_params", params)


def salted(request: InboundRequest, cache_salt: str | None) -> InboundRequest:
    """The request with this salt, in the body too, whatever salt the client has sent. Names that
    the client gives media are good with this salt only.
    """
    if cache_salt == request.cache_salt:
        return request
    body = _with_field(request.body, b"cache_salt", cache_salt)
    if request.kind == "chat" and cache_salt is not None:
        body = with_own_names(body, cache_salt)
    return msgspec.structs.replace(request, body=body, cache_salt=cache_salt)


def _with_field(body: bytes, name: bytes, value: object) -> bytes:
    head = body.rstrip(_WHITESPACE)[:-1].rstrip(_WHITESPACE)
    # Appended and not merged: the body is not parsed again, and the last duplicate counts.
    comma = b"" if head.endswith(b"{") else b","
    return b"".join((head, comma, b'"', name, b'":', msgspec.json.encode(value), b"}"))


def _check_transfer_params(fields: _Body) -> None:
    """These parameters name memory on the region's nodes, so no client may send them: raises
    `ApiError`. An engine takes those in vllm_xargs as it takes its own.
    """
    sent = {name for name in _TRANSFER_PARAMS if _is_set(getattr(fields, name))}
    sent |= _TRANSFER_PARAMS & (_optional(_names_decoder, fields.vllm_xargs) or {}).keys()
    for name in sorted(sent):
        message = f"{name} is set by the gateway and cannot be sent by a client."
        raise ApiError(400, "unsupported_parameter", message, param=name)


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
    most: int = _optional(_int64_decoder, fields.truncate_prompt_tokens) or 0
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
    decoded: _Part | None = _optional(_part_decoder, part)
    name = "" if decoded is None or decoded.type is None else decoded.type
    if name in _TEXT_PARTS:
        return None
    return next((kind for kind in (Media.AUDIO, Media.VIDEO) if kind in name), Media.IMAGE)


def _number(value: Raw | UnsetType, default: int) -> int:
    """A number in any spelling that engines take; `default` if it is none."""
    if not isinstance(value, Raw):
        return default
    try:
        return min(max(0, _engines_int.validate_json(bytes(value))), _MOST)
    except ValidationError:
        return default


def _is_plain_number(value: Raw | UnsetType) -> bool:
    return isinstance(value, Raw) and _PLAIN_NUMBER.fullmatch(memoryview(value)) is not None


def _num_bytes(value: Raw | UnsetType) -> int:
    return memoryview(value).nbytes if isinstance(value, Raw) else 0


def _string(name: str, value: Raw | UnsetType) -> str | None:
    """A string or, where it is absent or null, None. Raises `ApiError` for another type."""
    if not _is_set(value):
        return None
    text: str | None = _optional(_str_decoder, value)
    if text is None:
        raise ApiError(400, "invalid_type", f"{name} must be a string.", param=name)
    return text


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
