"""What a gateway needs of a prefill cluster, whether its front runs embedded or elsewhere.

The implementations are in embedded.py and remote.py. A prefill cluster does not know requests,
routing or decoding: a job says what to compute and where the KVCache must land.
"""

from typing import Protocol

from prfaas.jobs import PrefillJob, PrefillResult
from scheduler.reports import ClusterReport


class PrefillCluster(Protocol):
    """What a gateway needs of a prefill cluster, embedded or remote."""

    @property
    def name(self) -> str:
        """The cluster's name in the region."""
        ...

    async def submit(self, job: PrefillJob) -> PrefillResult:
        """Prefill `job`; returns when every byte is verified at the landing.

        Raises PrefillFailed. Cancelling the awaiting task takes the job back: out of the queue, or
        off its engine with its transfer cancelled.
        """
        ...

    async def report(self) -> ClusterReport:
        """Load and health now. Never raises: a front that cannot be reached is not healthy."""
        ...

    async def drain(self, instance: str) -> None:
        """Give the instance no more jobs; returns when it has none. Cancelling ends the wait and,
        where the front runs elsewhere, the drain. Else `resume` does; where it is not called within
        `drained_hold_s`, the front gives the instance work again by itself. Raises UnknownInstance.
        """
        ...

    async def resume(self, instance: str) -> None:
        """End a drain. Raises UnknownInstance."""
        ...

    async def close(self) -> None:
        """Fail what waits and runs (code "closed"), stop what was started. Idempotent."""
        ...
