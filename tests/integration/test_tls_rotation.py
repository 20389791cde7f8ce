"""Certificate files that are replaced while their users run: sender, receiver, gRPC both ways."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from agent_process import CHILD_ENV
from certificates import make_authority, make_node
from eventually import eventually, wait_until
from transport_loopback import LoopbackPair

from transport import Endpoint, LocalError, TlsFiles, TransportConfig
from transport.rotating import Rotating
from transport.rpc import RpcClient, RpcError, RpcServer
from transport.tls import client_context, server_context

MIB = 1024 * 1024
HANDSHAKES_S = 1.5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tls")


@pytest.fixture(scope="module")
def node(folder: Path) -> TlsFiles:
    return make_node(folder, "node", make_authority(folder, "ca"))


@pytest.fixture(scope="module")
def stranger(folder: Path) -> TlsFiles:
    return make_node(folder, "stranger", make_authority(folder, "other-ca"))


def connection(endpoint: Endpoint) -> socket.socket:
    sock = socket.create_connection((endpoint.host, endpoint.port), 5)
    sock.settimeout(5)
    return sock


def install(files: TlsFiles, directory: Path) -> None:
    """Replace the set in `directory` as Kubernetes does: a new folder, then a link is renamed."""
    version = directory / f"..{len(list(directory.iterdir()))}"
    version.mkdir(parents=True)
    for source, name in ((files.cert, "tls.crt"), (files.key, "tls.key"), (files.ca, "ca.crt")):
        shutil.copy(source, version / name)
        if not (directory / name).is_symlink():
            (directory / name).symlink_to(Path("..data", name))
    (directory / "..new").symlink_to(version.name)
    (directory / "..new").rename(directory / "..data")


def shown_by_receiver(endpoint: Endpoint, files: TlsFiles) -> object:
    """The serial number of the certificate that a new connection is shown."""
    with (
        connection(endpoint) as sock,
        client_context(files).wrap_socket(sock, server_hostname="127.0.0.1") as wrapped,
    ):
        return peer_serial(wrapped)


def shown_by_sender(listener: socket.socket, files: TlsFiles) -> object:
    """The same of the sender's next connection, which is then closed."""
    sock, _ = listener.accept()
    sock.settimeout(5)
    with server_context(files).wrap_socket(sock, server_side=True) as wrapped:
        return peer_serial(wrapped)


def transfer(pair: LoopbackPair, number: int) -> None:
    data = bytearray(random.Random(number).randbytes(MIB))
    handle, landed = pair.begin(number, data)
    handle.ready(0, len(data))
    assert pair.listener.wait(handle.transfer_id) is None
    assert landed == data


def peer_serial(wrapped: ssl.SSLSocket) -> object:
    certificate = wrapped.getpeercert()
    assert certificate is not None
    return certificate["serialNumber"]


def serial(files: TlsFiles) -> object:
    """As it is in the file."""
    shown = subprocess.run(
        ["openssl", "x509", "-in", files.cert, "-noout", "-serial"], capture_output=True, check=True
    )
    return shown.stdout.decode().strip().partition("=")[2]


def test_receiver_and_sender_show_a_new_certificate_without_restart(
    folder: Path, tmp_path: Path, node: TlsFiles
) -> None:
    (directory := tmp_path / "tls").mkdir()
    install(node, directory)
    config = TransportConfig(num_connections=1, tls=TlsFiles.in_directory(directory))
    with (
        closing(LoopbackPair(config)) as pair,
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):
        listener.settimeout(30)
        pair.sender.warm(Endpoint("127.0.0.1", listener.getsockname()[1]))
        assert shown_by_receiver(pair.endpoint, node) == serial(node)
        assert shown_by_sender(listener, node) == serial(node)
        transfer(pair, 1)
        renewed = make_node(folder, "renewed", node.ca)
        install(renewed, directory)
        expected = serial(renewed)
        wait_until(lambda: shown_by_receiver(pair.endpoint, node) == expected)
        wait_until(lambda: shown_by_sender(listener, node) == expected)
        transfer(pair, 2)  # on the connection from before


def test_nodes_move_to_a_new_authority_while_both_are_trusted(
    folder: Path, tmp_path: Path, node: TlsFiles
) -> None:
    new_ca = make_authority(folder, "new-ca")
    both = folder / "both.pem"
    both.write_bytes(node.ca.read_bytes() + new_ca.read_bytes())
    steps = [dataclasses.replace(node, ca=both), make_node(folder, "moved", new_ca, trusts=both)]
    steps.append(dataclasses.replace(steps[-1], ca=new_ca))
    (directory := tmp_path / "tls").mkdir()
    install(node, directory)
    context = Rotating(TlsFiles.in_directory(directory), server_context)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for second, files in enumerate(steps, start=1):
            install(files, directory)
            for peer in (steps[0], files) if second < 3 else (files,):
                assert_agree(listener, context.current(float(second)), client_context(peer))
        with pytest.raises(ssl.SSLError):
            assert_agree(listener, context.current(9.0), client_context(steps[0]))


def assert_agree(listener: socket.socket, server: ssl.SSLContext, client: ssl.SSLContext) -> None:
    """Both handshake and the server speaks; raises SSLError when either turns the other away."""
    client_end = connection(Endpoint("127.0.0.1", listener.getsockname()[1]))
    server_end, _ = listener.accept()
    wrapped = server.wrap_socket(server_end, server_side=True, do_handshake_on_connect=False)
    failure: list[ssl.SSLError] = []

    def serve() -> None:
        try:
            wrapped.do_handshake()
            wrapped.sendall(b"x")
        except ssl.SSLError as error:
            failure.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with client_end, client.wrap_socket(client_end, server_hostname="127.0.0.1") as speaking:
            assert speaking.recv(1) == b"x"
    finally:
        thread.join()
        wrapped.close()


def test_files_are_looked_at_once_a_second(tmp_path: Path, node: TlsFiles) -> None:
    files = copy_of(node, tmp_path)
    rotating = Rotating(files, client_context)
    first = rotating.current(10.0)
    files.cert.write_bytes(node.cert.read_bytes() + b"\n")
    assert rotating.current(10.9) is first
    second = rotating.current(11.0)
    assert second is not first
    assert rotating.current(12.0) is second


@pytest.mark.parametrize("name", ["cert", "key", "ca"])
def test_a_broken_file_keeps_the_last_good_set(
    tmp_path: Path, node: TlsFiles, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    files = copy_of(node, tmp_path)
    rotating = Rotating(files, server_context)
    good = rotating.current(0.0)
    path: Path = getattr(files, name)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    for second in (1.0, 2.0, 3.0):
        assert rotating.current(second) is good
    assert [str(path) in record.getMessage() for record in caplog.records] == [True]
    path.unlink()
    assert rotating.current(4.0) is good
    assert len(caplog.records) == 2
    path.write_bytes(whole)
    assert rotating.current(5.0) is not good
    assert len(caplog.records) == 2


def test_a_key_of_another_certificate_is_not_taken(
    tmp_path: Path, node: TlsFiles, stranger: TlsFiles
) -> None:
    files = copy_of(node, tmp_path)
    files.key.write_bytes(stranger.key.read_bytes())
    with pytest.raises(LocalError, match=r"key\.pem .*mismatch.*cert\.pem"):
        server_context(files)


def copy_of(files: TlsFiles, folder: Path) -> TlsFiles:
    copy = TlsFiles(cert=folder / "cert.pem", key=folder / "key.pem", ca=folder / "ca.pem")
    for name in ("cert", "key", "ca"):
        shutil.copy(getattr(files, name), getattr(copy, name))
    return copy


class Nothing(msgspec.Struct):
    pass


async def call(client: RpcClient) -> str:
    """The code of the error: the services here have no method."""
    with pytest.raises(RpcError) as caught:
        await client.call("Ask", Nothing(), Nothing, timeout_s=30)
    return caught.value.code


async def test_rpc_shows_new_certificates_without_restart(
    folder: Path, tmp_path: Path, node: TlsFiles
) -> None:
    (directory := tmp_path / "tls").mkdir()
    (renewed_folder := tmp_path / "renewed").mkdir()
    install(node, directory)
    renewed = make_node(renewed_folder, "node", node.ca)
    files = dataclasses.replace(TlsFiles.in_directory(directory), server_name="node")
    server = RpcServer("127.0.0.1:0", {"test.S": {}}, files)
    endpoint = Endpoint("127.0.0.1", await server.start())
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(30)
    clients = [
        RpcClient(f"127.0.0.1:{port}", "test.S", files)
        for port in (endpoint.port, listener.getsockname()[1])
    ]

    async def shown_by_both() -> set[object]:
        by_server = await asyncio.to_thread(shown_by_receiver, endpoint, node)
        asking = asyncio.create_task(call(clients[1]))
        by_client = await asyncio.to_thread(shown_by_sender, listener, node)
        assert await asking == "UNAVAILABLE"
        return {by_server, by_client}

    try:
        for present in (node, renewed):
            install(present, directory)
            expected = {serial(present)}
            await eventually(shown_by_both, expected.__eq__)
            assert await call(clients[0]) == "INVALID"  # the server's own answer
    finally:
        for client in clients:
            await client.close()
        listener.close()
        await server.stop(0)


SERVER = """
import asyncio, sys
from pathlib import Path
from transport import TlsFiles
from transport.rpc import RpcServer

async def serve():
    files = TlsFiles.in_directory(Path(sys.argv[1]))
    print(await RpcServer("127.0.0.1:0", {"test.S": {}}, files).start(), flush=True)
    await asyncio.Event().wait()

asyncio.run(serve())
"""


def test_an_rpc_server_outlives_handshakes_at_once(
    folder: Path, tmp_path: Path, node: TlsFiles
) -> None:
    """In a process of its own: what this is about is a segmentation fault in gRPC."""
    (directory := tmp_path / "tls").mkdir()
    install(node, directory)
    argv = [sys.executable, "-c", SERVER, str(directory)]
    context = client_context(node)
    context.check_hostname = False
    context.set_alpn_protocols(["h2"])
    shown: set[object] = set()
    stopping = threading.Event()
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=CHILD_ENV) as server:
        assert server.stdout is not None
        endpoint = Endpoint("127.0.0.1", int(server.stdout.readline()))

        def shake_hands() -> None:
            while not stopping.is_set() and server.poll() is None:
                with (
                    contextlib.suppress(OSError),
                    connection(endpoint) as sock,
                    context.wrap_socket(sock) as wrapped,
                ):
                    shown.add(peer_serial(wrapped))

        threads = [threading.Thread(target=shake_hands) for _ in range(8)]
        try:
            for thread in threads:
                thread.start()
            time.sleep(HANDSHAKES_S)
            (renewed_folder := tmp_path / "renewed").mkdir()
            renewed = make_node(renewed_folder, "node", node.ca)
            install(renewed, directory)
            time.sleep(HANDSHAKES_S)
            assert server.poll() is None, "the server crashed"
        finally:
            stopping.set()
            for thread in threads:
                thread.join()
            server.terminate()
    assert shown == {serial(node), serial(renewed)}


async def test_rpc_names_unusable_files(tmp_path: Path) -> None:
    files = TlsFiles.in_directory(tmp_path)
    with pytest.raises(RpcError, match=r"ca\.crt"):
        await RpcServer("127.0.0.1:0", {}, files).start()
    with pytest.raises(RpcError, match=r"ca\.crt"):
        await RpcClient("127.0.0.1:1", "test.S", files).call("Ask", Nothing(), Nothing, 1)
