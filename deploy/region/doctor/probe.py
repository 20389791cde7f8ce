"""One probe from an agent to another, observed while it runs. It asks and does not judge.

The probe is ended at both agents however this ends. If this process is killed, their leases end it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from kvmanager.agent.client import AgentClient
from kvmanager.agent.messages import StatusReply
from kvmanager.agent.probe_messages import ProbeLandingReply, ProbeSend, ProbeStatusReply
from transport import Endpoint
from transport.rpc import RpcError

POLL_S = 0.25
# Each sample renews it. If the doctor is killed, both ends give up after this time.
LEASE_S = 5.0
RPC_TIMEOUT_S = 5.0
REACH_S = 8.0
"""How long the first byte may take, seconds."""
END_TIMEOUT_S = 2.0

ReplyT = TypeVar("ReplyT")


class CannotMeasure(Exception):
    """The path could not be measured. The message names what failed, where, and what helps."""


@dataclass(frozen=True, slots=True)
class ProbePlan:
    """How much to send. `via` replaces the address that the receiver advertises."""

    seconds_s: float
    nbytes: int
    via: Endpoint | None = None


@dataclass(frozen=True, slots=True)
class ProbeSample:
    """Both ends of the probe at about the same time."""

    sender: ProbeStatusReply
    receiver: ProbeStatusReply


@dataclass(frozen=True, slots=True)
class ProbeRun:
    """The result of a probe. `samples` begin with the first acknowledged byte. `endpoint` is
    host:port.
    """

    endpoint: str
    samples: list[ProbeSample]
    receiver_status: StatusReply
    sender_status: StatusReply


@dataclass(frozen=True, slots=True)
class NamedAgent:
    """An agent and its name for the user."""

    name: str
    control: AgentClient

    @property
    def where(self) -> str:
        target = self.control.target
        return self.name if self.name == target else f"{self.name} ({target})"


async def run_probe(
    sender: NamedAgent,
    receiver: NamedAgent,
    plan: ProbePlan,
    on_sample: Callable[[ProbeSample, float], None],
) -> ProbeRun:
    """Send, and take samples until `plan` is done.

    `on_sample` gets each sample and the seconds since the first byte. Raises CannotMeasure.
    """
    status = await _ask(receiver, receiver.control.status(RPC_TIMEOUT_S))
    # Both are asked before memory is reserved, so that a wrong address is named as such.
    sender_status = await _ask(sender, sender.control.status(RPC_TIMEOUT_S))
    landing = await _ask(
        receiver, receiver.control.probe_landing(plan.nbytes, LEASE_S, RPC_TIMEOUT_S)
    )
    endpoint = plan.via or Endpoint(landing.host, landing.port)
    try:
        request = ProbeSend(
            transfer_id=landing.transfer_id,
            token=landing.token,
            fingerprint=landing.fingerprint,
            nbytes=plan.nbytes,
            host=endpoint.host,
            port=endpoint.port,
            lease_s=LEASE_S,
        )
        await _ask(sender, sender.control.probe_send(request, RPC_TIMEOUT_S))
        watch = _Watch(sender, receiver, landing, str(endpoint))
        samples = await watch.run(plan.seconds_s, on_sample)
    finally:
        await _end((sender, receiver), landing.transfer_id)
    return ProbeRun(str(endpoint), samples, status, sender_status)


class _Watch:
    """Takes samples of both ends of one probe."""

    def __init__(
        self, sender: NamedAgent, receiver: NamedAgent, landing: ProbeLandingReply, endpoint: str
    ) -> None:
        self._sender = sender
        self._receiver = receiver
        self._transfer_id = landing.transfer_id
        self._endpoint = endpoint

    async def run(
        self, seconds_s: float, on_sample: Callable[[ProbeSample, float], None]
    ) -> list[ProbeSample]:
        samples: list[ProbeSample] = []
        first_s: float | None = None
        while True:
            await asyncio.sleep(POLL_S)
            sample = await self._sample()
            now_s = sample.sender.load.now_s
            first_s = now_s if first_s is None else first_s
            if sample.sender.state in ("failed", "cancelled"):
                raise CannotMeasure(self._failure(sample))
            # Time counts from the first byte: connecting is no part of the rate.
            if not sample.sender.done_bytes:
                if now_s - first_s > REACH_S:
                    raise CannotMeasure(self._silence(sample))
                continue
            if not samples:
                first_s = now_s
            samples.append(sample)
            on_sample(sample, now_s - first_s)
            if sample.sender.state == "complete" or now_s - first_s >= seconds_s:
                return samples

    async def _sample(self) -> ProbeSample:
        sender, receiver = await asyncio.gather(
            _ask(
                self._sender,
                self._sender.control.probe_status(
                    self._transfer_id, "send", LEASE_S, RPC_TIMEOUT_S
                ),
            ),
            _ask(
                self._receiver,
                self._receiver.control.probe_status(
                    self._transfer_id, "landing", LEASE_S, RPC_TIMEOUT_S
                ),
            ),
        )
        return ProbeSample(sender, receiver)

    def _failure(self, sample: ProbeSample) -> str:
        return (
            f"the probe from {self._sender.name} to {self._endpoint} ended:"
            f" {sample.sender.error or sample.receiver.error}"
        )

    def _silence(self, sample: ProbeSample) -> str:
        where = f"the data port {self._endpoint} of {self._receiver.name}"
        if not sample.sender.num_connections:
            return (
                f"{self._sender.name} has no connection to {where} after {REACH_S:g} s: is the"
                " address what that host can reach (`advertise` of the receiving agent, `endpoints`"
                " of the link, --via here), does a firewall let it through, do both ends use TLS?"
            )
        return (
            f"{self._sender.name} is connected to {where}, but no byte was acknowledged within"
            f" {REACH_S:g} s: something on the path takes bytes and does not pass them on"
        )


async def _ask(agent: NamedAgent, call: Awaitable[ReplyT]) -> ReplyT:
    """The reply. An RpcError becomes a sentence that names the agent and the fix."""
    try:
        return await call
    except RpcError as error:
        where = f"agent {agent.where}"
        if error.code in ("UNAVAILABLE", "TIMEOUT"):
            raise CannotMeasure(
                f"{where} does not answer: {error.message}; is it running, is this its control"
                " port, and does it want TLS (--tls-dir)?"
            ) from error
        if error.code == "INVALID" and "ethod not found" in error.message:
            raise CannotMeasure(
                f"{where} knows no probes: it is of an older release than this command"
            ) from error
        raise CannotMeasure(f"{where} refused: {error.message}") from error


async def _end(agents: tuple[NamedAgent, NamedAgent], transfer_id: str) -> None:
    """End the probe. The sender goes first, so that it does not find its landing gone."""
    for agent in agents:
        with suppress(RpcError):  # its lease ends it then
            await agent.control.probe_end(transfer_id, "the doctor has finished", END_TIMEOUT_S)
