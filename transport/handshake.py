"""Version and limits that two peers agree on before anything else. Knows no transfer and no socket.

The layout of HELLO and WELCOME, and of the 48-byte header in front of them, never changes: this is
what lets an incompatible peer be told so in words. Version history is kept in WIRE.md.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from transport.errors import PeerError
from transport.frames import FrameType, encode_frame

MAGIC = b"PrfaaSkv"
VERSION = 1
"""The version this build speaks; it speaks no older one."""
FEATURES = 0
"""Optional features this build knows; both sides use the intersection."""

_HELLO = struct.Struct("<8sHHIQ16s")


@dataclass(frozen=True, slots=True)
class Hello:
    """What one side says about itself; the sender's is HELLO, the receiver's answer WELCOME."""

    version_min: int
    version_max: int
    max_frame_bytes: int
    """Largest DATA body this side takes."""
    features: int
    instance: bytes
    """16 random bytes of this process; a receiver that restarted has other ones."""

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


def own_hello(instance: bytes, max_frame_bytes: int) -> Hello:
    return Hello(VERSION, VERSION, max_frame_bytes, FEATURES, instance)


def decode_hello(body: bytes) -> Hello:
    """Parse a HELLO or WELCOME body; later versions may append to it. PeerError when malformed."""
    if len(body) < _HELLO.size or body[: len(MAGIC)] != MAGIC:
        raise PeerError("not_prfaas", "the peer does not speak the PrfaaS transport")
    _, version_min, version_max, max_frame_bytes, features, instance = _HELLO.unpack_from(body)
    if version_min > version_max or max_frame_bytes < 1:
        raise PeerError("protocol", "HELLO contradicts itself")
    return Hello(version_min, version_max, max_frame_bytes, features, instance)


def check_version(peer: Hello, who: str) -> None:
    """Raise PeerError("version") in words for both operators unless VERSION is spoken by `peer`."""
    if peer.version_min <= VERSION <= peer.version_max:
        return
    theirs = f"{peer.version_min}"
    if peer.version_max != peer.version_min:
        theirs += f" to {peer.version_max}"
    raise PeerError(
        "version",
        f"transport version mismatch: the {who} speaks version {theirs}, this side speaks "
        f"{VERSION}; run the same release of prfaas on both sides",
    )
