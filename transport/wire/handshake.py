"""The handshake: two peers agree on a version and limits. Knows no transfer and no socket.

The layout of HELLO and WELCOME, and of the 48-byte header in front of them, never changes, so that
peers of different versions can still tell each other so in words. WIRE.md has the versions.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntFlag
from typing import Final

from transport.codec.codecs import Codec
from transport.config import TransportConfig
from transport.errors import PeerError
from transport.versions import NoCommonVersion, Versions
from transport.wire.frames import FrameType, encode_frame

MAGIC = b"PrfaaSkv"
VERSIONS: Final = Versions(oldest=2, newest=2)
"""The versions that this build speaks."""
VERSION: Final = VERSIONS.newest


class Feature(IntFlag):
    """Optional features. Both sides use those that both have. Bits 8 to 23 are codecs, by value."""

    NO_SUM = 1
    """DATA frames may go without a checksum."""


def codec_feature(codec: int) -> int:
    """The feature bit that allows DATA in this codec."""
    return 1 << (8 + codec)


def takes_codec(config: TransportConfig, codec: int) -> bool:
    """Whether this side decodes `codec`. It takes lossless codecs unless coding is off, and the
    lossy one only when the configuration names it.
    """
    if codec not in set(Codec) or codec == Codec.RAW or config.codec == "none":
        return False
    return Codec(codec).is_lossless or config.codec == "fp8"


def own_features(config: TransportConfig) -> int:
    """The feature bits of this side's configuration."""
    features = 0 if config.checksum else int(Feature.NO_SUM)
    for codec in Codec:
        if takes_codec(config, codec):
            features |= codec_feature(codec)
    return features


_HELLO = struct.Struct("<8sHHIQ16s")


@dataclass(frozen=True, slots=True)
class Hello:
    """What one side says about itself: the sender in HELLO, the receiver in WELCOME."""

    version_min: int
    version_max: int
    max_frame_bytes: int
    """Largest DATA body this side takes."""
    features: int
    instance: bytes
    """16 random bytes of this process, by which a sender notices that a receiver restarted, and a
    receiver which connections are of one sender.
    """

    def encode(self, kind: FrameType) -> bytes:
        body = _HELLO.pack(
            MAGIC,
            self.version_min,
            self.version_max,
            self.max_frame_bytes,
            self.features,
            self.instance,
        )
        return encode_frame(kind, body=body)


def own_hello(instance: bytes, max_frame_bytes: int, features: int = 0) -> Hello:
    return Hello(VERSIONS.oldest, VERSIONS.newest, max_frame_bytes, features, instance)


def decode_hello(body: bytes) -> Hello:
    """Parse a HELLO or WELCOME body; later versions may append to it. PeerError when malformed."""
    if len(body) < _HELLO.size or body[: len(MAGIC)] != MAGIC:
        raise PeerError("not_prfaas", "the peer does not speak the PrfaaS transport")
    _, version_min, version_max, max_frame_bytes, features, instance = _HELLO.unpack_from(body)
    if version_min > version_max or max_frame_bytes < 1:
        raise PeerError("protocol", "HELLO contradicts itself")
    return Hello(version_min, version_max, max_frame_bytes, features, instance)


def check_version(peer: Hello, who: str) -> None:
    """Raise PeerError("version"), in words for operators of both sides, unless both sides speak one
    version.
    """
    try:
        VERSIONS.common(Versions(peer.version_min, peer.version_max), who)
    except NoCommonVersion as error:
        raise PeerError("version", f"transport version mismatch: {error}") from error
