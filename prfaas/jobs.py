"""A prefill leg: the job and its result.

They travel between gateway and cluster fronts as msgpack; fields may be added with defaults. They
do not know who runs the job.
"""

from typing import Any, Final, Literal

import msgspec

from kvmanager.landing import ReservedLanding
from kvmanager.media_items import MediaItem
from kvmanager.token_ids import TokenIds

ChatApi = Literal["chat", "responses"]
"""The endpoints of engines whose prompts may have media that the gateway can name."""

_REMOTE: Final = ("do_remote_", "remote_")
_BESIDE: Final = frozenset({"tp_size", "pp_size", "dcp_size", "transfer_mode"})
"""With those that begin like `_REMOTE`, the keys in the parameters of vLLM's NixlConnector."""


class PrefillJob(msgspec.Struct, frozen=True, kw_only=True):
    """Compute the KVCache of `prompt_token_ids` and send it to `landing`.

    `prompt_token_ids` excludes the prompt's last token, which the decode engine recomputes.
    A lower `priority` is served earlier. `model` is the served name; "" means that the cluster
    serves only one. `adapter` is the name of the LoRA adapter to compute with, "" for the model
    itself; `landing` has its identity. `tenant` is whose KVCache it is, for the shares and budgets
    of links. `grant` lets a node agent send it to `landing` (`kvmanager.agent.grants`).
    `traceparent` is a W3C trace context header or "". `cached_tokens` says by
    instance or node (`InstanceReport.node`) how much of the prompt need not be computed there.
    `pd` is the PD cluster that decodes: PD clusters share a prefill cluster fairly.
    `last_token` is what `prompt_token_ids` leaves out, for vLLM's own connectors, which prefill
    whole prompts, and for drafters, whose last KVCache depends on it; it may be left empty for a
    cluster without them. `num_choices` answers are decoded with the KVCache.
    `media` are the media of the prompt. With any, `chat` is the client's body, a request to the
    `api`: an engine makes the prompt of it by itself, and computes all but its last token.
    `embedding_grant` lets node agents move the embeddings of the joined `embedding_keys` between
    them, those of the media. `embedding_nodes` are nodes (`InstanceReport.node`) of the cluster
    that are known to have some of them; others may have them, too. `wait_s` is how long the job is
    predicted to wait for an instance.
    """

    request_id: str
    prompt_token_ids: TokenIds
    landing: ReservedLanding
    cache_salt: str | None = None
    tenant: str = ""
    priority: int = 0
    traceparent: str = ""
    model: str = ""
    cached_tokens: dict[str, int] = {}
    grant: bytes = b""
    pd: str = ""
    last_token: TokenIds = TokenIds()
    adapter: str = ""
    num_choices: int = 1
    media: tuple[MediaItem, ...] = ()
    chat: bytes = b""
    api: ChatApi = "chat"
    embedding_keys: bytes = b""
    embedding_grant: bytes = b""
    embedding_nodes: tuple[str, ...] = ()
    wait_s: float = 0.0

    @property
    def uncached_tokens(self) -> int:
        """Tokens to compute on the instance that has most of the prompt cached."""
        num_tokens = len(self.prompt_token_ids)
        return num_tokens - min(num_tokens, max(self.cached_tokens.values(), default=0))


class PrefillResult(msgspec.Struct, frozen=True, kw_only=True):
    """A prefill leg that ended with every byte verified at the landing.

    `media` counts its media by what became of them (`scheduler.encoding.values.EncodeReason`); {}:
    no instance encodes for others. The instance itself had to encode those that have
    `left_media_tokens` tokens. `encode_s` is the time that it waited for media after its turn had
    come. `queue_s` is the rest of the time in the front's queue, and `open_s` what it then
    took to open the outbox.

    `prefill_s` is the time from then to the end of the engine's last forward pass. `engine_queue_s`
    is the part of it before the engine began to compute: the request's way there and the engine's
    own queue. None: the engine does not say. `service_s` is the part of `prefill_s` after the
    instance had ended the prefills before this one.

    `transfer_tail_s` is the time from there to the receiver's confirmation, and `transfer_s` from
    the first byte on the wire to the same. `progress` is how the transfer went, in seconds since
    the begin of `prefill_s` (`TransferReport.progress`). `sent_share_at_prefill_end` (0..1) is the
    share of bytes on the wire when the prefill ended.

    `reason` says why the instance was chosen. `cached_tokens` are the tokens that the engine's
    prefix cache had. `num_attempts` counts the instances tried.

    `hand_off` is the way that the KVCache took: "transport", "arena" (written into the landing by
    an engine of the same node), or "nixl". With "nixl" the landing stays empty, the decode request
    needs these `kv_transfer_params` instead, and nobody here sees how many bytes vLLM moves. They
    count only in the answer of the cluster that decodes, and `is_kept_by_nixl` must be true.
    """

    instance: str
    queue_s: float
    prefill_s: float
    transfer_tail_s: float
    nbytes: int
    sent_share_at_prefill_end: float
    transfer_s: float = 0.0
    cached_tokens: int = 0
    num_attempts: int = 1
    service_s: float = 0.0
    open_s: float = 0.0
    engine_queue_s: float | None = None
    progress: tuple[tuple[float, int, int], ...] = ()
    reason: str = ""
    hand_off: Literal["transport", "arena", "nixl"] = "transport"
    kv_transfer_params: dict[str, Any] = {}
    encode_s: float = 0.0
    media: dict[str, int] = {}
    left_media_tokens: int | None = None

    @property
    def is_kept_by_nixl(self) -> bool:
        """Whether `kv_transfer_params` are what vLLM's NixlConnector says when it keeps KVCache.
        Those of another connector, ours above all, would make an engine load what they name.
        """
        params = self.kv_transfer_params
        is_known = all(key in _BESIDE or key.startswith(_REMOTE) for key in params)
        return is_known and params.get("do_remote_prefill") is True
