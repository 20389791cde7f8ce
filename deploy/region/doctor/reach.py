"""Connects to ports of a region, and shakes hands over TLS as a process of this host would.

It sends nothing, and does not judge what it finds.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

from deploy.region.doctor.viewpoint import PortKind, RegionPort
from transport import TlsFiles
from transport.addresses import dial
from transport.errors import LocalError
from transport.tls import client_context

CONNECT_S: Final = 5.0
REFUSAL_S: Final = 1.0
"""With TLS 1.3 the other end refuses a certificate after the handshake; this long it is waited
for.
"""
MAX_AT_ONCE: Final = 64
_NAMES_CHECKED: Final[tuple[PortKind, ...]] = ("control", "data", "front", "engine")
"""Where clients want the name that they dial in the certificate."""
_GRPC: Final[tuple[PortKind, ...]] = ("control", "front")


@dataclass(frozen=True, slots=True)
class Reached:
    """A port, and why there is no connection or no TLS ("": there is). `certificate` is the one
    that was shown there, DER; None without TLS.
    """

    port: RegionPort
    trouble: str = ""
    tls_trouble: str = ""
    certificate: bytes | None = None


async def reach(ports: Sequence[RegionPort], tls: TlsFiles | None) -> list[Reached]:
    """All ports, in their order. Without `tls` no port speaks it."""
    turns = asyncio.Semaphore(MAX_AT_ONCE)

    async def one(port: RegionPort) -> Reached:
        async with turns:
            return await _reach(port, tls if port.role is not None else None)

    return await asyncio.gather(*map(one, ports))


async def _reach(port: RegionPort, tls: TlsFiles | None) -> Reached:
    try:
        async with asyncio.timeout(CONNECT_S):
            _, writer = await asyncio.open_connection(sock=await dial(port.at))
    except TimeoutError:
        return Reached(port, f"no answer within {CONNECT_S:g} s")
    except OSError as error:
        return Reached(port, _reason(error))
    await _close(writer)
    if tls is None:
        return Reached(port)
    try:
        context = client_context(tls)
    except LocalError:  # said of this host's certificate
        return Reached(port)
    context.check_hostname = port.kind in _NAMES_CHECKED
    found = await _shake_hands(port, context)
    if found.tls_trouble and found.certificate is None:
        # Once more without looking, to say what is shown there.
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        shown = await _shake_hands(port, context)
        found = replace(found, certificate=shown.certificate)
    return found


async def _shake_hands(port: RegionPort, context: ssl.SSLContext) -> Reached:
    if port.kind in _GRPC:
        context.set_alpn_protocols(["h2"])
    certificate, writer = None, None
    try:
        async with asyncio.timeout(CONNECT_S):
            reader, writer = await asyncio.open_connection(
                sock=await dial(port.at), ssl=context, server_hostname=port.at.host
            )
        certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        with suppress(TimeoutError):
            async with asyncio.timeout(REFUSAL_S):
                await reader.read(1)
    except TimeoutError:
        return Reached(port, tls_trouble=f"no handshake within {CONNECT_S:g} s")
    except ssl.SSLCertVerificationError as error:
        return Reached(port, tls_trouble=error.verify_message)
    except ssl.SSLError as error:
        reason = (error.reason or str(error)).replace("_", " ").lower()
        if reason == "wrong version number":
            reason = "what listens there does not speak TLS"
        return Reached(port, tls_trouble=reason, certificate=certificate)
    except OSError as error:
        return Reached(port, tls_trouble=f"the connection was lost: {_reason(error)}")
    finally:
        if writer is not None:
            await _close(writer)
    return Reached(port, certificate=certificate)


def _reason(error: OSError) -> str:
    # asyncio puts the addresses into the error's text.
    if error.errno is not None and error.errno > 0:  # names that have no address are below 0
        return os.strerror(error.errno)
    return error.strerror or str(error) or type(error).__name__


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()
    with suppress(OSError):
        await writer.wait_closed()
