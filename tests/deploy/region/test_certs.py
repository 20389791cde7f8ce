"""`prfaas certs init` and `add`: the certificates and keys of each host, which TLS accepts."""

from __future__ import annotations

import json
import ssl
import stat
from pathlib import Path

import pytest
from cryptography import x509
from typer.testing import CliRunner

from deploy.cli import app
from deploy.region.certs import Authority, add, hosts_of, make
from deploy.region.spec.loading import parse_region
from transport.grants import Granter, GrantFile
from transport.identity import certificate_identities

REGION = """
name: two
models: [{name: m, path: org/m}]
clusters:
  - name: far
    kind: prefill
    nodes:
      - {name: a1, host: 10.0.0.1, instances: [{name: a1-p}]}
      - {name: a2, host: a2.example, agent: {advertise: "nat.example:7100"}, instances: [{name: q}]}
  - name: home
    kind: pd
    nodes:
      - {name: b1, host: 10.1.0.1, instances: [{name: b1-d}]}
      - {name: b2, host: 10.1.0.1, instances: [{name: b2-d}]}
links: [{from: far, to: home, endpoints: {b2: "198.51.100.7:7100"}}]
"""


def test_hosts_have_the_names_that_others_look_for() -> None:
    a1, a2, b = hosts_of(parse_region(REGION, {}))
    assert [str(one) for one in a1.identities] == [
        "spiffe://two/agent/a1", "spiffe://two/operator/a1", "spiffe://two/prefill-front/far",
    ]  # fmt: skip
    assert a2.addresses == ("a2.example", "nat.example")
    assert (b.folder, b.nodes, b.has_gateway) == ("b1", ("b1", "b2"), True)
    assert b.addresses == ("10.1.0.1", "198.51.100.7")
    assert "spiffe://two/gateway/gateway" in map(str, b.identities)
    assert not a1.has_gateway


def test_certificates_hold_for_their_host(tmp_path: Path) -> None:
    make(parse_region(REGION, {}), tmp_path / "keys", days=9)
    folder = tmp_path / "keys" / "b1"
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(folder / "ca.pem"))
    server.verify_mode = ssl.CERT_REQUIRED
    server.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    other = tmp_path / "keys" / "a2"
    client = ssl.create_default_context(cafile=str(other / "ca.pem"))
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    client.load_cert_chain(other / "cert.pem", other / "key.pem")
    seen = shaken_hands(server, client, "198.51.100.7")
    assert [str(one) for one in certificate_identities(seen)] == ["spiffe://two/agent/a2",
        "spiffe://two/operator/a2"]  # fmt: skip
    with pytest.raises(ssl.SSLCertVerificationError, match=r"10\.0\.0\.9"):
        shaken_hands(server, client, "10.0.0.9")
    certificate = x509.load_pem_x509_certificate((folder / "cert.pem").read_bytes())
    assert (certificate.not_valid_after_utc - certificate.not_valid_before_utc).days == 9


def shaken_hands(server: ssl.SSLContext, client: ssl.SSLContext, host: str) -> dict[str, object]:
    """What the client shows to the server that it reaches as `host`."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = client.wrap_bio(to_client, to_server, server_hostname=host)
    theirs = server.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(4):
        for end in (ours, theirs):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    return dict(theirs.getpeercert() or {})


def test_only_the_gateway_can_sign_grants_and_all_files_are_private(tmp_path: Path) -> None:
    make(parse_region(REGION, {}), tmp_path / "keys", days=9)
    folders = {path.name: path for path in (tmp_path / "keys").iterdir() if path.is_dir()}
    shared = {"ca.pem", "cert.pem", "key.pem", "engine.key", "granting.pub"}
    assert {name: {path.name for path in at.iterdir()} for name, at in folders.items()} == {
        "a1": shared,
        "a2": shared,
        "b1": shared | {"granting.key"},
    }
    assert len({(at / "engine.key").read_text() for at in folders.values()}) == 1
    assert len({(at / "key.pem").read_text() for at in folders.values()}) == 3
    Granter(GrantFile(folders["b1"] / "granting.key", "two"))
    for path in (tmp_path / "keys").rglob("*"):
        assert not stat.S_IMODE(path.stat().st_mode) & 0o077


def test_without_tls_the_region_gets_a_key(tmp_path: Path) -> None:
    text = f"{REGION}security: {{region_key: k}}\n"
    make(parse_region(text, {}), tmp_path / "keys", days=9)
    assert not (tmp_path / "keys" / "ca.key").exists()
    assert {path.name for path in (tmp_path / "keys" / "a1").iterdir()} == {
        "region.key", "engine.key", "granting.pub",
    }  # fmt: skip


def files_in(keys: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in keys.rglob("*") if path.is_file()}


def test_a_host_that_joins_later_gets_files_of_the_same_authority(tmp_path: Path) -> None:
    region, keys = parse_region(REGION, {}), tmp_path / "keys"
    make(region, keys, days=9)
    before = files_in(keys)
    assert add(region, keys, days=9) == []
    assert files_in(keys) == before
    a3 = "- {name: a3, host: a3, instances: [{name: r}]}"
    joined = REGION.replace("- {name: a2", f"{a3}\n      - {{name: a2")
    (new,) = add(parse_region(joined, {}), keys, days=9)
    assert new.folder == "a3"
    after = files_in(keys)
    assert {path: after[path] for path in before} == before
    for name in ("ca.pem", "engine.key", "granting.pub"):
        assert (keys / "a3" / name).read_bytes() == before[keys / "a1" / name]
    assert not (keys / "a3" / "granting.key").exists()
    assert stat.S_IMODE((keys / "a3" / "key.pem").stat().st_mode) == 0o600
    context = ssl.create_default_context(cafile=str(keys / "ca.pem"))
    context.load_cert_chain(keys / "a3" / "cert.pem", keys / "a3" / "key.pem")
    read = (
        x509.load_pem_x509_certificate(after[keys / path]) for path in ("a3/cert.pem", "ca.pem")
    )
    certificate, authority = read
    certificate.verify_directly_issued_by(authority)


def test_a_certificate_is_made_anew_for_other_names_or_when_asked(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    make(parse_region(REGION, {}), keys, days=9)
    before = files_in(keys)
    moved = parse_region(REGION.replace("a2.example", "10.0.0.2"), {})
    (host,) = add(moved, keys, days=9)
    assert host.addresses == ("10.0.0.2", "nat.example")
    changed = {path for path, data in files_in(keys).items() if before.get(path) != data}
    assert changed == {keys / "a2" / "cert.pem", keys / "a2" / "key.pem"}
    assert add(moved, keys, days=9) == []
    before = files_in(keys)
    assert [host.folder for host in add(moved, keys, days=20, renew=True)] == ["a1", "a2", "b1"]
    changed = {path for path, data in files_in(keys).items() if before.get(path) != data}
    assert {path.name for path in changed} == {"cert.pem", "key.pem"}
    (keys / "ca.key").unlink()
    with pytest.raises(FileNotFoundError, match=r"ca\.key"):
        add(moved, keys, days=9)


def test_without_tls_a_host_that_joins_gets_the_keys(tmp_path: Path) -> None:
    text, keys = f"{REGION}security: {{region_key: k}}\n", tmp_path / "keys"
    make(parse_region(text, {}), keys, days=9)
    (keys / "a2" / "region.key").unlink()
    (host,) = add(parse_region(text, {}), keys, days=9)
    assert host.folder == "a2"
    region_keys = {(keys / name / "region.key").read_bytes() for name in ("a1", "a2", "b1")}
    assert len(region_keys) == 1
    for folder in keys.iterdir():
        (folder / "engine.key").unlink()
    with pytest.raises(FileNotFoundError, match=r"has engine\.key"):
        add(parse_region(text, {}), keys, days=9)


class TestCommandLine:
    def told(self, *words: str, command: str = "init") -> tuple[int, str, str]:
        result = CliRunner().invoke(app, ["certs", command, *words])
        return result.exit_code, result.stdout, result.stderr

    def test_it_says_what_goes_where_and_overwrites_nothing(self, tmp_path: Path) -> None:
        file, keys = tmp_path / "region.yaml", tmp_path / "keys"
        file.write_text(REGION)
        status, said, _ = self.told(str(keys), str(file))
        assert status == 0
        assert f"copy {keys}/a1/ to the host 10.0.0.1 (a1)\n" in said
        assert f"copy {keys}/b1/ to the host 10.1.0.1 (b1, b2, with the gateway)\n" in said
        security = said[said.index("security:") :]
        assert "tls: {cert: keys/cert.pem, key: keys/key.pem, ca: keys/ca.pem}" in security
        before = (keys / "ca.pem").read_bytes()
        status, _, refused = self.told(str(keys), str(file))
        assert (status, f"{keys} is not empty" in refused) == (1, True)
        assert (keys / "ca.pem").read_bytes() == before
        # With what was said, the file names all of it.
        file.write_text(REGION + security)
        _, said, _ = self.told(str(tmp_path / "more"), str(file))
        assert f"engine.key    {keys}/engine.key" in said
        assert "security:" not in said

    def test_adding_says_what_to_copy(self, tmp_path: Path) -> None:
        file, keys = tmp_path / "region.yaml", tmp_path / "keys"
        file.write_text(REGION)
        status, _, refused = self.told(str(keys), str(file), command="add")
        assert (status, "ca.key" in refused) == (1, True)
        self.told(str(keys), str(file))
        _, said, _ = self.told(str(keys), str(file), command="add")
        assert said == "every host of the file has its files\n"
        file.write_text(REGION.replace("a2.example", "10.0.0.2"))
        _, said, _ = self.told(str(keys), str(file), command="add")
        assert said == f"copy {keys}/a2/ to the host 10.0.0.2 (a2)\n"
        _, said, _ = self.told(str(keys), str(file), "--renew", "--json", command="add")
        assert [host["folder"] for host in json.loads(said)["hosts"]] == ["a1", "a2", "b1"]

    def test_a_certificate_that_has_expired_is_made_anew(self, tmp_path: Path) -> None:
        file, keys = tmp_path / "region.yaml", tmp_path / "keys"
        file.write_text(REGION)
        self.told(str(keys), str(file))
        host = hosts_of(parse_region(REGION, {}))[0]
        for name, data in Authority.read(keys).certified(host, days=0).items():
            (keys / "a1" / name).write_bytes(data)
        _, said, _ = self.told(str(keys), str(file), command="add")
        assert said == f"copy {keys}/a1/ to the host 10.0.0.1 (a1)\n"
        _, said, _ = self.told(str(keys), str(file), command="add")
        assert said == "every host of the file has its files\n"

    def test_in_json(self, tmp_path: Path) -> None:
        file = tmp_path / "region.yaml"
        file.write_text(f"{REGION}security: {{trusted_network: true}}\n")
        _, said, _ = self.told(str(tmp_path / "keys"), str(file), "--json")
        told = json.loads(said)
        assert [host["folder"] for host in told["hosts"]] == ["a1", "a2", "b1"]
        assert told["settings"] == {"engine_key": "engine.key"}
