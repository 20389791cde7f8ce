"""A prefill cluster whose front runs in another process, reached over gRPC.

It is a `PrefillCluster` like the embedded one, with the same results and error codes, plus
"unreachable". It does not know instances or engines.
"""

from typing import Final

from prfaas.engines.errors import PrefillFailed, UnknownInstance
from prfaas.engines.members import MemberOrder
from prfaas.engines.prefill_rpc import (
    Empty,
    InstanceName,
    PrefillReply,
    from_reply,
    order_members,
    remote_report,
)
from prfaas.engines.timing import TimedPrefills, TimingOrder, order_timing
from prfaas.jobs import PrefillJob, PrefillResult
from prfaas.server import SERVICE
from scheduler.reports import ClusterReport
from transport import Credentials
from transport.rpc import RpcClient, RpcError

JOB_TIMEOUT_S: Final = 900.0
"""Longest time for queue, prefill and transfer of one job together."""
REPORT_TIMEOUT_S: Final = 3.0
DRAIN_TIMEOUT_S: Final = 900.0


class RemotePrefillCluster:
    """Client of a `prfaas prefill` front at `target` ("host:port")."""

    def __init__(self, name: str, target: str, credentials: Credentials | None = None) -> None:
        self._name = name
        self._client = RpcClient(target, SERVICE, credentials)
        self._closed = False

    @property
    def name(self) -> str:
        return self._name

    async def start(self) -> None:
        """Nothing to start: the front runs elsewhere, the connection opens with the first call."""

    async def submit(self, job: PrefillJob) -> PrefillResult:
        if self._closed:
            raise PrefillFailed("closed", f"cluster {self._name} is shutting down")
        call = self._client.call("Submit", job, PrefillReply, JOB_TIMEOUT_S)
        return await from_reply(call, self._name)

    async def report(self) -> ClusterReport:
        return await remote_report(self._client, self._name, REPORT_TIMEOUT_S)

    async def drain(self, instance: str) -> None:
        """As `PrefillCluster.drain`; raises RpcError when the front cannot be reached."""
        await self._about("Drain", instance, DRAIN_TIMEOUT_S)

    async def resume(self, instance: str) -> None:
        """As `PrefillCluster.resume`; raises RpcError when the front cannot be reached."""
        await self._about("Resume", instance, REPORT_TIMEOUT_S)

    async def change_members(self, order: MemberOrder) -> None:
        """As the protocol's; raises RpcError when the front cannot be reached."""
        await order_members(self._client, self._name, order, REPORT_TIMEOUT_S)

    async def time_prefills(self, order: TimingOrder) -> TimedPrefills:
        return await order_timing(self._client, self._name, order)

    async def close(self) -> None:
        """Close the connection; running jobs end with "unreachable" here, cancelled there."""
        self._closed = True
        await self._client.close()

    async def _about(self, method: str, instance: str, timeout_s: float) -> None:
        try:
            await self._client.call(method, InstanceName(instance), Empty, timeout_s)
        except RpcError as error:
            if error.code == "NOT_FOUND":
                raise UnknownInstance(self._name, instance) from error
            raise
