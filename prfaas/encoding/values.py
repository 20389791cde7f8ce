"""What the encode stage of a front is asked, and what it answers.

The structs travel between gateway and PD cluster fronts as msgpack; fields may be added with
defaults. Values only.
"""

from __future__ import annotations

import secrets
from collections import Counter
from dataclasses import dataclass

import msgspec
from msgspec import structs

from kvmanager.media_items import MediaItem
from prfaas.jobs import PrefillJob, PrefillResult
from scheduler.encoding.values import MediumEnd


class EncodeOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Have the media of a request encoded that `instance` will serve whole.

    `chat` is the client's body. `media` are its media as far as they are known: without them their
    tokens are guessed. The instance has `cached_tokens` of the prompt cached. `granted_keys`,
    `grant` and `embedding_nodes` are what `PrefillJob` has for embeddings.
    """

    request_id: str
    chat: bytes
    instance: str
    model: str = ""
    media: tuple[MediaItem, ...] = ()
    cached_tokens: int = 0
    tenant: str = ""
    traceparent: str = ""
    granted_keys: bytes = b""
    grant: bytes = b""
    embedding_nodes: tuple[str, ...] = ()


class EncodeDone(msgspec.Struct, frozen=True, kw_only=True):
    """How long an engine that needs them waited for its media, in seconds, and how many media ended
    so (`scheduler.encoding.values.EncodeReason`). The engine itself has to encode those that have
    `left_tokens` tokens; None: all of them.
    """

    encode_s: float = 0.0
    media: dict[str, int] = {}
    left_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Media:
    """Media to encode for one request. `key` is unique among those under way.

    `nodes` are the control addresses of the node agents of the instances that may prefill. `wait_s`
    is how long the prefill is predicted to wait anyway, and `cached_tokens` how much of the prompt
    need not be prefilled. Without `may_delay_decodes` no instance encodes them that decodes as
    well. Agents at `holders` are known to have some of the embeddings.
    """

    key: str
    request_id: str
    chat: bytes
    model: str = ""
    items: tuple[MediaItem, ...] = ()
    nodes: frozenset[str] = frozenset()
    wait_s: float = 0.0
    cached_tokens: int = 0
    may_delay_decodes: bool = True
    tenant: str = ""
    traceparent: str = ""
    granted_keys: bytes = b""
    grant: bytes = b""
    holders: frozenset[str] = frozenset()

    @classmethod
    def of(cls, job: PrefillJob, nodes: frozenset[str]) -> Media:
        """The media of a prefill job."""
        return cls(
            key=job.landing.transfer_id,
            request_id=job.request_id,
            chat=job.chat,
            model=job.model,
            items=job.media,
            nodes=nodes,
            wait_s=job.wait_s,
            cached_tokens=len(job.prompt_token_ids) - job.uncached_tokens,
            tenant=job.tenant,
            traceparent=job.traceparent,
            granted_keys=job.embedding_keys,
            grant=job.embedding_grant,
            holders=frozenset(job.embedding_nodes),
        )

    @classmethod
    def whole(cls, order: EncodeOrder, node: str) -> Media:
        """The media of a request that an instance of `node` serves whole."""
        return cls(
            # A request may come again after its first try failed.
            key=f"whole {order.request_id} {secrets.token_hex(4)}",
            request_id=order.request_id,
            chat=order.chat,
            model=order.model,
            items=order.media,
            nodes=frozenset((node,)),
            cached_tokens=order.cached_tokens,
            may_delay_decodes=False,
            tenant=order.tenant,
            traceparent=order.traceparent,
            granted_keys=order.granted_keys,
            grant=order.grant,
            holders=frozenset(order.embedding_nodes),
        )


@dataclass(frozen=True, slots=True)
class Encoded:
    """What became of the media of a request, and the seconds that this took."""

    ends: tuple[MediumEnd, ...] = ()
    seconds: float = 0.0
    left_tokens: int = 0
    """Of the media that are left to the instance that prefills."""

    @property
    def counts(self) -> dict[str, int]:
        """How many media ended so."""
        return dict(Counter(one.reason.value for one in self.ends))

    def noted(self, result: PrefillResult) -> PrefillResult:
        """The result of the prefill, with the time that it waited for its media."""
        return structs.replace(
            result,
            encode_s=self.seconds,
            media=self.counts,
            left_media_tokens=self.left_tokens,
        )
