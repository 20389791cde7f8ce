"""Mutual TLS over real sockets, with certificates that the `openssl` command makes for the test."""

from __future__ import annotations

import random
import subprocess
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from transport import LocalError, PeerError, Sender, TlsFiles, TransportConfig
from transport.testing_loopback import HurtfulProxy, LoopbackPair

MIB = 1024 * 1024
CONFIG = TransportConfig(
    num_connections=3,
    connect_timeout_s=2,
    handshake_timeout_s=2,
    ack_timeout_s=2,
    idle_timeout_s=4,
    reconnect_first_s=0.02,
    reconnect_max_s=0.2,
)


def openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=30)


def make_authority(folder: Path, name: str) -> Path:
    """A self-signed CA; its key lies beside the certificate."""
    cert = folder / f"{name}.pem"
    openssl(
        *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
        *("-days", "2", "-subj", f"/CN={name}", "-keyout", folder / f"{name}.key", "-out", cert),
    )
    return cert


def make_node(folder: Path, name: str, ca: Path, *, trusts: Path | None = None) -> TlsFiles:
    """Files of a node certified by `ca` that trusts `trusts` (the same CA unless given)."""
    request, cert, key = (folder / f"{name}.{kind}" for kind in ("csr", "pem", "key"))
    extensions = folder / f"{name}.ext"
    extensions.write_text(f"subjectAltName=DNS:{name}\n")
    openssl(
        *("req", "-new", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
        *("-subj", f"/CN={name}", "-keyout", key, "-out", request),
    )
    openssl(
        *("x509", "-req", "-in", request, "-CA", ca, "-CAkey", ca.with_suffix(".key")),
        *("-CAcreateserial", "-days", "2", "-extfile", extensions, "-out", cert),
    )
    return TlsFiles(cert=cert, key=key, ca=trusts or ca)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tls")


@pytest.fixture(scope="module")
def node(folder: Path) -> TlsFiles:
    return make_node(folder, "node", make_authority(folder, "ca"))


@pytest.fixture(scope="module")
def stranger(folder: Path, node: TlsFiles) -> TlsFiles:
    """Certified by another CA, but trusting ours."""
    return make_node(folder, "stranger", make_authority(folder, "other-ca"), trusts=node.ca)


def outcome(pair: LoopbackPair) -> Exception | None:
    data = bytearray(random.Random(0).randbytes(3 * MIB + 5))
    handle, landed = pair.begin(1, data)
    handle.ready(0, len(data))
    error = pair.listener.wait(handle.transfer_id)
    assert (landed == data) is (error is None)
    return error


def test_exact_bytes_under_mutual_tls(node: TlsFiles) -> None:
    with closing(LoopbackPair(replace(CONFIG, tls=node))) as pair:
        assert outcome(pair) is None


def test_cut_connections_are_resumed_under_tls(node: TlsFiles) -> None:
    with (
        closing(LoopbackPair(replace(CONFIG, tls=node))) as pair,
        closing(HurtfulProxy(pair.endpoint)) as proxy,
    ):
        data = bytearray(random.Random(0).randbytes(16 * MIB))
        handle, landed = pair.begin(1, data, via=proxy.endpoint)
        handle.ready(0, 4 * MIB)
        while handle.progress().acked_bytes == 0:
            assert not pair.listener.failed
        handle.ready(4 * MIB, 12 * MIB)
        proxy.cut()
        assert pair.listener.wait(handle.transfer_id) is None
        assert landed == data


def test_cancel_and_drop_work_under_tls(node: TlsFiles) -> None:
    with closing(LoopbackPair(replace(CONFIG, tls=node))) as pair:
        one, _ = pair.begin(1, bytearray(MIB))
        two, _ = pair.begin(2, bytearray(MIB))
        for handle in (one, two):
            handle.ready(0, 1000)
            while handle.progress().acked_bytes < 1000:
                assert not pair.listener.failed
        one.cancel("not wanted")
        pair.receiver.drop(two.transfer_id, "not wanted either")
        errors = [pair.listener.wait(handle.transfer_id) for handle in (one, two)]
        assert [error.code for error in errors if error] == ["cancelled", "dropped"]


def assert_fails_fast(pair: LoopbackPair, *codes: str) -> None:
    error = outcome(pair)
    assert isinstance(error, PeerError), error
    assert error.code in codes
    assert "TLS" in error.message


def test_receiver_turns_a_strangers_certificate_away(node: TlsFiles, stranger: TlsFiles) -> None:
    pair = LoopbackPair(replace(CONFIG, tls=stranger), receiver_config=replace(CONFIG, tls=node))
    with closing(pair):
        assert_fails_fast(pair, "tls")


def test_sender_turns_a_strangers_certificate_away(node: TlsFiles, stranger: TlsFiles) -> None:
    pair = LoopbackPair(replace(CONFIG, tls=node), receiver_config=replace(CONFIG, tls=stranger))
    with closing(pair):
        assert_fails_fast(pair, "tls")


def test_tls_sender_and_plain_receiver(node: TlsFiles) -> None:
    pair = LoopbackPair(replace(CONFIG, tls=node), receiver_config=CONFIG)
    with closing(pair):
        assert_fails_fast(pair, "tls")


def test_plain_sender_and_tls_receiver(node: TlsFiles) -> None:
    pair = LoopbackPair(CONFIG, receiver_config=replace(CONFIG, tls=node))
    with closing(pair):
        error = outcome(pair)
        assert error is not None
        assert error.code == "unreachable"
        assert "does it expect TLS?" in error.message


@pytest.mark.parametrize(("name", "matches"), [("node", True), ("elsewhere", False)])
def test_the_receivers_name_is_checked_when_asked(node: TlsFiles, name: str, matches: bool) -> None:
    named = replace(CONFIG, tls=replace(node, server_name=name))
    with closing(LoopbackPair(named, receiver_config=replace(CONFIG, tls=node))) as pair:
        error = outcome(pair)
        assert (error is None) is matches
        if error is not None:
            assert "mismatch" in str(error)


def test_unusable_files_are_named(node: TlsFiles) -> None:
    with pytest.raises(LocalError, match=r"missing\.pem"):
        Sender(replace(CONFIG, tls=replace(node, cert=Path("missing.pem"))))
