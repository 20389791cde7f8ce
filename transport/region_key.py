"""The key of a region, for calls between processes without TLS: its file, what it signs, and the
challenges that keep a signed call from being played again.

A caller signs the method, the body, its own name, a nonce of its own and a challenge of the server.
The server signs its answer over the same nonce, so that both ends know the other. A challenge is of
one server process and lives for a minute of that process's clock: clocks of different hosts need
not agree, and a call that was overheard is good for no other server. It hides nothing: whoever can
listen reads what is said, tokens of transfers included. It knows no gRPC.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import stat
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from blake3 import blake3

from transport.config import TlsFiles
from transport.errors import LocalError
from transport.identity import Identity

KEY_BYTES: Final = 32
CHALLENGE_S: Final = 60.0
"""A challenge is handed out for this long, and accepted for as long again."""
MAX_NONCES: Final = 1 << 16
"""Calls after which a challenge is replaced early: bounds the memory for their nonces."""
_LINE: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class RegionKey:
    """Credentials of a process without TLS: its identity, and the file of keys that proves it."""

    path: Path
    identity: Identity

    @property
    def paths(self) -> tuple[Path, ...]:
        return (self.path,)


Credentials = TlsFiles | RegionKey
"""With these a process proves who it is, and checks who others are."""


def new_key() -> str:
    """A line of a key file."""
    return secrets.token_hex(KEY_BYTES)


def parse_keys(text: str) -> tuple[bytes, ...]:
    """The keys of a file's text: one a line, 64 hex digits; `#` begins a comment. The first signs,
    all are accepted. ValueError names the line, never what is in it.
    """
    keys = []
    for number, line in enumerate(text.splitlines(), 1):
        word = line.split("#")[0].strip()
        if not word:
            continue
        if _LINE.fullmatch(word) is None:
            raise ValueError(f"line {number} is not a key of 64 hex digits (openssl rand -hex 32)")
        keys.append(bytes.fromhex(word))
    if not keys:
        raise ValueError("it has no key; write one with: openssl rand -hex 32")
    return tuple(keys)


def load_keys(key: RegionKey) -> tuple[bytes, ...]:
    """Read the key file; LocalError("region_key") also when others than its group may read it."""
    try:
        with open(key.path, encoding="ascii") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if mode & 0o027:  # group may read, as Kubernetes mounts secrets for an fsGroup
                message = f"mode {mode:04o} lets others read or its group write; chmod 600"
                raise ValueError(message)
            return parse_keys(file.read())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise LocalError("region_key", f"cannot use the region key {key.path}: {reason}") from error


def framed(*parts: str | bytes) -> bytes:
    """The parts, each behind its length in 8 bytes: no two lists of parts give the same."""
    data = (part.encode() if isinstance(part, str) else part for part in parts)
    return b"".join(len(part).to_bytes(8, "little") + part for part in data)


def signature(key: bytes, *parts: str | bytes) -> str:
    """HMAC-SHA256 over the framed parts."""
    return hmac.new(key, framed(*parts), hashlib.sha256).hexdigest()


def is_signed(keys: Sequence[bytes], mac: str, *parts: str | bytes) -> bool:
    """Whether any of the keys signed the parts."""
    given = mac.encode("utf-8", "replace")
    return any(hmac.compare_digest(signature(key, *parts).encode(), given) for key in keys)


@dataclass(frozen=True, slots=True)
class Proof:
    """A signed message carries this beside its body. `body` is the body's digest: a server knows
    who calls before it takes a byte of the body.
    """

    identity: Identity
    challenge: str
    nonce: str
    body: str
    mac: str

    def __str__(self) -> str:
        return " ".join((str(self.identity), self.challenge, self.nonce, self.body, self.mac))

    @classmethod
    def parse(cls, text: str) -> Proof:
        """ValueError for anything else than what `str` makes."""
        parts = text.split(" ")
        if len(parts) != 5 or not all(parts) or len(text) > 1024:
            raise ValueError("not a proof")
        uri, challenge, nonce, body, mac = parts
        return cls(Identity.parse(uri), challenge, nonce, body, mac)

    def is_of(self, body: bytes) -> bool:
        """Whether this is the body that was signed, if the proof holds."""
        return self.body == _digest(body)


def call_proof(key: bytes, identity: Identity, challenge: str, method: str, body: bytes) -> Proof:
    """The proof of a call, with a nonce of its own."""
    nonce = secrets.token_hex(16)
    return _signed(key, "call", method, Proof(identity, challenge, nonce, _digest(body), mac=""))


def is_call_proof(keys: Sequence[bytes], proof: Proof, method: str) -> bool:
    """Whether a call of this method has this proof; `Proof.is_of` tells whether of this body."""
    return is_signed(keys, proof.mac, *_parts("call", method, proof))


def answer_proof(
    key: bytes, identity: Identity, challenge: str, nonce: str, code: str, body: bytes
) -> Proof:
    """The proof of the answer to the call with this nonce; `challenge` is for the next call."""
    return _signed(key, "answer", code, Proof(identity, challenge, nonce, _digest(body), mac=""))


def is_answer_proof(
    keys: Sequence[bytes], proof: Proof, nonce: str, code: str, body: bytes
) -> bool:
    return (
        proof.nonce == nonce
        and is_signed(keys, proof.mac, *_parts("answer", code, proof))
        and proof.is_of(body)
    )


def _signed(key: bytes, kind: str, what: str, proof: Proof) -> Proof:
    return replace(proof, mac=signature(key, *_parts(kind, what, proof)))


def _parts(kind: str, what: str, proof: Proof) -> tuple[str, ...]:
    return (kind, str(proof.identity), proof.challenge, proof.nonce, what, proof.body)


def _digest(body: bytes) -> str:
    return blake3(body).hexdigest()


class Challenges:
    """The challenges of one server, and the nonces of the calls that used them. Time is passed in.

    Only calls whose signature holds may be noted, so that unauthenticated peers take no memory.
    """

    def __init__(self, now_s: float) -> None:
        self._present = secrets.token_hex(16)
        self._since_s = now_s
        self._used: dict[str, set[str]] = {self._present: set()}

    def current(self, now_s: float) -> str:
        """The challenge for a call that is made now."""
        is_full = len(self._used[self._present]) >= MAX_NONCES
        if is_full or now_s - self._since_s >= CHALLENGE_S:
            before, self._present = self._present, secrets.token_hex(16)
            kept = {before: self._used[before]} if now_s - self._since_s < 2 * CHALLENGE_S else {}
            self._used = kept | {self._present: set()}
            self._since_s = now_s
        return self._present

    def is_known(self, challenge: str, now_s: float) -> bool:
        """Whether it is one of the two last ones."""
        self.current(now_s)
        return challenge in self._used

    def is_unused(self, challenge: str, nonce: str) -> bool:
        """False: the nonce was used before, or the challenge is gone."""
        used = self._used.get(challenge)
        return used is not None and nonce not in used and len(used) < 2 * MAX_NONCES

    def note(self, challenge: str, nonce: str) -> bool:
        """Use a nonce; False, and nothing is noted, unless it is unused."""
        if not self.is_unused(challenge, nonce):
            return False
        self._used[challenge].add(nonce)
        return True
