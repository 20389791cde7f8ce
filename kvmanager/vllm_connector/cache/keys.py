"""Computes the keys of one engine's requests in the prefix cache.

A block's key must be the same in every engine that would compute the same bytes for it, and in no
other. Reads vLLM's configuration and requests; knows nothing of agents, memory or steps.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING

from blake3 import blake3

from kvmanager.hashing import block_keys, root_key
from kvmanager.layout import KVKind, KVLayout
from kvmanager.media_items import MediaItem, block_extras
from kvmanager.pool.shape import CacheShape

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

NAMESPACE_BYTES = 32
LOSSY_SALT = f"\0lossy-{secrets.token_hex(8)}"
"""Nobody outside this process can ask for it."""


def namespace_of(vllm_config: VllmConfig, layout: KVLayout) -> bytes:
    """The start of all keys of this engine; empty when its KVCache must not be shared.

    The layout has the weights, the configuration with all overrides, and the cache's data types.
    Blocks of engines with a drafter have its KVCache too, so those are apart from all others.
    Three things are added: the tokens of a block; those of each window layer's pages, because a
    part holds no more of a window than the pages of the engine that stored it; and the quantisation
    that the engine applies to its weights as it loads them.
    """
    cache = vllm_config.cache_config
    if not cache.enable_prefix_caching:
        return b""
    quantization = str(vllm_config.model_config.quantization)
    pages = [
        (layer.name, layout.groups[index].tokens_per_block)
        for index, layer in layout.layers
        if layout.groups[index].kind is KVKind.WINDOW
    ]
    values = (CacheShape.of(layout).block_tokens, pages, quantization)
    fingerprints = layout.fingerprint() + layout.draft_fingerprint
    return blake3(fingerprints + repr(values).encode()).digest(NAMESPACE_BYTES)


def may_be_cached(request: Request) -> bool:
    """Whether the keys cover everything that the request's KVCache depends on while it runs."""
    return (
        request.prompt_token_ids is not None
        and request.prompt_embeds is None
        and request.pooling_params is None
        and not request.resumable
    )


def media_of(request: Request) -> list[MediaItem]:
    """The media of a request, by vLLM's identifiers of their content."""
    return [
        MediaItem(feature.identifier, feature.mm_position.offset, feature.mm_position.length)
        for feature in request.mm_features
    ]


def set_apart(request: Request) -> None:
    """Give a new request a salt that no exact request has in the engine's own cache: its KVCache
    begins with bytes that lost precision, and so has all that is computed from them.
    """
    request.cache_salt = f"{request.cache_salt or ''}{LOSSY_SALT}"
    request.block_hashes.clear()
    request.update_block_hashes()


def leave_out_last_token(request: Request) -> None:
    """Make the prompt of a new request one token shorter, as vLLM's NixlConnector does
    (`_truncate_request_for_prefill`): the engine that decodes computes that token.
    """
    assert request.prompt_token_ids is not None
    del request.prompt_token_ids[-1:]
    del request._all_token_ids[-1:]
    request.num_prompt_tokens -= 1
    request.block_hashes.clear()
    request.update_block_hashes()


class RequestKeys:
    """The block keys of one request; they grow as its answer does."""

    def __init__(
        self, request: Request, block_tokens: int, namespace: bytes, adapter: str = ""
    ) -> None:
        """`adapter` is what the request's LoRA adapter is (`kvmanager.vllm_connector.weights`)."""
        self.root = root_key(namespace, tenant=request.cache_salt or "", lora=adapter)
        self.keys: list[bytes] = []
        self._block_tokens = block_tokens
        self._extras = block_extras(media_of(request), block_tokens)
        self.extend(request.all_token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add the keys of further full blocks; `token_ids` are all of the request's tokens."""
        known = len(self.keys)
        if len(token_ids) // self._block_tokens <= known:
            return
        rest = token_ids[known * self._block_tokens :]
        self.keys += block_keys(rest, self._block_tokens, self.before(known), self._extras, known)

    def before(self, block: int) -> bytes:
        """The key to which the key of `block` is chained."""
        return self.keys[block - 1] if block else self.root
