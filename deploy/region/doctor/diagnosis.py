"""What limits a measured path, and what would mend it: numbers in, findings out. Pure.

The limiting stage is searched in this order, because each stage hides those after it:

    receiver's memory   windows are closed while the receiving host is short of TCP memory
    receiver CPU        windows are closed, or nothing else is the limit, on a full receiving host
    receive window      windows are closed, and as large as the kernel allows
    send window         everything that the send buffers hold is in flight
    sender CPU          a full sending host, or sockets with nothing to send
    link                none of these: loss, the rate of the path, or windows that are closed for
                        no reason at the receiver, in which case something in between ends TCP

A *window* is the payload that one connection may have in flight. So connections x window / RTT is
the highest rate that the kernels allow. Not every limit is a fault. A limit that has to be mended
is a finding with `mends`. Without an expected rate, a full CPU or link is only worth a note.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from deploy.region.cache_identity import SAME_KVCACHE
from deploy.region.doctor.kernel_checks import KernelCheck, kernel_checks
from deploy.region.doctor.measurement import EndLoad, Measurement
from deploy.region.doctor.windows import Windows, windows_of
from kvmanager.config_files.units import format_duration, format_rate
from transport.config import NEAR_RTT_S
from transport.sending.tuning import FULL_QUEUE_RTTS, LIMITED_SHARE

MOSTLY = 0.5
FULL_CPU = 0.85
"""An agent that uses this share of its CPUs is limited by them."""
FULL_HOST = 0.95
WANTS_CPU = 0.2
"""On a full host, an agent that uses this share of its CPUs is limited by them, too."""
NOTHING_TO_SEND = 0.5
"""Sockets that are busy for a smaller share of the time wait for their own process."""
HEALTHY_SHARE = 0.8
"""A link that reaches this share of the expected rate is healthy."""
LOSS_NOTED, LOSS_BAD = 5e-4, 1e-2
FREE_LANDING_SHARE = 0.05


class Bottleneck(StrEnum):
    """The stage that limits the rate."""

    SENDER_CPU = "sender CPU"
    RECEIVER_CPU = "receiver CPU"
    SEND_WINDOW = "send window"
    RECEIVE_WINDOW = "receive window"
    LINK = "link"
    RECEIVER_MEMORY = "receiver's memory"


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding: what it is, the evidence, and the fix. `mends` says whether it should be
    mended.
    """

    what: str
    evidence: str
    fix: str
    mends: bool


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The result. Rates are bytes a second. `expected` is the least that windows and operator
    allow.
    """

    stage: Bottleneck
    evidence: str
    achieved_bytes_per_s: float
    expected_bytes_per_s: float
    window_bytes_per_s: float
    link_bytes_per_s: float | None
    """The rate according to the operator."""
    kernel: list[KernelCheck]
    findings: list[Finding]

    @property
    def is_healthy(self) -> bool:
        return not any(finding.mends for finding in self.findings)


def diagnose(
    measured: Measurement,
    link_bytes_per_s: float | None = None,
    *,
    unlike: Sequence[str] = (),
) -> Diagnosis:
    """What limits the path. `link_bytes_per_s` is the rate of the path according to the
    operator. `unlike` says which engines of its ends cannot use each other's KVCache.
    """
    windows = windows_of(measured)
    stage, evidence = limiting_stage(measured, windows)
    expected = min(windows.bytes_per_s, link_bytes_per_s or windows.bytes_per_s)
    target = link_bytes_per_s or measured.rate_bytes_per_s
    if link_bytes_per_s is None and stage in (Bottleneck.SEND_WINDOW, Bottleneck.RECEIVE_WINDOW):
        # Nobody knows how much more the path carries; twice the rate shows whether it does.
        target *= 2
    checks = kernel_checks(measured, target)
    findings = [_kernel_finding(check) for check in checks if check.is_wrong]
    fix = _fix(measured, stage, kernel_helps=any(check.is_wrong for check in checks))
    mends = _is_illness(measured, stage, link_bytes_per_s)
    findings.append(Finding(f"the limit is the {stage}", evidence, fix, mends))
    findings += _side_findings(measured, stage)
    findings += [
        Finding("KVCache of one side is none for the other", evidence, SAME_KVCACHE, mends=True)
        for evidence in unlike
    ]
    return Diagnosis(
        stage=stage,
        evidence=evidence,
        achieved_bytes_per_s=measured.rate_bytes_per_s,
        expected_bytes_per_s=expected,
        window_bytes_per_s=windows.bytes_per_s,
        link_bytes_per_s=link_bytes_per_s,
        kernel=checks,
        findings=findings,
    )


def limiting_stage(measured: Measurement, windows: Windows) -> tuple[Bottleneck, str]:
    """The limiting stage, and the evidence. The order is the one above."""
    path, rate = measured.path, measured.rate_bytes_per_s
    is_closed = path.rwnd_limited > LIMITED_SHARE
    closed = f"the receive window was the limit for {path.rwnd_limited:.0%} of the time"
    sender_full, receiver_full = _is_full(measured.sender), _is_full(measured.receiver)
    if is_closed and _is_short_of_memory(measured):
        used = measured.receiver_kernel.tcp_memory_bytes
        return (
            Bottleneck.RECEIVER_MEMORY,
            f"{closed}; TCP there holds {_mib(used)}, which is its limit",
        )
    if is_closed and receiver_full:
        return Bottleneck.RECEIVER_CPU, f"{closed}; {_cpu_evidence(measured.receiver)}"
    # A window within a factor of 2 of the rate is its limit: slow start and loss keep the mean
    # lower.
    if is_closed and windows.receive_bytes_per_s < 2 * rate:
        limit = format_rate(windows.receive_bytes_per_s)
        return Bottleneck.RECEIVE_WINDOW, f"{closed}, and it allows {limit} at this round trip"
    if path.sndbuf_limited > LIMITED_SHARE and windows.send_bytes_per_s < 2 * rate:
        limit = format_rate(windows.send_bytes_per_s)
        return Bottleneck.SEND_WINDOW, (
            f"the send buffer was the limit for {path.sndbuf_limited:.0%} of the time, and it"
            f" allows {limit} at this round trip"
        )
    if path.rwnd_limited > MOSTLY:
        return Bottleneck.LINK, _link_evidence(measured, closed)
    receiver_is_fuller = measured.receiver.agent_cpus > measured.sender.agent_cpus
    # Both ends may be full, as on one host: the fuller one is the limit.
    if receiver_full and (receiver_is_fuller or not sender_full):
        return Bottleneck.RECEIVER_CPU, _cpu_evidence(measured.receiver)
    if sender_full:
        return Bottleneck.SENDER_CPU, _cpu_evidence(measured.sender)
    if path.busy < NOTHING_TO_SEND:
        return Bottleneck.SENDER_CPU, (
            f"its sockets had nothing to send for {1 - path.busy:.0%} of the time, although"
            f" {_cpu_evidence(measured.sender)}: its threads wait for memory or for each other"
        )
    return Bottleneck.LINK, _link_evidence(measured, "")


def _is_full(end: EndLoad) -> bool:
    if end.agent_cpus >= FULL_CPU * end.usable_cpus:
        return True
    return end.host_busy >= FULL_HOST and end.agent_cpus >= WANTS_CPU * end.usable_cpus


def _cpu_evidence(end: EndLoad) -> str:
    return (
        f"the agent used {end.agent_cpus:.2g} of its {end.usable_cpus:.3g} CPUs and the host was"
        f" {end.host_busy:.0%} busy"
    )


def _is_short_of_memory(measured: Measurement) -> bool:
    kernel = measured.receiver_kernel
    pressure = kernel.tcp_memory_pressure_bytes
    return bool(pressure) and kernel.tcp_memory_bytes >= pressure


def _link_evidence(measured: Measurement, closed: str) -> str:
    path = measured.path
    if closed:
        return (
            f"{closed}, though it could be larger and the receiver has CPU to spare: something in"
            " between ends TCP (a relay, a tunnel, a proxy) and carries no more"
        )
    lost = f"{path.loss:.2%} of the bytes were lost and sent again"
    if _is_queue_full(measured):
        full = f"round trip {format_duration(path.rtt_s)}, {format_duration(path.min_rtt_s)} empty"
        return f"the queue before the bottleneck is full ({full}), where {lost}"
    if path.loss >= LOSS_NOTED:
        return lost
    control = " and ".join(path.congestion) or "congestion control"
    return f"no window, CPU or loss is the limit: this is the rate that {control} found"


def _kernel_finding(check: KernelCheck) -> Finding:
    return Finding(
        what=f"{check.name} on the {check.host} holds this path back",
        evidence=f"it is {check.present}; this path needs {check.wanted}",
        fix=check.fix,
        mends=True,
    )


def _is_illness(measured: Measurement, stage: Bottleneck, link_bytes_per_s: float | None) -> bool:
    """Whether this limit has to be mended.

    It must be if it costs rate that was expected, or that anybody would expect if no rate was
    given.
    """
    if stage is Bottleneck.RECEIVER_MEMORY:
        return True
    if link_bytes_per_s is not None:
        return measured.rate_bytes_per_s < HEALTHY_SHARE * link_bytes_per_s
    if stage is Bottleneck.LINK:
        return measured.path.loss >= LOSS_BAD and not _is_queue_full(measured)
    return stage in (Bottleneck.SEND_WINDOW, Bottleneck.RECEIVE_WINDOW)


def _fix(measured: Measurement, stage: Bottleneck, *, kernel_helps: bool) -> str:
    match stage:
        case Bottleneck.SENDER_CPU:
            return _cpu_fix(measured.sender, "sender")
        case Bottleneck.RECEIVER_CPU:
            return _cpu_fix(measured.receiver, "receiver")
        case Bottleneck.SEND_WINDOW | Bottleneck.RECEIVE_WINDOW:
            if kernel_helps:
                return "set what is listed for the kernel, and measure again"
            return "raise transport.max_link_connections of the sending agent, and measure again"
        case Bottleneck.RECEIVER_MEMORY:
            return "raise net.ipv4.tcp_mem on the receiver, or give the host fewer connections"
        case Bottleneck.LINK:
            return _link_fix(measured)


def _cpu_fix(end: EndLoad, name: str) -> str:
    if end.agent_cpus < FULL_CPU * end.usable_cpus and end.host_busy >= FULL_HOST:
        return f"others use the {name}'s CPUs: give its agent CPUs of its own (cpuset, CPU request)"
    return f"give the {name}'s agent more CPUs, or take other work off that host"


def _link_fix(measured: Measurement) -> str:
    path = measured.path
    if path.loss >= LOSS_NOTED and "bbr" not in path.congestion and _is_far(measured):
        return "let sockets use bbr, which loss hardly slows"
    if measured.width >= measured.max_connections:
        return (
            f"all {measured.max_connections} connections that it may open are in use: if the path"
            " limits each flow, raise transport.max_link_connections of the sending agent"
        )
    if path.loss >= LOSS_NOTED and not _is_queue_full(measured):
        return "ask the owner of the link for the reason of the loss; retransmissions cost rate"
    return "nothing here is wrong; more rate needs a faster link"


def _side_findings(measured: Measurement, stage: Bottleneck) -> list[Finding]:
    """Findings besides the limit."""
    findings = []
    path, memory = measured.path, measured.landing_memory
    if stage is not Bottleneck.LINK and path.loss >= LOSS_NOTED and _is_far(measured):
        findings.append(
            Finding(
                "the path loses packets",
                f"{path.loss:.2%} of the bytes were sent again",
                "harmless with bbr; otherwise let sockets use bbr",
                mends=path.loss >= LOSS_BAD,
            )
        )
    if measured.is_rising:
        findings.append(
            Finding(
                "the rate was still rising at the end",
                "the last part of the probe was clearly faster than the part before",
                "measure again with more --seconds",
                mends=False,
            )
        )
    if measured.other_bytes_per_s > 0.05 * measured.rate_bytes_per_s:
        findings.append(
            Finding(
                "other transfers used the link meanwhile",
                f"{format_rate(measured.other_bytes_per_s)} of it; they go before the probe",
                "measure again when the region is idle to see the link alone",
                mends=False,
            )
        )
    if memory.free_bytes < FREE_LANDING_SHARE * memory.cap_bytes:
        findings.append(
            Finding(
                "the receiver has hardly any memory left for landings",
                f"{_mib(memory.free_bytes)} of {_mib(memory.cap_bytes)} are free: requests wait for"
                " room there, however fast the path is",
                "raise arena_gib or landing_gib of the receiving agent, or find what holds it"
                " (`prfaas status`)",
                mends=True,
            )
        )
    return findings


def _is_far(measured: Measurement) -> bool:
    return measured.path.min_rtt_s >= NEAR_RTT_S


def _is_queue_full(measured: Measurement) -> bool:
    """Whether the sender's own queue causes the loss.

    On a near path CPUs, not queues, make round trips long.
    """
    path = measured.path
    return _is_far(measured) and path.rtt_s > FULL_QUEUE_RTTS * path.min_rtt_s


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.0f} MiB"
