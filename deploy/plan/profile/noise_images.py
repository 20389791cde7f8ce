"""Images of random pixels for measurements, as data URIs: no cache has ever seen one."""

from __future__ import annotations

import base64
import random
import struct
import zlib


def noise_uri(side: int, rng: random.Random) -> str:
    """A square PNG of `side` by `side` random pixels."""
    # Each line begins with its filter, 0: none.
    rows = b"".join(b"\0" + rng.randbytes(3 * side) for _ in range(side))
    header = struct.pack(">2I5B", side, side, 8, 2, 0, 0, 0)
    # Noise does not get smaller, so the fastest level is as good as any.
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(rows, 1)), (b"IEND", b""))
    png = b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in parts)
    return "data:image/png;base64," + base64.b64encode(png).decode()


def _chunk(kind: bytes, data: bytes) -> bytes:
    checksum = zlib.crc32(kind + data)
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", checksum)
