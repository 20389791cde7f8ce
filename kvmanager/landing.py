"""Memory reserved on a receiving node for a transfer, and the parameters that engines get for it.

Knows neither who reserved it nor what is sent.
"""

from typing import Any, Final

import msgspec

from kvmanager.agent.messages import OpenOutboxReply, ReserveReply

ENCODES_ONLY: Final = {"prfaas_encodes_only": True}
"""The `kv_transfer_params` of a prompt that is there for the embeddings of its media. Its KVCache
is of no use.
"""


class ReservedLanding(msgspec.Struct, frozen=True, kw_only=True):
    """Memory reserved on a receiving node for exactly one transfer.

    Ids, tokens, fingerprints and digests are lower-case hex. `num_tokens` is the number of tokens
    whose KVCache lands, `token_digest` the digest of exactly those (`kvmanager.hashing`).
    `host` and `port` are the receiving agent's address for data. The full-attention KVCache of the
    first `cached_tokens` is cached there already and not part of the `nbytes`. With `is_lossy` the
    rest may lose precision on its way. `adapter` identifies the weights of the LoRA adapter with
    which the KVCache is computed (`kvmanager.vllm_connector.weights`), "" for the base model.
    Windows begin at multiples of `window_step` tokens; 0: of the receiver's own pages.
    `draft` is the fingerprint of the drafter whose KVCache it has room for, "" for none.
    """

    transfer_id: str
    token: str
    nbytes: int
    num_tokens: int
    host: str
    port: int
    layout_fingerprint: str
    token_digest: str
    cached_tokens: int = 0
    is_lossy: bool = False
    adapter: str = ""
    window_step: int = 0
    draft: str = ""


def reserved_landing(
    reply: ReserveReply, num_tokens: int, token_digest: str, adapter: str = ""
) -> ReservedLanding:
    """The landing that an agent granted for these tokens, computed with this adapter."""
    return ReservedLanding(
        transfer_id=reply.transfer_id,
        token=reply.token,
        nbytes=reply.nbytes,
        num_tokens=num_tokens,
        host=reply.host,
        port=reply.port,
        layout_fingerprint=reply.layout_fingerprint,
        token_digest=token_digest,
        cached_tokens=reply.cached_tokens,
        is_lossy=reply.is_lossy,
        adapter=adapter,
        window_step=reply.window_step,
        draft=reply.draft,
    )


def producer_params(
    landing: ReservedLanding, outbox: OpenOutboxReply, *, checks_prompt: bool = False
) -> dict[str, Any]:
    """The `kv_transfer_params` that make an engine fill the outbox that its agent has opened. With
    `checks_prompt` the engine makes the prompt itself, and is told what must come out.
    """
    return {
        "prfaas": {
            "role": "producer",
            "transfer_id": landing.transfer_id,
            "attempt": outbox.attempt,
            "adapter": landing.adapter,
            "token_digest": landing.token_digest if checks_prompt else "",
        }
    }


def consumer_params(
    transfer_id: str, *, adapter: str = "", num_requests: int = 1
) -> dict[str, Any]:
    """The `kv_transfer_params` that make `num_requests` of an engine load this landing of its
    agent, if its KVCache was computed with the adapter of this identity.
    """
    return {
        "prfaas": {
            "role": "consumer",
            "transfer_id": transfer_id,
            "adapter": adapter,
            "num_requests": num_requests,
        }
    }
