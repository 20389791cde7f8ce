"""`prfaas prefill` and `prfaas pd` as processes, and a front that supervises its own engine."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import yaml
from eventually import eventually
from free_ports import free_port
from front_access import prefill_cluster
from front_doubles import FakeAgent, FakeEngine, prefill_job
from serving_process import serving
from typer.testing import CliRunner

from deploy.cli import app
from local_pd.messages import ReserveRequest
from local_pd.remote import RemotePdCluster
from prfaas.embedded import EmbeddedPrefillCluster, PrefillClusterConfig
from prfaas.engines.errors import EngineStartFailed, PrefillFailed
from prfaas.engines.health import ProbeTiming
from prfaas.engines.instance import InstanceSpec
from prfaas.engines.instances import InstancesConfig
from prfaas.engines.members import LetGo
from prfaas.remote import RemotePrefillCluster

pytestmark = pytest.mark.slow

ROOT = str(Path(__file__).resolve().parents[2])

# Stands in for the Python interpreter: it finds the port in vLLM's command line and serves there.
ENGINE = f"""#!{sys.executable}
import http.server, sys
print("engine starts", flush=True)
if "--broken" in sys.argv:
    sys.exit("RuntimeError: no such device")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
    def log_message(self, *args):
        pass
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ['PYTHONPATH']}"}


@asynccontextmanager
async def front_process(
    kind: str, config: Path, *, stopping: bool = False
) -> AsyncIterator[tuple[str, int]]:
    """The front's gRPC address and pid; on leaving it must end well on SIGTERM.

    `stopping`: the caller sends the signal itself. One more would find the process without its
    handlers, if it is about to end.
    """
    async with serving(kind, config, env=environment()) as (process, ready):
        assert ready["event"] == "ready"
        yield ready["control"], ready["pid"]
        if not stopping:
            process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 30) == 0


def write_config(
    path: Path, engine: FakeEngine, agent: FakeAgent, role: str, **settings: float
) -> Path:
    instance = {"name": "i0", "url": engine.url, "agent": agent.target, "role": role}
    config = {"name": "c", "listen": "127.0.0.1:0", "instances": [instance]} | settings
    path.write_text(yaml.safe_dump(config))
    return path


async def test_the_prefill_front_as_a_process(tmp_path: Path) -> None:
    agent = await FakeAgent("i0").start()
    engine = await FakeEngine(agent).start()
    config = write_config(tmp_path / "front.yaml", engine, agent, "prefill")
    async with front_process("prefill", config) as (target, _):
        front = RemotePrefillCluster("c", target)
        assert (await front.submit(prefill_job(1))).instance == "i0"
        engine.first_token.clear()
        task = asyncio.create_task(front.submit(prefill_job(2)))
        await engine.wait_requests(2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await engine.wait_aborts(1)
        await front.close()
    await engine.stop()
    await agent.stop()


@pytest.mark.parametrize("kind", ["prefill", "pd"])
@pytest.mark.parametrize("hurry", [False, True])
async def test_a_front_that_stops_lets_its_jobs_end(tmp_path: Path, kind: str, hurry: bool) -> None:
    """A restart must not throw away minutes of work of GPUs. A second signal skips that."""
    agent = await FakeAgent("i0").start()
    engine = await FakeEngine(agent).start()
    config = write_config(tmp_path / "front.yaml", engine, agent, "prefill")
    async with front_process(kind, config, stopping=True) as (target, pid):
        front: RemotePrefillCluster | RemotePdCluster = RemotePrefillCluster("c", target)
        if kind == "pd":
            front = RemotePdCluster("c", target, has_prefill_instances=True)
        submit = front.submit if isinstance(front, RemotePrefillCluster) else front.prefill_locally
        await submit(prefill_job(1))
        engine.first_token.clear()
        running = asyncio.create_task(submit(prefill_job(2)))
        await engine.wait_requests(2)
        os.kill(pid, signal.SIGTERM)
        refused = ""
        while not refused:
            try:
                async with asyncio.timeout(0.5):
                    await submit(prefill_job(3))
            except TimeoutError:  # it was taken before the signal came
                continue
            except PrefillFailed as error:
                refused = error.code
        assert refused == "closed"
        assert not running.done()
        if hurry:
            os.kill(pid, signal.SIGTERM)
            with pytest.raises(PrefillFailed):
                await running
        else:
            engine.first_token.set()
            assert (await running).instance == "i0"
        await front.close()
    await engine.stop()
    await agent.stop()


@pytest.mark.parametrize("signals", [False, True])
async def test_instances_join_and_leave_by_the_file(tmp_path: Path, signals: bool) -> None:
    agent = await FakeAgent("i0", "i1").start()
    engine = await FakeEngine(agent).start()
    path = write_config(tmp_path / "front.yaml", engine, agent, "prefill")
    file = yaml.safe_load(path.read_text())

    async def change(instances: list[dict[str, str]], pid: int) -> None:
        path.write_text(yaml.safe_dump(file | {"instances": instances}))
        if signals:
            os.kill(pid, signal.SIGHUP)

    async def until(front: RemotePrefillCluster, *names: str) -> None:
        await eventually(
            front.report, lambda found: tuple(i.name for i in found.instances if i.healthy) == names
        )

    async with front_process("prefill", path) as (target, pid):
        front = RemotePrefillCluster("c", target)
        await until(front, "i0")
        (first,) = file["instances"]
        await change([first, first | {"name": "i1"}], pid)
        await until(front, "i0", "i1")
        path.write_text("instances: [")
        os.kill(pid, signal.SIGHUP)  # a half-written file changes nothing
        await change([first | {"name": "i1"}], pid)
        await eventually(front.report, lambda found: any(i.leaving for i in found.instances))
        assert (await front.submit(prefill_job(1))).instance == "i1"
        await front.change_members(LetGo(name="i0"))
        await until(front, "i1")
        await front.close()
    await engine.stop()
    await agent.stop()


async def test_the_pd_front_as_a_process(tmp_path: Path) -> None:
    agent = await FakeAgent("i0").start()
    engine = await FakeEngine(agent).start()
    config = write_config(tmp_path / "front.yaml", engine, agent, "both")
    async with front_process("pd", config) as (target, _):
        front = RemotePdCluster("c", target, has_prefill_instances=False)
        slot = await front.reserve(
            ReserveRequest(
                num_tokens=8,
                token_digest=prefill_job(1).landing.token_digest,
                request_id="r1",
            )
        )
        assert slot.engine_url == engine.url
        await front.release(slot, "done")
        assert not agent.landings
        await front.close()
    await engine.stop()
    await agent.stop()


# A gateway that converts an instance, as far as its drain. It is killed before it says more.
DRAINER = """
import asyncio, sys
from local_pd.remote import RemotePdCluster
from prfaas.remote import RemotePrefillCluster

async def main(kind, target):
    pd = RemotePdCluster("c", target, has_prefill_instances=False)
    front = pd if kind == "pd" else RemotePrefillCluster("c", target)
    await front.drain("i0")
    print("drained", flush=True)
    await asyncio.sleep(600)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize("kind", ["pd", "prefill"])
async def test_what_a_killed_gateway_left_drained_is_given_work_again(
    tmp_path: Path, kind: str
) -> None:
    agent = await FakeAgent("i0").start()
    engine = await FakeEngine(agent).start()
    config = write_config(tmp_path / "front.yaml", engine, agent, "prefill", drained_hold_s=5.0)
    async with front_process(kind, config) as (target, _):
        front = RemotePrefillCluster("c", target)
        if kind == "pd":
            front = RemotePdCluster("c", target, has_prefill_instances=True)
        gateway = await asyncio.create_subprocess_exec(
            sys.executable, "-c", DRAINER, kind, target,
            stdout=asyncio.subprocess.PIPE,
            env=environment(),
        )  # fmt: skip
        assert gateway.stdout is not None
        async with asyncio.timeout(30):
            assert await gateway.stdout.readline() == b"drained\n"
        gateway.kill()
        await gateway.wait()
        assert (await front.report()).instances[0].draining
        await eventually(front.report, lambda report: not report.instances[0].draining)
        await front.close()
    await engine.stop()
    await agent.stop()


def test_a_bad_configuration_ends_the_command_with_a_message(tmp_path: Path) -> None:
    path = tmp_path / "front.yaml"
    path.write_text("name: c\n")
    result = CliRunner().invoke(app, ["prefill", "--config", str(path)])
    assert result.exit_code == 2
    assert "write instances, or discover" in result.stderr


def supervised(tmp_path: Path, agent: FakeAgent, port: int, *args: str) -> EmbeddedPrefillCluster:
    python = tmp_path / "python"
    python.write_text(ENGINE)
    python.chmod(0o755)
    spec = InstanceSpec.model_validate(
        {
            "name": "i0",
            "agent": agent.target,
            "role": "prefill",
            "engine": {
                "instance": "i0",
                "model": "/m",
                "served_name": "m",
                "port": port,
                "python": str(python),
                "args": args,
            },
        }
    )
    config = PrefillClusterConfig(
        instances=InstancesConfig(
            probes=ProbeTiming(interval_s=0.1, start_interval_s=0.05),
            log_dir=tmp_path / "logs",
        )
    )
    return prefill_cluster("c", [spec], config)


async def test_a_front_starts_restarts_and_stops_its_engine(tmp_path: Path) -> None:
    agent = await FakeAgent("i0").start()
    cluster = supervised(tmp_path, agent, free_port())
    await cluster.start()
    await cluster.wait_ready(30)
    supervisor = cluster._instances.by_name["i0"].supervisor
    assert supervisor is not None
    first = supervisor.members()
    os.kill(max(first), signal.SIGKILL)
    await eventually(lambda: not cluster._instances.by_name["i0"].transfers)
    await eventually(lambda: supervisor.num_restarts == 1)
    await eventually(lambda: cluster._instances.by_name["i0"].transfers)
    assert (await cluster.report()).instances[0].num_restarts == 1
    await cluster.close()
    assert supervisor.members() == []
    assert "engine starts" in (tmp_path / "logs" / "i0.log").read_text()
    await agent.stop()


async def test_an_engine_that_cannot_start_is_reported_with_its_log(tmp_path: Path) -> None:
    agent = await FakeAgent("i0").start()
    cluster = supervised(tmp_path, agent, free_port(), "--broken")
    await cluster.start()
    with pytest.raises(EngineStartFailed, match="RuntimeError: no such device"):
        await cluster.wait_ready(30)
    await cluster.close()
    await agent.stop()
