"""Typed client of what one node agent says of its links, and of probes through them.

It does not know which link leads where and never retries. Every method raises RpcError.
"""

from __future__ import annotations

import contextlib
from typing import Final, Protocol

from kvmanager.agent.links.messages import LinkFeed, SendLinkProbe, SendLinkProbeReply, WatchLinks
from kvmanager.agent.messages import (
    SERVICE,
    ProbeEnd,
    ProbeEndReply,
    ProbeLanding,
    ProbeLandingReply,
)
from transport import TlsFiles
from transport.rpc import RpcClient, RpcError

ANSWER_S: Final = 3.0
"""What a call may take beyond what it waits for."""
PROBE_LEASE_S: Final = 5.0


class LinkClient:
    """The agent at `target` ("host:port")."""

    def __init__(self, target: str, tls: TlsFiles | None = None) -> None:
        self.target = target
        self._client = RpcClient(target, SERVICE, tls)

    async def watch(self, request: WatchLinks) -> LinkFeed:
        """All links of the agent, when there is news. INVALID."""
        return await self._client.call(
            "WatchLinks", request, LinkFeed, request.timeout_s + ANSWER_S
        )

    async def open_landing(self, nbytes: int) -> ProbeLandingReply:
        """Let a probe land there. NO_ROOM, INVALID."""
        request = ProbeLanding(nbytes, PROBE_LEASE_S + ANSWER_S)
        return await self._client.call("ProbeLanding", request, ProbeLandingReply, ANSWER_S)

    async def send(
        self, landing: ProbeLandingReply, nbytes: int, host: str, port: int
    ) -> SendLinkProbeReply:
        """Send a probe to `landing` by way of `host`:`port`; how it went. NO_ROOM, INVALID."""
        request = SendLinkProbe(
            transfer_id=landing.transfer_id,
            token=landing.token,
            fingerprint=landing.fingerprint,
            nbytes=nbytes,
            host=host,
            port=port,
            lease_s=PROBE_LEASE_S,
        )
        return await self._client.call(
            "SendLinkProbe", request, SendLinkProbeReply, PROBE_LEASE_S + ANSWER_S
        )

    async def end_landing(self, transfer_id: str) -> None:
        """Forget a probe's landing there. Idempotent."""
        request = ProbeEnd(transfer_id, "the probe is over")
        await self._client.call("ProbeEnd", request, ProbeEndReply, ANSWER_S)

    async def close(self) -> None:
        """Close the connection. Idempotent."""
        await self._client.close()


class ProbeSender(Protocol):
    """As `LinkClient`."""

    async def send(
        self, landing: ProbeLandingReply, nbytes: int, host: str, port: int
    ) -> SendLinkProbeReply: ...


class ProbeReceiver(Protocol):
    """As `LinkClient`."""

    async def open_landing(self, nbytes: int) -> ProbeLandingReply: ...

    async def end_landing(self, transfer_id: str) -> None: ...


async def probe_link(
    sender: ProbeSender, receiver: ProbeReceiver, nbytes: int, host: str, port: int
) -> SendLinkProbeReply:
    """One probe from agent to agent by way of `host`:`port`. Raises RpcError."""
    landing = await receiver.open_landing(nbytes)
    try:
        return await sender.send(landing, nbytes, host, port)
    finally:
        with contextlib.suppress(RpcError):  # its lease ends it
            await receiver.end_landing(landing.transfer_id)
