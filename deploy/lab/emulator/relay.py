"""A TCP relay process that behaves like a long link: rate, delay, jitter, and faults on command.

It needs no privileges. Its process entry is ``python -m deploy.lab.emulator.relay --listen
127.0.0.1:0 --to 127.0.0.1:7100 --rate 1Gbit --rtt 20ms --control /tmp/link.sock``. It prints one
JSON line when it is ready and serves until SIGTERM.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
from contextlib import suppress

import msgspec

from deploy.lab.emulator.core import LinkShape
from deploy.lab.emulator.faults import Command, Reply
from deploy.lab.emulator.link import EmulatedLink
from deploy.processes import exit_with_parent
from kvmanager.config_files.units import parse_duration, parse_rate
from transport import Endpoint

_MAX_COMMAND_BYTES = 64 << 10
_PRIORITY = -10


class ControlServer:
    """The relay's unix socket: one JSON command per line, one `Reply` per line."""

    def __init__(self, link: EmulatedLink, path: str) -> None:
        self._link = link
        self._path = path
        self._decode = msgspec.json.Decoder(Command).decode
        self._peers: dict[int, tuple[socket.socket, bytearray]] = {}
        with suppress(FileNotFoundError):
            os.unlink(path)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(path)
        self._listener.listen(8)
        link.sockets.add_handler(self._listener.fileno(), self._accept)

    def close(self) -> None:
        for peer, _ in self._peers.values():
            peer.close()
        self._listener.close()
        with suppress(FileNotFoundError):
            os.unlink(self._path)

    def _accept(self, _events: int) -> None:
        peer, _ = self._listener.accept()
        # Replies are a few hundred bytes. A peer that does not read them loses its connection.
        peer.settimeout(0.1)
        self._peers[peer.fileno()] = (peer, bytearray())
        self._link.sockets.add_handler(peer.fileno(), lambda _events: self._read(peer))

    def _read(self, peer: socket.socket) -> None:
        fd = peer.fileno()
        received = self._peers[fd][1]
        try:
            data = peer.recv(_MAX_COMMAND_BYTES)
            received += data
            if not data or len(received) > _MAX_COMMAND_BYTES:
                raise ConnectionError("end of commands")
            while (end := received.find(b"\n")) >= 0:
                line = bytes(received[:end])
                del received[: end + 1]
                peer.sendall(msgspec.json.encode(self._answer(line)) + b"\n")
        except OSError:
            self._link.sockets.remove_handler(fd)
            del self._peers[fd]
            peer.close()

    def _answer(self, line: bytes) -> Reply:
        try:
            return Reply(report=self._link.command(self._decode(line)))
        except (msgspec.MsgspecError, ValueError) as error:
            return Reply(error=str(error))


def main(argv: list[str] | None = None) -> int:
    """Run a relay in this process until SIGTERM, SIGINT or the `quit` command."""
    args = _arguments().parse_args(argv)
    if args.exit_with_parent:
        exit_with_parent()
    # A real link does not slow down because the machine is busy. Without privileges it stays as
    # it is.
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, _PRIORITY)
    shape = LinkShape(parse_rate(args.rate), parse_duration(args.rtt), parse_duration(args.jitter))
    link = EmulatedLink(Endpoint.parse(args.listen), Endpoint.parse(args.to), shape, seed=args.seed)
    control = ControlServer(link, args.control) if args.control else None
    wake_read, wake_write = socket.socketpair()
    wake_write.setblocking(False)
    # A signal must end the wait in epoll, which restarts after handlers.
    signal.set_wakeup_fd(wake_write.fileno())
    link.sockets.add_handler(wake_read.fileno(), lambda _events: link.stop())
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: link.stop())
    ready = {
        "event": "ready",
        "listen": str(link.sockets.address),
        "to": args.to,
        "pid": os.getpid(),
    }
    print(json.dumps(ready | {"control": args.control}), flush=True)
    try:
        link.run()
    finally:
        if control is not None:
            control.close()
        signal.set_wakeup_fd(-1)
        wake_read.close()
        wake_write.close()
    return 0


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m deploy.lab.emulator.relay")
    parser.add_argument("--listen", default="127.0.0.1:0", help="host:port; port 0 picks one")
    parser.add_argument("--to", required=True, help="host:port of the target")
    parser.add_argument("--rate", default="unlimited", help="1Gbit, 200Mbit, unlimited")
    parser.add_argument("--rtt", default="0", help="round trip, half of it each way: 20ms")
    parser.add_argument("--jitter", default="0", help="uniform plus or minus, each way: 1ms")
    parser.add_argument("--control", default="", help="path of a unix socket for commands")
    parser.add_argument("--seed", type=int, default=1, help="of the jitter")
    parser.add_argument("--exit-with-parent", action="store_true", help="die with the parent")
    return parser


if __name__ == "__main__":
    sys.exit(main())
