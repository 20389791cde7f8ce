"""What cluster fronts report: their load, their instances, and the prefill jobs that they hold.

They travel between fronts and gateway as msgpack; fields may be added with defaults.
"""

from typing import Literal

import msgspec

from kvmanager.agent.messages import CacheModel

Role = Literal["prefill", "decode", "both"]
"""What an instance of a local PD cluster may be asked to do."""


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
    where that is not known). `landing_cap_bytes` is what landings may take at its node at most,
    `landing_room_bytes` what one more could take when the node said so last (None: it does not).
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
    layout_fingerprint: str = ""
    """Instances with the same one can use each other's KVCache; "": not known yet."""
    role_epoch: int = 0
    role_ready: bool = True
    decode_slots: int = 0
    looked_s: float = 0.0
    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float | None = None
    kv_total_bytes: int | None = None
    landing_cap_bytes: int | None = None
    landing_room_bytes: int | None = None


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


def serves(instance: InstanceReport, model: str) -> bool:
    """Whether requests for `model` may be given to the instance."""
    is_model = not model or not instance.model or instance.model == model
    return is_model and instance.healthy and not instance.draining
