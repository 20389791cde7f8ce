"""What the samples of a probe say: rates, round trips, shares of time. Pure; judges nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from deploy.region.doctor.probe import CannotMeasure, ProbeRun, ProbeSample
from kvmanager.agent.probe_messages import AgentLoad, KernelTcp
from netmon.tcp_info import TcpInfo, together
from transport import LinkState

MIN_PLATEAU_S = 0.4
SETTLING_SHARE = 1 / 3
"""The share of the probe's time that is left out: slow start and the first steps of tuning."""
RISING = 1.3


@dataclass(frozen=True, slots=True)
class EndLoad:
    """The load of one agent and its host during the plateau."""

    agent_cpus: float
    """CPU seconds per second of the agent's process."""
    usable_cpus: float
    host_busy: float
    """The share of all CPUs of the host in use, by any process."""


@dataclass(frozen=True, slots=True)
class LandingMemory:
    """The part of the receiver's arena that landings may use."""

    cap_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class PathNumbers:
    """What the sending sockets measured during the plateau. Shares are of time or of bytes."""

    rtt_s: float
    min_rtt_s: float
    loss: float
    busy: float
    """The share of the connections' time in which bytes waited to be sent or acknowledged."""
    rwnd_limited: float
    """The share of the busy time in which the receiver's window was the limit."""
    sndbuf_limited: float
    congestion: tuple[str, ...]
    """The algorithms that the sockets really use."""
    send_buffer_bytes: int
    """The largest send buffer of all connections."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """All input of a diagnosis. Rates are bytes a second."""

    seconds_s: float
    nbytes: int
    rate_bytes_per_s: float
    """The rate of the plateau, with transfers of others on the same link."""
    is_rising: bool
    """Whether the last third of the plateau was clearly faster than the first."""
    other_bytes_per_s: float
    """The part of that rate that other transfers used."""
    width: int
    max_connections: int
    frame_bytes: int
    tuning: str
    wanted_congestion: str
    path: PathNumbers
    sender: EndLoad
    receiver: EndLoad
    sender_kernel: KernelTcp
    receiver_kernel: KernelTcp
    landing_memory: LandingMemory


def summarise(run: ProbeRun) -> Measurement:
    """The measurement from a run's samples. Raises CannotMeasure if they are too few for a rate."""
    samples = _plateau(run.samples)
    first, last = samples[0], samples[-1]
    link = _link(last)
    rates = [_rate(before, after) for before, after in pairwise(samples)]
    # The median, so that an interval in which a host stood still does not move the result.
    rate = median(rates)
    if not rate:
        raise CannotMeasure(
            f"bytes to {run.endpoint} came to a halt: {last.sender.done_bytes} were acknowledged"
            " and then none; is the receiving host or the path stalled?"
        )
    elapsed_s = last.sender.load.now_s - first.sender.load.now_s
    own = (last.sender.done_bytes - first.sender.done_bytes) / elapsed_s
    total = (link.acked_bytes - _link(first).acked_bytes) / elapsed_s
    status = run.receiver_status
    return Measurement(
        seconds_s=run.samples[-1].sender.load.now_s - run.samples[0].sender.load.now_s,
        nbytes=run.samples[-1].sender.done_bytes,
        rate_bytes_per_s=rate,
        is_rising=_is_rising(rates),
        other_bytes_per_s=max(0.0, total - own),
        width=link.width,
        max_connections=last.sender.max_connections,
        frame_bytes=link.frame_bytes,
        tuning=link.phase,
        wanted_congestion=last.sender.congestion,
        path=_path(samples),
        sender=_load(first.sender.load, last.sender.load),
        receiver=_load(first.receiver.load, last.receiver.load),
        sender_kernel=last.sender.kernel,
        receiver_kernel=last.receiver.kernel,
        landing_memory=LandingMemory(
            status.landing_cap_bytes,
            min(status.free_bytes, status.landing_cap_bytes - status.landing_bytes),
        ),
    )


def _plateau(samples: Sequence[ProbeSample]) -> list[ProbeSample]:
    """The samples after the settling in which the link had something to send."""
    going = [s for s in samples if s.sender.state == "open" and s.sender.link is not None]
    if going:
        begin_s, end_s = going[0].sender.load.now_s, going[-1].sender.load.now_s
        settled_s = begin_s + SETTLING_SHARE * (end_s - begin_s)
        settled = [s for s in going if s.sender.load.now_s >= settled_s]
        if settled[-1].sender.load.now_s - settled[0].sender.load.now_s >= MIN_PLATEAU_S:
            return settled
    raise CannotMeasure(
        "the probe was over before a rate could be told; give more --seconds, or a larger --mib"
    )


def _link(sample: ProbeSample) -> LinkState:
    assert sample.sender.link is not None
    return sample.sender.link


def _rate(before: ProbeSample, after: ProbeSample) -> float:
    elapsed_s = max(1e-9, after.sender.load.now_s - before.sender.load.now_s)
    return (_link(after).acked_bytes - _link(before).acked_bytes) / elapsed_s


def _is_rising(rates: Sequence[float]) -> bool:
    third = len(rates) // 3
    return third > 0 and median(rates[-third:]) > RISING * median(rates[:third])


def _load(before: AgentLoad, after: AgentLoad) -> EndLoad:
    elapsed_s = max(1e-9, after.now_s - before.now_s)
    busy = (after.host_busy_s - before.host_busy_s) / (elapsed_s * after.host_cpus)
    return EndLoad(
        agent_cpus=(after.cpu_s - before.cpu_s) / elapsed_s,
        usable_cpus=after.usable_cpus,
        host_busy=min(1.0, max(0.0, busy)),
    )


def _path(samples: Sequence[ProbeSample]) -> PathNumbers:
    connection_s, gains = 0.0, list[TcpInfo]()
    for before, after in pairwise(samples):
        new = list(_gains(before, after))
        connection_s += len(new) * (after.sender.load.now_s - before.sender.load.now_s)
        gains += new
    carried = together(gains, median([gain.rtt_s for gain in gains] or [0.0]))
    connections = [item for item in _link(samples[-1]).connections if item.carries_data]
    return PathNumbers(
        rtt_s=carried.rtt_s,
        min_rtt_s=carried.min_rtt_s,
        loss=carried.loss,
        busy=min(1.0, carried.busy_s / max(1e-9, connection_s)),
        rwnd_limited=carried.rwnd_limited,
        sndbuf_limited=carried.sndbuf_limited,
        congestion=tuple(sorted({item.congestion for item in connections if item.congestion})),
        send_buffer_bytes=max((item.send_buffer_bytes for item in connections), default=0),
    )


def _gains(before: ProbeSample, after: ProbeSample) -> Iterator[TcpInfo]:
    """What each connection counted between two samples."""
    earlier = {item.number: item.info for item in _link(before).connections}
    for item in _link(after).connections:
        known = earlier.get(item.number)
        # A connection that sent nothing has no new values.
        if known is not None and item.info.sent_bytes != known.sent_bytes:
            yield item.info.since(known)
