"""Things break: the answer is right by another path or clearly an error, and never half of one."""

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from live_region_cases import teach
from openai_engine import fixed, reset, streamed

from deploy.gateway.serving import request as serving
from prfaas.engines.errors import PrefillFailed
from scheduler.routing.decision import ONE_ENGINE


async def read_events(response: Any) -> tuple[bytes, bool]:
    """What arrived, and whether the body ended properly."""
    got = b""
    try:
        async for chunk in response.content.iter_any():
            got += chunk
    except aiohttp.ClientError:
        return got, False
    return got, True


async def direct(region: Any, body: dict[str, Any], engine: Any = None) -> bytes:
    url = (engine or region.engine).url + "/v1/completions"
    async with region.session.post(url, json=body, headers={"X-Request-Id": "same"}) as response:
        raw: bytes = await response.read()
        return raw


SAME = {"X-Request-Id": "same"}
ONE = b'data: {"one": 1}\n\n'


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "error",
    [
        PrefillFailed("engine_failed", "killed"),
        PrefillFailed("queue_full", "busy"),
        OSError("no route"),
        RuntimeError("a bug"),
    ],
)
async def test_a_failed_prefill_is_recomputed_where_decoding_happens(
    region: Any, error: Exception, stream: bool
) -> None:
    region.far.error = error
    body = region.long_body(stream=stream)
    status, headers, answer = await region.post(body, headers=SAME)
    assert status == 200
    assert headers["x-prfaas-route"] == "local"
    assert headers["x-prfaas-reason"].startswith("prefill_failed; prompt_tokens=300")
    assert "x-prfaas-transfer-bytes" not in headers
    assert answer == await direct(region, body)
    assert region.engine.sources[0] == "prompt"
    record = await region.record()
    assert record.first_route == "prefill_cluster"
    assert record.prefill_error
    await region.assert_nothing_held()


async def test_another_prefill_cluster_is_tried_first(open_region: Any) -> None:
    async with open_region(prefill=("a", "b")) as region:
        region.prefill["a"].error = PrefillFailed("engine_failed", "killed")
        status, headers, _ = await region.post(region.long_body())
        assert status == 200
        assert headers["x-prfaas-route"] == "prefill_cluster"
        record = await region.record()
        assert record.target == "b"
        assert record.num_retries == 1
        assert region.engine.sources[-1] == "landing"
        region.prefill["b"].error = PrefillFailed("engine_failed", "killed too")
        status, headers, _ = await region.post(region.long_body())
        assert status == 200
        assert headers["x-prfaas-route"] == "local"
        await region.assert_nothing_held()


async def test_a_failed_prefill_is_no_work_ahead_of_its_own_second_try(open_region: Any) -> None:
    async with open_region(prefill=("a", "b")) as region:
        first, second = region.prefill["a"], region.prefill["b"]
        for place, token_s in (("a", 0.9e-2), ("b", 1e-2), (ONE_ENGINE, 1.5e-2)):
            teach(region.gateway.scheduler, place, token_s)
        second.gate.clear()
        first.is_healthy = False
        await region.heard()
        other = asyncio.create_task(region.post(region.long_body()))
        await region.until(lambda: second.num_running == 1)
        first.is_healthy, first.error = True, PrefillFailed("engine_failed", "killed")
        await region.heard()
        retried = asyncio.create_task(region.post(region.long_body()))
        await region.until(lambda: second.num_running == 2 or retried.done())
        second.gate.set()
        assert (await retried)[1]["x-prfaas-route"] == "prefill_cluster"
        assert (await other)[0] == 200


async def test_no_landing_room_means_local(region: Any) -> None:
    region.pd.is_full = True
    status, headers, _ = await region.post(region.long_body())
    assert status == 200
    assert headers["x-prfaas-route"] == "local"
    assert headers["x-prfaas-reason"].startswith("no_landing_room")
    assert region.far.jobs == []
    assert region.engine.sources == ["prompt"]


async def test_memory_is_not_asked_for_in_the_name_of_a_salt(region: Any) -> None:
    assert (await region.post(region.long_body(cache_salt="blue")))[0] == 200
    assert region.pd.tenants == [""], "a salt names no tenant"


async def test_a_reservation_that_takes_too_long_means_local(open_region: Any) -> None:
    timeouts = {"cluster_s": 0.05}
    async with open_region(timeouts=timeouts) as region:
        region.pd.reserve_gate.clear()
        status, headers, _ = await region.post(region.long_body())
        assert status == 200
        assert headers["x-prfaas-reason"].startswith("reserve_failed")
        await region.assert_nothing_held()


async def test_an_unhealthy_prefill_cluster_gets_nothing(region: Any) -> None:
    region.far.is_healthy = False
    await region.heard()
    status, headers, _ = await region.post(region.long_body())
    assert status == 200
    assert headers["x-prfaas-reason"].startswith("prefill_cluster_unhealthy")
    assert region.far.jobs == []


async def test_prefill_instances_at_home_hand_over_inside(open_region: Any) -> None:
    async with open_region(prefill=("far",), hand_off_tokens=20, threshold_tokens=1000) as region:
        region.pd.prefill = region.far
        await region.heard()
        status, headers, _ = await region.post(region.long_body())
        assert status == 200
        assert headers["x-prfaas-route"] == "local"
        assert headers["x-prfaas-reason"].startswith("below_threshold")
        assert region.engine.sources == ["landing"]
        record = await region.record()
        assert record.target == "hand_off"
        region.far.error = PrefillFailed("engine_failed", "killed")
        status, headers, _ = await region.post(region.long_body())
        assert status == 200
        assert headers["x-prfaas-reason"].startswith("prefill_failed")
        await region.assert_nothing_held()


async def test_rendering_down_means_one_engine(region: Any) -> None:
    region.engine.render_reply = fixed("no", 503)
    status, headers, _ = await region.post(region.long_body())
    assert status == 200
    assert headers["x-prfaas-route"] == "direct"
    assert headers["x-prfaas-reason"].startswith("render_unavailable")


@pytest.mark.parametrize("rendered", [b"[]", b"{}", b"nonsense", b'[{"token_ids":"x"}]'])
async def test_odd_renderings_mean_one_engine(region: Any, rendered: bytes) -> None:
    region.engine.render_reply = fixed(rendered)
    status, headers, _ = await region.post(region.long_body())
    assert status == 200
    assert headers["x-prfaas-route"] == "direct"


async def test_what_the_engine_refuses_is_said_in_its_own_words(region: Any) -> None:
    error = {
        "error": {"message": "too long", "type": "BadRequestError", "param": None, "code": 400}
    }
    region.engine.render_reply = region.engine.reply = fixed(error, 400)
    status, headers, answer = await region.post(region.long_body())
    assert status == 400
    assert json.loads(answer) == error
    assert headers["x-prfaas-reason"].startswith("render_refused")


@pytest.mark.parametrize(
    ("status", "seen", "text"), [(404, 404, "gone"), (401, 502, "key"), (302, 502, "moved")]
)
async def test_errors_without_an_error_object_get_one(
    region: Any, status: int, seen: int, text: str
) -> None:
    region.engine.reply = fixed(text, status)
    answered, headers, answer = await region.post({"model": "tiny", "prompt": "x"})
    assert answered == seen
    assert text in json.loads(answer)["error"]["message"]
    assert headers["content-type"].startswith("application/json")


async def test_an_error_instead_of_the_first_token_is_a_real_error(region: Any) -> None:
    event = b'data: {"error": {"message": "bad", "type": "x", "param": null, "code": 422}}\n\n'
    region.engine.reply = streamed(event + b"data: [DONE]\n\n")
    status, headers, answer = await region.post({"model": "tiny", "prompt": "x", "stream": True})
    assert status == 422
    assert headers["content-type"] == "application/json"
    assert json.loads(answer)["error"]["message"] == "bad"


DEATHS = {
    "reset": reset,
    "http_500": fixed("dead", 500),
    "http_503": fixed("dead", 503),
    "error_event": streamed(b'data: {"error": {"message": "m", "code": 500}}\n\n'),
    "silence_end": streamed(),
}


@pytest.mark.parametrize("offloaded", [False, True])
@pytest.mark.parametrize("how", DEATHS)
async def test_an_engine_that_dies_before_its_first_byte_is_replaced(
    open_region: Any, how: str, offloaded: bool
) -> None:
    async with open_region(num_engines=2) as region:
        first, second = region.engines
        first.reply = DEATHS[how]
        body = {"model": "tiny", "prompt": "x" * (300 if offloaded else 3), "stream": True}
        status, headers, answer = await region.post(body, headers=SAME)
        assert status == 200
        assert headers["x-prfaas-route"] == "local"
        assert headers["x-prfaas-reason"].startswith("decode_engine_failed")
        assert answer == await direct(region, body, second)
        record = await region.record()
        assert record.num_retries == 1
        assert record.decode_instance == second.name
        await region.assert_nothing_held()


async def test_two_dead_engines_are_an_openai_error(open_region: Any) -> None:
    async with open_region(num_engines=2) as region:
        for engine in region.engines:
            engine.reply = reset
        status, headers, answer = await region.post(region.long_body())
        assert status == 502
        error = json.loads(answer)["error"]
        assert error["code"] == "engine_unavailable"
        assert error["type"] == "server_error"
        assert headers["x-request-id"]
        await region.assert_nothing_held()


async def test_a_lone_engine_is_tried_twice(region: Any) -> None:
    region.engine.reply_once(reset)
    status, _, _ = await region.post({"model": "tiny", "prompt": "x"})
    assert status == 200


async def test_no_engine_at_all_is_503(region: Any) -> None:
    region.pd.down.add("d0")
    status, headers, answer = await region.post({"model": "tiny", "prompt": "x"})
    assert status == 503
    assert headers["retry-after"] == "1"
    assert json.loads(answer)["error"]["code"] == "no_engine_available"
    await region.heard()
    for path, expected in (("/health", 503), ("/readyz", 503), ("/livez", 200)):
        async with region.session.get(region.url + path) as response:
            assert response.status == expected, path


async def test_a_silent_engine_is_504_and_not_tried_again(open_region: Any) -> None:
    async with open_region(num_engines=2, timeouts={"engine_silence_s": 0.1}) as region:
        region.engine.first_token.clear()
        status, _, answer = await region.post(region.long_body())
        assert status == 504
        assert json.loads(answer)["error"]["code"] == "engine_timeout"
        assert region.engines[1].requests == []
        await region.assert_nothing_held()


@pytest.mark.parametrize("how", ["reset", "clean_end", "inside_an_event", "silence"])
async def test_a_stream_that_breaks_off_never_looks_whole(open_region: Any, how: str) -> None:
    async with open_region(timeouts={"engine_silence_s": 0.2}) as region:
        release = asyncio.Event()
        region.engine.reply = {
            "reset": streamed(ONE, then_reset=True),
            "clean_end": streamed(ONE),
            "inside_an_event": streamed(ONE, b'data: {"two": ', then_reset=True),
            "silence": streamed(ONE, b"", before_last=release),
        }[how]
        body = {"model": "tiny", "prompt": "x", "stream": True}
        async with region.session.post(region.url + "/v1/completions", json=body) as response:
            assert response.status == 200
            got, ended_properly = await read_events(response)
        release.set()
        first, second = got.split(b"\n\n")[:2]
        assert first == ONE.strip()
        assert json.loads(second.removeprefix(b"data: "))["error"]["code"] == "engine_lost"
        assert b"[DONE]" not in got
        assert not ended_properly
        record = await region.record()
        assert record.outcome == "engine_lost"
        await region.assert_nothing_held()


async def test_a_bug_while_relaying_never_looks_whole(
    region: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*args: Any, **kwargs: Any) -> None:
        await args[2].write(b'data: {"one": 1}\n\n')
        raise KeyError("a bug")

    monkeypatch.setattr(serving, "relay_stream", broken)
    body = {"model": "tiny", "prompt": "x", "stream": True}
    async with region.session.post(region.url + "/v1/completions", json=body) as response:
        _, ended_properly = await read_events(response)
    assert not ended_properly
    assert (await region.record()).outcome == "failed"


async def test_a_break_after_the_end_mark_is_no_break(region: Any) -> None:
    pieces = b": keep-alive\n\n", ONE + b"data: [DONE]\n\n"
    region.engine.reply = streamed(*pieces, then_reset=True)
    status, _, answer = await region.post({"model": "tiny", "prompt": "x", "stream": True})
    assert status == 200
    assert answer == b': keep-alive\n\ndata: {"one": 1}\n\ndata: [DONE]\n\n'


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n7\r\n",
        b"HTTP/1.0 200 OK\r\nContent-Type: application/json\r\n\r\n",
    ],
)
async def test_a_body_closed_short_is_never_handed_out(region: Any, head: bytes) -> None:
    async def short(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(head + b'{"text"')
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(short, "127.0.0.1", 0)
    async with server:
        region.engine.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        status, _, answer = await region.post({"model": "tiny", "prompt": "x"})
    assert status == 502
    assert json.loads(answer)["error"]["code"] == "engine_unavailable"
    assert (await region.record()).num_retries == 1


async def test_a_late_report_of_the_transfer_still_reaches_the_record(region: Any) -> None:
    region.far.report_gate.clear()
    status, headers, _ = await region.post(region.long_body())
    assert status == 200
    assert "x-prfaas-transfer-bytes" not in headers
    region.far.report_gate.set()
    record = await region.record()
    assert record.transfer_bytes == 299 * 512
    assert region.far.num_cancelled == 0


async def test_a_prefill_nobody_waits_for_is_cancelled(open_region: Any) -> None:
    async with open_region(timeouts={"result_grace_s": 0.05}) as region:
        region.far.gate.clear()
        region.pd.agent_is_gone = True
        region.engine.reply = fixed({"from": "its own prefix cache"})
        status, _, _ = await region.post(region.long_body())
        assert status == 200
        await region.assert_nothing_held()
        assert region.far.num_cancelled == 1


async def test_a_break_in_one_stream_leaves_the_others_alone(region: Any) -> None:
    async def odd_ones_die(request: Any, body: Any) -> Any:
        return await (streamed(ONE) if body["seed"] % 2 else region.engine.answer)(request, body)

    region.engine.reply = odd_ones_die

    async def ask(seed: int) -> bytes:
        body = region.long_body(stream=True, seed=seed)
        async with region.session.post(region.url + "/v1/completions", json=body) as response:
            return (await read_events(response))[0]

    answers = await asyncio.gather(*(ask(seed) for seed in range(40)))
    for seed, answer in enumerate(answers):
        assert answer.endswith(b"data: [DONE]\n\n") == (seed % 2 == 0)
    await region.assert_nothing_held()
