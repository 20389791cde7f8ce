"""Versions and limits two peers agree on."""

from __future__ import annotations

import pytest

from transport import PeerError
from transport.codec.codecs import Codec
from transport.config import TransportConfig
from transport.wire.frames import HEADER_BYTES, FrameType
from transport.wire.handshake import (
    VERSION,
    Hello,
    check_version,
    decode_hello,
    own_features,
    own_hello,
    takes_codec,
)


def test_hello_round_trips_and_may_grow() -> None:
    hello = own_hello(b"i" * 16, 4096)
    body = hello.encode(FrameType.HELLO)[HEADER_BYTES:]
    assert decode_hello(body) == hello
    assert decode_hello(body + b"from the future") == hello


@pytest.mark.parametrize("body", [b"", b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n" * 3, bytes(60)])
def test_another_protocol_is_recognised(body: bytes) -> None:
    with pytest.raises(PeerError) as caught:
        decode_hello(body)
    assert caught.value.code == "not_prfaas"


def test_contradictions_are_refused() -> None:
    body = Hello(3, 2, 4096, 0, bytes(16)).encode(FrameType.HELLO)[HEADER_BYTES:]
    with pytest.raises(PeerError):
        decode_hello(body)


def test_another_version_is_named_in_words() -> None:
    with pytest.raises(
        PeerError, match=f"the receiver speaks version 90 to 91, this side speaks {VERSION}"
    ):
        check_version(Hello(90, 91, 1, 0, bytes(16)), "receiver")


def test_the_lossy_codec_is_taken_only_by_name() -> None:
    assert not any(takes_codec(TransportConfig(codec="none"), codec) for codec in Codec)
    auto = TransportConfig(codec="auto")
    assert {codec for codec in Codec if takes_codec(auto, codec)} == set(Codec) - {
        Codec.RAW,
        Codec.FP8,
    }
    assert takes_codec(TransportConfig(codec="fp8"), Codec.FP8)
    assert not takes_codec(TransportConfig(codec="fp8"), 15)


def test_features_follow_the_configuration() -> None:
    assert own_features(TransportConfig(codec="none")) == 0
    assert own_features(TransportConfig(codec="none", checksum=False)) == 1
    assert own_features(TransportConfig(codec="fp8")) == 0b111110 << 8
