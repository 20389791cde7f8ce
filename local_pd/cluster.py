"""What a gateway needs of a local PD cluster, whether its front runs embedded or elsewhere.

The implementations are in embedded.py and remote.py. A local PD cluster serves a request end to
end alone, or decodes what was prefilled in another cluster. It does not know routing or clients.
"""

from typing import Protocol

from local_pd.messages import (
    DecodeSlot,
    DirectRequest,
    DirectTarget,
    LandingReport,
    ReserveRequest,
)
from prfaas.jobs import PrefillJob, PrefillResult
from scheduler.live.long_term.conversion import RoleChange, RoleStatus
from scheduler.reports import ClusterReport


class PdCluster(Protocol):
    """What a gateway needs of a local PD cluster, embedded or remote."""

    @property
    def name(self) -> str:
        """The cluster's name in the region."""
        ...

    @property
    def has_prefill_instances(self) -> bool:
        """Whether `prefill_locally` can work at all, by the roles known last."""
        ...

    async def reserve(self, request: ReserveRequest) -> DecodeSlot:
        """A decode instance, and memory on its node for the prompt's KVCache.

        The slot's lease is kept alive until `release`. Raises NoLandingRoom, NoInstance,
        FrontUnreachable. When cancelled, nothing stays reserved.
        """
        ...

    async def await_landing(self, slot: DecodeSlot, timeout_s: float) -> LandingReport:
        """How the slot's landing ended, or "open" after `timeout_s`. Until then the slot counts as
        a request of its instance, and afterwards the request that is sent there. Never raises:
        what cannot be asked is "unknown".
        """
        ...

    async def release(self, slot: DecodeSlot, reason: str) -> None:
        """Give the slot back: KVCache that has not landed never will, and the decode engine
        computes the prompt itself. KVCache that an engine took over is not touched. Idempotent,
        never raises; to be called once for every slot.
        """
        ...

    async def request_ended(self, instance: str) -> None:
        """A request that was sent to this instance is over. Untold it does no harm for long: how
        many there are is asked of the engine every few seconds. Never raises.
        """
        ...

    async def direct(self, request: DirectRequest) -> DirectTarget:
        """One engine that serves a request whole; one that drains only when no other is left. The
        instance counts as having a request more, until it is `ended`. Raises NoInstance,
        FrontUnreachable.
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

    async def drain(self, instance: str) -> None:
        """Give the instance nothing new that another can serve; returns when its engine has nothing
        to do and no slot of it is held. What is under way ends there. Cancelling ends the wait and,
        where the front runs elsewhere, the drain: a caller that is gone cannot. Else `resume` does,
        also after an error; where it is not called within `drained_hold_s`, the front gives the
        instance work again by itself. Raises UnknownInstance, and NoInstance when the engine does
        not serve any more: nobody can tell what became of its requests.
        """
        ...

    async def resume(self, instance: str) -> None:
        """End a drain. Raises UnknownInstance."""
        ...

    async def set_role(self, instance: str, change: RoleChange) -> RoleStatus:
        """Give the instance another role: from now on the cluster gives it work of that kind. To be
        called when it is drained. The same order again is no error. Raises RoleRefused when its
        epoch is not above the instance's, or the instance has the role `both`; UnknownInstance.
        """
        ...

    async def close(self) -> None:
        """Stop what was started. Idempotent."""
        ...
