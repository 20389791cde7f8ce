"""A cluster front's parameters for the connector about one request, in vLLM's `kv_transfer_params`.

    {"prfaas": {"role": "producer", "transfer_id": ..., "num_tokens": n, "arena_epoch": ...,
                "runs": [[first_block, count], ...], "attempt": ..., "layout_fingerprint": ...,
                "cached_tokens": r, "window_step": s, "adapter": ..., "draft": ...,
                "token_digest": ...}}

The receiver has the full-attention KVCache of the first `cached_tokens` already, so it does not
travel. Windows begin at multiples of `window_step` tokens, as the receiver's pages do; 0, from
fronts that do not know it, will do only for models without windows. `adapter` identifies the
weights of the LoRA adapter, "" for the base model (`kvmanager.vllm_connector.weights`), `draft` the
drafter whose KVCache is at the end of the transfer, "" without one (`KVLayout.draft_fingerprint`).
A producer's `attempt` is the opening of the outbox. Its `token_digest`, if not empty, is that of
the prompt's tokens and media without the last token, which the engine then leaves out. A
consumer's parameters have the digest of the n tokens whose KVCache will land, and for each cached
block the runs of arena blocks with its KV part. `num_requests` load it, one for each choice that
the client asks for. With `is_lossy` the
KVCache that lands may have lost precision, so that no other request may use it. Knows no engine
objects.
"""

from typing import Annotated, Any

import msgspec

KEY = "prfaas"
LOADED_BY_ANOTHER = "do_remote_prefill"
"""In the parameters of vLLM's NixlConnector: it will load this request."""


class ParamsError(ValueError):
    """The `kv_transfer_params` are malformed."""


class TransferParams(msgspec.Struct, frozen=True, kw_only=True, tag_field="role"):
    """Fields both roles share. Ids, digests and fingerprints are hex strings."""

    transfer_id: str
    num_tokens: int
    arena_epoch: str
    runs: tuple[tuple[int, int], ...]
    layout_fingerprint: str
    cached_tokens: int = 0
    window_step: int = 0
    adapter: str = ""
    draft: str = ""

    @property
    def id_bytes(self) -> bytes:
        return bytes.fromhex(self.transfer_id)


class ProducerParams(TransferParams, frozen=True, tag="producer"):
    """This engine prefills `num_tokens` tokens and hands their pages to its agent's outbox."""

    attempt: Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)]
    token_digest: str = ""


class ConsumerParams(TransferParams, frozen=True, tag="consumer"):
    """This engine decodes after loading `num_tokens` tokens from a landing of its agent."""

    token_digest: str
    num_requests: Annotated[int, msgspec.Meta(ge=1)] = 1
    is_lossy: bool = False
    cached_runs: tuple[tuple[tuple[int, int], ...], ...] = ()


def parse(kv_transfer_params: dict[str, Any] | None) -> ProducerParams | ConsumerParams | None:
    """The parameters for this connector; None: there are none.

    Raises `ParamsError` that names the wrong field.
    """
    ours = (kv_transfer_params or {}).get(KEY)
    if ours is None:
        return None
    try:
        params = msgspec.convert(ours, type=ProducerParams | ConsumerParams)
        bytes.fromhex(params.transfer_id)
    except (msgspec.ValidationError, ValueError) as error:
        raise ParamsError(f"kv_transfer_params[{KEY!r}]: {error}") from error
    if params.num_tokens < 1:
        raise ParamsError(f"kv_transfer_params[{KEY!r}]: num_tokens is {params.num_tokens}")
    if not 0 <= params.cached_tokens < params.num_tokens:
        raise ParamsError(
            f"kv_transfer_params[{KEY!r}]: {params.cached_tokens} of {params.num_tokens} cached"
        )
    return params
