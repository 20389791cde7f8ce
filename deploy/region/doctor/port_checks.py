"""Says in words which ports of a region were reached. Pure."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Final

from cryptography import x509

from deploy.region.doctor.certificates import RENEW, Certificate, date_check, name_checks
from deploy.region.doctor.findings import Check, ok, problem
from deploy.region.doctor.reach import Reached
from deploy.region.doctor.viewpoint import PortKind, RegionPort

_ASKED_BY: Final[dict[PortKind, str]] = {
    "data": "agents that send KVCache",
    "link": "agents that send KVCache",
    "metrics": "Prometheus",
    "engine": "its front and, in a PD cluster, the gateway",
    "nixl": "the engines of its cluster",
    "front": "the gateway",
    "gateway": "clients",
    "admin": "operators",
}


def port_checks(reached: Sequence[Reached]) -> list[Check]:
    """A line for each port."""
    return [_port_check(one) for one in reached]


def shown_certificates(
    reached: Sequence[Reached], region: str, now: datetime.datetime
) -> list[Check]:
    """Dates and names of the certificates that were shown, each once."""
    by_certificate: dict[bytes, list[RegionPort]] = {}
    for one in reached:
        if one.certificate is not None:
            by_certificate.setdefault(one.certificate, []).append(one.port)
    found: list[Check] = []
    for der, ports in by_certificate.items():
        certificate = Certificate.of(x509.load_der_x509_certificate(der))
        about = f"certificate at {ports[0].name}"
        found.append(date_check(about, certificate, now))
        found += name_checks(
            about,
            certificate,
            region,
            roles={port.role for port in ports if port.role is not None},
            addresses={port.at.host for port in ports},
        )
    return found


def _port_check(one: Reached) -> Check:
    port = one.port
    at = str(port.at)
    if one.tls_trouble:
        return problem(port.name, f"{at}: TLS fails: {one.tls_trouble}", _tls_fix(one))
    if not one.trouble:
        return ok(port.name, f"{at}: {'TLS' if one.certificate else 'reachable'}")
    if port.needed:
        return problem(port.name, f"{at}: {one.trouble}", _connect_fix(port))
    asked = _ASKED_BY.get(port.kind, "others")
    return ok(port.name, f"{at}: {one.trouble}; it only has to be reached by {asked}")


def _connect_fix(port: RegionPort) -> str:
    if port.is_here:
        return "start it: `prfaas status` and its log say how it is"
    return (
        "is it running there (`prfaas status` on that host), does a firewall let"
        f" {port.at.port}/tcp through, is {port.at.host} an address that this host reaches?"
    )


def _tls_fix(one: Reached) -> str:
    reason = one.tls_trouble
    if "issuer" in reason or "self-signed" in reason or "unknown ca" in reason:
        return "its certificate is of another authority: give all hosts certificates of one"
    if "does not speak TLS" in reason:
        return "give both hosts the same region file, and start what listens there anew"
    if "mismatch" in reason or "expired" in reason or "not yet" in reason:
        return f"the certificate of that host is wrong; {RENEW}"
    return "look at the certificates of both hosts, and at the log of what listens there"
