"""A hand-off inside a node: through the arena that both engines share against TCP, in turns.

Run: python tests/bench/bench_handoff.py [--json FILE] [--smoke] [--blocks N] [--prompts N].

`block`: 64 KiB in the arena, from the word that they are ready until the engine that decodes has
been told that they landed. The landing is open before, the engines are plain sockets of one thread.
`echo`: the same message through a process that only passes it on (`echo_process`), in turns with
`block`. So much of `block` is the machine's: sockets, and the waking of processes.
`prompt`: a KVCache of many layers that are copied one after the other, from the first that is ready
to the whole of it, and the CPU time of the agent meanwhile. `ttft`: real engines behind a gateway
for each way, the same lengths in turns, and the CPU time of engines and agents for each request.

Engines are started for `ttft`; `--no-engines` leaves it out, `--region DIR` takes the region that
runs there (`hand_off_ways.two_nodes`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any, Final

import aiohttp
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from agent_process import AgentProcess
from arena_bytes import put_bytes
from e2e_systems import stream
from echo_process import KINDS, EchoProcess
from engine_region import region_spec
from hand_off_ways import WAYS, gateway, two_nodes
from running_region import served_model
from smoke import add_smoke

from deploy.lab.demo.scenario import text
from deploy.lab.demo.tiny_models import build_model
from deploy.lab.demo.tiny_specs import MODELS
from deploy.region.launch.launcher import RunningRegion
from deploy.region.launch.rundir import RunDirectory, read_state
from kvmanager.agent.engines.protocol import (
    AgentMessage,
    Attach,
    EngineHello,
    EngineMessage,
    FrameDecoder,
    Landed,
    OutboxOpened,
    Ready,
    Release,
    Watch,
    Welcome,
    decode_agent_message,
    encode_frame,
)
from kvmanager.arena import Arena
from kvmanager.layout import KVGroup, KVKind, KVLayer, KVLayout, KVPart

Row = dict[str, Any]

GOAL_US: Final = 100.0
"""For the median of `block` through the arena."""
PAGE_BYTES: Final = 64 << 10
BLOCK_TOKENS: Final = 16
LAYERS: Final = 32
PROMPT_TOKENS: Final = 32 * BLOCK_TOKENS
SETTLES_S: Final = 30.0
"""For the prefill's own numbers after the answer."""
MODEL: Final = "mimo-v2-bench"
BY_TRANSPORT: Final = {"arena": False, "transport": True}
ENGINE_WAYS: Final = {"arena": "arena", "transport": "transport within a node"}


def layout(num_layers: int) -> KVLayout:
    part = KVPart("kv", 1, PAGE_BYTES // BLOCK_TOKENS, "bfloat16")
    layers = tuple(KVLayer(f"layer.{number}", (part,)) for number in range(num_layers))
    return KVLayout(
        model_id="bench",
        weights=f"files:{num_layers}",
        config_digest="0",
        tp_size=1,
        groups=(KVGroup(KVKind.FULL, BLOCK_TOKENS, layers),),
    )


class SocketEngine:
    """An engine that is one blocking socket; a context manager."""

    def __init__(self, agent: AgentProcess, instance: str, described: KVLayout) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(str(agent.socket))
        self._decoder = FrameDecoder()
        self._waiting: list[AgentMessage] = []
        self.send(EngineHello(instance, "worker", os.getpid(), described.encode()))
        welcome = self.receive()
        if not isinstance(welcome, Welcome):
            raise RuntimeError(f"no welcome: {welcome}")
        self.arena = Arena.attach(
            Path(welcome.arena_path),
            welcome.arena_bytes,
            welcome.block_bytes,
            epoch=welcome.arena_epoch,
        )

    def __enter__(self) -> SocketEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.arena.close()
        self._socket.close()

    def send(self, message: EngineMessage) -> None:
        self._socket.sendall(encode_frame(message))

    def receive(self) -> AgentMessage:
        while not self._waiting:
            data = self._socket.recv(1 << 16)
            if not data:
                raise RuntimeError("the agent closed the connection")
            self._waiting += map(decode_agent_message, self._decoder.feed(data))
        return self._waiting.pop(0)


def hand_over(
    agent: AgentProcess,
    engines: tuple[SocketEngine, SocketEngine],
    num_tokens: int,
    described: KVLayout,
    *,
    by_transport: bool,
) -> tuple[float, float]:
    """Hand a KVCache over, a layer at a time. Seconds of time, and of the agent's CPU."""
    prefill, decode = engines
    fingerprint = described.fingerprint().hex()
    landing = agent.reserve(num_tokens, fingerprint=fingerprint)
    transfer_id = bytes.fromhex(landing.transfer_id)
    decode.send(Watch(transfer_id))
    outbox = agent.open_outbox(landing, num_tokens, by_transport=by_transport)
    # Every engine of the layout is told of the outbox.
    opened, _ = prefill.receive(), decode.receive()
    if not isinstance(opened, OutboxOpened):
        raise RuntimeError(f"no outbox: {opened}")
    prefill.send(Attach(transfer_id, outbox.attempt))
    # An answer of its control port comes after everything that the agent has heard before.
    agent.status()
    assert agent.process is not None
    process = psutil.Process(agent.process.pid)
    step = landing.nbytes // len(described.groups[0].layers)
    page = bytes(step)
    before_s = sum(process.cpu_times()[:2])
    began_s = 0.0
    for start in range(0, landing.nbytes, step):
        put_bytes(prefill.arena, opened.runs, page, start)
        began_s = began_s or time.perf_counter()
        prefill.send(Ready(transfer_id, outbox.attempt, [(start, step)]))
    told = decode.receive()
    took_s = time.perf_counter() - began_s
    cpu_s = sum(process.cpu_times()[:2]) - before_s
    if not isinstance(told, Landed):
        raise RuntimeError(f"nothing landed: {told}")
    decode.send(Release(transfer_id))
    way = agent.wait(landing.transfer_id, kind="outbox").hand_off
    if way != ("transport" if by_transport else "arena"):
        raise RuntimeError(f"handed over by {way}")
    return took_s, cpu_s


def echo(agent: AgentProcess, process: EchoProcess) -> tuple[float, float]:
    """Seconds of a message's way through `process`, and of the CPU of that."""
    # Caches and cores are then as they are before a hand-over.
    agent.status()
    passing = psutil.Process(process.pid)
    message = encode_frame(Ready(bytes(16), 1, [(0, PAGE_BYTES)]))
    before_s = sum(passing.cpu_times()[:2])
    began_s = time.perf_counter()
    process.pass_on(message)
    took_s = time.perf_counter() - began_s
    return took_s, sum(passing.cpu_times()[:2]) - before_s


def measure_agent(num_blocks: int, num_prompts: int, folder: Path) -> list[Row]:
    rows: list[Row] = []
    sizes = (("block", 1, BLOCK_TOKENS, num_blocks), ("prompt", LAYERS, PROMPT_TOKENS, num_prompts))
    with ExitStack() as stack:
        agent = stack.enter_context(AgentProcess(folder / "agent", arena_gib=0.5))
        echoes = {
            kind: stack.enter_context(EchoProcess(kind, folder / f"{kind}.sock")) for kind in KINDS
        }
        for what, num_layers, num_tokens, repeats in sizes:
            described = layout(num_layers)
            with (
                SocketEngine(agent, f"{what}-prefill", described) as prefill,
                SocketEngine(agent, f"{what}-decode", described) as decode,
            ):
                engines = prefill, decode
                taken: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
                for number in range(repeats + 1):
                    found = {
                        (what, way): hand_over(
                            agent, engines, num_tokens, described, by_transport=by_transport
                        )
                        for way, by_transport in BY_TRANSPORT.items()
                    }
                    if what == "block":
                        found |= {("echo", kind): echo(agent, one) for kind, one in echoes.items()}
                    if number:  # the first one of each way opens connections
                        for key, numbers in found.items():
                            taken[key].append(numbers)
            for (name, way), measured in taken.items():
                nbytes = 0 if name == "echo" else described.transfer_bytes(num_tokens)
                rows.append(
                    {
                        "what": name,
                        "hand_off": way,
                        "nbytes": nbytes,
                        "seconds": [seconds for seconds, _ in measured],
                        "cpu_s": [cpu_s for _, cpu_s in measured],
                    }
                )
    return rows


async def measure_engines(directory: RunDirectory, lengths: list[int], repeats: int) -> list[Row]:
    """Prompts of each length in turns over both ways, each new to every cache."""
    state = read_state(directory.root)
    if state is None:
        raise RuntimeError(f"no region runs in {directory.root}")
    pids = [p.pid for p in state.processes if p.kind in ("agent", "engine") and p.pid is not None]
    rows: list[Row] = []
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        served = {}
        for name, known in ENGINE_WAYS.items():
            way = WAYS[known]
            made = gateway(directory.gateway_file, way.hand_off, [way.prefills])
            served[name] = await stack.enter_async_context(made)
        for num_tokens in lengths:
            for number in range(repeats + 1):
                for name, (url, behind) in served.items():
                    seed = 1000 * num_tokens + 10 * number + list(served).index(name)
                    prompt = text(num_tokens, seed=seed)
                    body = {"model": await served_model(url), "prompt": prompt}
                    before_s = cpu_s(pids)
                    ttft_s, _, request_id = await stream(session, url, body)
                    spent_s = cpu_s(pids) - before_s
                    (record,) = (r for r in behind.records if r.request_id == request_id)
                    async with asyncio.timeout(SETTLES_S):
                        while not record.is_settled:
                            await asyncio.sleep(0.01)
                    if record.hand_off != name:
                        raise RuntimeError(f"{name}: handed over by {record.hand_off!r}: {record}")
                    if number:
                        rows.append(
                            {
                                "what": "ttft",
                                "hand_off": name,
                                "num_tokens": num_tokens,
                                "nbytes": record.transfer_bytes,
                                "seconds": ttft_s,
                                "cpu_s": spent_s,
                            }
                        )
    return rows


def cpu_s(pids: list[int]) -> float:
    """User and system time of these processes and their children so far."""
    trees = [[process, *process.children(recursive=True)] for process in map(psutil.Process, pids)]
    return sum(sum(process.cpu_times()[:2]) for tree in trees for process in tree)


async def measure_own_region(folder: Path, lengths: list[int], repeats: int) -> list[Row]:
    model = MODELS[MODEL]
    spec = region_spec(build_model(model, folder), MODEL, prefix_caching=False)
    async with RunningRegion(two_nodes(spec, "auto"), folder / "region") as region:
        return await measure_engines(region.directory, lengths, repeats)


def summarise(rows: list[Row]) -> list[str]:
    lines = [f"{'what':8} {'KiB':>8} {'hand_off':>10} {'p50 us':>10} {'p99 us':>10} {'CPU us':>10}"]
    cells: dict[tuple[str, int, str], list[Row]] = {}
    for row in rows:
        cells.setdefault((row["what"], row["nbytes"], row["hand_off"]), []).append(row)
    for (what, nbytes, way), found in cells.items():
        seconds, cpu = (flat(found, key) for key in ("seconds", "cpu_s"))
        p99 = sorted(seconds)[min(len(seconds) - 1, int(0.99 * len(seconds)))]
        lines.append(
            f"{what:8} {nbytes >> 10:8} {way:>10} {1e6 * statistics.median(seconds):10.0f} "
            f"{1e6 * p99:10.0f} {1e6 * statistics.fmean(cpu):10.0f}"
        )
    return lines


def flat(rows: list[Row], key: str) -> list[float]:
    values: list[float] = []
    for row in rows:
        values += row[key] if isinstance(row[key], list) else [row[key]]
    return values


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the raw numbers here")
    parser.add_argument("--blocks", type=int, default=500, help="hand-overs of 64 KiB each way")
    parser.add_argument("--prompts", type=int, default=50, help="of a prompt's KVCache each way")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2000, 4000, 8000])
    parser.add_argument("--repeats", type=int, default=10, help="prompts of a length each way")
    parser.add_argument("--no-engines", action="store_true", help="leave `ttft` out")
    parser.add_argument("--region", type=Path, metavar="DIR", help="where such a region runs")
    add_smoke(parser, blocks=10, prompts=3, tokens=[600], repeats=1, no_engines=True)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ho-") as folder:
        rows = measure_agent(arguments.blocks, arguments.prompts, Path(folder))
        todo = arguments.tokens, arguments.repeats
        if arguments.region is not None:
            rows += asyncio.run(
                measure_engines(RunDirectory(arguments.region, arguments.region), *todo)
            )
        elif not arguments.no_engines:
            rows += asyncio.run(measure_own_region(Path(folder), *todo))
    print("\n".join(summarise(rows)))
    print(f"goal: a block through the arena in at most {GOAL_US:.0f} us (p50)")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"cpus": os.cpu_count(), "rows": rows}) + "\n")


if __name__ == "__main__":
    main()
