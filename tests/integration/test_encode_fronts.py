"""The encode stage of cluster fronts over loopback HTTP and gRPC, with fake engines and agents."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from eventually import eventually
from front_access import prefill_cluster, running, started_prefill
from front_doubles import FakeAgent, FakeEngine, encoded_names, image_job, image_part, prefill_job
from msgspec import structs
from openai_engine import refusing
from prometheus_client import CollectorRegistry

import prfaas.encoding.embeddings
from kvmanager.agent.between_agents import EmbeddingOrder, EmbeddingsPulled
from kvmanager.agent.client import AgentClient
from kvmanager.agent.messages import EmbeddingStatus
from kvmanager.embedding_keys import embedding_key
from kvmanager.hashing import join_keys
from prfaas.cluster import PrefillCluster
from prfaas.embedded import EmbeddedPrefillCluster, PrefillClusterConfig
from prfaas.encoding.metrics import EncodeMetrics
from prfaas.engines.errors import PrefillFailed
from prfaas.engines.health import ProbeTiming
from prfaas.engines.instances import InstancesConfig
from prfaas.engines.prefill_run import RunnerConfig
from prfaas.engines.timing import TimingOrder
from scheduler.encoding.values import EncodeConfig

ENCODER = "weights-1 bfloat16"
CONFIG = PrefillClusterConfig(
    instances=InstancesConfig(probes=ProbeTiming(interval_s=0.1, start_interval_s=0.05)),
    runner=RunnerConfig(await_slice_s=0.5, cleanup_timeout_s=1.0, stall_timeout_s=0.5),
)


class Rig:
    """Node 0 has instances that encode and one that prefills, node 1 one that prefills."""

    def __init__(self) -> None:
        self.nodes: list[FakeAgent] = []
        self.engines: dict[str, FakeEngine] = {}
        self.registry = CollectorRegistry()
        self.embedded: EmbeddedPrefillCluster
        self.front: PrefillCluster

    def encoded(self, *names: str) -> list[str]:
        """The images that these instances got to encode."""
        return [one for name in names or ("e0",) for one in encoded_names(self.engines[name])]

    @property
    def num_prefills(self) -> int:
        return sum(len(self.engines[name].posted) for name in ("p0", "p1") if name in self.engines)

    def has(self, node: int, *names: str) -> None:
        for name in names:
            self.nodes[node].has[embedding_key(ENCODER, name)] = 512

    def counted(self, outcome: str) -> float:
        labels = {"cluster": "east", "outcome": outcome}
        return self.registry.get_sample_value("prfaas_encode_media_total", labels) or 0.0


@asynccontextmanager
async def made(
    kind: str = "embedded", encoders: tuple[str, ...] = ("e0",), **encode: Any
) -> AsyncIterator[Rig]:
    rig = Rig()
    async with AsyncExitStack() as stack:
        for names in ((*encoders, "p0"), ("p1",)):
            node = await running(stack, FakeAgent(*names))
            node.encoder, node.embeddings = ENCODER, EmbeddingStatus()
            rig.nodes.append(node)
            for name in names:
                rig.engines[name] = await running(stack, FakeEngine(node))
        specs = [
            engine.spec(name, "encode" if name in encoders else "prefill")
            for name, engine in rig.engines.items()
        ]
        config = replace(CONFIG, encode=EncodeConfig(**encode))
        metrics = EncodeMetrics(rig.registry)
        rig.embedded = prefill_cluster("east", specs, config, encode_metrics=metrics)
        rig.front = await started_prefill(stack, kind, rig.embedded)
        yield rig
        for engine in rig.engines.values():
            engine.first_token.set()


@pytest.fixture(params=["embedded", "remote"])
async def rig(request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    async with made(request.param) as found:
        yield found


async def test_each_image_is_encoded_by_itself_before_the_prefill(rig: Rig) -> None:
    job = image_job(1, "a", "b")
    order: list[str] = []
    for name in ("e0", "p0", "p1"):
        rig.engines[name].before_answer = lambda _body, name=name: order.append(name)
    result = await rig.front.submit(job)
    assert order[:2] == ["e0", "e0"]
    assert sorted(rig.encoded()) == ["a", "b"]
    assert result.media == {"encoded": 2}
    assert result.encode_s > 0
    assert result.queue_s < result.encode_s
    body = rig.engines["e0"].posted[0]
    assert body["messages"] == [{"role": "user", "content": [image_part("a")]}]
    assert body["max_completion_tokens"] == 1
    assert body["cache_salt"] != rig.engines["e0"].posted[1]["cache_salt"]
    assert rig.counted("encoded") == 2


async def test_text_does_not_come_near_the_stage(rig: Rig) -> None:
    result = await rig.front.submit(prefill_job(1))
    assert (result.media, result.encode_s) == ({}, 0.0)
    assert not rig.engines["e0"].posted


async def test_others_prefill_while_images_are_encoded(rig: Rig) -> None:
    rig.engines["e0"].first_token.clear()
    waiting = asyncio.create_task(rig.front.submit(image_job(1, "a")))
    await rig.engines["e0"].wait_requests(1)
    await rig.front.submit(prefill_job(2))
    report = await rig.front.report()
    (job,) = report.jobs
    assert (job.instance, report.queue_depth, report.running) == ("", 1, 0)
    assert report.encode is not None
    (one,) = report.encode.instances
    assert (one.name, one.running_media, one.running_tokens) == ("e0", 1, 2)
    assert rig.num_prefills == 1
    rig.engines["e0"].first_token.set()
    assert (await waiting).media == {"encoded": 1}


async def test_the_same_image_of_several_requests_is_encoded_once(rig: Rig) -> None:
    rig.engines["e0"].first_token.clear()
    jobs = [asyncio.create_task(rig.front.submit(image_job(n, "a"))) for n in range(1, 4)]
    await rig.engines["e0"].wait_requests(1)
    await eventually(lambda: len(rig.embedded._tickets) == 3)
    await asyncio.sleep(0.05)
    rig.engines["e0"].first_token.set()
    found = [(await job).media for job in jobs]
    assert found.count({"encoded": 1}) == 1
    assert found.count({"shared": 1}) == 2
    assert rig.encoded() == ["a"]


async def test_few_are_given_at_a_time_while_times_are_not_known(rig: Rig) -> None:
    engine, most = rig.engines["e0"], 0

    def seen(_body: object) -> None:
        nonlocal most
        most = max(most, engine.num_serving)

    engine.before_answer = seen
    result = await rig.front.submit(image_job(1, *"abcdefgh"))
    assert sum(result.media.values()) == 8
    assert most <= 2


async def test_what_a_node_has_is_not_encoded(rig: Rig) -> None:
    rig.has(0, "a")
    result = await rig.front.submit(image_job(1, "a", "b"))
    assert result.media == {"found": 1, "encoded": 1}
    assert rig.encoded() == ["b"]


async def test_nodes_that_are_known_to_have_images_are_asked_first(rig: Rig) -> None:
    rig.has(1, "a", "b")
    job = image_job(1, "a", "b")
    known = structs.replace(job, embedding_nodes=(rig.nodes[1].target, "elsewhere:1"))
    assert (await rig.front.submit(known)).media == {"found": 2}
    assert not rig.nodes[0].asked_for
    # What they lack, another may have.
    rig.has(0, "c")
    job = structs.replace(image_job(2, "b", "c"), embedding_nodes=(rig.nodes[1].target,))
    assert (await rig.front.submit(job)).media == {"found": 2}
    assert set(rig.nodes[0].asked_for) == {embedding_key(ENCODER, "c")}


async def test_an_image_whose_kvcache_is_cached_is_not_encoded(rig: Rig) -> None:
    job = structs.replace(image_job(1, "a", "b"), cached_tokens={"p0": 3})
    result = await rig.front.submit(job)
    # Each has two tokens, and half of the second one is not cached.
    assert result.media == {"cached": 1, "encoded": 1}
    assert result.left_media_tokens == 0
    assert rig.encoded() == ["b"]


async def test_a_broken_image_is_left_to_the_engine_that_prefills(rig: Rig) -> None:
    rig.engines["e0"].reply = refusing(400)
    result = await rig.front.submit(image_job(1, "a"))
    assert (result.media, result.left_media_tokens) == ({"refused": 1}, 2)
    assert rig.num_prefills == 1
    assert rig.encoded() == ["a"]


async def test_an_overloaded_encoder_costs_no_answer(rig: Rig) -> None:
    rig.engines["e0"].reply = refusing(503)
    assert (await rig.front.submit(image_job(1, "a"))).media == {"failed": 1}


async def test_a_slow_encoder_is_given_up() -> None:
    async with made(timeout_s=0.3) as rig:
        rig.engines["e0"].first_token.clear()
        result = await rig.front.submit(image_job(1, "a"))
        assert result.media == {"timeout": 1}
        assert 0.25 < result.encode_s < 5
        await rig.engines["e0"].wait_aborts(1)


async def test_an_encoder_that_dies_costs_no_answer() -> None:
    async with made(encoders=("e0", "e1")) as rig:
        for name in ("e0", "e1"):
            rig.engines[name].first_token.clear()
        job = asyncio.create_task(rig.front.submit(image_job(1, "a", "b")))
        await rig.engines["e0"].wait_requests(1)
        await rig.engines["e1"].wait_requests(1)
        await rig.engines["e0"].stop()
        await rig.engines["e1"].wait_requests(2)
        rig.engines["e1"].first_token.set()
        assert (await job).media == {"encoded": 2}
        # The next one does not even try the dead one.
        assert (await rig.front.submit(image_job(2, "c"))).media == {"encoded": 1}
        await rig.engines["e1"].stop()
        assert (await rig.front.submit(image_job(3, "d"))).media == {"failed": 1}
        await eventually(lambda: not rig.embedded._instances.by_name["e1"].transfers)
        result = await rig.front.submit(image_job(4, "e"))
        assert result.media == {"no_instance": 1}


async def test_a_cancelled_request_stops_its_media(rig: Rig) -> None:
    engine = rig.engines["e0"]
    engine.first_token.clear()
    job = asyncio.create_task(rig.front.submit(image_job(1, *"abcd")))
    await engine.wait_requests(2)
    job.cancel()
    with pytest.raises(asyncio.CancelledError):
        await job
    await engine.wait_aborts(2)
    await eventually(lambda: not rig.embedded._stage.running_on("e0"))
    assert (await rig.front.report()).queue_depth == 0
    engine.first_token.set()
    assert (await rig.front.submit(image_job(2, "a"))).media == {"encoded": 1}
    assert rig.num_prefills == 1


async def test_a_job_that_waits_too_long_does_not_wait_for_its_media() -> None:
    config = replace(CONFIG, queue=replace(CONFIG.queue, max_wait_s=0.3))
    async with made() as rig:
        rig.embedded._queue._config = config.queue
        rig.engines["e0"].first_token.clear()
        with pytest.raises(PrefillFailed) as caught:
            await rig.front.submit(image_job(1, "a"))
        assert caught.value.code == "queue_timeout"
        await rig.engines["e0"].wait_aborts(1)


async def test_close_fails_jobs_whose_media_are_encoded() -> None:
    async with made() as rig:
        rig.engines["e0"].first_token.clear()
        job = asyncio.create_task(rig.front.submit(image_job(1, "a")))
        await rig.engines["e0"].wait_requests(1)
        await rig.embedded.close()
        with pytest.raises(PrefillFailed) as caught:
            await job
        assert caught.value.code == "closed"


async def test_a_drain_waits_for_media_and_then_gives_none() -> None:
    async with made() as rig:
        engine = rig.engines["e0"]
        engine.first_token.clear()
        job = asyncio.create_task(rig.front.submit(image_job(1, "a")))
        await engine.wait_requests(1)
        drain = asyncio.create_task(rig.front.drain("e0"))
        await asyncio.sleep(0.05)
        assert not drain.done()
        engine.first_token.set()
        await asyncio.wait_for(drain, 5.0)
        assert (await job).media == {"encoded": 1}
        assert (await rig.front.submit(image_job(2, "b"))).media == {"no_instance": 1}


@pytest.fixture
def pulls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, EmbeddingOrder]]:
    found: list[tuple[str, str, EmbeddingOrder]] = []

    async def pull(source: AgentClient, to: AgentClient, order: EmbeddingOrder) -> EmbeddingsPulled:
        found.append((source.target, to.target, order))
        return EmbeddingsPulled(len(order.sizes), sum(order.sizes.values()), 0, 0.0, 0.0)

    monkeypatch.setattr(prfaas.encoding.embeddings, "pull_embeddings", pull)
    return found


async def test_embeddings_come_to_the_node_of_the_prefill(
    pulls: list[tuple[str, str, EmbeddingOrder]],
) -> None:
    async with made() as rig:
        await rig.front.drain("p0")
        keys = [embedding_key(ENCODER, name) for name in "ab"]
        job = image_job(1, "a", "b")
        job = structs.replace(job, tenant="t", embedding_grant=b"g", embedding_keys=join_keys(keys))
        rig.engines["e0"].before_answer = lambda _body: rig.has(0, "a", "b")
        assert (await rig.front.submit(job)).media == {"encoded": 2}
        (source, to, order), *others = pulls
        assert not others
        assert (source, to) == (rig.nodes[0].target, rig.nodes[1].target)
        assert order == EmbeddingOrder(dict.fromkeys(keys, 512), b"g", tuple(keys), "t")
        value = rig.registry.get_sample_value
        assert value("prfaas_encode_pulled_bytes_total", {"cluster": "east"}) == 1024


async def test_embeddings_of_the_same_node_stay_there(
    pulls: list[tuple[str, str, EmbeddingOrder]],
) -> None:
    async with made() as rig:
        await rig.front.drain("p1")
        rig.has(0, "a")
        assert (await rig.front.submit(image_job(1, "a"))).media == {"found": 1}
        assert not pulls


async def test_an_instance_that_encodes_is_watched_and_gets_no_jobs() -> None:
    agent = await FakeAgent("p0", "e0").start()
    engines = [await FakeEngine(agent).start() for _ in range(2)]
    specs = [engines[0].spec("p0", "prefill"), engines[1].spec("e0", "encode")]
    front = prefill_cluster("east", specs, CONFIG)
    try:
        agent.embeddings, agent.encoder = EmbeddingStatus(), "weights-1"
        await front.start()
        found = (await front.report()).instances[1]
        assert (found.role, found.healthy, found.encodes, found.roles) == (
            "encode",
            True,
            True,
            ("encode",),
        )
        await asyncio.gather(*(front.submit(prefill_job(number)) for number in range(3)))
        assert engines[1].posted == []
        order = TimingOrder(instance="e0", lengths=(4,), limit_s=1.0)
        assert (await front.time_prefills(order)).reason == "e0 only encodes"
        # Nothing of it can be shared without room for embeddings.
        agent.embeddings = None
        await eventually(lambda: not front._instances.by_name["e0"].transfers)
        assert "embedding_gib" in front._instances.by_name["e0"].reason
        agent.embeddings, agent.encoder = EmbeddingStatus(), ""
        await eventually(lambda: "no connection" in front._instances.by_name["e0"].reason)
        agent.encoder = "weights-1"
        engines[0].healthy = False
        await eventually(lambda: not front._instances.by_name["p0"].transfers)
        assert not (await front.report()).healthy
        with pytest.raises(PrefillFailed) as caught:
            await front.submit(prefill_job(9))
        assert (caught.value.code, "e0" in caught.value.message) == ("no_instance", False)
    finally:
        await front.close()
        for server in (*engines, agent):
            await server.stop()
