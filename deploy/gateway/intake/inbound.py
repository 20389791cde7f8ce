"""One request body: what routing must know of it, and the body that an engine gets.

The body is parsed for a handful of top-level fields and otherwise stays the client's own bytes. The
engine judges the types of fields: it coerces some and words its own errors. Whatever looks unusual
here is served whole by one engine. As in the engine's own parser the last of duplicate keys counts,
so the parameters that `with_kv_transfer_params` appends win over anything before them.

This file does not know routes, tokenizers or HTTP.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final

import msgspec
from msgspec import UNSET, Raw, UnsetType
from pydantic import TypeAdapter, ValidationError

from deploy.gateway.errors import ApiError
from deploy.gateway.intake.body_checks import MOST_ITEMS, checking_body, half_of_pair, too_many
from deploy.gateway.intake.conversation import STEP_ITEMS, Conversation, unreadable, walking
from deploy.gateway.intake.endpoints import ENDPOINTS, Kind
from deploy.gateway.intake.fields import Body, fields_of
from deploy.gateway.intake.media_names import naming_by_content, own_name
from deploy.gateway.intake.media_urls import MediaAddress, Medium, addresses_in, put_media
from deploy.gateway.intake.prompt_content import prompt_content, repeated_bytes, turns_of
from deploy.gateway.intake.raw_fields import is_one_of, is_set, num_bytes, optional, starts_with
from kvmanager.token_ids import Steps, TokenIds, parsing
from scheduler.live.learning.prompt_length import LengthEstimator, PromptContent
from scheduler.routing.decision import RequestShape


class _Tool(msgspec.Struct):
    type: str = ""


class _Ids(msgspec.Struct, array_like=True):
    """A list whose items are passed over."""


_WHITESPACE: Final = b" \t\r\n"
_POSITION: Final = re.compile(r"\(byte (\d+)\)")
_prompts_decoder: Final = msgspec.json.Decoder(list[str | _Ids])
_tools_decoder: Final = msgspec.json.Decoder(list[_Tool])
_str_decoder: Final = msgspec.json.Decoder(str)
_int64_decoder: Final = msgspec.json.Decoder(
    Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
)
_engines_int: Final = TypeAdapter(int)
"""Engines read numbers with pydantic, which takes "1_000" and true for numbers, too."""
_NUMBER_BYTES: Final = 128
"""No number is written longer than this by anybody who means it."""
_names_decoder: Final = msgspec.json.Decoder(dict[str, Raw])
_TRANSFER_PARAMS: Final = frozenset({"kv_transfer_params", "ec_transfer_params"})
_ASKED_FOR_USAGE: Final = frozenset({"completion", "chat"})
"""The endpoints whose streams have the usage only if `stream_options` asks for it."""
_STATEFUL: Final = ("previous_response_id", "background", "conversation")
"""Fields of responses that need what one engine remembers."""
_PLAIN_NUMBER: Final = re.compile(rb"\d{1,18}")
_LEAST_OUTPUT_TOKENS: Final = 16
"""The tokens of a completion, in vLLM, that does not say how many it wants."""
_MOST: Final = 1 << 40
"""Bounds numbers that clients send, and work made of them: recordings have integers of 64 bits."""
_NOTHING_LEARNT: Final = LengthEstimator()
SaltOf = Callable[[str | None], str | None]
"""Makes the salt of a request of the client's own."""


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
    is_stream: bool
    """Whether it certainly asks for a stream."""
    hides_usage: bool
    """Whether `body` asks for the usage at the end of the stream, which the client did not."""
    request_id: str | None
    adapter: str = ""
    media_addresses: tuple[MediaAddress, ...] = ()
    """Where media in `body` are that are not in it. No engine may get it before they are looked at.
    """

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


def parsing_request(
    kind: Kind | None, body: bytes, *, template_tokens: int, salt_of: SaltOf = lambda own: own
) -> Steps[InboundRequest]:
    """Read what routing needs, in short steps. If `kind` is None, the body tells the endpoint.

    The request has the salt that `salt_of` makes of the client's, in the body too. Names of media
    are good with this salt only.

    Raises `ApiError` 400, with the byte position for what is not a JSON object.
    """
    # Some programs begin each text with this mark, and engines pass over it.
    body = body.removeprefix(codecs.BOM_UTF8)
    yield from checking_body(body)
    try:
        return (yield from _parsing(*fields_of(kind, body), body, template_tokens, salt_of))
    except (msgspec.MsgspecError, RecursionError) as error:
        raised = error
    raise (yield from _invalid_json(body, raised))


def _parsing(
    kind: Kind, fields: Body, body: bytes, template_tokens: int, salt_of: SaltOf
) -> Steps[InboundRequest]:
    _check_transfer_params(fields)
    if kind == "responses":
        _check_stateless(fields)
    own_salt = _string("cache_salt", fields.cache_salt)
    salt = salt_of(own_salt)
    token_ids = (yield from _client_token_ids(fields)) if kind == "completion" else None
    conversation = yield from walking(kind, fields)
    content = prompt_content(kind, body, fields, token_ids, conversation)
    bound = len(body) + template_tokens + repeated_bytes(kind, conversation)
    addresses, is_changed = yield from _own_media(conversation, salt)
    is_named = not addresses and (yield from _naming(kind, fields, conversation, content, salt))
    if is_changed or is_named:
        yield
        body = conversation.written(body)
    if salt != own_salt:
        body = _with_field(body, b"cache_salt", salt)
    is_stream = is_set(fields.stream) and is_one_of(fields.stream, b"true")
    usage_options = _usage_options(fields) if kind in _ASKED_FOR_USAGE and is_stream else None
    if usage_options is not None:
        body = _with_field(body, b"stream_options", usage_options)
    return InboundRequest(
        kind=kind,
        body=body,
        model=_string("model", fields.model) or "",
        shape=_shape(
            kind,
            fields,
            token_ids,
            content,
            conversation,
            bound=bound,
            has_bound_media=content.has_media and not is_named,
        ),
        content=content,
        token_ids=None if is_set(fields.truncate_prompt_tokens) else token_ids,
        cache_salt=salt,
        priority=optional(_int64_decoder, fields.priority) or 0,
        may_go_first=is_set(fields.priority) and not _is_plain_number(fields.priority),
        num_choices=_number("n", fields.n, 1),
        max_output_tokens=max(
            # Engines that know both take the second; counting the larger one suits all.
            _number("max_tokens", fields.max_tokens, _LEAST_OUTPUT_TOKENS),
            _number("max_completion_tokens", fields.max_completion_tokens, 0),
            _number("max_output_tokens", fields.max_output_tokens, 0),
            _number("min_tokens", fields.min_tokens, 0),
        ),
        has_long_events=is_set(fields.stream_interval),
        is_stream=is_stream,
        hides_usage=usage_options is not None,
        request_id=optional(_str_decoder, fields.request_id),
        media_addresses=addresses,
    )


def with_fetched_media(
    request: InboundRequest, media: Mapping[MediaAddress, Medium]
) -> Steps[InboundRequest]:
    """The request with `media` in its body, which were at addresses before."""
    kind, fields = fields_of(request.kind, request.body)
    conversation = yield from walking(kind, fields)
    for part in conversation.parts:
        put_media(part, media)
    yield
    is_named = yield from _naming(kind, fields, conversation, request.content, request.cache_salt)
    yield
    shape = msgspec.structs.replace(
        request.shape, has_bound_media=request.content.has_media and not is_named
    )
    body = conversation.written(request.body)
    return msgspec.structs.replace(request, body=body, shape=shape, media_addresses=())


def with_kv_transfer_params(body: bytes, params: dict[str, Any]) -> bytes:
    """`body`, a JSON object, with kv_transfer_params appended; all other bytes stay."""
    return _with_field(body, b"kv_transfer_params", params)


def without_pixels(body: bytes) -> bytes:
    """`body` for a render endpoint: its answer names media and their places, without their data
    (vLLM's `mm_payload`).
    """
    return _with_field(body, b"mm_payload", "none")


def _with_field(body: bytes, name: bytes, value: object) -> bytes:
    head = body.rstrip(_WHITESPACE)[:-1].rstrip(_WHITESPACE)
    # Appended and not merged: the body is not parsed again, and the last duplicate counts.
    comma = b"" if head.endswith(b"{") else b","
    return b"".join((head, comma, b'"', name, b'":', msgspec.json.encode(value), b"}"))


def _usage_options(fields: Body) -> dict[str, Any] | None:
    """The options of a stream that ends with its usage; None if the client has asked for it, or
    for something that only the engine can judge.
    """
    options: dict[str, Raw] | None = {}
    if is_set(fields.stream_options):
        options = optional(_names_decoder, fields.stream_options)
    if options is None or not is_one_of(options.get("include_usage", UNSET), b"false", b"null"):
        return None
    # Without `include_usage` engines pass over the usage in each event.
    return options | {"include_usage": True, "continuous_usage_stats": False}


def _check_transfer_params(fields: Body) -> None:
    """These parameters name memory on the region's nodes, so no client may send them: raises
    `ApiError`. An engine takes those in vllm_xargs as it takes its own.
    """
    sent = {name for name in _TRANSFER_PARAMS if is_set(getattr(fields, name))}
    if is_set(fields.vllm_xargs):
        arguments = optional(_names_decoder, fields.vllm_xargs)
        if arguments is None:
            raise unreadable("vllm_xargs", "an object")
        sent |= _TRANSFER_PARAMS & arguments.keys()
    for name in sorted(sent):
        message = f"{name} is set by the gateway and cannot be sent by a client."
        raise ApiError(400, "unsupported_parameter", message, param=name)


def _check_stateless(fields: Body) -> None:
    """Responses that one engine would remember are refused, as the next request may come to another
    engine: raises `ApiError`.
    """
    for name in _STATEFUL:
        value = getattr(fields, name)
        if is_set(value) and not is_one_of(value, b"false"):
            message = (
                f"{name} is not supported here: no engine keeps responses for others. Send the "
                "whole conversation as input, and leave this field out."
            )
            raise ApiError(400, "unsupported_parameter", message, param=name)


def _own_media(
    conversation: Conversation, salt: str | None
) -> Steps[tuple[tuple[MediaAddress, ...], bool]]:
    """The addresses of media in the parts, and whether a part had a name. Names become those of
    the tenant: engines take what has one for a medium, whatever its type.
    """
    found: list[MediaAddress] = []
    is_named = False
    for number, part in enumerate(conversation.parts, 1):
        if not number % STEP_ITEMS:
            yield
        found.extend(address for _, address in addresses_in(part))
        name = part.fields.get("uuid")
        if name is not None and is_set(name):
            part.fields["uuid"], is_named = own_name(name, salt), True
    return tuple(found), is_named


def _naming(
    kind: Kind, fields: Body, conversation: Conversation, content: PromptContent, salt: str | None
) -> Steps[bool]:
    """Give the media names that are the same at all sites. False where only the engine that serves
    the request can read all of them.
    """
    # Engines know no names in /v1/messages. With options for their processor they make names of
    # their own.
    if (
        kind not in ("chat", "responses")
        or not content.has_media
        or is_set(fields.mm_processor_kwargs)
        or is_set(fields.media_io_kwargs)
    ):
        return False
    yield
    num_media = sum(content.media.values())
    return (yield from naming_by_content(conversation.parts, num_media, salt))


def _shape(
    kind: Kind,
    fields: Body,
    token_ids: TokenIds | None,
    content: PromptContent,
    conversation: Conversation,
    *,
    bound: int,
    has_bound_media: bool,
) -> RequestShape:
    """`bound` limits the tokens if all is text: a byte never becomes more than one token."""
    # In chat the field only shapes the template, which rendering sees.
    has_echo = kind == "completion" and not is_one_of(fields.echo, b"false", b"null")
    num_prompts, is_unusual = 1, False
    if kind == "completion" and token_ids is None:
        num_prompts, is_unusual = _count_prompts(fields.prompt)
    num_texts = num_prompts
    if not ENDPOINTS[kind].is_routed:
        num_texts = max((num for num, _ in conversation.sizes.values()), default=1)
    at_most = None if content.media else _truncated(fields, bound, num_texts)
    is_exact = token_ids is not None and not is_set(fields.truncate_prompt_tokens)
    return RequestShape(
        num_prompt_tokens=_NOTHING_LEARNT.num_tokens(content, at_most),
        is_exact=is_exact,
        bound_tokens=None if is_exact else at_most,
        num_prompts=num_prompts,
        num_choices=_num_choices(fields),
        has_prompt_logprobs=is_set(fields.prompt_logprobs)
        or (has_echo and is_set(fields.logprobs)),
        # The text of a prompt takes no prefill, but other spellings are for one engine to judge.
        has_echo=has_echo and not is_one_of(fields.echo, b"true"),
        has_beam_search=not is_one_of(fields.use_beam_search, b"false", b"null"),
        has_prompt_embeds=is_set(fields.prompt_embeds),
        has_bound_media=has_bound_media,
        is_unusual=is_unusual or _is_unusual(kind, fields),
    )


def _is_unusual(kind: Kind, fields: Body) -> bool:
    """Whether a conversation is something that one engine must serve or judge."""
    turns = turns_of(kind, fields)
    if kind != "responses":
        return kind != "completion" and not starts_with(turns, b"[")
    if is_set(fields.previous_input_messages):
        return True
    if not (starts_with(turns, b"[") or starts_with(turns, b'"')):
        return True
    # With a tool of its own an engine computes several prompts for one request.
    tools = optional(_tools_decoder, fields.tools) if is_set(fields.tools) else ()
    if tools is not None and len(tools) > MOST_ITEMS:
        raise too_many("tools", MOST_ITEMS, "items", "tools")
    return tools is None or any(tool.type != "function" for tool in tools)


def _num_choices(fields: Body) -> int:
    """The answers that an engine will decode, each as a request of its own; 0 where only the engine
    can judge the field.
    """
    if not is_set(fields.n):
        return 1
    return _number("n", fields.n, 0) if _is_plain_number(fields.n) else 0


def _truncated(fields: Body, bound: int, num_texts: int) -> int:
    """The length to which the client lets the engine cut each text, all together, or `bound`."""
    most: int = optional(_int64_decoder, fields.truncate_prompt_tokens) or 0
    return min(bound, most * num_texts) if most > 0 else bound


def _client_token_ids(fields: Body) -> Steps[TokenIds | None]:
    """The ids of a prompt given as one flat list."""
    if not (isinstance(fields.prompt, Raw) and starts_with(fields.prompt, b"[")):
        return None
    try:
        return (yield from parsing(bytes(fields.prompt))) or None
    except ValueError:
        return None


def _count_prompts(prompt: Raw | UnsetType) -> tuple[int, bool]:
    """The number of prompts, and whether the field is something that only the engine can judge."""
    if starts_with(prompt, b'"'):
        return 1, False
    # A list with anything else in it can only be one prompt of ids.
    prompts = optional(_prompts_decoder, prompt)
    if not prompts:
        return 1, True
    if len(prompts) > MOST_ITEMS:
        raise too_many("prompt", MOST_ITEMS, "items", "prompt")
    return len(prompts), False


def _number(name: str, value: Raw | UnsetType, default: int) -> int:
    """A number in any spelling that engines take; `default` if it is none."""
    if not isinstance(value, Raw):
        return default
    if num_bytes(value) > _NUMBER_BYTES:
        raise unreadable(name, "a number")
    try:
        return min(max(0, _engines_int.validate_json(bytes(value))), _MOST)
    except ValidationError:
        return default


def _is_plain_number(value: Raw | UnsetType) -> bool:
    return isinstance(value, Raw) and _PLAIN_NUMBER.fullmatch(memoryview(value)) is not None


def _string(name: str, value: Raw | UnsetType) -> str | None:
    """A string or, where it is absent or null, None. Raises `ApiError` for another type."""
    if not is_set(value):
        return None
    text: str | None = optional(_str_decoder, value)
    if text is None:
        raise ApiError(400, "invalid_type", f"{name} must be a string.", param=name)
    return text


def _invalid_json(body: bytes, error: Exception) -> Steps[ApiError]:
    if isinstance(error, msgspec.ValidationError):
        return ApiError(400, "invalid_body", "The body must be a JSON object.")
    if isinstance(error, RecursionError):
        return ApiError(400, "invalid_json", "The body is not usable JSON: nested too deeply.")
    # The parser takes half a pair at the end of a text for the end of the body.
    half = yield from half_of_pair(body)
    message = f"The body is not valid JSON: {half or error}"
    match = _POSITION.search(message)
    if match is not None:
        line = body.count(b"\n", 0, int(match[1])) + 1
        message += f", line {line}"
    else:
        message += f" (byte {len(body)})"
    return ApiError(400, "invalid_json", message)
