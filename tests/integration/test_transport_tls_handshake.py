"""A TLS handshake of the data plane that is damaged, cut off or silent anywhere is made again, and
the transfer that waits for it goes on. Certificates that are refused are in test_transport_tls.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace

import pytest
from fault_settings import FAULT_CONFIG
from transport_loopback import FaultRig, Phase, eventually

from transport import TlsFiles

pytestmark = pytest.mark.alone

CONFIG = replace(FAULT_CONFIG, num_connections=1, autotune=False)
SHARES = [0.01, 0.25, 0.5, 0.75, 0.99]
"""How far the handshake has come in one direction; the greetings of our protocol come last."""


class Interruption:
    """The treatment, by a proxy, of byte number `position` in one direction: flips a bit of it, or
    loses it and all that follows, until `ends`.
    """

    def __init__(self, position: int, *, forward: bool, flips: bool) -> None:
        self.struck = threading.Event()
        self.ends = threading.Event()
        self._left = position
        self._forward = forward
        self._flips = flips

    def __call__(self, data: bytes, is_forward: bool) -> bytes:
        if self.ends.is_set():
            return data
        if self.struck.is_set():
            return data if self._flips else b""
        if is_forward is not self._forward:
            return data
        if self._left >= len(data):
            self._left -= len(data)
            return data
        self.struck.set()
        if not self._flips:
            return data[: self._left]
        hurt = bytearray(data)
        hurt[self._left] ^= 0x10
        return bytes(hurt)


def cut_off(rig: FaultRig) -> None:
    rig.proxy.cut()


def fall_silent(rig: FaultRig) -> None:
    rig.proxy.vanish()


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("forward", [True, False], ids=["to_receiver", "to_sender"])
@pytest.mark.parametrize("strike", [None, cut_off, fall_silent])
def test_a_handshake_that_fails_on_its_way_is_made_again(
    node_files: TlsFiles, strike: Callable[[FaultRig], None] | None, forward: bool, share: float
) -> None:
    """Without `strike` a bit flips: TLS says then what it says of a wrong peer."""
    with closing(FaultRig(replace(CONFIG, tls=node_files))) as rig:
        num_bytes = Counter[bool]()

        def count(data: bytes, is_forward: bool) -> bytes:
            num_bytes[is_forward] += len(data)
            return data

        rig.proxy.damage = count
        rig.bring_to(Phase.BEFORE)
        position = int(num_bytes[forward] * share)
        interruption = Interruption(position, forward=forward, flips=strike is None)
        rig.proxy.damage = interruption
        rig.proxy.reset()
        rig.go_on()
        eventually(interruption.struck.is_set)
        if strike is not None:
            strike(rig)
        interruption.ends.set()
        assert rig.outcome(CONFIG.idle_timeout_s + 1) is None
        rig.check_usable()
        rig.check_left_nothing()
