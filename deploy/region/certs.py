"""The keys and certificates of a region whose hosts each start their own part of it.

`hosts_of` works out from the file which host needs which names. `make` writes the files: an
authority of the region's own, a certificate a host, and the keys that all of them share. `add`
makes those of hosts that joined the file later, and certificates that are to be replaced.
"""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from deploy.region.launch.parts import fronts_apart
from deploy.region.spec.region import NodeSpec, RegionSpec
from kvmanager.private_files import make_new_directory, make_private_directory, write_private
from transport import Endpoint, Identity, Role
from transport.grants import new_key_pair
from transport.region_key import new_key

CA_DAYS: Final = 3650
RENEW: Final = datetime.timedelta(days=30)
"""So long before their end certificates are made anew; the doctor warns from then on."""
_SKEW: Final = datetime.timedelta(hours=1)
"""How far behind this machine's clock those of the hosts may be."""


@dataclass(frozen=True, slots=True)
class Host:
    """A host of the region: its folder, its nodes, and the names that its certificate must carry.

    `addresses` are IP addresses and DNS names at which other hosts connect to it.
    """

    folder: str
    nodes: tuple[str, ...]
    addresses: tuple[str, ...]
    identities: tuple[Identity, ...]
    has_gateway: bool


def hosts_of(region: RegionSpec) -> list[Host]:
    """The hosts in the order of the file. Nodes with one address are on one host."""
    by_address: dict[str, list[NodeSpec]] = {}
    for node in region.nodes:
        by_address.setdefault(node.host, []).append(node)
    return [_host(region, nodes) for nodes in by_address.values()]


def settings_of(region: RegionSpec) -> dict[str, str]:
    """The files that a host reads, as names in its folder, by the setting that names them."""
    security = region.security
    settings = {"engine_key": "engine.key"}
    if security.trusted_network:
        return settings
    if security.region_key is not None:
        settings |= {"region_key": "region.key"}
    else:
        settings |= {"tls.cert": "cert.pem", "tls.key": "key.pem", "tls.ca": "ca.pem"}
    return settings | {"granting_keys": "granting.pub", "granting_key": "granting.key"}


def make(region: RegionSpec, directory: Path, *, days: int) -> None:
    """Fill `directory`, which must be empty or missing. Raises FileExistsError, other OSErrors.

    It has one folder for each host with the files of `settings_of`, the private key of grants only
    for the gateway's, and the authority's `ca.pem` and `ca.key`, which no host needs.
    """
    make_new_directory(directory)
    wanted = _wanted(region)
    private, public = new_key_pair()
    shared = {
        "engine.key": f"{new_key()}\n".encode(),
        "region.key": f"{new_key()}\n".encode(),
        "granting.pub": public,
        "granting.key": private,
    }
    authority = Authority.new(region.name) if "ca.pem" in wanted else None
    if authority is not None:
        shared["ca.pem"] = authority.pem
        write_private(directory / "ca.pem", authority.pem)
        write_private(directory / "ca.key", _pem(authority.key))
    for host in hosts_of(region):
        certified = {} if authority is None else authority.certified(host, days)
        _write(directory / host.folder, host, wanted, shared | certified)


def add(region: RegionSpec, directory: Path, *, days: int, renew: bool = False) -> list[Host]:
    """Make what hosts of the file lack in a `directory` that `make` filled, and return these hosts:
    those without a folder, and those whose certificate has other names or expires soon. With
    `renew` all hosts get a new certificate. Keys stay as they are. Raises OSError, ValueError for
    files of another kind and an authority that has expired.
    """
    wanted = _wanted(region)
    authority = Authority.read(directory) if "ca.pem" in wanted else None
    lacking = [host for host in hosts_of(region) if renew or _lacks(directory, host, wanted)]
    shared = {name: _found(directory, name) for name in wanted - {"cert.pem", "key.pem"}}
    for host in lacking:
        certified = {} if authority is None else authority.certified(host, days)
        _write(directory / host.folder, host, wanted, shared | certified)
    return lacking


def _wanted(region: RegionSpec) -> set[str]:
    return set(settings_of(region).values())


def _write(folder: Path, host: Host, wanted: set[str], files: Mapping[str, bytes]) -> None:
    make_private_directory(folder)
    for name in sorted(_files_of(host, wanted)):
        write_private(folder / name, files[name])


def _files_of(host: Host, wanted: set[str]) -> set[str]:
    return wanted if host.has_gateway else wanted - {"granting.key"}


def _lacks(directory: Path, host: Host, wanted: set[str]) -> bool:
    folder = directory / host.folder
    if not all((folder / name).is_file() for name in _files_of(host, wanted)):
        return True
    if "cert.pem" not in wanted:
        return False
    certificate = x509.load_pem_x509_certificate((folder / "cert.pem").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return set(names) != set(_names(host)) or _expires(certificate)


def _expires(certificate: x509.Certificate) -> bool:
    """Whether it ends within `RENEW`, or the last third of its time if that is shorter."""
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    return datetime.datetime.now(datetime.UTC) > ends - min(RENEW, (ends - begins) / 3)


def _found(directory: Path, name: str) -> bytes:
    """The key or certificate that hosts share, from any folder that has it. FileNotFoundError."""
    paths = sorted([*directory.glob(name), *directory.glob(f"*/{name}")])
    if not paths:
        message = f"no folder of {directory} has {name}; `prfaas certs init` makes it"
        raise FileNotFoundError(message)
    return paths[0].read_bytes()


class Authority:
    """A certificate authority for one region only."""

    def __init__(self, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
        self.key = key
        self._certificate = certificate

    @classmethod
    def new(cls, region: str) -> Self:
        key = ec.generate_private_key(ec.SECP256R1())
        name = _name(f"{region[:50]} lab CA")
        public = key.public_key()
        certificate = (
            _builder(name, name, public, CA_DAYS)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .sign(key, hashes.SHA256())
        )
        return cls(key, certificate)

    @classmethod
    def read(cls, directory: Path) -> Self:
        """The one that `make` left there. OSError, ValueError."""
        key = load_pem_private_key((directory / "ca.key").read_bytes(), password=None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ValueError(f"{directory / 'ca.key'} is not a key that `prfaas certs init` made")
        certificate = x509.load_pem_x509_certificate((directory / "ca.pem").read_bytes())
        if (ends := certificate.not_valid_after_utc) < datetime.datetime.now(datetime.UTC):
            message = f"{directory / 'ca.pem'} expired on {ends:%Y-%m-%d}"
            raise ValueError(f"{message}: `prfaas certs init` makes another authority")
        return cls(key, certificate)

    @property
    def pem(self) -> bytes:
        """Its certificate."""
        return self._certificate.public_bytes(Encoding.PEM)

    def certified(self, host: Host, days: int) -> dict[str, bytes]:
        """The files `cert.pem` and `key.pem` of a host."""
        key = ec.generate_private_key(ec.SECP256R1())
        public, issuer = key.public_key(), self._certificate.subject
        # The processes of a host are both clients and servers.
        purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        authority_key = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        certificate = (
            _builder(_name(host.folder), issuer, public, days)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
            .add_extension(x509.SubjectAlternativeName(_names(host)), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .add_extension(authority_key, critical=False)
            .sign(self.key, hashes.SHA256())
        )
        return {"cert.pem": certificate.public_bytes(Encoding.PEM), "key.pem": _pem(key)}


def _host(region: RegionSpec, nodes: list[NodeSpec]) -> Host:
    names = tuple(node.name for node in nodes)
    addresses = dict.fromkeys([nodes[0].host, *_other_addresses(region, nodes)])
    has_gateway = any(node.name in names for node in region.gateway_nodes)
    identities = [Identity(region.name, "agent", name) for name in names]
    identities.append(Identity(region.name, "operator", names[0]))
    for cluster in fronts_apart(region):
        if cluster.nodes[0].name in names:
            role: Role = "prefill-front" if cluster.kind == "prefill" else "pd-front"
            identities.append(Identity(region.name, role, cluster.name))
    if has_gateway:
        identities.append(Identity(region.name, "gateway", "gateway"))
    return Host(names[0], names, tuple(addresses), tuple(identities), has_gateway)


def _other_addresses(region: RegionSpec, nodes: list[NodeSpec]) -> Iterator[str]:
    """Where senders connect to the nodes instead: behind NAT, or through a tunnel."""
    for node in nodes:
        for address in node.agent.advertised:
            yield Endpoint.parse(address).host
        for link in region.links:
            if node.name in link.endpoints:
                yield Endpoint.parse(link.endpoints[node.name]).host


def _names(host: Host) -> list[x509.GeneralName]:
    uris = [x509.UniformResourceIdentifier(str(one)) for one in host.identities]
    return [*map(_address, host.addresses), *uris]


def is_address(text: str) -> bool:
    """Whether a host is named by an IP address, and not by a DNS name."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _address(text: str) -> x509.GeneralName:
    if is_address(text):
        return x509.IPAddress(ipaddress.ip_address(text))
    return x509.DNSName(text)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _builder(
    subject: x509.Name, issuer: x509.Name, public: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
