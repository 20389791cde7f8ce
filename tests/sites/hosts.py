"""Hosts on this machine: each a network namespace with processes and memory of its own.

Every host has one link to a router between them, with a rate, an RTT and a loss of its own
(tests/bench/wan_forwarder.c). Needs root, `ip`, `unshare`, `nsenter` and a C compiler.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path as FilePath

import psutil
from wan import DEVICE, End, Forwarder, Path, add_namespace, build_forwarder, forwarding, run

NET = "10.79"
_LIVE = "mount -t tmpfs tmpfs /dev/shm && mount -t tmpfs tmpfs /run && echo up && exec sleep inf"


class Host:
    """A host that runs until `power_off`. `address` is how the others reach it."""

    def __init__(self, name: str, number: int, router: str, binary: FilePath, path: Path) -> None:
        self.name, self.address = name, f"{NET}.{number}.2"
        self.namespace = f"prfaas-{name}-{os.getpid()}"
        self._stack = contextlib.ExitStack()
        self._path = path
        add_namespace(self.namespace)
        self._stack.callback(_forget, self.namespace)
        gateway = f"{NET}.{number}.1"
        process = self._stack.enter_context(
            forwarding(
                binary,
                End(self.namespace, DEVICE, self.address),
                End(router, f"to-{name}", gateway),
            )
        )
        run("ip", "-n", self.namespace, "route", "add", "default", "via", gateway)
        self._link = Forwarder(process, path)
        self._boot()

    def argv(self, argv: Sequence[str]) -> list[str]:
        """The command that runs `argv` on this host."""
        return ["nsenter", "-t", str(self._pid), "-n", "-m", "-p", *argv]

    def cut_off(self) -> None:
        """Lose every packet from and to this host."""
        self._link.set_path(replace(self._path, loss=1.0))

    def reach_again(self) -> None:
        """End `cut_off`."""
        self._link.set_path(self._path)

    def power_off(self) -> None:
        """End all processes of the host at once, as a failed power supply does."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        self._init.wait()

    def power_on(self) -> None:
        """Start the host again, with empty memory and the same files."""
        self._boot()

    def close(self) -> None:
        """Remove the host."""
        self.power_off()
        self._stack.close()

    def _boot(self) -> None:
        # The first process of a process namespace takes all others with it when it ends.
        own = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        self._init = subprocess.Popen(
            ["ip", "netns", "exec", self.namespace, *own, "sh", "-c", _LIVE],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # it remarks that its child was killed
            text=True,
            start_new_session=True,
        )
        assert self._init.stdout is not None
        if self._init.stdout.readline() != "up\n":
            raise OSError(f"host {self.name} does not start")
        self._init.stdout.close()
        # `ip` becomes `unshare`, whose only child is the host's first process.
        (child,) = psutil.Process(self._init.pid).children()
        self._pid = child.pid


@contextlib.contextmanager
def hosts(paths: Mapping[str, Path]) -> Iterator[dict[str, Host]]:
    """Hosts by name, each with its path to the router. PermissionError without root; OSError."""
    if os.geteuid() != 0:
        raise PermissionError("hosts in network namespaces need root: run `sudo make sites`")
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="prfaas-sites-"))
        binary = build_forwarder(FilePath(folder))
        router = f"prfaas-router-{os.getpid()}"
        add_namespace(router, "net.ipv4.ip_forward=1")
        stack.callback(_forget, router)
        made = {}
        for number, (name, path) in enumerate(paths.items(), start=1):
            made[name] = Host(name, number, router, binary, path)
            stack.callback(made[name].close)
        yield made


def _forget(namespace: str) -> None:
    subprocess.run(["ip", "netns", "delete", namespace], check=False, capture_output=True)
