"""Has the instances of a cluster join and leave as a service discovery tells."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from prfaas.engines.departures import Departures, follow_changes
from prfaas.engines.discovery.found import Discovered, DiscoverySection, Found
from transport.errors import LocalError

logger = logging.getLogger("prfaas.engines")

NUM_MISSES = 3
"""Answers of DNS in a row that must lack an instance before it leaves."""


async def follow_discovery(section: DiscoverySection, departures: Departures) -> None:
    """Follow what `section` names until cancelled. While nobody answers, all instances stay."""
    is_dns = section.dns is not None
    discovered = Discovered(section, NUM_MISSES if is_dns else 1)
    said = ""
    while True:
        try:
            await _follow(section, departures, discovered)
        except LocalError as error:
            # Logged once: the next attempts fail alike.
            if error.message != said:
                said = error.message
                logger.warning("instances are not looked up now: %s", said)
        await asyncio.sleep(section.interval_s)


async def _follow(
    section: DiscoverySection, departures: Departures, discovered: Discovered
) -> None:
    # Imported here: only their users install these extras.
    if section.dns is not None:
        try:
            from prfaas.engines.discovery.dns import DnsRecords
        except ModuleNotFoundError as error:
            raise LocalError("dns", "discover.dns needs pip install prfaas[dns]") from error
        records = DnsRecords(section)
        while True:
            _take(discovered, departures, await records.found())
            await asyncio.sleep(section.interval_s)
    try:
        from prfaas.engines.discovery.kubernetes import EndpointSlices
    except ModuleNotFoundError as error:
        message = "discover.kubernetes needs pip install prfaas[kubernetes]"
        raise LocalError("kubernetes", message) from error
    slices = await asyncio.to_thread(EndpointSlices, section)
    while True:
        _take(discovered, departures, await slices.found())
        await slices.changed()


def _take(discovered: Discovered, departures: Departures, found: Sequence[Found]) -> None:
    refused = follow_changes(departures, discovered.heard(found))
    for message in discovered.refused(refused):
        logger.warning("an instance that was found cannot join: %s", message)
