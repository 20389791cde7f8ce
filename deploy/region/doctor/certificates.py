"""Whether certificates hold, for how long, and for whom. Pure."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, Self

from cryptography import x509

from deploy.region.certs import RENEW as RENEW_BEFORE
from deploy.region.doctor.findings import Check, ok, problem, warning
from transport import Role
from transport.identity import Identity, identities_of, refusal

RENEW: Final = "issue a new one: `prfaas certs add`, or your own authority (docs/security.md)"


@dataclass(frozen=True, slots=True)
class Certificate:
    """A certificate: when it holds, and the addresses and processes that it names."""

    begins: datetime.datetime
    ends: datetime.datetime
    addresses: frozenset[str]
    identities: tuple[Identity, ...]

    @classmethod
    def of(cls, certificate: x509.Certificate) -> Self:
        names = x509.SubjectAlternativeName([])
        try:
            extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
            names = extension.value
        except x509.ExtensionNotFound:
            pass
        ips = map(str, names.get_values_for_type(x509.IPAddress))
        return cls(
            certificate.not_valid_before_utc,
            certificate.not_valid_after_utc,
            frozenset([*ips, *names.get_values_for_type(x509.DNSName)]),
            identities_of(names.get_values_for_type(x509.UniformResourceIdentifier)),
        )

    def covers(self, address: str) -> bool:
        """Whether a client that dials `address` may believe it."""
        try:
            return str(ipaddress.ip_address(address)) in self.addresses
        except ValueError:
            name = address.lower()
            wildcard = f"*.{name.partition('.')[2]}"
            return bool({name, wildcard} & {known.lower() for known in self.addresses})


def date_check(about: str, certificate: Certificate, now: datetime.datetime) -> Check:
    """Whether it holds now, and will for a while."""
    ends = certificate.ends
    days = (ends - now) // datetime.timedelta(days=1)
    if now >= ends:
        return problem(about, f"it has expired, on {ends:%Y-%m-%d %H:%M} UTC", RENEW)
    if now < certificate.begins:
        begins = f"{certificate.begins:%Y-%m-%d %H:%M} UTC"
        return problem(about, f"it holds from {begins} only", "set the clock, or issue it anew")
    holds = f"it holds until {ends:%Y-%m-%d}, {days} days"
    return warning(about, holds, RENEW) if days < RENEW_BEFORE.days else ok(about, holds)


def name_checks(
    about: str,
    certificate: Certificate,
    region: str,
    *,
    roles: Collection[Role],
    addresses: Collection[str],
) -> list[Check]:
    """Problems of a certificate that must name each of `roles` and `addresses`; none if it does."""
    found = []
    for role in sorted(roles):
        why = refusal(certificate.identities, region=region, roles={role}, what="a process there")
        if why is not None:
            found.append(problem(about, why, RENEW))
    for address in sorted(addresses):
        if not certificate.covers(address):
            known = ", ".join(sorted(certificate.addresses)) or "none"
            what = f"it is not for {address}, at which others connect; its addresses: {known}"
            found.append(problem(about, what, RENEW))
    return found
