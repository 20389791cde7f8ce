"""Who may call and who answers, on the two ends of a gRPC connection (`transport.rpc`).

With TLS the certificates name both ends; without, each call and answer is signed with the region's
key. What a role may do is said by `transport.access`. It knows no handler and opens no channel.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import grpc

from transport.access import ACCESS, callers_of
from transport.addresses import dial
from transport.config import TlsFiles
from transport.endpoint import Endpoint
from transport.errors import LocalError
from transport.identity import (
    ROLES,
    Identity,
    certificate_identities,
    identities_of,
    refusal,
)
from transport.region_key import (
    Challenges,
    Credentials,
    Proof,
    RegionKey,
    answer_proof,
    call_proof,
    is_answer_proof,
    is_call_proof,
    load_keys,
)
from transport.rotating import Rotating
from transport.tls import RegionTls, client_context, client_tls, server_context, server_tls

Metadata = tuple[tuple[str, str], ...]
Seal = Callable[[str, bytes], Metadata]
"""The metadata of the answer that has this code and body."""

PROOF: Final = "prfaas-proof"
CHALLENGE: Final = "prfaas-challenge"
LOOK_S: Final = 5.0
"""Most time that a call waits for a look at a server's certificate."""
_NO_CHALLENGE: Final = "-"
_HANDSHAKES_BEGIN_S: Final = 0.1
"""Time in which handshakes that gRPC has begun take hold of their certificates. They need
microseconds, but may wait for a core.
"""


class NotAdmitted(Exception):
    """The caller may not have what it asks for; `metadata` goes with the refusal."""

    def __init__(self, message: str, metadata: Metadata = ()) -> None:
        super().__init__(message)
        self.message = message
        self.metadata = metadata


class WrongServer(Exception):
    """Who answers is not who was called; the message is for people."""


def _take_any(body: bytes) -> None:
    """TLS vouches for the body."""


def _unsealed(code: str, answer: bytes) -> Metadata:
    return ()


@dataclass(frozen=True, slots=True)
class Admission:
    """A call whose caller may make it. `take` raises NotAdmitted for another body than the one that
    the caller signed.
    """

    take: Callable[[bytes], None] = _take_any
    seal: Seal = _unsealed


class CallerAuth(Protocol):
    """Decides over each call of a server, before it takes the call's body."""

    def admit(self, service: str, method: str, context: Any) -> Admission:
        """Raises NotAdmitted."""
        ...


def caller_auth(credentials: Credentials | None) -> CallerAuth | None:
    """None: everybody may call everything. Raises LocalError for files that cannot be used."""
    if credentials is None:
        return None
    if isinstance(credentials, RegionKey):
        return KeyAuth(credentials)
    return CertificateAuth(credentials)


class CertificateAuth:
    """Callers are who their certificates say, which TLS has verified already."""

    def __init__(self, tls: TlsFiles) -> None:
        self._tls = Rotating(tls, server_tls)

    def admit(self, service: str, method: str, context: Any) -> Admission:
        uris = context.auth_context().get("peer_uri", ())
        why = refusal(
            identities_of(uri.decode("utf-8", "replace") for uri in uris),
            region=self._tls.current(time.monotonic()).region,
            roles=callers_of(service, method),
            what=f"calling {service}/{method}",
        )
        if why is not None:
            raise NotAdmitted(why)
        return Admission()


class KeyAuth:
    """Callers are who they say, if the region's key has signed the call."""

    def __init__(self, key: RegionKey) -> None:
        self._identity = key.identity
        self._keys = Rotating(key, load_keys)
        self._challenges = Challenges(time.monotonic())

    def admit(self, service: str, method: str, context: Any) -> Admission:
        now_s = time.monotonic()
        keys = self._keys.current(now_s)
        what = f"calling {service}/{method}"
        again: Metadata = ((CHALLENGE, self._challenges.current(now_s)),)
        proof = _proof_in(dict(context.invocation_metadata() or ()))
        region, roles = self._identity.region, callers_of(service, method)
        if proof is None:
            raise NotAdmitted(str(refusal((), region=region, roles=roles, what=what)), again)
        if not self._challenges.is_known(proof.challenge, now_s):
            raise NotAdmitted(f"{what} needs a challenge of the last minutes", again)
        unsigned = f"{what}: the call is not signed with a key of region {region}"
        if not is_call_proof(keys, proof, f"{service}/{method}"):
            raise NotAdmitted(unsigned)
        repeated = f"{what}: this very call has been made before"
        if not self._challenges.is_unused(proof.challenge, proof.nonce):
            raise NotAdmitted(repeated)
        why = refusal((proof.identity,), region=region, roles=roles, what=what)
        if why is not None:
            raise NotAdmitted(why)

        def take(body: bytes) -> None:
            if not proof.is_of(body):
                raise NotAdmitted(unsigned)
            # Only now: whoever overheard the proof could otherwise use up its nonce with a body
            # of its own, before the call itself is here.
            if not self._challenges.note(proof.challenge, proof.nonce):
                raise NotAdmitted(repeated)

        def seal(code: str, answer: bytes) -> Metadata:
            challenge = self._challenges.current(time.monotonic())
            key = self._keys.current(time.monotonic())[0]
            sealed = answer_proof(key, self._identity, challenge, proof.nonce, code, answer)
            return ((PROOF, str(sealed)),)

        return Admission(take, seal)


class CallSigner:
    """A client's side of `KeyAuth`: signs calls, checks answers, keeps the latest challenge."""

    def __init__(self, key: RegionKey, service: str) -> None:
        """Raises LocalError."""
        self._identity = key.identity
        self._service = service
        self._keys = Rotating(key, load_keys)
        self._challenge = _NO_CHALLENGE

    def sign(self, method: str, body: bytes) -> Proof:
        key = self._keys.current(time.monotonic())[0]
        return call_proof(key, self._identity, self._challenge, f"{self._service}/{method}", body)

    def is_worth_again(self, proof: Proof, trailers: Mapping[str, Any]) -> bool:
        """Whether the server refused the call for its challenge only, and gave another one."""
        given = trailers.get(CHALLENGE)
        if not isinstance(given, str) or given == proof.challenge:
            return False
        self._challenge = given
        return True

    def check(self, asked: Proof, code: str, body: bytes, trailers: Mapping[str, Any]) -> None:
        """Raises WrongServer unless a server of the region gave this answer to this call."""
        region = self._identity.region
        proof = _proof_in(trailers)
        keys = self._keys.current(time.monotonic())
        if proof is None or not is_answer_proof(keys, proof, asked.nonce, code, body):
            raise WrongServer(f"the answer is not signed with a key of region {region}")
        self._challenge = proof.challenge
        _check_server(self._service, (proof.identity,), region)


class ServerLook:
    """Looks at the certificate that a server shows, because gRPC tells a client only that its
    authority has signed it and that it names the host.
    """

    def __init__(self, tls: TlsFiles, target: str, service: str) -> None:
        """Raises LocalError."""
        self._target = target
        self._service = service
        self._tls = Rotating(tls, _looking_tls)

    async def check(self) -> None:
        """Raises WrongServer, OSError (ssl.SSLError included)."""
        at, tls = Endpoint.parse(self._target), self._tls.current(time.monotonic())
        sock = await dial(at)
        _, writer = await asyncio.open_connection(
            sock=sock, ssl=tls.context, server_hostname=at.host
        )
        shown = certificate_identities(writer.get_extra_info("peercert"))
        writer.transport.abort()
        _check_server(self._service, shown, tls.region)


def _looking_tls(files: TlsFiles) -> RegionTls:
    tls = client_tls(files)
    tls.context.check_hostname = False  # gRPC does that, also with another name
    tls.context.set_alpn_protocols(["h2"])
    return tls


def _check_server(service: str, shown: tuple[Identity, ...], region: str) -> None:
    roles = ACCESS[service].servers if service in ACCESS else ROLES
    why = refusal(shown, region=region, roles=roles, what=f"serving {service}")
    if why is not None:
        raise WrongServer(why)


def _proof_in(metadata: Mapping[str, Any]) -> Proof | None:
    text = metadata.get(PROOF)
    if not isinstance(text, str):
        return None
    try:
        return Proof.parse(text)
    except ValueError:
        return None


def server_credentials(tls: TlsFiles) -> Any:
    """The credentials of a gRPC server, which follow the files. Raises LocalError."""
    certificates = ReplacedCertificates(Rotating(tls, _server_certificates))
    return grpc.dynamic_ssl_server_credentials(
        certificates.given, certificates.fetch, require_client_authentication=True
    )


class ReplacedCertificates:
    """Gives a gRPC server its certificates when they have changed, and at no other time.

    gRPC asks `fetch` as each handshake begins, on a thread of that handshake. It frees what it had
    as soon as it is given something, though another thread may just begin a handshake with it. That
    ends the process with a segmentation fault (https://github.com/grpc/grpc/issues/36693).
    """

    def __init__(
        self,
        certificates: Rotating[Any, Any],
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._certificates = certificates
        self._clock = clock
        self._pause = pause
        self.given = certificates.current(clock())
        """What gRPC has got last."""

    def fetch(self) -> Any:
        """New certificates, or None to keep those that were given. gRPC makes one call at a time,
        and other handshakes wait for its end.
        """
        found = self._certificates.current(self._clock())
        if found is self.given:
            return None
        # Handshakes that were told None before this call still take hold of the old certificates.
        self._pause(_HANDSHAKES_BEGIN_S)
        self.given = found
        return found


def _server_certificates(tls: TlsFiles) -> Any:
    # gRPC notices unusable files late and does not name them, so OpenSSL checks them first.
    server_context(tls)
    key, cert, ca = _read_tls(tls)
    return grpc.ssl_server_certificate_configuration([(key, cert)], root_certificates=ca)


def channel_credentials(tls: TlsFiles) -> Any:
    """The credentials of a gRPC client. Raises LocalError."""
    # Checked first for the same reason as the server's files.
    client_context(tls)
    key, cert, ca = _read_tls(tls)
    return grpc.ssl_channel_credentials(
        root_certificates=ca, private_key=key, certificate_chain=cert
    )


def _read_tls(tls: TlsFiles) -> tuple[bytes, bytes, bytes]:
    try:
        return tls.key.read_bytes(), tls.cert.read_bytes(), tls.ca.read_bytes()
    except OSError as error:
        raise LocalError("tls_files", f"cannot read the files for TLS: {error}") from error
