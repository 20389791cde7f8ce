"""Signs, for a request, that its KVCache may land and that it may be sent there.

Moves of cached prefixes and probes are signed by the clients of node agents. It does not know keys.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import structs

from kvmanager.agent.grants import OUTBOX_GRANT_S, embedding_pull, outbox_send, reservation
from kvmanager.embedding_keys import embedding_key
from kvmanager.hashing import join_keys
from prfaas.jobs import PrefillJob
from scheduler.reports import ClusterReport
from transport.grants import Granter


def reservation_grant(
    granter: Granter | None,
    num_tokens: int,
    token_digest: str,
    block_keys: bytes,
    agents: str = "",
) -> bytes:
    """For `PdCluster.reserve` with these arguments at one of these agents, as
    `RegionLinks.receivers` names them; empty where nobody asks for grants.
    """
    if granter is None:
        return b""
    return granter.grant(reservation(num_tokens, token_digest, block_keys, agents))


def granted_job(granter: Granter | None, job: PrefillJob) -> PrefillJob:
    """The job with a grant for its landing, at the address that its sender connects to."""
    if granter is None:
        return job
    return structs.replace(job, grant=granter.grant(outbox_send(job.landing), OUTBOX_GRANT_S))


def embedding_grant(
    granter: Granter | None, report: ClusterReport | None, identifiers: Iterable[str]
) -> tuple[bytes, bytes]:
    """The joined keys that the embeddings of these media may have at the cluster with this report,
    and the grant to move them between its nodes. Both are empty where nobody asks for grants.
    """
    if granter is None or report is None or report.encode is None:
        return b"", b""
    encoders = {one.encoder for one in report.instances if one.encoder}
    keys = sorted({embedding_key(one, name) for name in identifiers for one in encoders})
    if not keys:
        return b"", b""
    return join_keys(keys), granter.grant(embedding_pull(keys), OUTBOX_GRANT_S)
