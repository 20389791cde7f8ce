"""One link of a sender, without sockets: whoever waits for acknowledgements hears of the end."""

import itertools
import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from transport import Endpoint, OutgoingSpec, TransportConfig, TransportError
from transport.sending import sender_link as module
from transport.sending.lane import Lane
from transport.sending.sender_link import SenderLink

SPEC = OutgoingSpec(b"i" * 16, b"t" * 32, b"f" * 32, Endpoint("192.0.2.1", 1))
LONG_S = 60.0
"""Far more than the test takes: a wait that lasts so long was not woken."""


class IdleLane:
    """Stands for a lane that never connects."""

    def __init__(self, link: SenderLink, index: int) -> None: ...

    def run(self) -> None: ...


class Space:
    nbytes = 100

    def views(self, offset: int, length: int) -> list[memoryview]:
        raise AssertionError("nothing is sent")


class Listener:
    def __init__(self) -> None:
        self.errors: list[str] = []

    def on_complete(self, transfer_id: bytes) -> None:
        raise AssertionError("nothing was sent")

    def on_failed(self, transfer_id: bytes, error: TransportError) -> None:
        self.errors.append(error.code)


class TellingCondition(threading.Condition):
    """Says when somebody sleeps in it: the lock is free again only once he does."""

    def __init__(self, lock: Any) -> None:
        super().__init__(lock)
        self.someone_sleeps = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.someone_sleeps.set()
        return super().wait(timeout)


def refuse(link: SenderLink, connection: int) -> None:
    """The receiver answered this connection that it speaks another version."""
    link.ended(connection, TransportError("version", "speaks another version"), in_handshake=True)


@pytest.mark.parametrize("what_ends_it", ["timeout", "cancel", "wrong release"])
def test_waiting_for_acknowledgements_ends_with_the_transfer(
    what_ends_it: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "Lane", IdleLane)
    config = TransportConfig(num_connections=1)
    link = SenderLink(
        SPEC.endpoint, config, None, instance=b"", numbers=itertools.count(), stir=lambda: None
    )
    sleepers = TellingCondition(link.lock)
    link._acked = sleepers
    listener = Listener()
    transfer = link.open(SPEC, Space(), listener)
    answers: list[bool] = []
    waiting = threading.Thread(
        target=lambda: answers.append(link.wait_acked(transfer, 1, LONG_S)), daemon=True
    )
    waiting.start()
    assert sleepers.someone_sleeps.wait(5)
    match what_ends_it:
        case "timeout":
            link.tick(time.monotonic() + config.idle_timeout_s + 1)
        case "cancel":
            link.cancel(transfer, "not wanted any more")
            link.tick(time.monotonic())  # as the watchdog does when it is stirred
        case _:
            refuse(link, link.begin(Lane(link)))
    waiting.join(5)
    assert answers == [False]
    assert len(listener.errors) == 1


def test_a_refusal_ends_what_was_open_when_its_connection_was_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "Lane", IdleLane)
    config = TransportConfig(num_connections=2)
    link = SenderLink(
        SPEC.endpoint, config, None, instance=b"", numbers=itertools.count(), stir=lambda: None
    )
    early, late = Listener(), Listener()
    link.open(SPEC, Space(), early)
    one, two = (link.begin(Lane(link)) for _ in range(2))
    refuse(link, one)
    assert early.errors == ["version"]
    link.open(replace(SPEC, transfer_id=b"2" * 16), Space(), late)  # the receiver was replaced
    refuse(link, two)
    assert late.errors == []
    refuse(link, link.begin(Lane(link)))
    assert late.errors == ["version"]


def test_a_closed_link_starts_no_more_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Lane", IdleLane)
    config = TransportConfig(num_connections=1)
    link = SenderLink(
        SPEC.endpoint, config, None, instance=b"", numbers=itertools.count(), stir=lambda: None
    )
    link.close()
    assert link.join(time.monotonic() + LONG_S)
    link._meter._tuner.width = 4  # as the tuner may find just now
    link.tune(time.monotonic())
    assert len(link._threads) == 1
