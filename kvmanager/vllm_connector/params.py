"""A cluster front's parameters for the connector about one request, in vLLM's `kv_transfer_params`.

    {"prfaas": {"role": "producer", "transfer_id": ..., "attempt": ..., "adapter": ...,
                "token_digest": ...}}
    {"prfaas": {"role": "consumer", "transfer_id": ..., "adapter": ..., "num_requests": ...}}

They name a transfer and nothing about it, because whoever sends a request must not choose the
memory that is written or read for it: the engine's agent says what the transfer holds, and where.
`adapter` identifies the weights of the LoRA adapter, "" for the base model
(`kvmanager.vllm_connector.weights`). A producer's `attempt` is the opening of the outbox. Its
`token_digest`, if not empty, is that of the prompt's tokens and media without the last token, which
the engine then leaves out. `num_requests` load a landing, one for each choice that the client asks
for. Knows no engine objects.
"""

from typing import Annotated, Any

import msgspec

from transport.interfaces import ID_BYTES

KEY = "prfaas"
LOADED_BY_ANOTHER = "do_remote_prefill"
"""In the parameters of vLLM's NixlConnector: it will load this request."""


class ParamsError(ValueError):
    """The `kv_transfer_params` are malformed."""


class TransferParams(msgspec.Struct, frozen=True, kw_only=True, tag_field="role"):
    """Fields both roles share. Ids, digests and fingerprints are hex strings."""

    transfer_id: str
    adapter: str = ""

    @property
    def id_bytes(self) -> bytes:
        return bytes.fromhex(self.transfer_id)


class ProducerParams(TransferParams, frozen=True, tag="producer"):
    """This engine prefills the prompt and hands its pages to its agent's outbox."""

    attempt: Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)]
    token_digest: str = ""


class ConsumerParams(TransferParams, frozen=True, tag="consumer"):
    """This engine decodes after loading all tokens but the last from a landing of its agent."""

    num_requests: Annotated[int, msgspec.Meta(ge=1)] = 1


def parse(kv_transfer_params: dict[str, Any] | None) -> ProducerParams | ConsumerParams | None:
    """The parameters for this connector; None: there are none.

    Raises `ParamsError` that names the wrong field.
    """
    ours = (kv_transfer_params or {}).get(KEY)
    if ours is None:
        return None
    try:
        params = msgspec.convert(ours, type=ProducerParams | ConsumerParams)
        if len(params.id_bytes) != ID_BYTES:
            raise ValueError(f"a transfer_id of {len(params.id_bytes)} bytes, not {ID_BYTES}")
    except (msgspec.ValidationError, ValueError) as error:
        raise ParamsError(f"kv_transfer_params[{KEY!r}]: {error}") from error
    return params
