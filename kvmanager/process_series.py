"""Prometheus series that every process of a region has: its build, and when its certificates end.

It does not know what kind of process it is in.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from prometheus_client import CollectorRegistry, Info
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvmanager.agent.engines.protocol import PROTOCOL_VERSIONS
from kvmanager.program_version import program_version
from transport import Credentials
from transport.config import TlsFiles
from transport.versions import Versions
from transport.wire.handshake import VERSIONS as WIRE_VERSIONS

_EXPIRY: Final = "prfaas_certificate_expiry_timestamp_seconds"


def show_exposure(registry: CollectorRegistry, prefix: str, exposure: str) -> None:
    """Show what somebody on the network may do, as `<prefix>_exposure_info`."""
    text = "What somebody on the network may do. There is none where nothing is open."
    Info(f"{prefix}_exposure", text, registry=registry).info({"what": exposure})


class ProcessSeries(Collector):
    """The series of one process."""

    def __init__(
        self, registry: CollectorRegistry, component: str, credentials: Credentials | None = None
    ) -> None:
        """`component` is the kind of process. Without TLS in `credentials` there is nothing that
        ends.
        """
        self._component = component
        files = credentials if isinstance(credentials, TlsFiles) else None
        self._files = {} if files is None else {"own": files.cert, "ca": files.ca}
        self._known: dict[Path, tuple[int, float]] = {}
        registry.register(self)

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        build = GaugeMetricFamily(
            "prfaas_build_info",
            "The version of the program, and those of the protocols that it speaks.",
            labels=["component", "version", "wire_protocol", "engine_protocol"],
        )
        labels = (_words(WIRE_VERSIONS), _words(PROTOCOL_VERSIONS))
        build.add_metric([self._component, program_version(), *labels], 1)
        yield build
        expiry = GaugeMetricFamily(
            _EXPIRY,
            "Unix time at which the certificate in a file ends, the first of several to end.",
            labels=["certificate", "file"],
        )
        for name, path in self._files.items():
            ends_s = self._ends_s(path)
            if ends_s is not None:
                expiry.add_metric([name, path.name], ends_s)
        yield expiry

    def _ends_s(self, path: Path) -> float | None:
        """When the first certificate of a file ends; None if it cannot be read."""
        # Only processes with TLS pay for loading it.
        from cryptography import x509

        try:
            changed_ns = path.stat().st_mtime_ns
            known = self._known.get(path)
            # A file that is replaced says when the new certificate ends, at the next scrape.
            if known is None or known[0] != changed_ns:
                found = x509.load_pem_x509_certificates(path.read_bytes())
                ends_s = min(item.not_valid_after_utc.timestamp() for item in found)
                known = self._known[path] = changed_ns, ends_s
        except (OSError, ValueError):
            return None
        return known[1]


def _words(versions: Versions) -> str:
    return f"{versions.oldest}-{versions.newest}"
