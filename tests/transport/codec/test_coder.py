"""What the coder of a link tells besides the chunks."""

from __future__ import annotations

import logging

import pytest

from transport.codec.coder import RAW_CHUNK, LinkCoder
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
