"""Signs, for a request, that its KVCache may land and that it may be sent there.

Moves of cached prefixes and probes are signed by the clients of node agents. It does not know keys.
"""

from __future__ import annotations

from msgspec import structs

from kvmanager.agent.grants import OUTBOX_GRANT_S, outbox_send, reservation
from prfaas.jobs import PrefillJob
from transport.grants import Granter


def reservation_grant(
    granter: Granter | None, num_tokens: int, token_digest: str, block_keys: bytes
) -> bytes:
    """For `PdCluster.reserve` with these arguments; empty where nobody asks for grants."""
    if granter is None:
        return b""
    return granter.grant(reservation(num_tokens, token_digest, block_keys))


def granted_job(granter: Granter | None, job: PrefillJob) -> PrefillJob:
    """The job with a grant for its landing, at the address that its sender connects to."""
    if granter is None:
        return job
    return structs.replace(job, grant=granter.grant(outbox_send(job.landing), OUTBOX_GRANT_S))
