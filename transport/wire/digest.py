"""The digest of a whole transfer. Knows nothing but bytes."""

from __future__ import annotations

from blake3 import blake3

from transport.interfaces import ByteSpace

PIECE_BYTES = 1024 * 1024


def digest_of(space: ByteSpace) -> bytes:
    """BLAKE3 (32 bytes) of all bytes of `space` in order; about 5 GB/s on one core."""
    state = blake3()
    for start in range(0, space.nbytes, PIECE_BYTES):
        for view in space.views(start, min(PIECE_BYTES, space.nbytes - start)):
            state.update(view)
    return state.digest()
