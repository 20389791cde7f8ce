"""Digests of token sequences: what says that two processes speak of the same prompt.

Knows nothing of blocks, models or tenants.
"""

from collections.abc import Sequence

import numpy as np
from blake3 import blake3


def token_digest(token_ids: Sequence[int]) -> bytes:
    """BLAKE3 of the token ids as little-endian unsigned 32-bit integers, 32 bytes.

    Raises `ValueError` for an id that is negative or does not fit 32 bits.
    """
    ids = np.asarray(token_ids, dtype=np.int64)
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) > 0xFFFFFFFF):
        raise ValueError(
            f"token ids must lie in [0, 2**32), got {int(ids.min())}..{int(ids.max())}"
        )
    return blake3(ids.astype("<u4").tobytes()).digest()
