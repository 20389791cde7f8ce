"""What the prompt of a request is made of, as far as its undecoded fields tell.

Nothing is tokenized here. This file does not know routes or HTTP.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Final

import msgspec
from msgspec import UNSET, Raw, UnsetType

from deploy.gateway.intake.endpoints import ENDPOINTS, Kind
from deploy.gateway.intake.raw_fields import is_set, num_bytes, optional, starts_with
from kvmanager.token_ids import TokenIds
from scheduler.live.learning.prompt_length import Media, PromptContent

_TEXT_PARTS: Final = frozenset(
    {
        "text",
        "refusal",
        "thinking",
        "redacted_thinking",
        "reasoning_text",
        "summary_text",
        "input_text",
        "output_text",
        "tool_reference",
        "tool_use",
    }
)
_ESCAPE: Final = rb"\u"
_ESCAPED_MORE_BYTES: Final = 3
"""An escape takes six bytes; most of the escaped characters take three in UTF-8."""
_IDS: Final = re.compile(rb"[\s\[]*\d")


class _Part(msgspec.Struct):
    type: str | None = None
    content: Raw | UnsetType = UNSET


class _Message(msgspec.Struct):
    content: Raw | UnsetType = UNSET
    output: Raw | UnsetType = UNSET
    """What a tool answered, in an item of OpenAI's responses."""


class Body(msgspec.Struct):
    """The top-level fields of all endpoints that routing needs, undecoded."""

    model: Raw | UnsetType = UNSET
    prompt: Raw | UnsetType = UNSET
    messages: Raw | UnsetType = UNSET
    input: Raw | UnsetType = UNSET
    instructions: Raw | UnsetType = UNSET
    system: Raw | UnsetType = UNSET
    previous_response_id: Raw | UnsetType = UNSET
    previous_input_messages: Raw | UnsetType = UNSET
    conversation: Raw | UnsetType = UNSET
    background: Raw | UnsetType = UNSET
    max_output_tokens: Raw | UnsetType = UNSET
    logprobs: Raw | UnsetType = UNSET
    tools: Raw | UnsetType = UNSET
    documents: Raw | UnsetType = UNSET
    n: Raw | UnsetType = UNSET
    best_of: Raw | UnsetType = UNSET
    max_tokens: Raw | UnsetType = UNSET
    max_completion_tokens: Raw | UnsetType = UNSET
    min_tokens: Raw | UnsetType = UNSET
    stream: Raw | UnsetType = UNSET
    stream_interval: Raw | UnsetType = UNSET
    stream_options: Raw | UnsetType = UNSET
    echo: Raw | UnsetType = UNSET
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


_items_decoder: Final = msgspec.json.Decoder(list[Raw])
_messages_decoder: Final = msgspec.json.Decoder(list[_Message])
_part_decoder: Final = msgspec.json.Decoder(_Part)


def turns_of(kind: Kind, fields: Body) -> Raw | UnsetType:
    """The field with the turns of a conversation."""
    return fields.input if kind == "responses" else fields.messages


def prompt_content(
    kind: Kind, body: bytes, fields: Body, token_ids: TokenIds | None
) -> PromptContent:
    """What the prompt is made of; the bytes of media do not count as text."""
    if token_ids is not None:
        return PromptContent(num_ids=len(token_ids))
    media: Counter[Media] = Counter()
    text_bytes = num_ids = 0
    if not ENDPOINTS[kind].is_routed:
        text_bytes = len(body)
    elif kind == "completion":
        if isinstance(fields.prompt, Raw) and _IDS.match(memoryview(fields.prompt)):
            # Several prompts of ids, or ids that the engine will cut or refuse: count the commas.
            num_ids = bytes(fields.prompt).count(b",") + 1
        else:
            text_bytes = num_bytes(fields.prompt)
    else:
        turns = turns_of(kind, fields)
        media_bytes = 0
        # The input of a response may be a text; messages that are one are refused by engines.
        if kind != "responses" or not starts_with(turns, b'"'):
            media, media_bytes = _media_parts(turns)
        prompt = (turns, fields.tools, fields.documents, fields.instructions, fields.system)
        text_bytes = sum(map(num_bytes, prompt)) - media_bytes
    if is_set(fields.prompt_embeds):
        media[Media.EMBEDS] = num_bytes(fields.prompt_embeds)
    # Megabytes of media would have to be searched for the escapes of the text beside them.
    num_escapes = 0 if media else body.count(_ESCAPE)
    text_bytes = max(text_bytes // 2, text_bytes - _ESCAPED_MORE_BYTES * num_escapes)
    return PromptContent(text_bytes, num_ids, media)


def _media_parts(turns: Raw | UnsetType) -> tuple[Counter[Media], int]:
    """The media in turns, and how many bytes they take. What may be media counts as an image."""
    found: Counter[Media] = Counter()
    media_bytes = 0
    try:
        decoded = _messages_decoder.decode(turns) if isinstance(turns, Raw) else []
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return Counter({Media.IMAGE: 1}), num_bytes(turns)
    for message in decoded:
        for content in (message.content, message.output):
            for kind, length in _media_in(content):
                found[kind] += 1
                media_bytes += length
    return found, media_bytes


def _media_in(content: Raw | UnsetType) -> Iterator[tuple[Media, int]]:
    """The kind and the bytes of each part of a message's content that is no text."""
    if not is_set(content) or starts_with(content, b'"'):
        return
    parts = optional(_items_decoder, content)
    if parts is None:
        # Content that is neither a string nor a list counts as one part of unknown kind.
        yield Media.IMAGE, num_bytes(content)
        return
    for part in parts:
        if starts_with(part, b'"'):
            continue
        decoded: _Part | None = optional(_part_decoder, part)
        name = "" if decoded is None or decoded.type is None else decoded.type
        if decoded is not None and name == "tool_result":
            # Anthropic's: it has content of its own.
            yield from _media_in(decoded.content)
        elif name not in _TEXT_PARTS:
            kinds = (kind for kind in (Media.AUDIO, Media.VIDEO) if kind in name)
            yield next(kinds, Media.IMAGE), num_bytes(part)
