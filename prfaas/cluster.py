"""The interface of a prefill cluster for a gateway, whether its front runs embedded or elsewhere.

The implementations are in embedded.py and remote.py. A prefill cluster does not know requests,
routing or decoding. A job says what to compute and where the KVCache must land.
"""

from typing import Protocol

from prfaas.engines.members import MemberOrder
from prfaas.engines.timing import TimedPrefills, TimingOrder
from prfaas.jobs import PrefillJob, PrefillResult
from scheduler.reports import ClusterReport


class PrefillCluster(Protocol):
    """A prefill cluster, embedded or remote."""

    @property
    def name(self) -> str:
        """The cluster's name in the region."""
        ...

    async def submit(self, job: PrefillJob) -> PrefillResult:
        """Prefill `job`. Returns when every byte is verified at the landing.

        Raises PrefillFailed. Cancelling the awaiting task withdraws the job: it leaves the queue,
        or its engine's request and its transfer are cancelled.
        """
        ...

    async def report(self) -> ClusterReport:
        """Load and health now. Never raises: a front that cannot be reached is not healthy."""
        ...

    async def drain(self, instance: str) -> None:
        """Give the instance no more jobs. Returns when it has none.

        `resume` ends the drain. If it is not called within `drained_hold_s`, the front gives the
        instance work again by itself. Cancelling ends the wait and, if the front runs elsewhere,
        the drain as well. Raises UnknownInstance.
        """
        ...

    async def resume(self, instance: str) -> None:
        """End a drain. Raises UnknownInstance."""
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
        """Fail all jobs with code "closed", and stop everything that was started. Idempotent."""
        ...
