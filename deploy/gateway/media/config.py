"""The settings of media: who fetches them from their addresses, and within which limits."""

from __future__ import annotations

import re
from typing import Annotated, Final, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from deploy.gateway.media.addresses import AddressRules
from kvmanager.config_files.fields import Bytes, Port, Seconds, Section

_DOMAIN: Final = re.compile(
    r"(\*\.)?[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*"
)


def _domain(text: str) -> str:
    name = text.lower().removesuffix(".")
    if not _DOMAIN.fullmatch(name):
        raise ValueError(f"{text!r} is no host name; write example.org or *.example.org")
    return name


def _network(text: str) -> str:
    AddressRules(private=(text,))
    return text


Domain = Annotated[str, AfterValidator(_domain)]
Network = Annotated[str, AfterValidator(_network)]


class MediaSection(Section):
    """Images, videos and audio at http(s) addresses in requests. Media in requests themselves
    (data URIs) need none of this.
    """

    fetch: Literal["gateway", "engine", "refuse"] = "gateway"
    """Who fetches them. gateway: the gateway, once, so that every cluster gets the same bytes and
    prompts may go to prefill clusters. engine: the engine that serves the request, from `domains`
    only; such prompts stay on one engine. refuse: nobody; such requests get 400.
    """
    domains: tuple[Domain, ...] = ()
    """Hosts that media may come from, such as example.org, or *.example.org for all below it. Left
    out: any at a public address. Needed if engines fetch.
    """
    schemes: Annotated[tuple[Literal["https", "http"], ...], Field(min_length=1)] = (
        "https",
        "http",
    )
    """Schemes of addresses. A redirect never leads from https to http."""
    ports: Annotated[tuple[Port, ...], Field(min_length=1)] = (80, 443)
    """Ports of addresses."""
    private_networks: tuple[Network, ...] = ()
    """Networks that the gateway may fetch from though they are not public, such as 10.1.0.0/16.
    Addresses of cloud metadata are refused all the same.
    """
    refused_networks: tuple[Network, ...] = ()
    """Public networks that the gateway may not fetch from, such as those of the region's hosts."""
    max_bytes: Bytes = 16 << 20
    """The largest medium that the gateway fetches, bytes, a number or such as 16MiB. In base64 and
    with the rest of the request it must also fit `max_body_bytes`.
    """
    max_per_request: Annotated[int, Field(gt=0)] = 32
    """The most addresses in one request."""
    max_redirects: Annotated[int, Field(ge=0)] = 3
    """The most redirects that the gateway follows; each target is checked as the first address."""
    timeout_s: Seconds = 20.0
    """How long the gateway waits for one medium, with redirects and the wait for its turn."""
    max_fetches: Annotated[int, Field(gt=0)] = 64
    """The most media that the gateway fetches at a time. Others wait for their turn."""
    max_tenant_fetches: Annotated[int, Field(gt=0)] = 16
    """The most of them for one tenant, or for one client address where there are no API keys."""
    max_host_fetches: Annotated[int, Field(gt=0)] = 16
    """The most of them from one host, so that a slow one holds up no others."""

    @model_validator(mode="after")
    def _check_engine(self) -> Self:
        if self.fetch == "engine":
            if not self.domains:
                raise ValueError(
                    "fetch: engines do not check where a host's name leads; name domains that "
                    "they may fetch from, or leave fetching to the gateway"
                )
            if any(domain.startswith("*.") for domain in self.domains):
                raise ValueError("domains: engines know no *.; write each host's name")
        return self

    def allows_host(self, host: str) -> bool:
        """Whether `domains` allow a host with this name, in lower case."""
        host = host.removesuffix(".")
        return not self.domains or any(
            host.endswith(domain[1:]) if domain.startswith("*.") else host == domain
            for domain in self.domains
        )
