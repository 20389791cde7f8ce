"""Out of file descriptors at each end and at each point of a transfer's life: once there are some
again the transfer goes on.
"""

from __future__ import annotations

import hashlib
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any, Self

import pytest
from fault_settings import FAULT_CONFIG as CONFIG
from fault_settings import FAULT_OPTIONS as OPTIONS
from transport_doubles import MemorySpace, make_spec
from transport_loopback import FaultRig, LoopbackPair, Phase

from transport import Endpoint, LinkError

pytestmark = pytest.mark.alone

KIB = 1024
SHORTAGE_S = 0.3


@contextmanager
def no_more_descriptors() -> Iterator[None]:
    """Allow this process no new descriptor.

    A limit of 3 leaves the numbers 0 to 2, which are in use for good. Under a higher limit a number
    could become free, because an earlier test may have left something that closes later.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def surprises(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged with a traceback."""
    return [record.getMessage() for record in caplog.records if record.exc_info]


@pytest.mark.parametrize("phase", Phase, ids=lambda phase: f"no_descriptors_at_sender-{phase}")
def test_a_sender_waits_for_descriptors(phase: Phase, caplog: pytest.LogCaptureFixture) -> None:
    with closing(FaultRig(CONFIG)) as rig:
        rig.bring_to(phase)
        with no_more_descriptors():
            rig.proxy.reset()
            rig.go_on()
            rig.proxy.resume()
            with pytest.raises(TimeoutError):
                rig.outcome(SHORTAGE_S)
        assert rig.outcome(CONFIG.idle_timeout_s + 1) is None
        rig.check_usable()
        rig.check_left_nothing()
    assert not surprises(caplog)


def test_a_sender_that_gets_no_descriptor_fails_in_time_and_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with closing(FaultRig(replace(CONFIG, idle_timeout_s=1.5))) as rig:
        rig.bring_to(Phase.DURING)
        with no_more_descriptors():
            rig.proxy.reset()
            rig.go_on()
            error = rig.outcome(3)
        assert isinstance(error, LinkError)
        assert error.code == "unreachable"
        assert "Too many open files" in error.message
        rig.proxy.resume()
        rig.check_usable()
        rig.check_left_nothing()
    assert not surprises(caplog)


def environment() -> dict[str, str]:
    """For a process that imports what this one does, the doubles of `tests/support` included."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}


SENDER = """
import sys, time
from transport import Endpoint, Sender, TransportConfig
from transport_doubles import MemorySpace, RecordingListener, make_spec

class NoMoreLibraries:
    def find_spec(self, name, path=None, target=None):
        if name == "unicodedata":
            raise ImportError("unicodedata.so: cannot open shared object file: Too many open files")

shortage = NoMoreLibraries()
sys.meta_path.insert(0, shortage)
sender = Sender(TransportConfig(**eval(sys.argv[1])))
listener = RecordingListener()
spec = make_spec(1, Endpoint("127.0.0.1", int(sys.argv[2])))
sender.open(spec, MemorySpace(bytearray(b"first")), listener).ready(0, 5)
time.sleep(0.3)
sys.meta_path.remove(shortage)
print(repr(listener.wait(spec.transfer_id, 10)))
"""


def test_a_process_short_of_descriptors_at_its_first_connection_is_not_spoilt_for_good() -> None:
    """The first getaddrinfo of a process loads the codec for host names; when a library of that
    cannot be opened Python takes the codec for unknown until the process ends.
    """
    with closing(LoopbackPair(CONFIG)) as pair:
        landed = bytearray(5)
        pair.registry.expect(make_spec(1), MemorySpace(landed))
        argv = [sys.executable, "-c", SENDER, repr(OPTIONS), str(pair.endpoint.port)]
        done = subprocess.run(
            argv, capture_output=True, text=True, check=True, timeout=30, env=environment()
        )
        assert done.stdout.strip() == "None"
        assert landed == b"first"
        assert "Traceback" not in done.stderr


RECEIVER = """
import hashlib, resource, sys
from transport import Endpoint, Receiver, TransportConfig
from transport_doubles import MemoryRegistry, MemorySpace, make_spec
from transport_loopback import Census

soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
registry = MemoryRegistry()
receiver = Receiver(Endpoint("127.0.0.1", 0), TransportConfig(**eval(sys.argv[1])), registry)
census = Census.take()
receiver.start()
spaces = {}
print(receiver.endpoint.port, flush=True)
for line in sys.stdin:
    command, *numbers = line.split()
    numbers = [int(number) for number in numbers]
    if command == "expect":
        number, nbytes = numbers
        spaces[number] = MemorySpace(bytearray(nbytes))
        registry.expect(make_spec(number), spaces[number])
        print("expected", flush=True)
    elif command == "limit":
        resource.setrlimit(resource.RLIMIT_NOFILE, (numbers[0] or soft, hard))
        print("limited", flush=True)
    elif command == "digest":
        (number,) = numbers
        is_complete = make_spec(number).transfer_id in registry.completed
        digest = hashlib.sha256(spaces[number].data).hexdigest() if is_complete else "incomplete"
        print(digest, flush=True)
    elif command == "close":
        receiver.close()
        for space in spaces.values():
            space.release()
        print(census.leaks(), flush=True)
"""


class ReceiverProcess:
    """A receiver with descriptors of its own."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", RECEIVER, repr(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        assert self._process.stdout is not None
        self.endpoint = Endpoint("127.0.0.1", int(self._process.stdout.readline()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=10)

    def ask(self, *words: object) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(*words, file=self._process.stdin, flush=True)
        return self._process.stdout.readline().strip()


class RemoteRig(FaultRig):
    """As FaultRig, with the receiver in a process of its own."""

    def __init__(self, remote: ReceiverProcess) -> None:
        super().__init__(CONFIG)
        self._remote = remote
        self.proxy.target = remote.endpoint
        remote.ask("expect", 1, len(self.data))

    def is_complete(self) -> bool:
        return self._remote.ask("digest", 1) != "incomplete"

    def is_exact(self) -> bool:
        return self._remote.ask("digest", 1) == hashlib.sha256(self.data).hexdigest()

    def check_usable(self, number: int = 2, timeout_s: float = 20.0) -> None:
        data = bytearray(b"further")
        self._remote.ask("expect", number, len(data))
        spec = make_spec(number, self.spec.endpoint)
        handle = self.pair.sender.open(spec, MemorySpace(data), self.pair.listener)
        handle.ready(0, len(data))
        assert self.pair.listener.wait(spec.transfer_id, timeout_s) is None
        assert self._remote.ask("digest", number) == hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("phase", Phase, ids=lambda phase: f"no_descriptors_at_receiver-{phase}")
def test_a_receiver_takes_connections_again_once_it_has_descriptors(phase: Phase) -> None:
    with ReceiverProcess(OPTIONS) as remote, closing(RemoteRig(remote)) as rig:
        rig.bring_to(phase)
        remote.ask("limit", 1)
        # The accept that waits has its descriptor already.
        socket.create_connection((remote.endpoint.host, remote.endpoint.port)).close()
        rig.proxy.reset()
        rig.go_on()
        rig.proxy.resume()
        with pytest.raises(TimeoutError):
            rig.outcome(SHORTAGE_S)
        remote.ask("limit", 0)
        assert rig.outcome(CONFIG.idle_timeout_s + 1) is None
        rig.check_usable()
        rig.check_left_nothing()
        assert remote.ask("close") == "[]"
