"""Each fault of the link at each point of a transfer's life: exact bytes or a clean failure in
time, a usable link afterwards, and nothing left behind.

Over TLS the faults are tried that its records or its handshake notice: bytes that are lost, cut
off, late or damaged. Connections that overtake each other, are half gone or are refused look the
same with and without TLS. Faults within a handshake are in test_transport_tls_handshake.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace

import pytest
from fault_settings import FAULT_CONFIG as CONFIG
from fault_settings import matrix
from transport_loopback import FaultRig, Phase, eventually

from transport import LinkError, LocalError, TlsFiles

pytestmark = pytest.mark.alone

KIB = 1024
IMPATIENT = replace(CONFIG, idle_timeout_s=0.8)
LONGER_THAN_ACK_TIMEOUT_S = 1.5 * CONFIG.ack_timeout_s


@pytest.fixture
def rig(request: pytest.FixtureRequest, node_files: TlsFiles) -> Iterator[FaultRig]:
    """Over TLS where a test's parameter says so."""
    with closing(FaultRig(replace(CONFIG, tls=node_files if request.param else None))) as rig:
        yield rig


def flip_one_bit(*, forward: bool) -> Callable[[bytes, bool], bytes]:
    """Damage to a byte in the middle of what passes next in one direction, once."""
    lock = threading.Lock()
    todo = [forward]

    def damage(data: bytes, is_forward: bool) -> bytes:
        with lock:
            if is_forward not in todo:
                return data
            todo.clear()
        hurt = bytearray(data)
        hurt[len(hurt) // 2] ^= 0x10
        return bytes(hurt)

    return damage


# A fault strikes when the rig is in the phase asked for, and lets the transfer go on.


def reset(rig: FaultRig) -> None:
    rig.proxy.reset()
    rig.go_on()
    rig.proxy.resume()


def cut(rig: FaultRig) -> None:
    rig.proxy.cut()
    rig.go_on()
    rig.proxy.resume()


def stall(rig: FaultRig) -> None:
    """Longer than the sender waits for acknowledgements: what it sends again meets the first
    copies.
    """
    rig.proxy.stall()
    rig.go_on()
    time.sleep(LONGER_THAN_ACK_TIMEOUT_S)
    rig.proxy.resume()


def black_hole(rig: FaultRig) -> None:
    rig.proxy.swallow()
    rig.go_on()
    rig.proxy.resume()
    time.sleep(LONGER_THAN_ACK_TIMEOUT_S)
    rig.proxy.heal()


def flap(rig: FaultRig) -> None:
    rig.proxy.bytes_per_read = 1000
    rig.go_on()
    rig.proxy.resume()
    for _ in range(5):
        rig.proxy.cut()
        time.sleep(0.1)


def corrupt_forward(rig: FaultRig) -> None:
    rig.proxy.damage = flip_one_bit(forward=True)
    rig.go_on()
    rig.proxy.resume()


def corrupt_backward(rig: FaultRig) -> None:
    rig.proxy.damage = flip_one_bit(forward=False)
    rig.go_on()
    rig.proxy.resume()


def reorder(rig: FaultRig) -> None:
    rig.proxy.bytes_per_read = 20_000
    rig.proxy.delay_s = lambda connection, is_forward: 0.02 * ((connection + is_forward) % 3)
    rig.go_on()
    rig.proxy.resume()


def half_open_receiver(rig: FaultRig) -> None:
    """The receiver's host forgot its connections: what is sent to it vanishes."""
    rig.proxy.vanish("forward")
    rig.go_on()
    rig.proxy.resume()


def half_open_sender(rig: FaultRig) -> None:
    """What the receiver says on the connections of now vanishes, even that they end."""
    rig.proxy.vanish("backward")
    rig.go_on()
    rig.proxy.resume()


NOTICED_BY_TLS = [reset, cut, stall, black_hole, flap, corrupt_forward, corrupt_backward]


@matrix(plain=[*NOTICED_BY_TLS, reorder, half_open_receiver, half_open_sender], tls=NOTICED_BY_TLS)
def test_the_bytes_arrive_all_the_same(
    rig: FaultRig, strike: Callable[[FaultRig], None], phase: Phase
) -> None:
    rig.bring_to(phase)
    strike(rig)
    assert rig.outcome(CONFIG.idle_timeout_s + 1) is None
    rig.proxy.heal()
    rig.check_usable()
    rig.check_left_nothing()


@pytest.mark.parametrize("has_tls", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("phase", Phase, ids=lambda phase: f"black_hole_for_good-{phase}")
def test_a_lasting_black_hole_fails_both_ends_in_time(
    phase: Phase, has_tls: bool, node_files: TlsFiles
) -> None:
    with closing(FaultRig(replace(IMPATIENT, tls=node_files if has_tls else None))) as rig:
        rig.bring_to(phase)
        rig.proxy.swallow()
        begin_s = time.monotonic()
        rig.go_on()
        rig.proxy.resume()
        error = rig.outcome(IMPATIENT.idle_timeout_s + 2)
        assert time.monotonic() - begin_s < IMPATIENT.idle_timeout_s + 1
        assert isinstance(error, LinkError)
        assert error.code in ("unreachable", "idle")
        rig.proxy.heal()
        rig.check_usable()
        if phase in (Phase.DURING, Phase.LAST_FRAME):
            told = rig.pair.registry.wait(rig.transfer_id, IMPATIENT.idle_timeout_s + 2)
            assert isinstance(told, LinkError)
            assert told.code == "idle"
        rig.check_left_nothing()


@pytest.mark.parametrize("phase", Phase, ids=lambda phase: f"receiver_gone-{phase}")
def test_a_receiver_that_refuses_connections_fails_the_transfer_in_time(phase: Phase) -> None:
    with closing(FaultRig(IMPATIENT)) as rig:
        rig.bring_to(phase)
        rig.proxy.stall()
        rig.pair.receiver.close()
        rig.proxy.reset()  # with the farewell in it
        begin_s = time.monotonic()
        rig.go_on()
        rig.proxy.resume()
        error = rig.outcome(IMPATIENT.idle_timeout_s + 2)
        assert time.monotonic() - begin_s < IMPATIENT.idle_timeout_s + 1
        assert isinstance(error, LinkError)
        assert error.code == "unreachable"
        rig.restart_receiver()
        rig.check_usable()
        rig.check_left_nothing()


def test_connections_that_died_together_are_not_tried_one_after_the_other() -> None:
    """The timeouts have the proportions of the defaults: three dead connections in a row would be
    the end of a transfer that one new connection could carry.
    """
    config = replace(
        CONFIG,
        num_connections=8,
        idle_timeout_s=3 * CONFIG.ack_timeout_s,
        reconnect_first_s=0.5 * CONFIG.ack_timeout_s,  # the new one comes after the next attempt
    )
    with closing(FaultRig(config)) as rig:
        rig.bring_to(Phase.LAST_FRAME)
        half_open_receiver(rig)
        assert rig.outcome(config.idle_timeout_s + 2) is None
        rig.check_usable()
        rig.check_left_nothing()


def test_an_open_that_arrives_after_the_sender_gave_up_holds_no_memory() -> None:
    """The connection outlives the transfer; its sender never sends anything about it again."""
    with closing(FaultRig(IMPATIENT)) as rig:
        rig.bring_to(Phase.BEFORE)
        rig.proxy.stall()
        rig.pair.sender.open(rig.spec, rig.source, rig.pair.listener)  # and nothing is ready
        assert isinstance(rig.outcome(IMPATIENT.idle_timeout_s + 1), LinkError)
        rig.proxy.resume()
        rig.check_usable()
        if rig.pair.registry.num_asked > 1:
            told = rig.pair.registry.wait(rig.transfer_id, IMPATIENT.idle_timeout_s + 1)
            assert told is not None
        rig.check_left_nothing()


def test_a_cancel_that_is_lost_is_not_the_last_word() -> None:
    """The sender gives up waiting for an answer to it. Then it must not keep any connection open on
    which the receiver would wait for the rest.
    """
    # Of several, one that got no frame of the transfer was never told of it, and rightly stays.
    with closing(FaultRig(replace(IMPATIENT, num_connections=1, autotune=False))) as rig:
        rig.bring_to(Phase.DURING)
        assert rig.handle is not None
        rig.handle.cancel("no longer wanted")
        error = rig.outcome(CONFIG.ack_timeout_s + 2)
        assert isinstance(error, LocalError)
        assert error.code == "cancelled"
        # In any case the kernel gives up on it, after about 20 s.
        eventually(lambda: rig.pair.sender.num_connections(rig.proxy.endpoint) == 0, 10.0)
        rig.proxy.cut()
        rig.proxy.resume()
        told = rig.pair.registry.wait(rig.transfer_id, IMPATIENT.idle_timeout_s + 2)
        assert isinstance(told, LinkError)
        assert told.code == "idle"
        rig.check_usable()
        rig.check_left_nothing()
