"""A receiver with several addresses: connections go to all of them, and one may be down."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing

import psutil
from transport_loopback import LoopbackPair, eventually

from transport import Endpoint, LinkPath, TransportConfig
from transport.testing.proxy import HurtfulProxy

MIB = 1 << 20
EVERYWHERE = Endpoint("0.0.0.0", 0)
CONFIG = TransportConfig(
    num_connections=4,
    frame_bytes=1 << 16,
    autotune=False,
    reconnect_first_s=0.02,
    reconnect_max_s=0.2,
)


def random_bytes(num_bytes: int) -> bytearray:
    return bytearray(random.Random(num_bytes).randbytes(num_bytes))


def both(
    *paths: LinkPath,
) -> Callable[[Endpoint], Mapping[Endpoint, Sequence[LinkPath]]]:
    """Paths with the receiver's port where they name none."""

    def routes(endpoint: Endpoint) -> Mapping[Endpoint, Sequence[LinkPath]]:
        port = endpoint.port
        filled = [LinkPath(Endpoint(one.to.host, one.to.port or port), one.source) for one in paths]
        return {Endpoint("127.0.0.2", port): filled}

    return routes


def connections(*ports: int) -> Counter[tuple[str, str]]:
    """From where to where this process has connections to these ports."""
    found: Counter[tuple[str, str]] = Counter()
    for one in psutil.Process().net_connections("tcp"):
        if one.raddr and one.raddr.port in ports and one.status == psutil.CONN_ESTABLISHED:
            found[one.laddr.ip, one.raddr.ip] += 1
    return found


def send(pair: LoopbackPair, number: int, nbytes: int = 4 * MIB) -> None:
    data = random_bytes(nbytes)
    handle, landed = pair.begin(number, data, via=Endpoint("127.0.0.2", pair.endpoint.port))
    handle.ready(0, len(data))
    assert pair.listener.wait(handle.transfer_id) is None
    assert landed == data


def test_connections_are_spread_pairwise() -> None:
    paths = both(
        LinkPath(Endpoint("127.0.0.2", 0), "127.0.0.4"),
        LinkPath(Endpoint("127.0.0.3", 0), "127.0.0.5"),
    )
    with closing(LoopbackPair(CONFIG, bind=EVERYWHERE, routes=paths)) as pair:
        port = pair.endpoint.port
        pair.sender.warm(Endpoint("127.0.0.2", port))
        wanted = {("127.0.0.4", "127.0.0.2"): 2, ("127.0.0.5", "127.0.0.3"): 2}
        eventually(lambda: connections(port) == wanted)
        send(pair, 1)


def test_an_address_that_is_not_this_hosts_is_left_to_the_kernel() -> None:
    paths = both(
        LinkPath(Endpoint("127.0.0.2", 0), "192.0.2.1"), LinkPath(Endpoint("127.0.0.3", 0))
    )
    with closing(LoopbackPair(CONFIG, bind=EVERYWHERE, routes=paths)) as pair:
        send(pair, 1)


def test_one_address_down_costs_only_its_connections() -> None:
    # Nobody listens at the second address; all four connections take the first.
    paths = both(LinkPath(Endpoint("127.0.0.2", 0)), LinkPath(Endpoint("127.0.0.3", 1)))
    with closing(LoopbackPair(CONFIG, bind=EVERYWHERE, routes=paths)) as pair:
        send(pair, 1)
        port = pair.endpoint.port
        eventually(lambda: sum(connections(port).values()) == 4)
        assert {there for _, there in connections(port, 1)} == {"127.0.0.2"}


def test_an_address_that_goes_down_while_a_transfer_runs() -> None:
    with closing(LoopbackPair(CONFIG, bind=EVERYWHERE)) as receiving:
        port = receiving.endpoint.port
        with closing(HurtfulProxy(Endpoint("127.0.0.3", port))) as proxy:
            other = LinkPath(proxy.endpoint)
            first = LinkPath(Endpoint("127.0.0.2", port))
            with closing(
                LoopbackPair(CONFIG, routes=lambda _: {first.to: [first, other]})
            ) as sending:
                sending.registry = receiving.registry
                data = random_bytes(4 * MIB)
                handle, landed = sending.begin(1, data, via=first.to)
                handle.ready(0, MIB)
                assert handle.wait_acked(MIB, 30)
                eventually(lambda: sum(connections(port, proxy.endpoint.port).values()) >= 4)
                proxy.close()
                handle.ready(MIB, len(data) - MIB)
                assert sending.listener.wait(handle.transfer_id) is None
                assert landed == data
