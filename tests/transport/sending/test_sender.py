"""A sender's links over time, with links that stand for those with sockets."""

from __future__ import annotations

import math
from typing import Any

import pytest

from transport import Endpoint, TransportConfig
from transport.sending import sender as module
from transport.sending.sender import Sender

ENDPOINT = Endpoint("192.0.2.1", 1)


class StubbornLink:
    """An idle link whose threads end when `ends` says so."""

    has_transfers = False
    is_active = False
    idle_since_s = math.inf

    def __init__(self, endpoint: Endpoint, *_: Any, **__: Any) -> None:
        self.endpoint = endpoint
        self.ends = False
        self.num_closed = 0
        self.num_joined = 0

    def warm(self) -> None: ...

    def tick(self, now_s: float) -> None: ...

    def close(self) -> None:
        self.num_closed += 1

    def join(self, deadline_s: float) -> bool:
        self.num_joined += 1
        return self.ends


def test_threads_of_a_link_that_was_idle_for_long_are_waited_for_in_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "SenderLink", StubbornLink)
    sender = Sender(TransportConfig(link_idle_timeout_s=1.0))
    sender.warm(ENDPOINT)
    link: Any = sender._links[ENDPOINT]
    link.idle_since_s = 0.0
    sender._retire(link, 2.0)
    assert sender.link_activity() == {}
    assert link.num_closed == 1
    sender.close(timeout_s=0.1)
    assert link.num_joined > 0
    assert "did not end" in caplog.text


def test_a_retired_link_whose_threads_have_ended_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "SenderLink", StubbornLink)
    sender = Sender(TransportConfig(link_idle_timeout_s=1.0))
    links = []
    for _ in range(2):
        sender.warm(ENDPOINT)
        link: Any = sender._links[ENDPOINT]
        links.append(link)
        link.idle_since_s = 0.0
        sender._retire(link, 2.0)
        link.ends = True
    assert sender._retired == [links[1]]
    sender.close()
