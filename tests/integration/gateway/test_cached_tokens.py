"""`cached_tokens` of an answer is what was cached where the prompt was computed."""

import asyncio
import json
from typing import Any

import pytest
from eventually import eventually

from prfaas.engines.errors import PrefillFailed

STREAM = {"stream": True, "stream_options": {"include_usage": True}}


def cached_tokens(answer: bytes, *, stream: bool) -> int:
    chunks = [answer]
    if stream:
        chunks = [event[6:] for event in answer.split(b"\n\n") if event.startswith(b"data: {")]
    usage = json.loads(chunks[-1])["usage"]
    assert set(usage) == {"prompt_tokens", "completion_tokens", "prompt_tokens_details"}
    return int(usage["prompt_tokens_details"]["cached_tokens"])


@pytest.fixture(params=[False, True], ids=["whole", "stream"])
def stream(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


async def asked(region: Any, *, stream: bool, path: str = "/v1/completions") -> int:
    body = region.long_body(**(STREAM if stream else {}))
    if path == "/v1/chat/completions":
        body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
    status, _, answer = await region.post(body, path)
    assert status == 200
    return cached_tokens(answer, stream=stream)


async def pd_instances(region: Any) -> set[str]:
    """Those that the gateway has heard of."""
    async with region.session.get(region.url + "/prfaas/region") as response:
        return {item["name"] for item in (await response.json())["pd"]["instances"]}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("hit", [0, 256])
async def test_of_a_moved_prompt_it_is_what_the_prefill_cluster_had(
    region: Any, stream: bool, path: str, hit: int
) -> None:
    region.engine.local_hit, region.far.cached_tokens = 128, hit
    assert await asked(region, stream=stream, path=path) == hit
    assert region.engine.sources == ["landing"]


async def test_of_a_local_prompt_it_is_what_the_engine_had(region: Any, stream: bool) -> None:
    region.engine.local_hit, region.far.cached_tokens = 16, 256
    body = {"model": "tiny", "prompt": "x" * 30} | (STREAM if stream else {})
    status, _, answer = await region.post(body)
    assert status == 200
    assert cached_tokens(answer, stream=stream) == 16


@pytest.mark.parametrize("agent_is_gone", [False, True])
async def test_after_a_fallback_it_is_what_the_decode_engine_had(
    region: Any, stream: bool, agent_is_gone: bool
) -> None:
    region.engine.local_hit, region.far.cached_tokens = 128, 256
    region.far.error = PrefillFailed("engine_failed", "dead")
    region.pd.agent_is_gone = agent_is_gone
    assert await asked(region, stream=stream) == 128
    assert (await region.record()).route == "local"


async def test_of_a_hand_off_it_is_what_the_prefill_instance_had(
    open_region: Any, stream: bool
) -> None:
    async with open_region(hand_off_tokens=20, threshold_tokens=1000) as region:
        region.pd.prefill = region.far
        # What the landing builds on is at the decode side: not sent, but computed all the same.
        region.engine.local_hit, region.pd.cached_tokens = 0, 128
        region.far.cached_tokens = 64
        await eventually(lambda: pd_instances(region), lambda names: "p0" in names)
        assert await asked(region, stream=stream) == 64
        assert (await region.record()).target == "hand_off"


async def test_the_number_is_waited_for(region: Any, stream: bool) -> None:
    region.engine.local_hit, region.far.cached_tokens = 0, 256
    region.far.report_gate.clear()
    asking = asyncio.create_task(asked(region, stream=stream))
    await region.until(lambda: region.engine.sources == ["landing"])
    # One that came later and waits for no number is answered first.
    assert (await region.post({"model": "tiny", "prompt": "x"}))[0] == 200
    assert not asking.done()
    region.far.report_gate.set()
    assert await asking == 256


@pytest.mark.parametrize("error", [None, PrefillFailed("engine_failed", "lost the answer")])
async def test_without_the_number_nothing_counts_as_cached(
    region: Any, stream: bool, error: Exception | None
) -> None:
    region.engine.local_hit, region.far.cached_tokens = 0, 256
    region.far.late_error = error
    region.far.report_gate.clear()
    asking = asyncio.create_task(asked(region, stream=stream))
    await region.until(lambda: region.engine.sources == ["landing"])
    if error is not None:
        region.far.report_gate.set()
    assert await asking == 0
    await region.assert_nothing_held()


async def test_an_engine_that_does_not_say_is_not_made_to(region: Any, stream: bool) -> None:
    region.far.cached_tokens = 256
    status, _, answer = await region.post(region.long_body(**(STREAM if stream else {})))
    assert status == 200
    assert b"cached_tokens" not in answer
