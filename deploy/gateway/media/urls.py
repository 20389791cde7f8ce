"""Whether the address of a medium may be fetched, as far as the address itself says. Pure."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Final

from yarl import URL

from deploy.gateway.media.addresses import AddressRules, parsed
from deploy.gateway.media.config import MediaSection

MAX_URL_CHARS: Final = 8192
_UNUSABLE: Final = re.compile(r"[\x00-\x20\x7f\\]")
"""Parsers of addresses leave some of these out, or take them for others."""


class Refusal(StrEnum):
    """Why a medium is not there."""

    FETCH = "fetch"
    """Nobody fetches media here."""
    URL = "url"
    """The address cannot be read."""
    SCHEME = "scheme"
    CREDENTIALS = "credentials"
    PORT = "port"
    DOMAIN = "domain"
    ADDRESS = "address"
    """The host is at an address that may not be fetched from."""
    UNRESOLVED = "unresolved"
    """The host's name leads to no address."""
    UNREACHABLE = "unreachable"
    REDIRECTS = "redirects"
    STATUS = "status"
    CONTENT_TYPE = "content_type"
    ENCODING = "encoding"
    TOO_LARGE = "too_large"
    TOO_MANY = "too_many"
    BODY_TOO_LARGE = "body_too_large"
    TIMEOUT = "timeout"
    BUSY = "busy"
    """Too many others were being fetched."""
    NO_MEMORY = "no_memory"
    """The gateway, or the tenant, has no memory left for it."""


class Refused(Exception):
    """A medium is not fetched; the message says why, and nothing of what lies behind."""

    def __init__(self, reason: Refusal, message: str) -> None:
        super().__init__(message)
        self.reason = reason


NO_ADDRESS: Final = "its host has no address that may be fetched from"
"""Said of unknown names as well, so that nobody learns which internal names there are."""


def checked_url(
    text: str, config: MediaSection, rules: AddressRules, before: URL | None = None
) -> URL:
    """The URL that `text` is, after `before` if that was redirected. Raises `Refused`.

    Where its host is a name, the addresses behind it must still be checked.
    """
    if len(text) > MAX_URL_CHARS or _UNUSABLE.search(text):
        raise Refused(Refusal.URL, "its address cannot be read")
    try:
        url = URL(text) if before is None else before.join(URL(text))
        host, port = url.raw_host, url.port
    except ValueError:
        raise Refused(Refusal.URL, "its address cannot be read") from None
    allowed = "https" if before is not None and before.scheme == "https" else None
    if url.scheme not in config.schemes or (allowed is not None and url.scheme != allowed):
        raise Refused(Refusal.SCHEME, f"its address must begin with {_schemes(config, allowed)}")
    if not host:
        raise Refused(Refusal.URL, "its address has no host")
    if "@" in url.raw_authority:
        raise Refused(Refusal.CREDENTIALS, "its address must have no user and no password")
    if port not in config.ports:
        ports = ", ".join(map(str, config.ports))
        raise Refused(Refusal.PORT, f"its address must have one of these ports: {ports}")
    host = host.lower()
    if not config.allows_host(host):
        raise Refused(Refusal.DOMAIN, "its host is none of those that media may come from")
    address = parsed(host)
    # A zone names a link of the gateway's host.
    if "%" in host or (address is not None and not rules.allow(address)):
        raise Refused(Refusal.ADDRESS, NO_ADDRESS)
    return url.with_fragment(None)


def _schemes(config: MediaSection, only: str | None) -> str:
    names = config.schemes if only is None else (only,)
    return " or ".join(f"{name}://" for name in names) + ", or be a data URI"
