"""Loopback throughput of the transport: two processes, checksums on, every byte acknowledged.

Run: python tests/bench/bench_transport.py [--json FILE]. Each cell is the median of --runs
transfers of --mib MiB whose memory is cut into views of the given size. iperf3 is run beside it
when it is installed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from transport import Endpoint, Receiver, Sender, TransportConfig
from transport.testing import MemoryRegistry, MemorySpace, RecordingListener, make_spec

KIB = 1024
MIB = 1024 * KIB


def serve(pipe: Connection, config: TransportConfig, nbytes: int) -> None:
    """The receiving process: expects the transfers it is told about, reports CPU seconds at the
    end.
    """
    registry = MemoryRegistry()
    data = bytearray(nbytes)
    memoryview(data)[:] = b"\1" * nbytes  # fault the pages in
    receiver = Receiver(Endpoint("127.0.0.1", 0), config, registry)
    receiver.start()
    pipe.send(receiver.endpoint)
    while (message := pipe.recv()) is not None:
        number, view_bytes, size = message
        space = MemorySpace(data, view_bytes)
        if size != nbytes:
            space = MemorySpace(bytearray(size), view_bytes)
        registry.expect(make_spec(number), space)
        pipe.send(cpu_s())
    receiver.close()


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class Bench:
    """A sender in this process, a receiver in another."""

    def __init__(self, config: TransportConfig, nbytes: int) -> None:
        self.nbytes = nbytes
        self.data = bytearray(nbytes)
        memoryview(self.data)[:] = b"\2" * nbytes
        self.pipe, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("fork")
        self.process = context.Process(target=serve, args=(theirs, config, nbytes), daemon=True)
        self.process.start()
        self.endpoint: Endpoint = self.pipe.recv()
        self.sender = Sender(config)
        self.number = 0

    def transfer(self, view_bytes: int, size: int) -> tuple[float, float]:
        """(seconds, CPU seconds of both processes) of one acknowledged transfer."""
        self.number += 1
        self.pipe.send((self.number, view_bytes, size))
        before_s = self.pipe.recv() + cpu_s()
        spec = make_spec(self.number, self.endpoint)
        space = MemorySpace(self.data if size == self.nbytes else bytearray(size), view_bytes)
        listener = RecordingListener()
        begin_s = time.perf_counter()
        handle = self.sender.open(spec, space, listener)
        handle.ready(0, size)
        error = listener.wait(spec.transfer_id, 60)
        elapsed_s = time.perf_counter() - begin_s
        if error is not None:
            raise error
        self.pipe.send((0, view_bytes, self.nbytes))
        return elapsed_s, self.pipe.recv() + cpu_s() - before_s

    def close(self) -> None:
        self.sender.close()
        self.pipe.send(None)
        self.process.join(5)


def iperf3_gbits() -> float | None:
    """One stream for two seconds, or None when it is not installed."""
    if shutil.which("iperf3") is None:
        return None
    server = subprocess.Popen(
        ["iperf3", "-s", "-1", "-p", "52017"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    time.sleep(0.3)
    try:
        done = subprocess.run(
            ["iperf3", "-c", "127.0.0.1", "-p", "52017", "-t", "2", "-J"],
            capture_output=True,
            check=True,
            timeout=20,
        )
        return float(json.loads(done.stdout)["end"]["sum_received"]["bits_per_second"]) / 1e9
    finally:
        server.kill()
        server.wait()


def measure(arguments: argparse.Namespace) -> dict[str, object]:
    config = replace(
        TransportConfig(),
        num_connections=arguments.connections,
        frame_bytes=arguments.frame_kib * KIB,
    )
    nbytes = arguments.mib * MIB
    bench = Bench(config, nbytes)
    rows = []
    try:
        bench.transfer(64 * KIB, nbytes)  # connections, slow start
        for view_kib in arguments.view_kib:
            runs = [bench.transfer(view_kib * KIB, nbytes) for _ in range(arguments.runs)]
            seconds = statistics.median(elapsed for elapsed, _ in runs)
            cpu = statistics.median(used for _, used in runs)
            rows.append(
                {
                    "view_kib": view_kib,
                    "gbit_per_s": round(nbytes * 8 / seconds / 1e9, 2),
                    "cpu_s_per_gib": round(cpu / (nbytes / 2**30), 3),
                    "num_runs": len(runs),
                }
            )
        small = sorted(bench.transfer(64 * KIB, 64 * KIB)[0] for _ in range(200))
    finally:
        bench.close()
    return {
        "connections": arguments.connections,
        "frame_kib": arguments.frame_kib,
        "mib": arguments.mib,
        "throughput": rows,
        "transfer_64kib_us": {
            "p50": round(small[len(small) // 2] * 1e6),
            "p99": round(small[len(small) * 99 // 100] * 1e6),
        },
        "iperf3_gbit_per_s": iperf3_gbits(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=512, help="bytes per transfer, in MiB")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--connections", type=int, default=4)
    parser.add_argument("--frame-kib", type=int, default=1024)
    parser.add_argument("--view-kib", type=int, nargs="+", default=[16, 64, 1024])
    parser.add_argument("--json", type=Path, help="write the result here as well")
    arguments = parser.parse_args()
    result = measure(arguments)
    print(f"{'view':>10} {'Gbit/s':>8} {'CPU s/GiB':>10}")
    rows = result["throughput"]
    assert isinstance(rows, list)
    for row in rows:
        print(f"{row['view_kib']:>6} KiB {row['gbit_per_s']:>8} {row['cpu_s_per_gib']:>10}")
    print(f"one 64 KiB transfer, opened to complete: {result['transfer_64kib_us']} us")
    print(f"iperf3, one stream: {result['iperf3_gbit_per_s']} Gbit/s")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
