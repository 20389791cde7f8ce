"""Stories of hosts with several addresses. tests/integration/test_names.py runs them in a process
of its own, with the /etc/hosts that HOSTS says. An AssertionError ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import uvloop
from gateway_region import open_region
from transport_loopback import LoopbackPair

from deploy.lab.emulator import RelayProcess
from deploy.region.launch.ports import can_listen
from transport import Endpoint, TransportConfig
from transport.testing.proxy import HurtfulProxy

HOSTS = """\
127.0.0.1 localhost
::1 both
127.0.0.1 both
127.0.0.2 two
127.0.0.3 two
::1 six
"""
"""Resolvers give ::1 of `both` first (RFC 6724). In most stories nobody is there, or somebody else,
or somebody who does not answer.
"""

CONFIG = TransportConfig(num_connections=2, autotune=False, reconnect_first_s=0.02)


def send(pair: LoopbackPair, number: int, via: Endpoint) -> float:
    """Send a transfer; returns how long it took, seconds."""
    data, begin_s = bytearray(b"x" * 100_000), time.monotonic()
    transfer, landed = pair.begin(number, data, via=via)
    transfer.ready(0, len(data))
    assert pair.listener.wait(transfer.transfer_id) is None
    assert landed == data
    return time.monotonic() - begin_s


@contextlib.contextmanager
def hole(port: int) -> Iterator[None]:
    """At ::1 connections neither succeed nor fail: Linux drops what a full queue has no room
    for.
    """
    with socket.socket(socket.AF_INET6) as full, socket.socket(socket.AF_INET6) as waiting:
        full.bind(("::1", port))
        full.listen(0)
        waiting.connect(full.getsockname())
        yield


def a_transfer_goes_to_the_address_that_answers() -> None:
    with closing(LoopbackPair(CONFIG)) as pair:
        send(pair, 1, Endpoint("both", pair.endpoint.port))
    for address in ("127.0.0.2", "127.0.0.3"):
        with closing(LoopbackPair(CONFIG, bind=Endpoint(address, 0))) as pair:
            send(pair, 1, Endpoint("two", pair.endpoint.port))


def a_hole_costs_a_transfer_little() -> None:
    with closing(LoopbackPair(CONFIG)) as pair, hole(pair.endpoint.port):
        assert send(pair, 1, Endpoint("both", pair.endpoint.port)) < CONFIG.connect_timeout_s


def the_good_address_is_remembered() -> None:
    """Somebody else listens at the first address, who does not speak our protocol."""
    config = replace(CONFIG, num_connections=1)
    with closing(LoopbackPair(config)) as pair, closing(HurtfulProxy(pair.endpoint)) as proxy:
        num_visits = 0

        def turn_away(server: socket.socket) -> None:
            nonlocal num_visits
            with contextlib.suppress(OSError):
                while True:
                    server.accept()[0].close()
                    num_visits += 1

        with closing(
            socket.create_server(("::1", proxy.endpoint.port), family=socket.AF_INET6)
        ) as server:
            threading.Thread(target=turn_away, args=(server,), daemon=True).start()
            via = Endpoint("both", proxy.endpoint.port)
            send(pair, 1, via)
            before = num_visits
            assert before
            for number in range(2, 5):
                proxy.cut()
                send(pair, number, via)
            assert num_visits == before
            server.shutdown(socket.SHUT_RDWR)


def each_address_is_listened_on() -> None:
    for name, addresses in {"both": ("::1", "127.0.0.1"), "six": ("::1",)}.items():
        with closing(LoopbackPair(CONFIG, bind=Endpoint(name, 0))) as pair:
            port = pair.endpoint.port
            for number, address in enumerate((*addresses, name)):
                send(pair, number, Endpoint(address, port))
            assert not can_listen(name, port)  # as the launcher looks


def a_port_that_is_taken_at_one_address_is_taken() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        assert not can_listen("both", taken.getsockname()[1])


def a_relay_leads_to_the_address_that_answers() -> None:
    with closing(LoopbackPair(CONFIG)) as pair:
        with RelayProcess(f"both:{pair.endpoint.port}", listen="both:0") as relay:
            for number, address in enumerate(("::1", "127.0.0.1", "both")):
                send(pair, number, Endpoint(address, relay.port))


async def _ask_behind_a_hole() -> None:
    async with open_region(prefill=(), host="::") as region:
        engine = next(iter(region.pds["home"].engines.values()))
        port = int(engine.url.rpartition(":")[2])
        engine.url = f"http://both:{port}"
        with hole(port):
            gateway_port = region.url.rpartition(":")[2]
            for host in ("127.0.0.1", "[::1]"):
                url = f"http://{host}:{gateway_port}/v1/completions"
                begin_s = time.monotonic()
                body = {"model": "tiny", "prompt": "hello", "max_tokens": 2}
                async with region.session.post(url, json=body) as answer:
                    assert answer.status == 200, await answer.text()
                assert time.monotonic() - begin_s < 5.0


def a_gateway_reaches_an_engine_behind_a_hole() -> None:
    """It listens at "::", which is both families, and an engine's first address is a hole."""
    uvloop.run(_ask_behind_a_hole())
    asyncio.run(_ask_behind_a_hole())


if __name__ == "__main__":
    for story in (
        a_transfer_goes_to_the_address_that_answers,
        a_hole_costs_a_transfer_little,
        the_good_address_is_remembered,
        each_address_is_listened_on,
        a_port_that_is_taken_at_one_address_is_taken,
        a_relay_leads_to_the_address_that_answers,
        a_gateway_reaches_an_engine_behind_a_hole,
    ):
        story()
