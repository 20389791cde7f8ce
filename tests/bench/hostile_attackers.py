"""Attackers of a gateway and of node agents: they hold sockets, send garbage, open handshakes.

Run by `bench_hostile` as a process of its own, so that they take one core at most: python
hostile_attackers.py PLAN, where PLAN is a `Plan` as JSON. They say in one line that all have begun,
and attack until SIGTERM; then they print what each attack did. With --decoys PORT... the process is
a victim that nobody depends on: it accepts everything and reads it.

Every connection comes from one of 64 addresses of loopback. Only the attackers with a key know
anything of the region.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import resource
import signal
import ssl
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from raw_client import RawClient

from kvmanager.agent.messages import SERVICE, Status, StatusReply
from transport.rpc import RpcClient, RpcError
from transport.wire.frames import FrameType
from transport.wire.handshake import own_hello

KIB: Final = 1024
MIB: Final = 1024 * KIB
PATH: Final = "/v1/completions"
PATIENCE_S: Final = 0.5
"""How long an attack that is no long one waits for an answer."""
SENDERS_AT_ONCE: Final = 32
"""Connections of each attack that does not hold its sockets."""
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(frozen=True, slots=True)
class Plan:
    """Whom to attack, and how much. Ports are on loopback; `data` and `controls` are of agents.

    `key` is an API key of the gateway. All attacks together hold about `num_held` sockets and open
    `connections_per_s` new ones, after a first one for each socket that is held.
    """

    gateway: int
    data: int
    controls: tuple[int, ...]
    key: str
    num_held: int
    connections_per_s: float


@dataclass(slots=True)
class Tally:
    """Counts of one attack. The victim, or patience, ended `num_ended` connections."""

    num_begun: int = 0
    num_ended: int = 0


_numbers = itertools.count()


def source() -> str:
    """An address of loopback, the next of 64."""
    return f"127.0.{1 + next(_numbers) % 64}.1"


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[Stream]:
    """A connection to `port`; it ends with a reset."""
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", port, local_addr=(source(), 0), limit=64 * KIB
    )
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def hold(reader: asyncio.StreamReader) -> None:
    """Keep the connection until the other end is tired of it."""
    while await reader.read(4 * KIB):
        pass


def json_headers(key: str) -> dict[str, str]:
    return {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}


# Attacks on the gateway.


async def idle_body(plan: Plan) -> None:
    """A body of megabytes of which some bytes come."""
    async with RawClient(f"http://127.0.0.1:{plan.gateway}", source()) as client:
        await client.post(PATH, json_headers(plan.key), announced=16 * MIB, body=b" " * KIB)
        await hold(client.reader)


async def slow_headers(plan: Plan) -> None:
    """One header after the other, for ever (slow loris)."""
    async with RawClient(f"http://127.0.0.1:{plan.gateway}", source()) as client:
        await client.send(f"POST {PATH} HTTP/1.1\r\nHost: x\r\n".encode())
        while True:
            await asyncio.sleep(2.0)
            await client.send(b"X-More: x\r\n")


async def trickling_reader(plan: Plan) -> None:
    """A long answer that is read a few bytes at a time."""
    body = json.dumps({"model": "echo", "prompt": "flood", "stream": True}).encode()
    async with RawClient(f"http://127.0.0.1:{plan.gateway}", source()) as client:
        await client.post(PATH, json_headers(plan.key), announced=len(body), body=body)
        while await client.reader.read(100):
            await asyncio.sleep(0.5)


async def wrong_key(plan: Plan) -> None:
    body = b'{"model": "echo", "prompt": "x"}'
    async with RawClient(f"http://127.0.0.1:{plan.gateway}", source()) as client:
        headers = json_headers(f"guess-{random.getrandbits(64)}")
        await client.post(PATH, headers, announced=len(body), body=body)
        await client.status(PATIENCE_S)


BAD_BODIES: Final[tuple[Callable[[], bytes], ...]] = (
    lambda: b"[" * (256 * KIB),
    lambda: b'{"model": "echo", "prompt": "' + b"x" * (256 * KIB),
    lambda: os.urandom(256 * KIB),
    lambda: b'{"model": "echo", "prompt": ' + b"9" * (64 * KIB) + b"}",
)


async def bad_body(plan: Plan) -> None:
    """A body that is deep, cut off, random or absurd, or one that is announced too long."""
    body = random.choice(BAD_BODIES)()
    announced = random.choice((len(body), 1 << 40))
    async with RawClient(f"http://127.0.0.1:{plan.gateway}", source()) as client:
        await client.post(PATH, json_headers(plan.key), announced=announced, body=body)
        await client.status(PATIENCE_S)


# Attacks on ports of agents.


async def silent(port: int) -> None:
    """A connection on which nothing is said."""
    async with connected(port) as (reader, _):
        await hold(reader)


async def greeting_only(port: int) -> None:
    """A HELLO of the transport that no OPEN follows."""
    async with connected(port) as (reader, writer):
        writer.write(own_hello(os.urandom(16), 4 * MIB).encode(FrameType.HELLO))
        await hold(reader)


async def garbage(port: int) -> None:
    """Random bytes, as fast as they are taken."""
    async with connected(port) as (reader, writer), asyncio.timeout(PATIENCE_S):
        writer.write(os.urandom(64 * KIB))
        await writer.drain()
        await hold(reader)


async def abandoned_handshake(port: int) -> None:
    """A TLS handshake that ends once the server has computed its part."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    outgoing = ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), outgoing).do_handshake()
    async with connected(port) as (reader, writer), asyncio.timeout(PATIENCE_S):
        writer.write(outgoing.read())
        await reader.read(4 * KIB)


async def call_without_credentials(port: int) -> None:
    client = RpcClient(f"127.0.0.1:{port}", SERVICE)
    try:
        await client.call("Status", Status(), StatusReply, PATIENCE_S)
    finally:
        await client.close()


def on_data(attack: Callable[[int], Awaitable[None]]) -> Callable[[Plan], Awaitable[None]]:
    return lambda plan: attack(plan.data)


def on_control(attack: Callable[[int], Awaitable[None]]) -> Callable[[Plan], Awaitable[None]]:
    return lambda plan: attack(random.choice(plan.controls))


@dataclass(frozen=True, slots=True)
class Attack:
    """`held`: the share of all held sockets; 0: connections are short. `rate`: the weight of its
    new connections among those of all attacks.
    """

    name: str
    attack: Callable[[Plan], Awaitable[None]]
    held: float
    rate: float


ATTACKS: Final = (
    Attack("gateway: idle bodies", idle_body, 0.06, 1),
    Attack("gateway: slow headers", slow_headers, 0.06, 1),
    Attack("gateway: trickling readers", trickling_reader, 0.015, 1),
    Attack("gateway: wrong keys", wrong_key, 0, 3),
    Attack("gateway: bad bodies", bad_body, 0, 1),
    # More than the 512 connections that an agent serves by default, and opened again as fast as it
    # cuts them, which is after 5 s, or sooner when others come.
    Attack("data: silent", on_data(silent), 0.65, 20),
    Attack("data: HELLO only", on_data(greeting_only), 0.15, 4),
    Attack("data: random bytes", on_data(garbage), 0, 4),
    Attack("data: TLS handshakes", on_data(abandoned_handshake), 0, 2),
    Attack("control: silent", on_control(silent), 0.06, 1),
    Attack("control: calls", on_control(call_without_credentials), 0, 1),
    Attack("control: random bytes", on_control(garbage), 0, 1),
    Attack("control: TLS handshakes", on_control(abandoned_handshake), 0, 1),
)


class Pace:
    """Lets whoever waits pass at `per_s`, one by one. What was not used is not made up for."""

    def __init__(self, per_s: float) -> None:
        self._gap_s = 1 / per_s
        self._next_s = 0.0

    async def turn(self) -> None:
        now_s = asyncio.get_running_loop().time()
        self._next_s = max(self._next_s + self._gap_s, now_s)
        await asyncio.sleep(self._next_s - now_s)


async def work(attack: Attack, plan: Plan, pace: Pace, tally: Tally) -> None:
    """One connection after the other, for ever. The first one of a held socket does not wait."""
    if not attack.held:
        await pace.turn()
    while True:
        tally.num_begun += 1
        # Every way in which a victim ends a connection is what the attack is about.
        with suppress(OSError, TimeoutError, RpcError, ValueError):
            await attack.attack(plan)
        tally.num_ended += 1
        await pace.turn()


async def run(plan: Plan) -> None:
    """Attack until SIGTERM."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    tallies = {attack.name: Tally() for attack in ATTACKS}
    weights = sum(attack.rate for attack in ATTACKS)
    workers: list[asyncio.Task[None]] = []
    for attack in ATTACKS:
        pace = Pace(plan.connections_per_s * attack.rate / weights)
        count = max(1, round(plan.num_held * attack.held)) if attack.held else SENDERS_AT_ONCE
        for _ in range(count):
            workers.append(asyncio.create_task(work(attack, plan, pace, tallies[attack.name])))
            # A burst of a thousand is no attack that lasts, and would only fill queues at once.
            await asyncio.sleep(0.002 if attack.held else 0)
    say({"event": "begun", "num_workers": len(workers)})
    await stop.wait()
    for worker in workers:
        worker.cancel()
    await asyncio.gather(*workers, return_exceptions=True)
    say({name: asdict(tally) for name, tally in tallies.items()})


def say(words: dict[str, Any]) -> None:
    print(json.dumps(words), flush=True)


class Decoy(asyncio.Protocol):
    """Reads and says nothing."""


async def serve_decoys(ports: list[int]) -> None:
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(Decoy, "127.0.0.1", port, backlog=1024) for port in ports]
    await asyncio.gather(*(server.serve_forever() for server in servers))


def main(words: list[str]) -> None:
    # Thousands of sockets: the usual soft limit is 1024.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if words[0] == "--decoys":
        uvloop.run(serve_decoys([int(word) for word in words[1:]]))
    else:
        uvloop.run(run(Plan(**json.loads(words[0]))))


if __name__ == "__main__":
    main(sys.argv[1:])
