"""iperf3 as a peer: plain TCP from one cached buffer, so it neither reads nor fills our blocks.

One run of client and server per transfer, its connections made before iperf3's own clock starts.
`options`: connections.
"""

from __future__ import annotations

import json
import socket
import subprocess
from typing import Any

from peer_end import MIB, Job, Place


class Receiving:
    def __init__(self, place: Place) -> None:
        self._host = place.host
        self._server: subprocess.Popen[str] | None = None
        with socket.create_server((place.host, 0)) as probe:
            self._port = int(probe.getsockname()[1])

    def hello(self) -> dict[str, Any]:
        return {"port": self._port}

    def connect(self, other: dict[str, Any]) -> None: ...

    def prepare(self, job: Job) -> None:
        argv = ["iperf3", "-s", "-1", "-B", self._host, "-p", str(self._port), "--forceflush"]
        self._server = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        assert self._server.stdout is not None
        for line in self._server.stdout:
            if "listening" in line:
                return
        raise RuntimeError("iperf3 -s does not listen")

    def settle(self) -> None:
        if self._server is not None:
            self._server.communicate(timeout=10)


class Sending:
    def __init__(self, place: Place) -> None:
        self._place = place
        self._port = 0

    def hello(self) -> dict[str, Any]:
        return {}

    def connect(self, other: dict[str, Any]) -> None:
        self._port = int(other["port"])

    def prepare(self, job: Job) -> None: ...

    def run(self, job: Job) -> float:
        argv = ["iperf3", "-c", self._place.host, "-p", str(self._port), "-J"]
        argv += ["-n", str(job.nbytes), "-P", str(self._place.options["connections"])]
        argv += ["-l", str(min(job.block_bytes, MIB))]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        report = json.loads(done.stdout)
        if "error" in report:
            raise RuntimeError(report["error"])
        bits_per_s = float(report["end"]["sum_received"]["bits_per_second"])
        return 8 * job.nbytes / bits_per_s

    def settle(self) -> None: ...


def open_end(place: Place) -> Receiving | Sending:
    return Sending(place) if place.side == "sender" else Receiving(place)
