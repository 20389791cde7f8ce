"""The inputs and outputs of a prefill cluster's job queue.

Values only; queue.py has the rules.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from prfaas.engines.errors import PrefillCode
from scheduler.routing.front_placement import DEFAULT_ROOM, Room
from scheduler.routing.order_config import OrderConfig
from scheduler.routing.queue_order import NUM_CLASSES


@dataclass(frozen=True, slots=True)
class QueueConfig:
    """The bounds of the queue, and its order. `max_attempts`: most instances tried for one job.

    Jobs of every class and length must be due before they are given up. So at most `max_wait_s` / 4
    of `order.patience_s` is used, and the rest bounds the time that length adds.
    """

    max_queued: int = 64
    """Most jobs that may wait; more are refused."""
    max_wait_s: float = 120.0
    """Longest wait of a job before it fails, seconds."""
    max_attempts: int = 2
    order: OrderConfig = field(default_factory=OrderConfig)

    def __post_init__(self) -> None:
        if self.max_queued < 0 or self.max_attempts < 1 or self.max_wait_s <= 0:
            raise ValueError("max_queued >= 0, max_attempts >= 1 and max_wait_s > 0 are needed")

    @property
    def bounded_order(self) -> OrderConfig:
        """`order` with a patience for which `max_wait_s` leaves room, and half of the remaining
        time for lengths. So the longest job of the last class is due before it is given up.
        """
        patience_s = min(self.order.patience_s, self.max_wait_s / (NUM_CLASSES + 1))
        length_s = min(self.order.max_length_s, (self.max_wait_s - NUM_CLASSES * patience_s) / 2)
        return replace(self.order, patience_s=patience_s, max_length_s=length_s)


@dataclass(frozen=True, slots=True)
class QueueInstance:
    """An instance as the queue sees it. `model` "" serves every job. `cached_tokens` of jobs may
    name its `node` instead of it. `layout` has its KVCache layout in words. The fingerprint is ""
    while it is not known.
    """

    name: str
    model: str
    healthy: bool
    draining: bool = False
    room: Room = DEFAULT_ROOM
    node: str = ""
    layout_fingerprint: str = ""
    layout: str = ""
    text_only: bool = False


@dataclass(frozen=True, slots=True)
class QueuedJob:
    """A job as the queue sees it. `key` is unique among its jobs. `cached_tokens` says, by instance
    or node, how much of the prompt need not be computed there. `pd` is the PD cluster that decodes.
    `layout_fingerprint` is that of the landing; "" fits every instance.
    """

    key: str
    model: str
    priority: int
    num_tokens: int
    cached_tokens: Mapping[str, int] = field(default_factory=dict)
    pd: str = ""
    layout_fingerprint: str = ""
    has_media: bool = False

    @property
    def uncached_tokens(self) -> int:
        """Tokens to compute on the instance that has most of the prompt cached."""
        return self.num_tokens - min(self.num_tokens, max(self.cached_tokens.values(), default=0))


@dataclass(frozen=True, slots=True)
class StartJob:
    """Run the job on this instance. `queue_s` is its wait since it was submitted, without the
    `held_s` for which it was held although an instance had room for it. `reason` says why the
    instance was chosen.
    """

    key: str
    instance: str
    queue_s: float
    attempt: int
    reason: str = field(default="", compare=False)
    held_s: float = 0.0


@dataclass(frozen=True, slots=True)
class FailJob:
    """The job is over without a result; the queue has forgotten it."""

    key: str
    code: PrefillCode
    message: str


Effect = StartJob | FailJob
