"""Value types of a prefill leg: where KVCache must land, the job, and what came of it.

They travel between gateway and cluster fronts as msgpack; fields may be added with defaults. They
do not know who runs the job.
"""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from kvmanager.agent.messages import CacheModel, OpenOutboxReply, ReserveReply
from kvmanager.token_ids import TokenIds

Role = Literal["prefill", "decode", "both"]
"""What an instance of a local PD cluster may be asked to do."""


class Landing(msgspec.Struct, frozen=True, kw_only=True):
    """Memory reserved on a receiving node for exactly one transfer.

    Ids, tokens, fingerprints and digests are lower-case hex. `num_tokens` is the number of tokens
    whose KVCache lands, `token_digest` the digest of exactly those (`kvmanager.hashing`).
    `host`, `port` is where the receiving agent takes data connections. The full-attention KVCache
    of the first `cached_tokens` is there already and not part of the `nbytes`.
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


class PrefillJob(msgspec.Struct, frozen=True, kw_only=True):
    """Compute the KVCache of `prompt_token_ids` and send it to `landing`.

    `prompt_token_ids` excludes the prompt's last token, which the decode engine recomputes.
    A lower `priority` is served earlier. `model` is the served name; "" means that the cluster
    serves only one. `traceparent` is a W3C trace context header or "". `cached_tokens` says by
    instance or node (`InstanceReport.node`) how much of the prompt need not be computed there.
    """

    request_id: str
    prompt_token_ids: TokenIds
    landing: Landing
    cache_salt: str | None = None
    priority: int = 0
    traceparent: str = ""
    model: str = ""
    cached_tokens: dict[str, int] = {}

    @property
    def uncached_tokens(self) -> int:
        """What has to be computed on the instance that has most of it cached."""
        num_tokens = len(self.prompt_token_ids)
        return num_tokens - min(num_tokens, max(self.cached_tokens.values(), default=0))


class PrefillResult(msgspec.Struct, frozen=True, kw_only=True):
    """A prefill leg that ended with every byte verified at the landing.

    `queue_s` is time in the front's queue, `prefill_s` from then to the end of the engine's last
    forward pass, `transfer_tail_s` from there to the receiver's confirmation, `transfer_s` from
    the first byte on the wire to the same. `service_s` is the part of `prefill_s` after the
    instance had ended the prefills that it was given before: what this one took by itself. `reason`
    says why the instance was chosen.
    `sent_share_at_prefill_end` (0..1) is the share of bytes on the wire when the prefill ended.
    `cached_tokens` is what the engine's prefix cache spared it. `num_attempts` counts instances
    tried.
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
    reason: str = ""


class JobReport(msgspec.Struct, frozen=True, kw_only=True):
    """A prefill job that a front holds: on `instance` for `for_s`, or waiting for that long ("").

    `uncached_tokens` is what the instance has to compute; while the job waits, what the instance
    that has most of it cached would have to. `priority` is the submitter's.
    """

    transfer_id: str
    num_tokens: int
    uncached_tokens: int
    for_s: float
    instance: str = ""
    priority: int = 0
    model: str = ""


class InstanceReport(msgspec.Struct, frozen=True, kw_only=True):
    """One instance as its front sees it now; `reason` says why it is not healthy.

    `node` is its node agent's control address, `node_name` what people call it; `cache` how its
    prompts are cached there, None when they are not or it is not known yet. `role_epoch` numbers
    the orders that gave it its role, `role_ready` is False while it changes. `decode_slots` is how
    many requests it decodes at a time.

    The engine's own numbers are those of the last look at it, `looked_s` before this report: how
    many requests its batch has (`num_running`), how many wait for room in it (`num_waiting`), and
    the share in use (`kv_usage`, None where nobody looks) of its KV memory (`kv_total_bytes`, None
    where that is not known). `landing_cap_bytes` is what landings may take at its node at
    most. How much of that is free changes with every request, and only the node itself knows it.
    """

    name: str
    role: Role
    model: str
    healthy: bool
    draining: bool
    running: int
    max_concurrent: int
    reason: str = ""
    num_restarts: int = 0
    node: str = ""
    node_name: str = ""
    cache: CacheModel | None = None
    role_epoch: int = 0
    role_ready: bool = True
    decode_slots: int = 0
    looked_s: float = 0.0
    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float | None = None
    kv_total_bytes: int | None = None
    landing_cap_bytes: int | None = None


class ClusterReport(msgspec.Struct, frozen=True, kw_only=True):
    """A front's load. `healthy` means that a job submitted now would find an instance.

    `jobs` are the prefills that wait or run; `queued_tokens` and `running_tokens` count their
    uncached tokens, the better measure of waiting time. `reason` says why the whole front is not
    healthy when no instance can.
    """

    name: str
    healthy: bool
    queue_depth: int
    running: int
    instances: tuple[InstanceReport, ...]
    max_queued: int = 0
    queued_tokens: int = 0
    running_tokens: int = 0
    jobs: tuple[JobReport, ...] = ()
    reason: str = ""


def reserved_landing(reply: ReserveReply, num_tokens: int, token_digest: str) -> Landing:
    """The landing that an agent granted for these tokens."""
    return Landing(
        transfer_id=reply.transfer_id,
        token=reply.token,
        nbytes=reply.nbytes,
        num_tokens=num_tokens,
        host=reply.host,
        port=reply.port,
        layout_fingerprint=reply.layout_fingerprint,
        token_digest=token_digest,
        cached_tokens=reply.cached_tokens,
    )


def producer_params(landing: Landing, outbox: OpenOutboxReply) -> dict[str, Any]:
    """The `kv_transfer_params` that make an engine fill the outbox its agent opened."""
    return {
        "prfaas": {
            "role": "producer",
            "transfer_id": landing.transfer_id,
            "num_tokens": landing.num_tokens,
            "arena_epoch": outbox.arena_epoch,
            "runs": [list(run) for run in outbox.runs],
            "attempt": outbox.attempt,
            "layout_fingerprint": landing.layout_fingerprint,
            "cached_tokens": landing.cached_tokens,
        }
    }


def consumer_params(
    landing: Landing,
    *,
    arena_epoch: str,
    runs: Sequence[tuple[int, int]],
    cached_runs: Sequence[Sequence[tuple[int, int]]] = (),
) -> dict[str, Any]:
    """The `kv_transfer_params` that make an engine load the landing at `runs` of its agent.

    `cached_runs`: where the agent's prefix cache has each block of the first `cached_tokens`.
    """
    return {
        "prfaas": {
            "role": "consumer",
            "transfer_id": landing.transfer_id,
            "num_tokens": landing.num_tokens,
            "token_digest": landing.token_digest,
            "arena_epoch": arena_epoch,
            "runs": [list(run) for run in runs],
            "layout_fingerprint": landing.layout_fingerprint,
            "cached_tokens": landing.cached_tokens,
            "cached_runs": [[list(run) for run in block] for block in cached_runs],
        }
    }
