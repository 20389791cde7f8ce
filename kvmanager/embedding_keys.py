"""The keys of embeddings, for whoever puts them, finds them or asks who has them.

An embedding is the encoder's output of one image or other medium. It knows neither vLLM nor where
embeddings lie.
"""

from __future__ import annotations

from blake3 import blake3

from kvmanager.hashing import KEY_BYTES


def embedding_key(encoder: str, identifier: str) -> bytes:
    """The key of a medium's embedding. `encoder` names the weights and all else that the bytes
    depend on, `identifier` is vLLM's hash of the medium and of how it is processed, or the name
    (`uuid`) that it was sent with.
    """
    digest = blake3(f"{len(encoder)}:{encoder}:{identifier}".encode())
    return digest.digest(KEY_BYTES)
