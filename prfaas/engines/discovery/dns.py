"""Asks DNS for the engines of a cluster: SRV records (RFC 2782). Needs dnspython, an extra."""

from __future__ import annotations

import dns.asyncresolver
import dns.exception
import dns.name
import dns.resolver

from prfaas.engines.discovery.found import DiscoverySection, Found
from transport import Endpoint
from transport.errors import LocalError

_TIMEOUT_S = 5.0


class DnsRecords:
    """The records of one name. Use it on one event loop."""

    def __init__(self, section: DiscoverySection) -> None:
        assert section.dns is not None
        self._name = section.dns
        try:
            self._resolver = dns.asyncresolver.Resolver(configure=section.nameserver is None)
        except dns.exception.DNSException as error:
            raise LocalError("dns", f"this host has no DNS server: {error}") from error
        if section.nameserver is not None:
            at = Endpoint.parse(section.nameserver)
            self._resolver.nameservers, self._resolver.port = [at.host], at.port

    async def found(self) -> list[Found]:
        """The engines now; none if the name has no records. LocalError: DNS does not answer."""
        try:
            answer = await self._resolver.resolve(self._name, "SRV", lifetime=_TIMEOUT_S)
        except (dns.resolver.NXDOMAIN, dns.resolver.NoAnswer):
            return []
        except (dns.exception.DNSException, OSError) as error:
            raise LocalError("dns", f"{self._name}: {error}") from error
        # RFC 2782: the root as a target says that there is no such service.
        records = [record for record in answer if record.target != dns.name.root]
        # Names in DNS are the same in any case, and servers may answer in another one each time.
        hosts = [record.target.to_text(omit_final_dot=True).lower() for record in records]
        return [
            Found(f"{host}-{record.port}", host, record.port)
            for host, record in zip(hosts, records, strict=True)
        ]
