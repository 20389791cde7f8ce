"""What the coder of a link tells besides the chunks."""

from __future__ import annotations

import logging

import pytest

from transport.codec.choice import CodecChoice
from transport.codec.coder import RAW_CHUNK, RAW_HOLDS_S, LinkCoder
from transport.config import TransportConfig
from transport.interfaces import Elements
from transport.wire.handshake import own_features


def test_a_change_of_the_codec_is_logged_once_with_its_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = TransportConfig(codec="auto")
    coder = LinkCoder(config, "host:7100")
    views = [memoryview(bytes(1 << 16))]
    with caplog.at_level(logging.DEBUG, "prfaas.transport"):
        for _ in range(3):
            assert coder.encode(views, 0, Elements.BF16, own_features(config)) == RAW_CHUNK
    (message,) = caplog.messages
    assert message.startswith("host:7100: ")
    assert coder.codec_name == "raw"
    assert coder.reason in message


def test_while_it_says_raw_the_chooser_is_asked_again_only_after_news_or_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = TransportConfig(codec="auto")
    coder = LinkCoder(config, "host:7100")
    chooser = coder._chooser
    assert chooser is not None
    asked_s: list[float] = []
    choose = chooser.choose

    def ask(now_s: float) -> CodecChoice:
        asked_s.append(now_s)
        return choose(now_s)

    monkeypatch.setattr(chooser, "choose", ask)
    clock = [100.0]
    monkeypatch.setattr("transport.codec.coder.time.monotonic", lambda: clock[0])
    views = [memoryview(bytes(1 << 16))]

    def encode() -> int:
        coder.encode(views, 0, Elements.BF16, own_features(config))
        return len(asked_s)

    assert encode() == 1
    coder._ask_s = 100.0 + RAW_HOLDS_S  # whether or not a first sample was taken
    assert encode() == 1
    coder.tick(is_backlogged=True, num_lanes=1, now_s=100.0)
    assert encode() == 2
    clock[0] += RAW_HOLDS_S
    assert encode() == 3
