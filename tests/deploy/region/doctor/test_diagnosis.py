"""What limits a path, told from made-up numbers: stages, kernel settings, findings."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from deploy.region.doctor.diagnosis import Bottleneck, Diagnosis, Finding, diagnose
from deploy.region.doctor.kernel_checks import KernelCheck
from deploy.region.doctor.measurement import EndLoad, LandingMemory, Measurement, PathNumbers
from kvmanager.agent.probe_messages import KernelTcp

MIB = 1 << 20
GBIT = 1e9 / 8

IDLE = EndLoad(agent_cpus=0.3, usable_cpus=4.0, host_busy=0.2)
FULL = EndLoad(agent_cpus=3.8, usable_cpus=4.0, host_busy=0.97)
CROWDED = EndLoad(agent_cpus=1.0, usable_cpus=4.0, host_busy=1.0)

KERNEL = KernelTcp(
    wmem_max_bytes=212992,
    tcp_wmem_bytes=4 * MIB,
    tcp_rmem_bytes=32 * MIB,
    available_congestion=["reno", "cubic", "bbr"],
    allowed_congestion=["reno", "cubic", "bbr"],
    default_congestion="cubic",
    slow_start_after_idle=True,
    tcp_memory_bytes=10 * MIB,
    tcp_memory_pressure_bytes=1000 * MIB,
)

WAN = PathNumbers(
    rtt_s=0.0402,
    min_rtt_s=0.040,
    loss=0.0,
    busy=0.98,
    rwnd_limited=0.0,
    sndbuf_limited=0.0,
    congestion=("bbr",),
    send_buffer_bytes=4 * MIB,
)

HEALTHY = Measurement(
    seconds_s=10.0,
    nbytes=1200 * MIB,
    rate_bytes_per_s=0.95 * GBIT,
    is_rising=False,
    other_bytes_per_s=0.0,
    width=8,
    max_connections=16,
    frame_bytes=256 << 10,
    tuning="steady",
    wanted_congestion="bbr",
    path=WAN,
    sender=IDLE,
    receiver=IDLE,
    sender_kernel=KERNEL,
    receiver_kernel=KERNEL,
    landing_memory=LandingMemory(1000 * MIB, 1000 * MIB),
)


def path(**changes: object) -> Measurement:
    return replace(HEALTHY, path=replace(WAN, **changes))  # type: ignore[arg-type]


def check(diagnosis: Diagnosis, name: str) -> KernelCheck:
    return next(item for item in diagnosis.kernel if item.name.startswith(name))


def limit(diagnosis: Diagnosis) -> Finding:
    return next(item for item in diagnosis.findings if item.what.startswith("the limit is"))


def test_a_full_link_is_healthy() -> None:
    diagnosis = diagnose(HEALTHY, GBIT)
    assert diagnosis.is_healthy
    assert diagnosis.stage is Bottleneck.LINK
    assert diagnosis.expected_bytes_per_s == GBIT
    # 8 connections, 65% of 4 MiB each, 40 ms.
    assert diagnosis.window_bytes_per_s == pytest.approx(8 * 0.65 * 4 * MIB / 0.04)
    assert not any(item.is_wrong for item in diagnosis.kernel)
    assert "bbr found" in diagnosis.evidence


def test_engines_that_cannot_use_each_others_kvcache_are_to_be_mended() -> None:
    diagnosis = diagnose(HEALTHY, GBIT, unlike=["m: p and d have different weights"])
    assert not diagnosis.is_healthy
    (finding,) = [item for item in diagnosis.findings if item.mends]
    assert finding.evidence == "m: p and d have different weights"
    assert "same weights" in finding.fix


def test_half_of_the_believed_rate_is_to_be_mended() -> None:
    diagnosis = diagnose(HEALTHY, 2 * GBIT)
    assert not diagnosis.is_healthy
    assert limit(diagnosis).mends
    assert diagnose(HEALTHY).is_healthy


def test_full_send_buffers() -> None:
    slow = replace(path(sndbuf_limited=0.8), rate_bytes_per_s=2 * 0.65 * 4 * MIB / 0.04, width=2)
    diagnosis = diagnose(slow, 5 * GBIT)
    assert diagnosis.stage is Bottleneck.SEND_WINDOW
    wmem = check(diagnosis, "net.ipv4.tcp_wmem")
    # 5 Gbit/s x 40 ms over 2 connections is 12.5 MB of payload in 18.3 MiB of buffer.
    assert wmem.wanted == "32 MiB"
    assert wmem.fix == 'on the sender: sysctl -w net.ipv4.tcp_wmem="4096 16384 33554432"'
    assert check(diagnosis, "net.core.wmem_max").fix.endswith("net.core.wmem_max=16777216")
    assert not check(diagnosis, "net.ipv4.tcp_rmem").is_wrong
    assert "listed" in limit(diagnosis).fix


def test_windows_are_doubled_when_nobody_knows_the_link() -> None:
    slow = replace(path(sndbuf_limited=0.5), rate_bytes_per_s=8 * 0.6 * 4 * MIB / 0.04)
    diagnosis = diagnose(slow)
    assert diagnosis.stage is Bottleneck.SEND_WINDOW
    assert check(diagnosis, "net.ipv4.tcp_wmem").wanted == "8 MiB"
    assert not diagnosis.is_healthy


def test_an_agent_that_may_exceed_the_limits_needs_no_sysctl() -> None:
    kernel = KernelTcp(tcp_wmem_bytes=4 * MIB, wmem_max_bytes=4 * MIB, may_exceed=True)
    diagnosis = diagnose(replace(HEALTHY, sender_kernel=kernel), 5 * GBIT)
    assert not check(diagnosis, "net.ipv4.tcp_wmem").is_wrong


def test_a_send_window_without_a_sysctl_wants_more_connections() -> None:
    kernel = KernelTcp(tcp_wmem_bytes=64 * MIB, tcp_rmem_bytes=128 * MIB)
    slow = replace(
        path(sndbuf_limited=0.5, send_buffer_bytes=64 * MIB),
        rate_bytes_per_s=0.7 * 0.65 * 64 * MIB / 0.04,
        width=1,
        sender_kernel=kernel,
        receiver_kernel=kernel,
    )
    diagnosis = diagnose(slow, 0.9 * 0.65 * 64 * MIB / 0.04)
    assert diagnosis.stage is Bottleneck.SEND_WINDOW
    assert "max_link_connections" in limit(diagnosis).fix


def test_small_receive_windows() -> None:
    small = KernelTcp(tcp_rmem_bytes=MIB)
    slow = replace(
        path(rwnd_limited=0.9),
        rate_bytes_per_s=8 * 0.5 * MIB / 0.04,
        receiver_kernel=small,
    )
    diagnosis = diagnose(slow, GBIT)
    assert diagnosis.stage is Bottleneck.RECEIVE_WINDOW
    rmem = check(diagnosis, "net.ipv4.tcp_rmem")
    assert (rmem.host, rmem.wanted) == ("receiver", "4 MiB")
    assert not check(diagnosis, "net.ipv4.tcp_wmem").is_wrong


def test_a_full_receiver_closes_windows() -> None:
    diagnosis = diagnose(replace(path(rwnd_limited=0.6), receiver=FULL))
    assert diagnosis.stage is Bottleneck.RECEIVER_CPU
    assert diagnosis.is_healthy  # nobody said how fast it should be
    assert not diagnose(replace(path(rwnd_limited=0.6), receiver=FULL), 2 * GBIT).is_healthy


def test_a_receiver_short_of_memory() -> None:
    short = KernelTcp(
        tcp_rmem_bytes=32 * MIB, tcp_memory_bytes=200 * MIB, tcp_memory_pressure_bytes=200 * MIB
    )
    diagnosis = diagnose(replace(path(rwnd_limited=0.6), receiver_kernel=short))
    assert diagnosis.stage is Bottleneck.RECEIVER_MEMORY
    assert "tcp_mem" in limit(diagnosis).fix
    assert not diagnosis.is_healthy


def test_windows_closed_by_something_in_between() -> None:
    diagnosis = diagnose(path(rwnd_limited=0.97))
    assert diagnosis.stage is Bottleneck.LINK
    assert "in between" in diagnosis.evidence
    assert diagnosis.is_healthy


@pytest.mark.parametrize(
    ("sender", "receiver", "stage"),
    [
        (FULL, IDLE, Bottleneck.SENDER_CPU),
        (IDLE, FULL, Bottleneck.RECEIVER_CPU),
        (FULL, replace(FULL, agent_cpus=3.9), Bottleneck.RECEIVER_CPU),
        (FULL, CROWDED, Bottleneck.SENDER_CPU),
        (CROWDED, IDLE, Bottleneck.SENDER_CPU),
        # A crowded host does not matter to an agent that needs next to nothing.
        (replace(IDLE, host_busy=1.0), IDLE, Bottleneck.LINK),
    ],
)
def test_full_hosts(sender: EndLoad, receiver: EndLoad, stage: Bottleneck) -> None:
    assert diagnose(replace(HEALTHY, sender=sender, receiver=receiver)).stage is stage


def test_whose_cpu_it_is() -> None:
    assert "others use" in limit(diagnose(replace(HEALTHY, sender=CROWDED))).fix
    assert "more CPUs" in limit(diagnose(replace(HEALTHY, sender=FULL))).fix


def test_sockets_with_nothing_to_send_wait_for_the_sender() -> None:
    diagnosis = diagnose(path(busy=0.3))
    assert diagnosis.stage is Bottleneck.SENDER_CPU
    assert "nothing to send for 70%" in diagnosis.evidence


def test_loss_with_cubic() -> None:
    kernel = KernelTcp(
        tcp_wmem_bytes=4 * MIB,
        available_congestion=["reno", "cubic"],
        allowed_congestion=["reno", "cubic"],
        slow_start_after_idle=True,
    )
    lossy = replace(path(loss=0.001, congestion=("cubic",)), sender_kernel=kernel)
    diagnosis = diagnose(lossy, GBIT)
    assert diagnosis.stage is Bottleneck.LINK
    assert "0.10% of the bytes" in diagnosis.evidence
    allowed = check(diagnosis, "net.ipv4.tcp_allowed_congestion_control")
    assert allowed.wanted == "reno cubic bbr"
    assert "modprobe tcp_bbr" in allowed.fix
    assert check(diagnosis, "net.ipv4.tcp_slow_start_after_idle").wanted == "0"
    assert not diagnosis.is_healthy


def test_a_near_path_may_use_reno() -> None:
    near = path(rtt_s=2e-4, min_rtt_s=5e-5, congestion=("reno",))
    diagnosis = diagnose(near)
    assert not any(item.is_wrong for item in diagnosis.kernel)
    assert diagnosis.is_healthy


def test_random_loss_is_the_owners_and_overflow_is_our_own() -> None:
    assert not diagnose(path(loss=0.02)).is_healthy
    diagnosis = diagnose(path(loss=0.1, rtt_s=0.08), GBIT)
    assert diagnosis.is_healthy
    assert "queue before the bottleneck is full" in diagnosis.evidence


def test_flow_caps_are_thought_of_when_all_connections_are_in_use() -> None:
    diagnosis = diagnose(replace(HEALTHY, width=16), 5 * GBIT)
    assert "max_link_connections" in limit(diagnosis).fix


def test_what_is_said_beside_the_limit() -> None:
    said = diagnose(
        replace(
            HEALTHY,
            is_rising=True,
            other_bytes_per_s=0.3 * GBIT,
            landing_memory=LandingMemory(1000 * MIB, 10 * MIB),
        )
    )
    texts = [item.what for item in said.findings]
    assert any("still rising" in text for text in texts)
    assert any("other transfers" in text for text in texts)
    assert [item.what for item in said.findings if item.mends] == [
        "the receiver has hardly any memory left for landings"
    ]


def test_unknown_kernels_set_no_limit() -> None:
    unknown = replace(
        path(send_buffer_bytes=0), sender_kernel=KernelTcp(), receiver_kernel=KernelTcp()
    )
    diagnosis = diagnose(unknown)
    assert math.isinf(diagnosis.window_bytes_per_s)
    assert diagnosis.is_healthy
    assert diagnose(unknown, GBIT).expected_bytes_per_s == GBIT
