"""The interface of a local PD cluster for a gateway, whether its front runs embedded or elsewhere.

The implementations are in embedded.py and remote.py. A local PD cluster serves a request end to end
alone, or decodes a prompt that another cluster has prefilled. It does not know routing or clients.
"""

from typing import Protocol

from kvmanager.load_times import LoadTimes
from local_pd.messages import (
    DecodeSlot,
    DirectRequest,
    DirectTarget,
    LandingReport,
    ReserveRequest,
)
from prfaas.encoding.values import EncodeDone, EncodeOrder
from prfaas.engines.members import MemberOrder
from prfaas.engines.timing import TimedPrefills, TimingOrder
from prfaas.jobs import PrefillJob, PrefillResult
from scheduler.live.long_term.conversion import RoleChange, RoleStatus
from scheduler.reports import ClusterReport


class PdCluster(Protocol):
    """A local PD cluster, embedded or remote."""

    @property
    def name(self) -> str:
        """The cluster's name in the region."""
        ...

    @property
    def has_prefill_instances(self) -> bool:
        """Whether `prefill_locally` can work at all, by the last known roles."""
        ...

    async def reserve(self, request: ReserveRequest) -> DecodeSlot:
        """Reserve a decode instance, and memory on its node for the prompt's KVCache.

        The slot's lease is renewed until `release`. Raises NoLandingRoom, NoInstance,
        FrontUnreachable. When cancelled, nothing stays reserved.
        """
        ...

    async def await_landing(self, slot: DecodeSlot, timeout_s: float) -> LandingReport:
        """The outcome of the slot's landing, or "open" after `timeout_s`. Until its end the slot
        counts as a request of its instance; afterwards the decode request counts. Never raises:
        a landing that cannot be asked for is "unknown".
        """
        ...

    async def release(self, slot: DecodeSlot, reason: str) -> LoadTimes | None:
        """Give the slot back. KVCache that has not landed is given up, and the decode engine
        computes the prompt. KVCache that an engine has taken over is not touched. Call it once for
        every slot. Idempotent, never raises. Returns what the engine says of its load and first
        step, None if it has said nothing yet.
        """
        ...

    def request_ended(self, instance: str) -> None:
        """A request that was sent to this instance is over. A missing call does little harm, since
        the engine is asked for its requests every few seconds. Never raises, and does not wait.
        """
        ...

    async def direct(self, request: DirectRequest) -> DirectTarget:
        """Choose one engine that serves a whole request; a draining one only if no other is left.
        The instance counts one request more until `request_ended`. Raises NoInstance,
        FrontUnreachable.
        """
        ...

    async def encode(self, order: EncodeOrder) -> EncodeDone:
        """Have the media of a request encoded for the instance that will serve it whole, as far as
        an instance of this cluster encodes for others and that is of use. Raises FrontUnreachable;
        without it, too, that instance encodes what it does not find. Cancelling withdraws the
        media.
        """
        ...

    async def prefill_locally(self, job: PrefillJob) -> PrefillResult:
        """Prefill `job` on a prefill instance of this cluster. Raises PrefillFailed; cancelling
        aborts the engine's request and the transfer.
        """
        ...

    async def report(self) -> ClusterReport:
        """Load and health now. Never raises: a front that cannot be reached is not healthy."""
        ...

    # Orders about roles carry the number of the gateway that leads where several share a region
    # (`deploy.gateway.scheduling.leadership`), else 0. One with a lower number than the highest
    # that was seen comes from a former leader: RoleRefused.

    async def drain(self, instance: str, *, leader: int = 0) -> None:
        """Give the instance no new work that another one can serve. Returns when its engine has
        nothing to do and none of its slots is held; work under way ends there.

        `resume` ends the drain, also after an error. If it is not called within `drained_hold_s`,
        the front gives the instance work again by itself. Cancelling ends the wait and, if the
        front runs elsewhere, the drain as well, because a caller that is gone cannot call `resume`.
        Raises UnknownInstance, and NoInstance when the engine does not serve any more, so that the
        fate of its requests is unknown.
        """
        ...

    async def resume(self, instance: str, *, leader: int = 0) -> None:
        """End a drain. Raises UnknownInstance."""
        ...

    async def set_role(self, instance: str, change: RoleChange, *, leader: int = 0) -> RoleStatus:
        """Give the instance another role, and from now on work of that kind. Call it when the
        instance is drained. Repeating an order is no error. Raises RoleRefused when the order's
        epoch is not above the instance's, or the instance has the role `both`; UnknownInstance.
        """
        ...

    async def change_members(self, order: MemberOrder) -> None:
        """Begin to add an instance or to let one go; the reports show how it goes on. Raises
        MemberRefused, UnknownInstance.
        """
        ...

    async def time_prefills(self, order: TimingOrder) -> TimedPrefills:
        """Time a few prompts on an instance that has nothing else to do. Raises UnknownInstance,
        and RpcError when a front elsewhere cannot be reached or is too old for it.
        """
        ...

    async def close(self) -> None:
        """Stop everything that was started. Idempotent."""
        ...
