"""Grants: what a gateway lets a node agent do with KVCache, signed with a key that no agent has.

A role says who may call a method (`transport.access`), a grant that a gateway wanted this very
call. Without TLS everybody who holds the region's key can take any role, and a front that somebody
else has got hold of keeps its own; neither can sign. A grant is an Ed25519 signature (RFC 8032)
over a msgpack body that names one call. The gateway has the private key, agents have public keys:
several while one replaces another. Both are PEM files, read again when they change.

A grant holds for a minute or so of wall-clock time, because agents of two sites share no other
clock. Clocks of a gateway and an agent may differ by `SKEW_S`. It does not know what calls mean,
and only `Granter` reads a clock.
"""

from __future__ import annotations

import os
import secrets
import stat
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
from blake3 import blake3

from transport.errors import LocalError
from transport.region_key import framed
from transport.rotating import Rotating

# Only processes that sign or check grants pay for loading cryptography, in the functions that do.
if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )

GRANT_S: Final = 60.0
"""Life of a grant that is used at once."""
SKEW_S: Final = 60.0
"""How far the wall clocks of a gateway and an agent may be apart."""
MAX_GRANT_BYTES: Final = 4096
"""Far above what a grant has: checking a signature takes time for every byte."""
_SIGNATURE_BYTES: Final = 64
# Keeps a signature from meaning anything elsewhere, should somebody use the key twice.
_CONTEXT: Final = b"prfaas grant 1\0"
_PUBLIC_END: Final = b"-----END PUBLIC KEY-----"


@dataclass(frozen=True, slots=True)
class GrantFile:
    """A key file, the private one or public ones, and the region whose grants it is for."""

    path: Path
    region: str

    @property
    def paths(self) -> tuple[Path, ...]:
        return (self.path,)


class NotGranted(Exception):
    """The call has no grant that allows it; the message is for people."""


# A field that a newer gateway signs may be one more condition: who does not know it must not let
# the call in.
class Granted(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One call of a node agent. Empty fields do not apply to its method.

    `agent`: the agent that is called, named by where it receives KVCache; in a grant: one of these,
    with spaces between them, or "" for any of the region. `endpoint`: where it sends to. `content`:
    which KVCache, as `content_digest`. `nbytes`: how much; in a grant: at most.
    """

    method: str
    agent: str = ""
    endpoint: str = ""
    transfer_id: str = ""
    content: str = ""
    nbytes: int = 0


class Grant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The signed statement. Times are seconds of Unix time; `nonce` tells two grants apart."""

    region: str
    granted: Granted
    begins_s: float
    ends_s: float
    nonce: bytes


_decoder: Final = msgspec.msgpack.Decoder(Grant)


def content_digest(*parts: str | bytes) -> str:
    """BLAKE3 of the framed parts."""
    return blake3(framed(*parts)).hexdigest()


def sign_grant(key: Ed25519PrivateKey, grant: Grant) -> bytes:
    """The grant as it travels: 64 bytes of signature, then what is signed."""
    body = msgspec.msgpack.encode(grant)
    return key.sign(_CONTEXT + body) + body


def read_grant(keys: Sequence[Ed25519PublicKey], raw: bytes, what: str) -> Grant:
    """The grant, if one of the keys has signed it. Raises NotGranted, which says for `what`."""
    if not raw:
        raise NotGranted(f"{what} needs a grant of a gateway, and the call has none")
    if len(raw) > MAX_GRANT_BYTES:
        raise NotGranted(f"{what}: a grant of {len(raw)} bytes; {MAX_GRANT_BYTES} at most")
    from cryptography.exceptions import InvalidSignature

    signature, body = raw[:_SIGNATURE_BYTES], raw[_SIGNATURE_BYTES:]
    for key in keys:
        try:
            key.verify(signature, _CONTEXT + body)
            return _decoder.decode(body)
        except InvalidSignature:
            continue
        except msgspec.MsgspecError as error:
            raise NotGranted(f"{what}: the grant is of another version: {error}") from error
    raise NotGranted(f"{what}: the grant is not signed with a key that this agent knows")


def check_grant(grant: Grant, wanted: Granted, *, region: str, now_s: float) -> None:
    """Raises NotGranted unless the grant allows the call now. `now_s` is Unix time."""
    what, granted = wanted.method, grant.granted
    if grant.region != region:
        raise NotGranted(f"{what}: the grant is of region {grant.region}, not {region}")
    for field in ("method", "agent", "endpoint", "transfer_id", "content"):
        has, needs = getattr(granted, field), getattr(wanted, field)
        if has != needs and not (field == "agent" and (not has or needs in has.split())):
            raise NotGranted(f"{what}: the grant is for {field} {has or 'none'}, not {needs}")
    if wanted.nbytes > granted.nbytes:
        raise NotGranted(
            f"{what}: the grant is for {granted.nbytes} bytes at most, not {wanted.nbytes}"
        )
    if not grant.begins_s - SKEW_S <= now_s <= grant.ends_s + SKEW_S:
        raise NotGranted(
            f"{what}: the grant holds from {grant.begins_s:.0f} to {grant.ends_s:.0f} and it is "
            f"{now_s:.0f} here (Unix time); the clocks of gateway and agent may be {SKEW_S:g} s "
            "apart"
        )


class Granter:
    """Signs the grants of one gateway."""

    def __init__(self, file: GrantFile) -> None:
        """Raises LocalError("granting_key") for a file that cannot be used."""
        self._region = file.region
        self._key = Rotating(file, load_private_key)

    def grant(self, granted: Granted, lifetime_s: float = GRANT_S) -> bytes:
        """A grant that holds from now on."""
        now_s = time.time()
        grant = Grant(
            region=self._region,
            granted=granted,
            begins_s=now_s,
            ends_s=now_s + lifetime_s,
            nonce=secrets.token_bytes(16),
        )
        return sign_grant(self._key.current(time.monotonic()), grant)


def new_key_pair() -> tuple[bytes, bytes]:
    """A private and its public key as PEM files have them."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    public = key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return private, public


def load_private_key(file: GrantFile) -> Ed25519PrivateKey:
    """The gateway's key; LocalError also when others than its owner and group may read the file."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    # The group may read it, as Kubernetes mounts secrets for an fsGroup.
    text = _read(file, "granting_key", forbidden=0o027)
    try:
        key = serialization.load_pem_private_key(text, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise _unusable(file, "granting_key", "it is no unencrypted private key") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise _unusable(file, "granting_key", "its key is not of Ed25519")
    return key


def load_public_keys(file: GrantFile) -> tuple[Ed25519PublicKey, ...]:
    """All keys of an agent's file; LocalError also when others than its owner may change it."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    text = _read(file, "granting_keys", forbidden=0o022)
    keys = []
    *blocks, rest = text.split(_PUBLIC_END)
    if b"-----BEGIN PUBLIC" in rest:
        raise _unusable(file, "granting_keys", "it ends within a key")
    for block in blocks:
        try:
            key = serialization.load_pem_public_key(block.lstrip() + _PUBLIC_END + b"\n")
        except (ValueError, UnsupportedAlgorithm) as error:
            raise _unusable(file, "granting_keys", "it has what is no public key") from error
        if not isinstance(key, Ed25519PublicKey):
            raise _unusable(file, "granting_keys", "one of its keys is not of Ed25519")
        keys.append(key)
    if not keys:
        raise _unusable(file, "granting_keys", "it has no public key")
    return tuple(keys)


def key_digest(key: Ed25519PublicKey) -> str:
    """A name for a public key, for people and to compare."""
    return blake3(key.public_bytes_raw()).hexdigest(8)


def _read(file: GrantFile, code: str, *, forbidden: int) -> bytes:
    try:
        with open(file.path, "rb") as opened:
            mode = stat.S_IMODE(os.fstat(opened.fileno()).st_mode)
            if mode & forbidden:
                raise _unusable(file, code, f"mode {mode:04o} allows others too much; chmod 600")
            return opened.read()
    except OSError as error:
        raise _unusable(file, code, error.strerror or str(error)) from error


def _unusable(file: GrantFile, code: str, reason: str) -> LocalError:
    return LocalError(code, f"cannot use the keys of grants in {file.path}: {reason}")
