"""Certificate files for tests, made by the `openssl` command."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from transport import TlsFiles
from transport.identity import ROLES


def openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=30)


def make_authority(folder: Path, name: str) -> Path:
    """A self-signed CA; its key lies beside the certificate."""
    cert = folder / f"{name}.pem"
    openssl(
        *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
        *("-days", "2", "-subj", f"/CN={name}", "-keyout", folder / f"{name}.key", "-out", cert),
        # Python 3.13 checks as RFC 5280 asks (VERIFY_X509_STRICT), unless it is told not to.
        *("-addext", "keyUsage=critical,keyCertSign,cRLSign"),
    )
    return cert


def make_node(
    folder: Path,
    name: str,
    ca: Path,
    *,
    trusts: Path | None = None,
    num_days: int = 2,
    uris: Sequence[str] | None = None,
    addresses: Sequence[str] = ("127.0.0.1",),
) -> TlsFiles:
    """Files of a node certified by `ca` for `num_days` from now; it trusts `trusts`, else `ca`.

    The certificate is for the host `name` and its `addresses`. Unless `uris` says otherwise its
    holder is the agent `name` of the region "r".
    """
    request, cert, key = (folder / f"{name}.{kind}" for kind in ("csr", "pem", "key"))
    extensions = folder / f"{name}.ext"
    uris = (f"spiffe://r/agent/{name}",) if uris is None else uris
    ips = (f"IP:{address}" for address in addresses)
    names = (f"DNS:{name}", *ips, *(f"URI:{uri}" for uri in uris))
    extensions.write_text(f"subjectAltName={','.join(names)}\n")
    openssl(
        *("req", "-new", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
        *("-subj", f"/CN={name}", "-keyout", key, "-out", request),
    )
    openssl(
        *("x509", "-req", "-in", request, "-CA", ca, "-CAkey", ca.with_suffix(".key")),
        *("-CAcreateserial", "-days", str(num_days), "-extfile", extensions, "-out", cert),
    )
    return TlsFiles(cert=cert, key=key, ca=trusts or ca)


def make_region_files(folder: Path, region: str, *addresses: str) -> TlsFiles:
    """The certificate of all processes of `prfaas up`: every role at each of `addresses`."""
    uris = [f"spiffe://{region}/{role}/test" for role in ROLES]
    return make_node(folder, "region", make_authority(folder, "ca"), uris=uris, addresses=addresses)
