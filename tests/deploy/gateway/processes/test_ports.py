"""An address for the processes of one gateway: they share it, and nobody else gets it."""

import socket

import pytest

from deploy.gateway.processes.ports import hold
from transport import Endpoint


def listening(port: int) -> socket.socket:
    """As the processes of a gateway listen."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    sock.bind(("127.0.0.1", port))
    sock.listen()
    return sock


def test_processes_share_what_is_held() -> None:
    held = hold(Endpoint("127.0.0.1", 0))
    port = held.endpoint.port
    assert port != 0
    # Nobody listens yet, and the socket that holds the port does not count.
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)
    with listening(port) as one, listening(port) as two:
        clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(64)]
        assert {one.getsockname(), two.getsockname()} == {("127.0.0.1", port)}
        for client in clients:
            client.close()
    held.close()


@pytest.mark.parametrize("is_served", [False, True])
def test_a_second_gateway_does_not_get_it(is_served: bool) -> None:
    held = hold(Endpoint("127.0.0.1", 0))
    process = listening(held.endpoint.port) if is_served else None
    with pytest.raises(OSError, match="in use"):
        hold(held.endpoint)
    if process is not None:
        process.close()
    held.close()
    hold(held.endpoint).close()


def test_an_address_that_a_stranger_has_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        with pytest.raises(OSError, match="in use"):
            hold(Endpoint("127.0.0.1", stranger.getsockname()[1]))


def test_all_addresses_of_a_name_have_one_port() -> None:
    held = hold(Endpoint("localhost", 0))
    assert {sock.getsockname()[1] for sock in held.sockets} == {held.endpoint.port}
    held.close()
