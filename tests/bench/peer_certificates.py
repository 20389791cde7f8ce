"""Throw-away certificates for a bench of mutual TLS: one CA, one node that both ends show."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from wan import FAR, NEAR

ADDRESSES = ("127.0.0.1", NEAR, FAR)
"""Of receivers: a sender looks whether the certificate names the one that it dials."""


def make_certificates(folder: Path) -> dict[str, str]:
    """Write them as PEM files, valid for a day; the paths of `cert`, `key` and `ca`."""
    ca_key, node_key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    authority = _certificate("bench-ca", ca_key, "bench-ca", ca_key, is_ca=True)
    node = _certificate("bench-node", node_key, "bench-ca", ca_key, is_ca=False)
    pem = serialization.Encoding.PEM
    contents = {
        "cert": node.public_bytes(pem),
        "key": node_key.private_bytes(
            pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ),
        "ca": authority.public_bytes(pem),
    }
    for name, data in contents.items():
        (folder / f"{name}.pem").write_bytes(data)
    return {name: str(folder / f"{name}.pem") for name in contents}


def _certificate(
    subject: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: str,
    issuer_key: ec.EllipticCurvePrivateKey,
    *,
    is_ca: bool,
) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(_name(subject))
        .issuer_name(_name(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()),
            critical=False,
        )
        .add_extension(
            x509.SubjectAlternativeName(
                [
                    x509.UniformResourceIdentifier(f"spiffe://bench/agent/{subject}"),
                    *(x509.IPAddress(ipaddress.ip_address(item)) for item in ADDRESSES),
                ]
            ),
            critical=False,
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    return builder.sign(issuer_key, hashes.SHA256())


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])
