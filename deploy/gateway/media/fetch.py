"""One fetch: resolve, check, connect to what was checked, follow redirects, read within limits.

A host's name is resolved here, once for each hop, and the connection goes to the addresses that
were checked: a name that leads elsewhere at the next look changes nothing. Nothing of the client
is sent, and nothing is kept between two fetches: no connection, no cookie.
"""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.client_proto import ResponseHandler
from yarl import URL

from deploy.gateway.intake.media_urls import MediumKind
from deploy.gateway.media.addresses import AddressRules, parsed
from deploy.gateway.media.config import MediaSection
from deploy.gateway.media.turns import Turn, Turns
from deploy.gateway.media.urls import NO_ADDRESS, Refusal, Refused, checked_url

Resolve = Callable[[str, int], list[str]]
"""The addresses of a host, given its name and a port. Blocks. Raises `OSError`."""

_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_TYPE: Final = re.compile(r"[a-z0-9][a-z0-9!#$&^_.+-]{0,126}/[a-z0-9][a-z0-9!#$&^_.+-]{0,126}")
_UNTYPED: Final = frozenset({"application/octet-stream", "binary/octet-stream"})
"""The types of what is stored without one. Engines look at the bytes."""
_HEADERS: Final = {
    # A body that is packed could be larger than the limits without end.
    "Accept-Encoding": "identity",
    "User-Agent": "prfaas",
}
_CHUNK_BYTES: Final = 64 << 10
_STEP_BYTES: Final = 8 << 10
_HEAD_BYTES: Final = 32 << 10


class Fetch:
    """Fetches media one by one. `close` it in the end."""

    def __init__(self, config: MediaSection, turns: Turns, resolve: Resolve | None = None) -> None:
        self._config = config
        self._turns = turns
        self._rules = AddressRules(config.private_networks, config.refused_networks)
        self._resolve = resolve or _system_addresses
        # Threads of its own: a slow name server must hold up nothing else.
        self._threads = ThreadPoolExecutor(config.max_fetches, "media")
        self._tls: ssl.SSLContext | None = None

    def check(self, text: str) -> None:
        """Raises `Refused` if the address alone says that it may not be fetched."""
        checked_url(text, self._config, self._rules)

    async def get(
        self, text: str, kind: MediumKind, who: str, on_bytes: Callable[[int], None]
    ) -> tuple[str, bytes]:
        """The type and the bytes of the medium at an address. `on_bytes` is told how many more have
        arrived, and may raise. Raises `Refused`.
        """
        url = checked_url(text, self._config, self._rules)
        is_begun = False
        try:
            async with asyncio.timeout(self._config.timeout_s):
                for _ in range(self._config.max_redirects + 1):
                    async with self._turns.turn(who, url.raw_host or "") as turn:
                        is_begun = True
                        found = await self._hop(url, kind, turn, on_bytes)
                    if not isinstance(found, URL):
                        return found
                    url = found
        except TimeoutError:
            limit = f"{self._config.timeout_s:g} s"
            if not is_begun:
                message = f"too many others were being fetched for {limit}"
                raise Refused(Refusal.BUSY, message) from None
            raise Refused(Refusal.TIMEOUT, f"it was not there within {limit}") from None
        except (aiohttp.ClientError, OSError, ssl.SSLError) as error:
            message = "its server cannot be reached, breaks off or has no valid certificate"
            raise Refused(Refusal.UNREACHABLE, message) from error
        message = f"its server redirects more than {self._config.max_redirects} times"
        raise Refused(Refusal.REDIRECTS, message)

    def close(self) -> None:
        """Resolve nothing more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _hop(
        self, url: URL, kind: MediumKind, turn: Turn, on_bytes: Callable[[int], None]
    ) -> URL | tuple[str, bytes]:
        """The medium at `url`, or where its server redirects."""
        addresses = await self._addresses(url, turn)
        if self._tls is None:
            # Reading the authorities takes a while.
            self._tls = await asyncio.get_running_loop().run_in_executor(
                self._threads, ssl.create_default_context
            )
        connector = aiohttp.TCPConnector(
            resolver=_Checked(addresses), use_dns_cache=False, force_close=True, ssl=self._tls
        )
        make: Callable[..., ResponseHandler] = _Bounded
        connector._factory = partial(make, loop=asyncio.get_running_loop())
        async with (
            aiohttp.ClientSession(
                connector=connector,
                headers=_HEADERS | {"Accept": f"{kind}/*"},
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None),
                auto_decompress=False,
                trust_env=False,
            ) as session,
            session.get(url, allow_redirects=False) as response,
        ):
            if response.status in _REDIRECTS and "Location" in response.headers:
                location = response.headers["Location"]
                return checked_url(location, self._config, self._rules, before=url)
            if response.status != 200:
                message = f"its server answers with status {response.status}"
                raise Refused(Refusal.STATUS, message)
            content_type = _content_type(response, kind)
            return content_type, await self._read(response, on_bytes)

    async def _read(
        self, response: aiohttp.ClientResponse, on_bytes: Callable[[int], None]
    ) -> bytes:
        most = self._config.max_bytes
        if (response.content_length or 0) > most:
            raise _too_large(most)
        body = bytearray()
        async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
            if len(body) + len(chunk) > most:
                raise _too_large(most)
            on_bytes(len(chunk))
            body += chunk
        return bytes(body)

    async def _addresses(self, url: URL, turn: Turn) -> list[str]:
        """The addresses of a URL's host, all of which may be fetched from."""
        host = url.raw_host or ""
        if parsed(host) is not None:
            return [host]  # checked with the URL
        loop = asyncio.get_running_loop()
        resolving = loop.run_in_executor(self._threads, partial(self._resolve, host, url.port or 0))
        # The thread cannot be stopped, so the turn lasts as long as it does.
        self._turns.hold(turn)
        resolving.add_done_callback(lambda done: self._resolved(turn, done))
        try:
            found = await asyncio.shield(resolving)
        except (OSError, UnicodeError) as error:
            raise Refused(Refusal.UNRESOLVED, NO_ADDRESS) from error
        if not found:
            raise Refused(Refusal.UNRESOLVED, NO_ADDRESS)
        for text in found:
            address = parsed(text)
            # One that may not be fetched from spoils all: no honest host has both.
            if address is None or not self._rules.allow(address):
                raise Refused(Refusal.ADDRESS, NO_ADDRESS)
        return found

    def _resolved(self, turn: Turn, done: asyncio.Future[list[str]]) -> None:
        self._turns.let_go(turn)
        if not done.cancelled():
            done.exception()  # looked at, if nobody waits for it any more


class _Bounded(ResponseHandler):
    """Ends a connection whose server sends much that is no body: endless heads, tiny chunks. They
    cost much to parse, and no limit of bodies sees them.
    """

    _num_bytes = _num_body_bytes = 0

    def data_received(self, data: bytes) -> None:
        if self.exception() is not None:
            return
        # In steps, since what one read brings may already take long to parse.
        for start in range(0, len(data), _STEP_BYTES):
            step = data[start : start + _STEP_BYTES]
            self._num_bytes += len(step)
            super().data_received(step)
            if self._payload is not None:
                self._num_body_bytes = self._payload.total_bytes
            if self._num_bytes > _HEAD_BYTES + 2 * self._num_body_bytes + _STEP_BYTES:
                # Whoever reads the answer gets it, and ends the connection.
                error = aiohttp.ClientPayloadError("it sends much that is no body")
                self.set_exception(error)
                if self._payload is not None:
                    self._payload.set_exception(error)
                return


class _Checked(AbstractResolver):
    """Resolves every host to the addresses that were checked for the one that is asked."""

    def __init__(self, addresses: list[str]) -> None:
        self._addresses = addresses

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=socket.IPPROTO_TCP,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for address in self._addresses
        ]

    async def close(self) -> None:
        return


def _system_addresses(host: str, port: int) -> list[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(item[4][0]) for item in found))


def _content_type(response: aiohttp.ClientResponse, kind: MediumKind) -> str:
    """The type of the medium. Raises `Refused` if it is of another kind, or packed."""
    encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding != "identity":
        raise Refused(Refusal.ENCODING, "its server sends it with a Content-Encoding")
    sent = response.headers.get("Content-Type", "application/octet-stream")
    content_type = sent.partition(";")[0].strip().lower()
    if content_type in _UNTYPED:
        return "application/octet-stream"
    if not _TYPE.fullmatch(content_type) or not content_type.startswith(f"{kind}/"):
        raise Refused(Refusal.CONTENT_TYPE, f"its server does not call it {kind}/*")
    return content_type


def _too_large(most: int) -> Refused:
    return Refused(Refusal.TOO_LARGE, f"it is larger than {most} bytes, the limit here")
