"""What the gateway costs: added latency, requests/s and CPU, beside proxies that do less.

Run: python tests/bench/bench_gateway.py [--json FILE] [--smoke] [--seconds S] [--rounds N]. An echo
engine, the gateway (`prfaas gateway`, a process of its own), two proxies that only pass on
(`bare_proxy.py`: what the HTTP stack alone costs) and the `vllm-router` wheel stand on loopback;
the load generator is this process. They are measured in turn, several rounds; each number is the
median over the rounds. Without the wheel (it is installed into a temporary directory, but not with
--smoke) the rest is measured all the same.

--traces measures only the gateway, without and with spans: of no request, of all, and of all with a
receiver that is gone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from bare_proxy import KINDS
from echo_engine import NUM_PACED_EVENTS, PACE_S, Client, EchoEngine, serve_engine
from free_ports import free_port
from gateway_process import ROOT, answers, child, completion_request, gateway_process
from router_wheel import ROUTER, router_path
from smoke import add_smoke

NUM_WARM = 20


@dataclass(frozen=True, slots=True)
class Sample:
    """One round at one target. Latencies of a lone client, rate and CPU with many."""

    p50_ms: float
    p99_ms: float
    first_byte_p50_ms: float
    stream_p50_ms: float
    requests_per_s: float
    stream_requests_per_s: float
    cpu_ms_per_request: float
    cpu_us_per_event: float
    kib_per_stream: float


async def _connect(port: int, request: bytes) -> Client:
    loop = asyncio.get_running_loop()
    _, client = await loop.create_connection(lambda: Client(request), "127.0.0.1", port)
    return client


async def _latencies(port: int, request: bytes, num: int) -> tuple[list[float], list[float]]:
    client = await _connect(port, request)
    for _ in range(NUM_WARM):
        await client.ask()
    pairs = [await client.ask() for _ in range(num)]
    client.close()
    return [first for first, _ in pairs], [whole for _, whole in pairs]


async def _rate(port: int, request: bytes, seconds: float, concurrency: int) -> tuple[float, int]:
    clients = [await _connect(port, request) for _ in range(concurrency)]
    deadline_s = time.perf_counter() + seconds
    num_done = 0

    async def ask_on(client: Client) -> None:
        nonlocal num_done
        while time.perf_counter() < deadline_s:
            await client.ask()
            num_done += 1

    started_s = time.perf_counter()
    await asyncio.gather(*(ask_on(client) for client in clients))
    elapsed_s = time.perf_counter() - started_s
    for client in clients:
        client.close()
    return num_done / elapsed_s, num_done


async def _measure(port: int, pid: int | None, args: argparse.Namespace) -> Sample:
    prompt = "word " * 64
    plain, stream = completion_request(port, prompt), completion_request(port, prompt, stream=True)
    _, whole = await _latencies(port, plain, args.requests)
    first, streamed = await _latencies(port, stream, args.requests)
    process = psutil.Process(pid) if pid else None
    before_s = _cpu_s(process)
    rate, num_done = await _rate(port, plain, args.seconds, args.concurrency)
    cpu_s = _cpu_s(process) - before_s
    stream_rate, _ = await _rate(port, stream, args.seconds, args.concurrency)
    event_cpu_s = await _event_cpu_s(port, process, args.concurrency)
    stream_bytes = await _stream_bytes(port, process, args.streams)
    whole.sort()
    return Sample(
        p50_ms=statistics.median(whole) * 1e3,
        p99_ms=whole[int(len(whole) * 0.99)] * 1e3,
        first_byte_p50_ms=statistics.median(first) * 1e3,
        stream_p50_ms=statistics.median(streamed) * 1e3,
        requests_per_s=rate,
        stream_requests_per_s=stream_rate,
        cpu_ms_per_request=cpu_s / max(1, num_done) * 1e3,
        cpu_us_per_event=event_cpu_s * 1e6,
        kib_per_stream=stream_bytes / 1024,
    )


async def _event_cpu_s(port: int, process: psutil.Process | None, concurrency: int) -> float:
    """CPU seconds for one event of many concurrent streams that decode at 1/PACE_S tokens/s."""
    request = completion_request(port, "paced", stream=True)
    clients = [await _connect(port, request) for _ in range(concurrency)]
    before_s = _cpu_s(process)
    await asyncio.gather(*(client.ask() for client in clients))
    spent_s = _cpu_s(process) - before_s
    for client in clients:
        client.close()
    return spent_s / (concurrency * (NUM_PACED_EVENTS + 1))


async def _stream_bytes(port: int, process: psutil.Process | None, num: int) -> float:
    """Memory that one of `num` streams under way takes, with its two connections."""
    if process is None:
        return 0.0
    request = completion_request(port, "paced", stream=True)
    clients = [await _connect(port, request) for _ in range(num)]
    before_bytes = process.memory_info().rss
    asking = [asyncio.ensure_future(client.ask()) for client in clients]
    # Half of their events have come by then.
    await asyncio.sleep(NUM_PACED_EVENTS * PACE_S / 2)
    grown_bytes = process.memory_info().rss - before_bytes
    await asyncio.gather(*asking)
    for client in clients:
        client.close()
    return grown_bytes / num


def _cpu_s(process: psutil.Process | None) -> float:
    if process is None:
        return 0.0
    times = process.cpu_times()
    return float(times.user + times.system)


@contextmanager
def gateway(
    engine_port: int, folder: Path, traces: dict[str, Any] | None = None
) -> Iterator[tuple[int, int]]:
    """`prfaas gateway` in front of the engine: (port, pid)."""
    port = free_port()
    url = f"http://127.0.0.1:{engine_port}"
    config = {
        "gateway": {"port": port, "models": [{"name": "echo"}], "threshold_tokens": 4096},
        # No agent answers there: nothing is offloaded here.
        "pd": {
            "name": "home",
            "instances": [{"name": "d0", "url": url, "agent": "127.0.0.1:1", "model": "echo"}],
        },
        "log_dir": str(folder),
    }
    if traces is not None:
        config["traces"] = traces
    with gateway_process(config, folder, completion_request(port, "up?")) as pid:
        yield port, pid


@contextmanager
def bare_proxy(kind: str, engine_port: int) -> Iterator[tuple[int, int]]:
    """A proxy that only passes on, in front of the engine: (port, pid)."""
    port = free_port()
    script = str(Path(__file__).with_name("bare_proxy.py"))
    argv = [sys.executable, script, kind, str(port), str(engine_port)]
    with child(argv, answers(port, completion_request(port, "up?"))) as pid:
        yield port, pid


@contextmanager
def router(
    engine_port: int, folder: Path, *, may_install: bool
) -> Iterator[tuple[int, int] | None]:
    """The vllm-router wheel in front of the engine, or None when it cannot be had or run."""
    path = router_path(folder, may_install=may_install)
    if path is None:
        print(f"vllm-router left out: {ROUTER} is not installed", file=sys.stderr)
        yield None
        return
    env = os.environ | {"PYTHONPATH": path}
    port = free_port()
    argv = [sys.executable, "-m", "vllm_router.launch_router", "--host", "127.0.0.1"]
    argv += ["--port", str(port), "--worker-urls", f"http://127.0.0.1:{engine_port}"]
    argv += ["--policy", "round_robin", "--log-level", "error"]
    argv += ["--prometheus-port", str(free_port())]
    try:
        with child(argv, answers(port, completion_request(port, "up?")), env) as pid:
            yield port, pid
    except RuntimeError as error:
        print(f"vllm-router cannot be run here: {str(error).strip()[-500:]}", file=sys.stderr)
        yield None


def traced_gateways(
    stack: contextlib.ExitStack, engine_port: int, folder: Path
) -> dict[str, tuple[int, int | None]]:
    """The gateway with spans of no request, of all, and of all for nobody; and without any."""
    port, gone = free_port(), free_port()
    argv = [sys.executable, str(Path(__file__).with_name("span_sink.py")), str(port)]
    stack.enter_context(child(argv, lambda: _is_open(port)))
    wanted: dict[str, dict[str, Any] | None] = {
        "off": None,
        "of none": {"endpoint": f"http://127.0.0.1:{port}", "sample": 0},
        "of all": {"endpoint": f"http://127.0.0.1:{port}"},
        "receiver gone": {"endpoint": f"http://127.0.0.1:{gone}"},
    }
    found: dict[str, tuple[int, int | None]] = {}
    for name, traces in wanted.items():
        own = folder / name.replace(" ", "-")
        own.mkdir()
        found[name] = stack.enter_context(gateway(engine_port, own, traces))
    return found


def _is_open(port: int) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


def run(args: argparse.Namespace) -> dict[str, Any]:
    """All rounds; medians by target."""
    samples: dict[str, list[Sample]] = {}
    engine_port = free_port()
    engine_argv = [sys.executable, __file__, "--serve-engine", str(engine_port)]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(
            child(engine_argv, answers(engine_port, completion_request(engine_port, "up?")))
        )
        targets: dict[str, tuple[int, int | None] | None] = {"engine": (engine_port, None)}
        if args.traces:
            targets |= traced_gateways(stack, engine_port, folder)
        else:
            targets["gateway"] = stack.enter_context(gateway(engine_port, folder))
            targets |= {
                f"bare {kind}": stack.enter_context(bare_proxy(kind, engine_port)) for kind in KINDS
            }
            targets["vllm-router"] = stack.enter_context(
                router(engine_port, folder, may_install=not args.smoke)
            )
        for number in range(args.rounds):
            for name, target in targets.items():
                if target is not None:
                    print(f"round {number + 1}/{args.rounds}: {name}", file=sys.stderr)
                    sample = uvloop.run(_measure(*target, args))
                    samples.setdefault(name, []).append(sample)
    return {name: _median(taken) for name, taken in samples.items()}


def _median(samples: list[Sample]) -> dict[str, float]:
    columns = [asdict(sample) for sample in samples]
    found = {key: statistics.median(column[key] for column in columns) for key in columns[0]}
    # A process keeps what it freed, so only its first round shows what streams take.
    return found | {"kib_per_stream": columns[0]["kib_per_stream"]}


def table(result: dict[str, dict[str, float]]) -> str:
    """The medians, and what each target adds to the engine's own latency."""
    names = list(next(iter(result.values())))
    lines = [f"{'':24}" + "".join(f"{target:>14}" for target in result)]
    for name in names:
        lines.append(f"{name:24}" + "".join(f"{values[name]:14.3f}" for values in result.values()))
    for name in ("p50_ms", "p99_ms", "first_byte_p50_ms"):
        added = [values[name] - result["engine"][name] for values in result.values()]
        lines.append(f"{'added ' + name:24}" + "".join(f"{value:14.3f}" for value in added))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write the medians here")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=500, help="for the latencies, a round")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each rate, a round")
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--streams", type=int, default=400, help="under way, for their memory")
    parser.add_argument("--traces", action="store_true", help="only the gateway, with spans")
    parser.add_argument("--serve-engine", type=int, help=argparse.SUPPRESS)
    add_smoke(parser, rounds=1, requests=20, seconds=0.2, concurrency=4, streams=4)
    args = parser.parse_args()
    if args.serve_engine:
        uvloop.run(serve_engine(args.serve_engine, EchoEngine))
        return
    result = run(args)
    print(table(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
