"""A request that one engine serves whole has its media encoded first, where instances do that."""

import asyncio
import json
from typing import Any

import pytest
from eventually import eventually

from local_pd.errors import FrontUnreachable
from prfaas.encoding.values import EncodeDone
from scheduler.reports import EncodeInstanceReport, EncodeReport

STAGE = EncodeReport(instances=(EncodeInstanceReport(name="e0"),))
CHATS = "/v1/chat/completions"


def chat(url: str = "data:image/png;base64,AAAA", **fields: Any) -> dict[str, Any]:
    # Only the engine that serves it knows what this option does, so it stays there.
    image = {"type": "image_url", "image_url": {"url": url}, "uuid": "mine"}
    message = {"role": "user", "content": [{"type": "text", "text": "what?"}, image]}
    return {"model": "tiny", "messages": [message], **fields}


async def with_stage(region: Any) -> None:
    region.pd.stage = STAGE
    await eventually(lambda: region.gateway._watcher.pd_reports()["home"].encode is not None)


async def test_media_are_encoded_before_the_engine_is_asked(region: Any) -> None:
    await with_stage(region)
    pd, engine = region.pd, region.engine
    pd.encode_done = EncodeDone(encode_s=0.1, media={"encoded": 1}, left_tokens=0)
    pd.encode_gate.clear()
    asking = asyncio.create_task(region.post(chat(), CHATS))
    await eventually(lambda: pd.encode_orders)
    assert engine.bodies(CHATS) == []
    await asyncio.sleep(0.05)
    pd.encode_gate.set()
    status, headers, _ = await asking
    assert (status, headers["x-prfaas-route"]) == (200, "direct")
    (order,) = pd.encode_orders
    assert order.instance == engine.name
    assert json.loads(order.chat) == json.loads(engine.bodies(CHATS)[0])
    record = await region.record()
    assert record.media == {"encoded": 1}
    assert record.parts.encode_s >= 0.05
    assert sum(record.parts.known().values()) == pytest.approx(record.ttft_s, abs=1e-6)


async def test_a_stage_that_fails_costs_no_answer(region: Any) -> None:
    await with_stage(region)
    region.pd.encode_done = FrontUnreachable("gone")
    status, _, _ = await region.post(chat(), CHATS)
    assert status == 200
    record = await region.record()
    assert record.media == {}


async def test_text_and_clusters_without_the_stage_wait_for_nothing(region: Any) -> None:
    await region.post(chat(), CHATS)
    await with_stage(region)
    await region.post({"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}, CHATS)
    assert region.pd.encode_orders == []
    record = await region.record()
    assert record.parts.encode_s is None


async def test_instances_that_decode_encode_for_no_other_engine(region: Any) -> None:
    await with_stage(region)
    decoding = EncodeInstanceReport(name="ed", decodes=True)
    region.pd.stage = EncodeReport(instances=(decoding,))
    await eventually(lambda: region.gateway._watcher.pd_reports()["home"].encode != STAGE)
    await region.post(chat(), CHATS)
    assert region.pd.encode_orders == []


async def test_a_client_that_goes_away_stops_the_encoding(region: Any) -> None:
    await with_stage(region)
    pd = region.pd
    pd.encode_gate.clear()
    asking = asyncio.create_task(region.post(chat(), CHATS))
    await eventually(lambda: pd.encode_orders)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await eventually(lambda: pd.ended_at == [region.engine.name])
    assert region.engine.bodies(CHATS) == []
