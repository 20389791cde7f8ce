"""What the prompt of a request is made of, as far as its undecoded fields tell.

Nothing is tokenized here. This file does not know routes or HTTP.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Final

from msgspec import Raw, UnsetType

from deploy.gateway.intake.conversation import Conversation
from deploy.gateway.intake.endpoints import ENDPOINTS, Kind
from deploy.gateway.intake.fields import Body
from deploy.gateway.intake.raw_fields import is_set, num_bytes
from kvmanager.token_ids import TokenIds
from scheduler.live.learning.prompt_length import Media, PromptContent

_ESCAPE: Final = rb"\u"
_ESCAPED_MORE_BYTES: Final = 3
"""An escape takes six bytes; most of the escaped characters take three in UTF-8."""
_IDS: Final = re.compile(rb"[\s\[]*\d")
_FIRST_BYTES: Final = 4096


def turns_of(kind: Kind, fields: Body) -> Raw | UnsetType:
    """The field with the turns of a conversation."""
    return fields.input if kind == "responses" else fields.messages


def prompt_content(
    kind: Kind, body: bytes, fields: Body, token_ids: TokenIds | None, conversation: Conversation
) -> PromptContent:
    """What the prompt is made of; the bytes of media do not count as text."""
    if token_ids is not None:
        return PromptContent(num_ids=len(token_ids))
    media: Counter[Media] = Counter()
    text_bytes = num_ids = 0
    if not ENDPOINTS[kind].is_routed:
        text_bytes = len(body) + repeated_bytes(kind, conversation)
    elif kind == "completion":
        if isinstance(fields.prompt, Raw) and _has_ids(fields.prompt):
            # Several prompts of ids, or ids that the engine will cut or refuse: count the commas.
            num_ids = bytes(fields.prompt).count(b",") + 1
        else:
            text_bytes = num_bytes(fields.prompt)
    else:
        media = Counter(_medium(part.type) for part in conversation.parts if not part.is_text)
        beside = (fields.tools, fields.instructions, fields.system)
        text_bytes = conversation.text_bytes + sum(map(num_bytes, beside))
    if is_set(fields.prompt_embeds):
        media[Media.EMBEDS] = num_bytes(fields.prompt_embeds)
    # Megabytes of media would have to be searched for the escapes of the text beside them.
    num_escapes = 0 if media else body.count(_ESCAPE)
    text_bytes = max(text_bytes // 2, text_bytes - _ESCAPED_MORE_BYTES * num_escapes)
    return PromptContent(text_bytes, num_ids, media)


def repeated_bytes(kind: Kind, conversation: Conversation) -> int:
    """The bytes of what an engine reads again for each text that it is compared with."""
    if kind not in ("rerank", "score"):
        return 0
    most = max((num for num, _ in conversation.sizes.values()), default=1)
    return sum((most - 1) * nbytes for num, nbytes in conversation.sizes.values() if num == 1)


def _has_ids(prompt: Raw) -> bool:
    """Whether a prompt, or the first of several, begins with an id."""
    return _IDS.match(memoryview(prompt)[:_FIRST_BYTES]) is not None


def _medium(name: str) -> Media:
    """The kind of a medium by the type of its part. What is not known counts as an image."""
    kinds = (kind for kind in (Media.AUDIO, Media.VIDEO) if kind in name)
    return next(kinds, Media.IMAGE)
