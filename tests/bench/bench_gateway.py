"""What the gateway costs: added latency, requests/s and CPU, beside proxies that do less.

Run: python tests/bench/bench_gateway.py [--json FILE] [--smoke] [--seconds S] [--rounds N]. An echo
engine, the gateway (`prfaas gateway`, a process of its own), two proxies that only pass on
(`bare_proxy.py`: what the HTTP stack alone costs) and the `vllm-router` wheel stand on loopback;
the load generator is this process. They are measured in turn, several rounds; each number is the
median over the rounds. Without the wheel (it is installed into a temporary directory, but not with
--smoke) the rest is measured all the same.

"gateway xN" is a gateway of N processes (`processes: N`), with what they need: a front that is a
process of its own (`prfaas pd`) and a Redis server, for N = 1 too, so that N is the only
difference. Their CPU is that of the gateway's processes; the front has a line of its own. All share
the cores of this machine with the load generator and the engine, so N processes cannot be N times
as fast where the machine has few cores.

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
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import uvloop
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from bare_proxy import KINDS
from echo_engine import NUM_PACED_EVENTS, PACE_S, Client, EchoEngine, serve_engine
from free_ports import free_port
from gateway_process import (
    ROOT,
    answers,
    child,
    completion_request,
    gateway_process,
    listens,
)
from redis_server import RedisServer
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
    cpu_front_ms_per_request: float
    cpu_us_per_event: float
    kib_per_stream: float


@dataclass(frozen=True, slots=True)
class Target:
    """Something that answers at a port; without a `pid` its CPU and memory are not measured."""

    port: int
    pid: int | None = None
    front_pid: int | None = None

    def processes(self) -> list[psutil.Process]:
        """It and what it has started."""
        return _family(self.pid)

    def front(self) -> list[psutil.Process]:
        """The front beside it, if it is a process of its own."""
        return _family(self.front_pid)


def _family(pid: int | None) -> list[psutil.Process]:
    if pid is None:
        return []
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


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


async def _measure(target: Target, args: argparse.Namespace) -> Sample:
    port = target.port
    prompt = "word " * 64
    plain, stream = completion_request(port, prompt), completion_request(port, prompt, stream=True)
    _, whole = await _latencies(port, plain, args.requests)
    first, streamed = await _latencies(port, stream, args.requests)
    processes, front = target.processes(), target.front()
    before_s, front_before_s = _cpu_s(processes), _cpu_s(front)
    rate, num_done = await _rate(port, plain, args.seconds, args.concurrency)
    cpu_s, front_cpu_s = _cpu_s(processes) - before_s, _cpu_s(front) - front_before_s
    stream_rate, _ = await _rate(port, stream, args.seconds, args.concurrency)
    event_cpu_s = await _event_cpu_s(port, processes, args.concurrency)
    stream_bytes = await _stream_bytes(port, processes, args.streams)
    whole.sort()
    return Sample(
        p50_ms=statistics.median(whole) * 1e3,
        p99_ms=whole[int(len(whole) * 0.99)] * 1e3,
        first_byte_p50_ms=statistics.median(first) * 1e3,
        stream_p50_ms=statistics.median(streamed) * 1e3,
        requests_per_s=rate,
        stream_requests_per_s=stream_rate,
        cpu_ms_per_request=cpu_s / max(1, num_done) * 1e3,
        cpu_front_ms_per_request=front_cpu_s / max(1, num_done) * 1e3,
        cpu_us_per_event=event_cpu_s * 1e6,
        kib_per_stream=stream_bytes / 1024,
    )


async def _event_cpu_s(port: int, processes: list[psutil.Process], concurrency: int) -> float:
    """CPU seconds for one event of many concurrent streams that decode at 1/PACE_S tokens/s."""
    request = completion_request(port, "paced", stream=True)
    clients = [await _connect(port, request) for _ in range(concurrency)]
    before_s = _cpu_s(processes)
    await asyncio.gather(*(client.ask() for client in clients))
    spent_s = _cpu_s(processes) - before_s
    for client in clients:
        client.close()
    return spent_s / (concurrency * (NUM_PACED_EVENTS + 1))


async def _stream_bytes(port: int, processes: list[psutil.Process], num: int) -> float:
    """Memory that one of `num` streams under way takes, with its two connections."""
    if not processes:
        return 0.0
    request = completion_request(port, "paced", stream=True)
    clients = [await _connect(port, request) for _ in range(num)]
    before_bytes = _rss_bytes(processes)
    asking = [asyncio.ensure_future(client.ask()) for client in clients]
    # Half of their events have come by then.
    await asyncio.sleep(NUM_PACED_EVENTS * PACE_S / 2)
    grown_bytes = _rss_bytes(processes) - before_bytes
    await asyncio.gather(*asking)
    for client in clients:
        client.close()
    return grown_bytes / num


def _rss_bytes(processes: list[psutil.Process]) -> int:
    return sum(process.memory_info().rss for process in processes)


def _cpu_s(processes: list[psutil.Process]) -> float:
    times = [process.cpu_times() for process in processes]
    return float(sum(item.user + item.system for item in times))


@contextmanager
def gateway(
    engine_port: int, folder: Path, traces: dict[str, Any] | None = None
) -> Iterator[Target]:
    """`prfaas gateway` in front of the engine."""
    port = free_port()
    config = _config(port, {"instances": [_instance(engine_port)]}, folder)
    if traces is not None:
        config["traces"] = traces
    with gateway_process(config, folder, completion_request(port, "up?")) as pid:
        yield Target(port, pid)


@contextmanager
def several(num: int, engine_port: int, folder: Path) -> Iterator[Target]:
    """`prfaas gateway` of so many processes, with its front and the Redis server."""
    port, front_port = free_port(), free_port()
    folder = folder / f"x{num}"
    folder.mkdir()
    settings = {
        "name": "home",
        "listen": f"127.0.0.1:{front_port}",
        "instances": [_instance(engine_port)],
    }
    file = folder / "front.yaml"
    file.write_text(yaml.safe_dump(settings))
    code = "import typer; from local_pd.cli import pd_command as c; typer.run(c)"
    argv = [sys.executable, "-c", code, "--config", str(file), "--log-level", "warning"]
    with RedisServer(folder) as server, child(argv, lambda: listens(front_port)) as front_pid:
        config = _config(port, {"front": f"127.0.0.1:{front_port}"}, folder)
        config["gateway"] |= {"processes": num, "shared": {"redis": server.url}}
        with gateway_process(config, folder, completion_request(port, "up?")) as pid:
            # The first one that serves answers before the others do.
            while num > 1 and not _all_serve(port, num):
                time.sleep(0.05)
            yield Target(port, pid, front_pid)


def _all_serve(port: int, num: int) -> bool:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/prfaas/gateways") as answer:
        processes = json.load(answer)["processes"]
    return [item["state"] for item in processes] == ["serving"] * num


def _instance(engine_port: int) -> dict[str, str]:
    # No agent answers there: nothing is offloaded here.
    url = f"http://127.0.0.1:{engine_port}"
    return {"name": "d0", "url": url, "agent": "127.0.0.1:1", "model": "echo"}


def _config(port: int, place: dict[str, Any], folder: Path) -> dict[str, Any]:
    return {
        "gateway": {"port": port, "models": [{"name": "echo"}], "threshold_tokens": 4096},
        "pd": {"name": "home", **place},
        "log_dir": str(folder),
    }


@contextmanager
def bare_proxy(kind: str, engine_port: int) -> Iterator[Target]:
    """A proxy that only passes on, in front of the engine."""
    port = free_port()
    script = str(Path(__file__).with_name("bare_proxy.py"))
    argv = [sys.executable, script, kind, str(port), str(engine_port)]
    with child(argv, answers(port, completion_request(port, "up?"))) as pid:
        yield Target(port, pid)


@contextmanager
def router(engine_port: int, folder: Path, *, may_install: bool) -> Iterator[Target | None]:
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
            yield Target(port, pid)
    except RuntimeError as error:
        print(f"vllm-router cannot be run here: {str(error).strip()[-500:]}", file=sys.stderr)
        yield None


def traced_gateways(
    stack: contextlib.ExitStack, engine_port: int, folder: Path
) -> dict[str, Target]:
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
    found: dict[str, Target] = {}
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
        targets: dict[str, Target | None] = {"engine": Target(engine_port)}
        if args.traces:
            targets |= traced_gateways(stack, engine_port, folder)
        else:
            targets["gateway"] = stack.enter_context(gateway(engine_port, folder))
            targets |= {
                f"gateway x{num}": stack.enter_context(several(num, engine_port, folder))
                for num in args.processes
            }
            targets |= {
                f"bare {kind}": stack.enter_context(bare_proxy(kind, engine_port)) for kind in KINDS
            }
            targets["vllm-router"] = stack.enter_context(
                router(engine_port, folder, may_install=not (args.smoke or args.only))
            )
        for number in range(args.rounds):
            for name, target in targets.items():
                if target is not None and (not args.only or name in ("engine", *args.only)):
                    print(f"round {number + 1}/{args.rounds}: {name}", file=sys.stderr)
                    sample = uvloop.run(_measure(target, args))
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
    parser.add_argument(
        "--processes", type=int, nargs="*", default=[1, 2], help="of gateways beside the first"
    )
    parser.add_argument("--only", nargs="*", help="measure these targets and the engine alone")
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
