"""How many tokens an uncounted prompt has, and what counted prompts teach about that.

Only text has a number of tokens that grows with its bytes. An image, a clip or an embedding becomes
as many tokens as the model's encoder makes of it, however many bytes carried it. So a prompt is
measured by its bytes of text, its token ids and the units of each kind of media. Pure. Does not
know JSON, models or routes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Final

import msgspec


class Media(StrEnum):
    """What a prompt may have besides text. `EMBEDS` is counted in base64 bytes, the others in
    parts.
    """

    IMAGE = "image"
    AUDIO = "audio"
    VIDEO = "video"
    EMBEDS = "embeds"


BYTES_PER_TOKEN: Final = 4.0
"""UTF-8 bytes per token before any prompt was counted: the value of common tokenizers for English.
Code needs fewer bytes, Chinese about as many.
"""
TOKENS_PER_UNIT: Final[Mapping[Media, float]] = MappingProxyType(
    {
        # A megapixel in patches of 32 x 32 pixels (Qwen3-VL). Other models make 256 to 4,000
        # tokens.
        Media.IMAGE: 1024.0,
        # One window of 30 s of an encoder like Whisper's, at 25 tokens a second (Qwen2-Audio).
        Media.AUDIO: 750.0,
        # 32 frames of 256 tokens (InternVL, LLaVA-OneVision).
        Media.VIDEO: 8192.0,
        # Vectors of 4,096 numbers of 2 bytes; base64 needs 4 bytes for 3.
        Media.EMBEDS: 1 / (4096 * 2 * 4 / 3),
    }
)
"""Tokens per unit, before an answer said how many tokens the model makes of them."""
MOST_BYTES_PER_TOKEN: Final = 16.0
LEAST_BYTES_PER_TOKEN: Final = 0.5
"""What tenants send teaches the estimates of all, so no prompt teaches more or less than this. Text
of any language and code lie well within; a field that engines ignore, or blanks between the values
of JSON, may have any length.
"""
MOST_OF_GUESS: Final = 32.0
"""The same for media: they are learnt to have at most so many times the tokens of the guess, and at
least this part of them.
"""
TEXT_GAIN: Final = 0.02
MEDIA_GAIN: Final = 0.05


@dataclass(frozen=True, slots=True)
class PromptContent:
    """The content of a prompt.

    `text_bytes` are the UTF-8 bytes of text with the JSON around it, 0 for a prompt of ids alone.
    `num_ids` are token ids that the client sent, `media` the units of each kind.
    """

    text_bytes: int = 0
    num_ids: int = 0
    media: Mapping[Media, int] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def has_media(self) -> bool:
        """Whether it has media that engines must encode."""
        return any(media is not Media.EMBEDS for media in self.media)


class LengthsState(msgspec.Struct, frozen=True, array_like=True):
    """The counts of a `LengthEstimator`: bytes and tokens of text, and units and tokens of each
    kind of media.
    """

    text_bytes: float
    text_tokens: float
    media: dict[Media, tuple[float, float]]


class LengthEstimator:
    """Estimates the tokens of one model's prompts. It learns from lengths that engines reported."""

    def __init__(self) -> None:
        self._text_bytes = 0.0
        self._text_tokens = 0.0
        self._units = dict[Media, float]()
        self._unit_tokens = dict[Media, float]()

    @classmethod
    def restored(cls, state: LengthsState) -> LengthEstimator:
        """The estimator that `state` was made of."""
        found = cls()
        found._text_bytes, found._text_tokens = state.text_bytes, state.text_tokens
        found._units = {kind: units for kind, (units, _) in state.media.items()}
        found._unit_tokens = {kind: tokens for kind, (_, tokens) in state.media.items()}
        return found

    def state(self) -> LengthsState:
        """The argument of `restored`."""
        media = {kind: (units, self._unit_tokens[kind]) for kind, units in self._units.items()}
        return LengthsState(self._text_bytes, self._text_tokens, media)

    @property
    def is_known(self) -> bool:
        """Whether any prompt of text was counted."""
        return self._text_tokens > 0

    @property
    def bytes_per_token(self) -> float:
        """Bytes of text per token, over what was counted lately.

        Long prompts weigh more: their lengths matter more, and the chat template around a short
        prompt says little about text.
        """
        if not self.is_known:
            return BYTES_PER_TOKEN
        # What other gateways or an older state say is bounded here.
        learnt = self._text_bytes / self._text_tokens
        return _within(learnt, LEAST_BYTES_PER_TOKEN, MOST_BYTES_PER_TOKEN)

    def tokens_per_unit(self, kind: Media) -> float:
        """The mean number of tokens that the model makes of one image, clip or byte of
        embeddings.
        """
        units, guess = self._units.get(kind, 0.0), TOKENS_PER_UNIT[kind]
        learnt = self._unit_tokens[kind] / units if units > 0 else guess
        return _within(learnt, guess / MOST_OF_GUESS, guess * MOST_OF_GUESS)

    def num_tokens(self, content: PromptContent, at_most: int | None = None) -> int:
        """About how many tokens a prompt has, at least 1. `at_most` is an upper bound where
        known.
        """
        text = content.text_bytes / self.bytes_per_token
        media = sum(num * self.tokens_per_unit(kind) for kind, num in content.media.items())
        likely = max(1, round(text + content.num_ids + media))
        return likely if at_most is None else min(likely, at_most)

    def media_tokens(self, content: PromptContent) -> list[int]:
        """About how many tokens each unit of media has that engines must encode."""
        return [
            max(1, round(self.tokens_per_unit(kind)))
            for kind, num in content.media.items()
            if kind is not Media.EMBEDS
            for _ in range(num)
        ]

    def counted(self, content: PromptContent, num_tokens: int) -> None:
        """An engine counted `num_tokens` in a prompt.

        Ids teach nothing. Nor does a prompt with several kinds of media, since nothing says which
        tokens belong to which kind.
        """
        kinds = [kind for kind, num in content.media.items() if num > 0]
        rest = float(num_tokens - content.num_ids)
        if rest <= 0 or len(kinds) > 1:
            return
        if not kinds:
            if content.text_bytes > 0:
                keep = 1 - TEXT_GAIN
                least, most = rest * LEAST_BYTES_PER_TOKEN, rest * MOST_BYTES_PER_TOKEN
                text_bytes = _within(content.text_bytes, least, most)
                self._text_bytes = keep * self._text_bytes + text_bytes
                self._text_tokens = keep * self._text_tokens + rest
            return
        # Text beside the media has its learnt length; what is left belongs to the media.
        kind, keep = kinds[0], 1 - MEDIA_GAIN
        in_media = rest - content.text_bytes / self.bytes_per_token
        if in_media > 0:
            units = content.media[kind]
            guess = units * TOKENS_PER_UNIT[kind]
            in_media = _within(in_media, guess / MOST_OF_GUESS, guess * MOST_OF_GUESS)
            self._units[kind] = keep * self._units.get(kind, 0.0) + units
            self._unit_tokens[kind] = keep * self._unit_tokens.get(kind, 0.0) + in_media


def _within(value: float, least: float, most: float) -> float:
    """`value`, but within these bounds; `least` for what is no number."""
    return min(value, most) if value >= least else least
