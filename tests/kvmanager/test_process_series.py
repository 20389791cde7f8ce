"""What every process shows of itself: its build, and when its certificates end."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from certificates import make_authority, make_node
from prometheus_client import CollectorRegistry

from kvmanager.process_series import ProcessSeries, show_exposure

NAME = "prfaas_certificate_expiry_timestamp_seconds"
DAY_S = 86_400


def test_the_build_names_its_protocols() -> None:
    registry = CollectorRegistry()
    ProcessSeries(registry, "agent")
    (family,) = [found for found in registry.collect() if found.name == "prfaas_build_info"]
    (sample,) = family.samples
    assert sample.value == 1
    assert sample.labels["component"] == "agent"
    assert sample.labels.keys() == {"component", "version", "wire_protocol", "engine_protocol"}
    oldest, newest = map(int, sample.labels["engine_protocol"].split("-"))
    assert oldest <= newest


def test_certificates_end_and_are_replaced(tmp_path: Path) -> None:
    ca = make_authority(tmp_path, "ca")
    files = make_node(tmp_path, "node", ca, num_days=2)
    registry = CollectorRegistry()
    ProcessSeries(registry, "pd", files)

    def days(certificate: str, path: Path) -> float | None:
        labels = {"certificate": certificate, "file": path.name}
        ends_s = registry.get_sample_value(NAME, labels)
        return None if ends_s is None else (ends_s - time.time()) / DAY_S

    assert days("own", files.cert) == pytest.approx(2, abs=0.1)
    assert days("ca", files.ca) == pytest.approx(2, abs=0.1)
    newer = make_node(tmp_path, "newer", ca, num_days=30)
    os.replace(newer.cert, files.cert)
    os.utime(files.cert, ns=(1, 1))
    assert days("own", files.cert) == pytest.approx(30, abs=0.1)
    # A file that cannot be read says nothing, and the others go on.
    files.cert.write_text("no certificate")
    assert days("own", files.cert) is None
    files.ca.unlink()
    assert days("ca", files.ca) is None


def test_what_is_open_is_an_info() -> None:
    registry = CollectorRegistry()
    show_exposure(registry, "prfaas_pd", "everybody may call everything")
    labels = {"what": "everybody may call everything"}
    assert registry.get_sample_value("prfaas_pd_exposure_info", labels) == 1
