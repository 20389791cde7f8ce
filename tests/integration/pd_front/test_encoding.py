"""The encode stage of a PD cluster: for hand-offs, and for requests that one engine serves."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import pytest
from eventually import eventually
from front_access import pd_cluster, running, started_pd
from front_doubles import FakeAgent, FakeEngine, encoded_names, image_job, image_part, looked_at
from msgspec import json, structs
from pd_front_rig import CONFIG
from prometheus_client import CollectorRegistry

from kvmanager.agent.messages import EmbeddingStatus
from kvmanager.embedding_keys import embedding_key
from kvmanager.media_items import MediaItem
from local_pd.cluster import PdCluster
from local_pd.embedded import EmbeddedPdCluster
from local_pd.errors import FrontUnreachable
from local_pd.messages import ReserveRequest
from local_pd.remote import RemotePdCluster
from prfaas.encoding.metrics import EncodeMetrics
from prfaas.encoding.values import EncodeDone, EncodeOrder
from prfaas.engines.errors import PrefillFailed
from prfaas.jobs import PrefillJob
from scheduler.encoding.values import EncodeConfig

ENCODER = "weights-1 bfloat16"


class Rig:
    """All instances on one node, and the front."""

    def __init__(self) -> None:
        self.node: FakeAgent
        self.engines: dict[str, FakeEngine] = {}
        self.embedded: EmbeddedPdCluster
        self.front: PdCluster

    async def job(self, number: int, *names: str) -> PrefillJob:
        """A job whose KVCache has a landing here."""
        job = image_job(number, *names)
        slot = await self.front.reserve(
            ReserveRequest(
                num_tokens=len(job.prompt_token_ids),
                token_digest=job.landing.token_digest,
                request_id=job.request_id,
                hands_off=True,
            )
        )
        return structs.replace(job, landing=slot.landing)


@asynccontextmanager
async def made(kind: str, instances: dict[str, str]) -> AsyncIterator[Rig]:
    """`instances`: roles by name; those of names with "ed" encode as well."""
    rig = Rig()
    async with AsyncExitStack() as stack:
        rig.node = await running(stack, FakeAgent(*instances))
        rig.node.encoder, rig.node.embeddings = ENCODER, EmbeddingStatus()
        specs = []
        for name, role in instances.items():
            engine = rig.engines[name] = await running(stack, FakeEngine(rig.node))
            specs.append(engine.spec(name, role, encodes="ed" in name))
        encode, keep_leases = EncodeConfig(timeout_s=5.0), kind == "embedded"
        config = replace(CONFIG, encode=encode, keep_leases=keep_leases)
        metrics = EncodeMetrics(CollectorRegistry())
        rig.embedded = pd_cluster("west", specs, config, encode_metrics=metrics)
        rig.front = await started_pd(stack, kind, rig.embedded)
        yield rig
        for engine in rig.engines.values():
            engine.first_token.set()


@pytest.fixture(params=["embedded", "remote"])
async def apart(request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    """(E, P, D)."""
    async with made(request.param, {"e": "encode", "p": "prefill", "d": "decode"}) as rig:
        yield rig


@pytest.fixture(params=["embedded", "remote"])
async def beside(request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    """(ED, P)."""
    async with made(request.param, {"ed": "decode", "p": "prefill"}) as rig:
        yield rig


def order_for(instance: str, *names: str) -> EncodeOrder:
    chat = {"messages": [{"role": "user", "content": [image_part(name) for name in names]}]}
    return EncodeOrder(request_id="r", chat=json.encode(chat), instance=instance)


async def test_a_hand_off_has_its_images_encoded(apart: Rig) -> None:
    result = await apart.front.prefill_locally(await apart.job(1, "a", "b"))
    assert result.media == {"encoded": 2}
    assert result.encode_s > 0
    assert sorted(encoded_names(apart.engines["e"])) == ["a", "b"]
    assert len(apart.engines["p"].posted) == 1


async def test_an_instance_that_decodes_encodes_one_at_a_time(beside: Rig) -> None:
    engine, most = beside.engines["ed"], 0

    def seen(_body: object) -> None:
        nonlocal most
        most = max(most, engine.num_serving)

    engine.before_answer = seen
    result = await beside.front.prefill_locally(await beside.job(1, "a", "b", "c"))
    assert result.media == {"encoded": 3}
    assert most == 1
    # Its KVCache must not fill the node's prefix cache.
    assert engine.posted[0]["kv_transfer_params"] == {"prfaas_encodes_only": True}


async def test_a_job_that_waits_for_its_images_is_reported(apart: Rig) -> None:
    apart.engines["e"].first_token.clear()
    task = asyncio.create_task(apart.front.prefill_locally(await apart.job(1, "a")))
    await apart.engines["e"].wait_requests(1)
    report = await apart.front.report()
    assert [(job.instance, job.num_tokens) for job in report.jobs] == [("", 6)]
    assert report.encode is not None
    assert [one.running_media for one in report.encode.instances] == [1]
    apart.engines["e"].first_token.set()
    assert (await task).media == {"encoded": 1}
    assert (await apart.front.report()).jobs == ()


async def test_nothing_is_encoded_where_no_instance_could_prefill(apart: Rig) -> None:
    job = await apart.job(1, "a")
    await apart.engines["p"].stop()
    await eventually(lambda: not apart.embedded._instances.by_name["p"].transfers)
    with pytest.raises(PrefillFailed) as caught:
        await apart.front.prefill_locally(job)
    assert caught.value.code == "no_instance"
    assert not apart.engines["e"].posted


async def test_a_cancelled_hand_off_stops_its_images(apart: Rig) -> None:
    apart.engines["e"].first_token.clear()
    task = asyncio.create_task(apart.front.prefill_locally(await apart.job(1, "a")))
    await apart.engines["e"].wait_requests(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await apart.engines["e"].wait_aborts(1)
    assert not apart.engines["p"].posted


async def test_a_request_for_one_engine_has_its_images_encoded(apart: Rig) -> None:
    done = await apart.front.encode(order_for("d", "a", "b"))
    assert done.media == {"encoded": 2}
    assert done.encode_s > 0
    # Names that somebody has counted are asked for by their tokens; one of them is there already.
    apart.node.has[embedding_key(ENCODER, "a")] = 64
    order = order_for("d", "a", "c")
    media = (MediaItem("a", 0, 2), MediaItem("c", 4, 2))
    done = await apart.front.encode(structs.replace(order, media=media))
    assert done.media == {"found": 1, "encoded": 1}
    report = (await apart.front.report()).encode
    assert report is not None
    assert report.token_bytes == 32


async def test_no_decode_is_delayed_for_a_request_of_another_engine() -> None:
    async with made("embedded", {"ed": "both", "d": "both"}) as rig:
        assert await rig.front.encode(order_for("d", "a")) == EncodeDone()
        assert not rig.engines["ed"].posted
    async with made("embedded", {"ed": "both", "d": "both", "e": "encode"}) as rig:
        await rig.engines["e"].stop()
        await eventually(lambda: not rig.embedded._instances.by_name["e"].transfers)
        done = await rig.front.encode(order_for("d", "a"))
        assert done.media == {"no_instance": 1}
        assert not rig.engines["ed"].posted


async def test_a_cluster_without_the_stage_does_nothing() -> None:
    async with made("embedded", {"p": "prefill", "d": "decode"}) as rig:
        assert (await rig.front.report()).encode is None
        assert await rig.front.encode(order_for("d", "a")) == EncodeDone()
        result = await rig.front.prefill_locally(await rig.job(1, "a"))
        assert (result.media, result.encode_s) == ({}, 0.0)


async def test_what_has_no_name_or_no_bytes_is_left(apart: Rig) -> None:
    url = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}, "uuid": "u"}
    chat = {"messages": [{"role": "user", "content": [url, {"type": "text", "text": "?"}]}]}
    order = EncodeOrder(
        request_id="r", chat=json.encode(chat), instance="d", media=(MediaItem("u", 0, 2),)
    )
    assert (await apart.front.encode(order)).media == {"unnamed": 1}
    order = structs.replace(order, chat=b"no chat", media=())
    assert (await apart.front.encode(order)).media == {}
    assert not apart.engines["e"].posted


async def test_an_instance_that_is_not_known_gets_nothing(apart: Rig) -> None:
    assert await apart.front.encode(order_for("gone", "a")) == EncodeDone()


async def test_a_front_that_is_gone_is_told_apart() -> None:
    front = RemotePdCluster("west", "127.0.0.1:9", has_prefill_instances=True)
    with pytest.raises(FrontUnreachable):
        await front.encode(order_for("d", "a"))
    await front.close()


async def test_a_drain_waits_for_images(apart: Rig) -> None:
    engine = apart.engines["e"]
    engine.first_token.clear()
    task = asyncio.create_task(apart.front.encode(order_for("d", "a")))
    await engine.wait_requests(1)
    drain = asyncio.create_task(apart.front.drain("e"))
    await eventually(lambda: apart.embedded._instances.by_name["e"].draining)
    await looked_at(engine)
    assert not drain.done()
    engine.first_token.set()
    await asyncio.wait_for(drain, 5.0)
    assert (await task).media == {"encoded": 1}
    assert (await apart.front.encode(order_for("d", "b"))).media == {"no_instance": 1}
