"""One interface over our transport and what it is measured against: both ends as processes.

A `Peer` says what to run; `open` starts its two ends, each behind a command prefix (`ip netns exec
NAME`), so that the bench itself need not be where they are. Every peer but iperf3 moves the same
blocks: they lie in a permuted order in both buffers, and a transfer counts once all of it is
acknowledged. Ends that hang or die are killed and reported as `PeerFailure`; `Kept` restarts them
and goes on. Commands to the ends are JSON lines (see `peer_worker`).

    with Kept(ours(num_connections=4), Site()) as session:
        sample = session.transfer(256 * MIB, 64 * KIB)  # None when it failed
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from peer_end import KIB, MIB, SIDES, Side
from peer_process import START_TIMEOUT_S, EndProcess, PeerFailure

WORKER = Path(__file__).with_name("peer_worker.py")
MAX_FAILURES = 5
"""After so many failures a `Kept` peer is not started again."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Sample:
    """One acknowledged transfer. CPU: user and system seconds of each end's process."""

    nbytes: int
    seconds: float
    cpu_sender_s: float
    cpu_receiver_s: float

    @property
    def gbit_per_s(self) -> float:
        return 8e-9 * self.nbytes / self.seconds

    @property
    def cpu_s_per_gib(self) -> float:
        """Both ends together."""
        return (self.cpu_sender_s + self.cpu_receiver_s) / (self.nbytes / 2**30)


@dataclass(frozen=True, slots=True)
class Site:
    """Where a peer runs. Prefixes: commands that run their arguments at the sender's (near) and
    the receiver's (far) end. `env` is added to both ends' environment, over the peer's own.
    """

    near_prefix: Sequence[str] = ()
    far_prefix: Sequence[str] = ()
    far_host: str = "127.0.0.1"
    nbytes_max: int = 256 * MIB
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Peer:
    """What to run: `peer_KIND.py` with these options and environment. `driver` starts transfers.
    `moves_blocks`: whether it moves our bytes at all, acknowledged.
    """

    name: str
    kind: str
    options: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    driver: Side = "sender"
    moves_blocks: bool = True
    acks_blocks: bool = False
    """Whether one transfer can grow block by block, each acknowledged."""

    def available(self) -> str | None:
        """Why it cannot run on this machine, None if it can."""
        return _AVAILABLE.get(self.kind, _always)(self)

    def open(
        self,
        near_prefix: Sequence[str] = (),
        far_prefix: Sequence[str] = (),
        far_host: str = "127.0.0.1",
        nbytes_max: int = 256 * MIB,
        env: Mapping[str, str] | None = None,
    ) -> Session:
        """Start both ends and connect them; PeerFailure."""
        return Session(self, Site(near_prefix, far_prefix, far_host, nbytes_max, env or {}))


class Session:
    """Both ends of a peer, connected. After a PeerFailure only `close` makes sense."""

    def __init__(self, peer: Peer, site: Site) -> None:
        self.peer = peer
        self.site = site
        self._number = 0
        self._ends: dict[Side, EndProcess] = {}
        try:
            for side in SIDES:
                self._ends[side] = _start(peer, site, side)
            hellos = {side: self._ends[side].ask("hello") for side in SIDES}
            self._ends["receiver"].ask("connect", other=hellos["sender"])
            self._ends["sender"].ask("connect", other=hellos["receiver"])
        except PeerFailure:
            self.close()
            raise

    def transfer(self, nbytes: int, block_bytes: int, timeout_s: float = 60.0) -> Sample:
        """Move `nbytes`, a multiple of `block_bytes` and at most `nbytes_max`; PeerFailure."""
        taken_s, cpu_s = self._run(nbytes, block_bytes, 1, timeout_s)
        return Sample(nbytes, taken_s[0], cpu_s["sender"], cpu_s["receiver"])

    def acked_block_us(self, block_bytes: int, count: int, timeout_s: float = 60.0) -> list[float]:
        """Microseconds of `count` blocks, each sent once the one before it was acknowledged: blocks
        of one transfer where the peer can do that, else transfers of one block. PeerFailure.
        """
        if self.peer.acks_blocks:
            count = min(count, self.site.nbytes_max // block_bytes)
            job = self._job(block_bytes * count, block_bytes)
            self._both("prepare", timeout_s, job=job)
            taken_s: list[float] = self._ends[self.peer.driver].ask(
                "run_blocks", timeout_s, job=job
            )
            self._both("settle")
        else:
            taken_s, _ = self._run(block_bytes, block_bytes, count, timeout_s)
        return [1e6 * seconds for seconds in taken_s]

    def _run(
        self, nbytes: int, block_bytes: int, count: int, timeout_s: float
    ) -> tuple[list[float], dict[Side, float]]:
        """Seconds of each transfer, CPU seconds of each end for all of them."""
        if nbytes % block_bytes or not 0 < nbytes <= self.site.nbytes_max:
            raise ValueError(f"{nbytes} bytes in blocks of {block_bytes}")
        job = self._job(nbytes, block_bytes, count)
        self._both("prepare", timeout_s, job=job, count=count)
        before_s = self._both("cpu")
        driver = self._ends[self.peer.driver]
        taken_s: list[float] = driver.ask("run", timeout_s, job=job, count=count)
        self._both("settle")
        after_s = self._both("cpu")
        return taken_s, {side: after_s[side] - before_s[side] for side in SIDES}

    def _job(self, nbytes: int, block_bytes: int, count: int = 1) -> list[int]:
        """The fields of a `Job` whose numbers nobody has used."""
        number, self._number = self._number + 1, self._number + count
        return [number, block_bytes, 0, nbytes // block_bytes]

    def _both(
        self, command: str, timeout_s: float = START_TIMEOUT_S, **arguments: Any
    ) -> dict[Side, Any]:
        """The receiver's answer comes before the sender is asked: it must be ready first."""
        order: tuple[Side, Side] = ("receiver", "sender")
        return {side: self._ends[side].ask(command, timeout_s, **arguments) for side in order}

    def verify(
        self, block_bytes: int = 64 * KIB, nbytes: int | None = None, timeout_s: float = 60.0
    ) -> None:
        """Clear the receiver's memory, move `nbytes` (all by default) and compare what lies there
        with what was sent; PeerFailure when they differ.
        """
        if not self.peer.moves_blocks:
            return
        nbytes = self.site.nbytes_max if nbytes is None else nbytes
        self._ends["receiver"].ask("fill", value=0)
        self.transfer(nbytes, block_bytes, timeout_s)
        digests = self._both("digest", job=self._job(nbytes, block_bytes))
        if digests["sender"] != digests["receiver"]:
            raise PeerFailure(f"{self.peer.name}: wrong bytes arrived")

    def idle_cpu(self, seconds: float) -> tuple[float, float]:
        """(sender, receiver): cores used while nothing is transferred."""
        before_s = self._both("cpu")
        start_s = time.monotonic()
        time.sleep(seconds)
        after_s = self._both("cpu")
        took_s = time.monotonic() - start_s
        sender, receiver = ((after_s[side] - before_s[side]) / took_s for side in SIDES)
        return sender, receiver

    def rss_mib(self) -> tuple[float, float]:
        """(sender, receiver): resident MiB beyond the buffer, the interpreter included."""
        found = self._both("rss")
        return found["sender"] / MIB, found["receiver"] / MIB

    def close(self) -> None:
        for end in self._ends.values():
            end.kill()


def _start(peer: Peer, site: Site, side: Side) -> EndProcess:
    prefix = site.near_prefix if side == "sender" else site.far_prefix
    argv = [*prefix, sys.executable, str(WORKER), peer.kind, side]
    argv += [site.far_host, str(site.nbytes_max), json.dumps(dict(peer.options))]
    return EndProcess(f"{peer.name} {side}", argv, {**peer.env, **site.env})


class Kept:
    """A session that is opened when it is needed and again after a failure. Its methods are
    `Session`'s, with None for what failed; `failures` has the reasons.
    """

    def __init__(self, peer: Peer, site: Site) -> None:
        self.peer = peer
        self.site = site
        self.failures: list[str] = []
        self._session: Session | None = None

    def __enter__(self) -> Kept:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def transfer(self, nbytes: int, block_bytes: int, timeout_s: float = 60.0) -> Sample | None:
        return self._try(lambda session: session.transfer(nbytes, block_bytes, timeout_s))

    def acked_block_us(
        self, block_bytes: int, count: int, timeout_s: float = 60.0
    ) -> list[float] | None:
        """None as well for a peer that acknowledges nothing."""
        if not self.peer.moves_blocks:
            return None
        return self._try(lambda session: session.acked_block_us(block_bytes, count, timeout_s))

    def verify(
        self, block_bytes: int = 64 * KIB, nbytes: int | None = None, timeout_s: float = 60.0
    ) -> bool:
        """Whether the right bytes arrived."""

        def check(session: Session) -> bool:
            session.verify(block_bytes, nbytes, timeout_s)
            return True

        return self._try(check) or False

    def idle_cpu(self, seconds: float) -> tuple[float, float] | None:
        return self._try(lambda session: session.idle_cpu(seconds))

    def rss_mib(self) -> tuple[float, float] | None:
        return self._try(lambda session: session.rss_mib())

    def close(self) -> None:
        """Stop the ends; the next transfer starts them again."""
        if self._session is not None:
            self._session.close()
            self._session = None

    def _try(self, action: Callable[[Session], T]) -> T | None:
        if len(self.failures) >= MAX_FAILURES:
            return None
        try:
            if self._session is None:
                self._session = Session(self.peer, self.site)
            return action(self._session)
        except PeerFailure as error:
            self.failures.append(str(error))
            self.close()
            return None


def ours(name: str = "ours", **config: Any) -> Peer:
    """This project's transport; `config`: fields of TransportConfig, `tls` as a dict of paths."""
    return Peer(name, "ours", config, acks_blocks=True)


def raw(connections: int = 4) -> Peer:
    return Peer(f"raw x{connections}", "raw", {"connections": connections})


def iperf3(connections: int = 1) -> Peer:
    options = {"connections": connections}
    return Peer(f"iperf3 -P{connections}", "iperf3", options, moves_blocks=False)


def mooncake(name: str = "mooncake", *, lanes: int = 16, slice_bytes: int = MIB) -> Peer:
    """Mooncake Transfer Engine over TCP; by default the settings that did best when tried."""
    env = {
        "MC_TCP_ENABLE_CONNECTION_POOL": "1",
        "MC_TCP_LANES_PER_PEER": str(lanes),
        "MC_TCP_SLICE_SIZE": str(slice_bytes),
        "MC_LOG_LEVEL": "ERROR",
    }
    return Peer(name, "mooncake", env=env)


def mooncake_default() -> Peer:
    return Peer("mooncake default", "mooncake", env={"MC_LOG_LEVEL": "ERROR"})


def nixl_write(name: str = "nixl write", **env: str) -> Peer:
    """NIXL with UCX over TCP; `env`: more of UCX's settings."""
    return Peer(name, "nixl", {"operation": "WRITE"}, {**_UCX, **env})


def nixl_read(name: str = "nixl read", **env: str) -> Peer:
    return Peer(name, "nixl", {"operation": "READ"}, {**_UCX, **env}, driver="receiver")


_UCX = {
    "UCX_TLS": "tcp",
    "UCX_USE_MT_MUTEX": "y",
    "UCX_KEEPALIVE_INTERVAL": "inf",  # starved cores are not lost peers
    "NIXL_LOG_LEVEL": "ERROR",
}


def _always(peer: Peer) -> str | None:
    return None


def _ours_available(peer: Peer) -> str | None:
    from transport import TransportConfig

    unknown = set(peer.options) - {known.name for known in fields(TransportConfig)}
    return f"TransportConfig has no {', '.join(sorted(unknown))}" if unknown else None


def _iperf3_available(peer: Peer) -> str | None:
    return None if shutil.which("iperf3") else "iperf3 is not installed"


def _nixl_available(peer: Peer) -> str | None:
    return None if importlib.util.find_spec("nixl_cu12") else "the nixl-cu12 wheel is not installed"


def _mooncake_available(peer: Peer) -> str | None:
    """Imported in a process of its own: the wheel needs the system's libibverbs, also for TCP."""
    argv = [sys.executable, "-c", "import mooncake.engine"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


_AVAILABLE: dict[str, Callable[[Peer], str | None]] = {
    "ours": _ours_available,
    "iperf3": _iperf3_available,
    "nixl": _nixl_available,
    "mooncake": _mooncake_available,
}
