"""`prfaas doctor region` for a region of two hosts that runs, and with one problem of each kind."""

from __future__ import annotations

import datetime
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import Encoding
from eventually import wait_until
from region_hosts import PATIENCE_S, RegionHost, make_keys
from two_hosts import MADE, two_hosts
from typer.testing import CliRunner

from deploy.cli import app
from deploy.region.certs import Authority
from transport.grants import new_key_pair

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

OTHER_RELEASE = "9.9.9"


@dataclass(frozen=True)
class Found:
    """What the doctor said; `problems` and `warnings` by what they are about."""

    status: int
    checks: list[dict[str, str]]

    def _of(self, level: str) -> dict[str, str]:
        return {one["about"]: one["what"] for one in self.checks if one["level"] == level}

    @property
    def problems(self) -> dict[str, str]:
        return self._of("problem")

    @property
    def warnings(self) -> dict[str, str]:
        return self._of("warning")


def doctor(host: RegionHost, *words: str) -> Found:
    words = words or ("--node", host.node, "--run-dir", host.run_dir)
    file = str(host.folder / "region.yaml")
    said = CliRunner().invoke(app, ["doctor", "region", file, "--json", *words])
    assert said.stdout, said.stderr
    found: dict[str, Any] = json.loads(said.stdout)
    assert found["healthy"] is (said.exit_code == 0)
    return Found(said.exit_code, found["checks"])


def doctor_until(host: RegionHost, condition: Callable[[Found], object]) -> Found:
    """The first answer for which the condition holds."""
    found: Found = wait_until(lambda: doctor(host), condition, timeout_s=PATIENCE_S)
    return found


def put(path: Path, data: bytes) -> None:
    new = path.with_suffix(".new")
    shutil.copy(path, new)
    new.write_bytes(data)
    new.replace(path)


def of_another_release(folder: Path) -> Callable[[Any], list[str]]:
    """Runs commands as if another release of prfaas were installed."""
    info = folder / f"prfaas-{OTHER_RELEASE}.dist-info"
    info.mkdir(parents=True)
    text = f"Metadata-Version: 2.1\nName: prfaas\nVersion: {OTHER_RELEASE}\n"
    (info / "METADATA").write_text(text)
    return lambda argv: ["env", f"PYTHONPATH={folder}", *argv]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("region")


@pytest.fixture(scope="module")
def hosts(folder: Path) -> Iterator[dict[str, RegionHost]]:
    both = two_hosts(folder)
    both["a1"].run_in = of_another_release(folder / "release")
    try:
        for host in both.values():
            host.begin()
        for host in both.values():
            host.ready()
        yield both
    finally:
        for host in both.values():
            if host.launcher is not None:
                host.down()


def test_a_region_that_is_all_right(
    hosts: dict[str, RegionHost], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    far, home = hosts["a1"], hosts["b1"]
    # The gateway asks the front of the other host from time to time.
    found = doctor_until(home, lambda found: found.status == 0)
    about = {one["about"]: one["what"] for one in found.checks if one["level"] == "ok"}
    assert about["agent a1, data"].endswith(": TLS")
    assert about["front far"].startswith("it can use all 1 engines")
    assert about["weights and layouts"] == "the same for all engines of small"
    assert {"clock of a1", "keys of grants at a1", "keys of grants of this host"} <= set(about)
    # Only some things are noted: releases differ, and tests keep arenas where they may be on disk.
    assert f"{OTHER_RELEASE}: agent a1, front far" in found.warnings["versions of prfaas"]
    assert set(found.warnings) <= {"versions of prfaas", "arena of a1", "arena of b1"}
    assert doctor(far).status == 0
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "nothing runs here"))
    outside = doctor(far, "--site", "far")
    assert outside.status == 0
    from_elsewhere = doctor(far, "--set", "UNUSED=1")
    assert from_elsewhere.status == 0
    text = (
        CliRunner()
        .invoke(app, ["doctor", "region", str(far.folder / "region.yaml"), "--node", "a1"])
        .stdout
    )
    assert "seen from a1" in text
    assert "0 problems," in text


def test_an_expired_certificate(hosts: dict[str, RegionHost], folder: Path) -> None:
    far, path = hosts["a1"], hosts["a1"].folder / "keys" / "cert.pem"
    good = path.read_bytes()
    old, now = x509.load_pem_x509_certificate(good), datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(
        issuer_name=old.issuer,
        subject_name=old.subject,
        public_key=old.public_key(),
        serial_number=x509.random_serial_number(),
        not_valid_before=now - datetime.timedelta(days=3),
        not_valid_after=now - datetime.timedelta(days=1),
    )
    for extension in old.extensions:
        builder = builder.add_extension(extension.value, extension.critical)
    expired = builder.sign(Authority.read(folder / MADE).key, hashes.SHA256())
    put(path, expired.public_bytes(Encoding.PEM))
    try:
        # Processes look at their files now and then.
        found = doctor_until(hosts["b1"], lambda found: "agent a1, control" in found.problems)
        assert found.problems["agent a1, control"].endswith("certificate has expired")
        assert "it has expired, on" in found.problems["certificate at agent a1, control"]
        assert "it has expired, on" in doctor(far).problems["certificate of this host"]
    finally:
        put(path, good)
    doctor_until(hosts["b1"], lambda found: found.status == 0)


def test_a_certificate_of_another_authority(hosts: dict[str, RegionHost], folder: Path) -> None:
    keys = hosts["a1"].folder / "keys"
    make_keys(folder / "other", folder / "region.yaml")
    names = ("cert.pem", "key.pem", "ca.pem")
    good = {name: (keys / name).read_bytes() for name in names}
    for name in names:
        put(keys / name, (folder / "other" / "a1" / name).read_bytes())
    try:
        found = doctor_until(hosts["b1"], lambda found: "agent a1, control" in found.problems)
        assert "TLS fails" in found.problems["agent a1, control"]
        assert "agent b1, control" not in found.problems
        fixes = {one["about"]: one["fix"] for one in found.checks}
        assert fixes["agent a1, control"].startswith("its certificate is of another authority")
    finally:
        for name in names:
            put(keys / name, good[name])
    doctor_until(hosts["b1"], lambda found: found.status == 0)


def test_keys_of_grants_that_do_not_belong_together(hosts: dict[str, RegionHost]) -> None:
    path = hosts["a1"].folder / "keys" / "granting.pub"
    good = path.read_bytes()
    put(path, new_key_pair()[1])
    try:
        found = doctor_until(hosts["b1"], lambda found: "keys of grants at a1" in found.problems)
        assert "it does not know the gateway's key" in found.problems["keys of grants at a1"]
        assert "keys of grants at b1" not in found.problems
    finally:
        put(path, good)
    doctor_until(hosts["b1"], lambda found: found.status == 0)


def test_a_host_whose_ports_are_closed(hosts: dict[str, RegionHost]) -> None:
    far, home = hosts["a1"], hosts["b1"]
    far.down()
    found = doctor_until(home, lambda found: "gateway, cluster far" in found.problems)
    for name in ("agent a1, control", "agent a1, data", "front far"):
        assert "Connection refused" in found.problems[name]
    fixes = {one["about"]: one["fix"] for one in found.checks if one["level"] == "problem"}
    assert "does a firewall let 7101/tcp through" in fixes["agent a1, control"]
    # What only others have to reach is no problem of this host.
    assert "engine a1-engine" not in found.problems
    (home.folder / "keys" / "granting.key").rename(home.folder / "away")
    assert "there is no" in doctor(home).problems["security.granting_key"]
    (home.folder / "away").rename(home.folder / "keys" / "granting.key")
