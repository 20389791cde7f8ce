"""Keys, sizes, hostile bodies, concurrency and shutting down."""

import asyncio
import gzip
import json
from typing import Any

import aiohttp
import pytest

SHORT = {"model": "tiny", "prompt": "x"}


def error_of(answer: bytes) -> dict[str, Any]:
    error: dict[str, Any] = json.loads(answer)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


async def send(region: Any, raw: bytes, **headers: str) -> tuple[int, bytes]:
    headers = {"Content-Type": "application/json"} | headers
    url = region.url + "/v1/completions"
    async with region.session.post(url, data=raw, headers=headers) as response:
        return response.status, await response.read()


@pytest.mark.parametrize(
    ("header", "code"),
    [
        (None, "missing_api_key"),
        ("Basic abc", "missing_api_key"),
        ("Bearer ", "missing_api_key"),
        ("Bearer wrong", "invalid_api_key"),
        ("Bearer one two", "invalid_api_key"),
    ],
)
async def test_a_key_is_asked_for(open_region: Any, header: str | None, code: str) -> None:
    async with open_region(api_keys=("one", "two")) as region:
        headers = {"Authorization": header} if header else {}
        status, seen, answer = await region.post(SHORT, headers=headers)
        assert status == 401
        assert error_of(answer)["code"] == code
        assert seen["www-authenticate"] == "Bearer"
        async with region.session.get(region.url + "/v1/models", headers=headers) as response:
            assert response.status == 401
        assert region.engine.requests == []


async def test_known_keys_are_let_in(open_region: Any) -> None:
    async with open_region(api_keys=("one", "two")) as region:
        for header in ("Bearer one", "bearer two"):
            status, _, _ = await region.post(SHORT, headers={"Authorization": header})
            assert status == 200
        for path in ("/health", "/version", "/livez", "/readyz"):
            async with region.session.get(region.url + path) as response:
                assert response.status == 200


async def test_what_operators_see_may_be_open(open_region: Any) -> None:
    async with open_region(api_keys=("one",), protect_admin=False) as region:
        for path in ("/metrics", "/prfaas/requests", "/prfaas/region", "/v1/pd_role"):
            async with region.session.get(region.url + path) as response:
                assert response.status == 200


@pytest.mark.parametrize(
    ("raw", "code", "words"),
    [
        (b"", "invalid_json", "byte 0"),
        (b'{"model": "tiny"', "invalid_json", "byte 16"),
        (b'{"model": tiny}', "invalid_json", "byte 11"),
        (b'{"model":\n "tiny",\n "prompt": x}', "invalid_json", "line 3"),
        (b'{"model": "tiny"} {}', "invalid_json", "trailing"),
        (b'{"temperature": NaN}', "invalid_json", "byte"),
        (b'\xff\xfe{"model": 1}', "invalid_json", "byte 0"),
        (b"[1]", "invalid_body", "object"),
        (b"null", "invalid_body", "object"),
        (b'{"model": 3}', "invalid_type", "string"),
        (b'{"x": ' + b"[" * 200_000, "invalid_json", "deep"),
        (b'{"x": ' + b'{"a":' * 50_000, "invalid_json", "deep"),
    ],
)
async def test_hostile_bodies(region: Any, raw: bytes, code: str, words: str) -> None:
    status, answer = await send(region, raw)
    assert status == 400
    error = error_of(answer)
    assert error["code"] == code
    assert words in error["message"]
    assert error["type"] == "invalid_request_error"
    assert region.engine.requests == []


@pytest.mark.parametrize(
    "raw",
    [
        b'{"model":"tiny","prompt":"x","kv_transfer_params":{"prfaas":{}}}',
        b'{"model":"tiny","prompt":"x","kv\\u005ftransfer_params":{}}',
        b'{"kv_transfer_params":null,"model":"tiny","prompt":"x","kv_transfer_params":[1]}',
    ],
)
async def test_clients_cannot_name_memory(region: Any, raw: bytes) -> None:
    status, answer = await send(region, raw)
    assert status == 400
    assert error_of(answer)["param"] == "kv_transfer_params"


async def test_null_transfer_params_do_not_override_ours(region: Any) -> None:
    raw = b'{"model":"tiny","prompt":"%s","kv_transfer_params":null}' % (b"x" * 300)
    status, _ = await send(region, raw)
    assert status == 200
    assert region.engine.sources == ["landing"]


async def test_an_unknown_model_is_404(region: Any) -> None:
    status, _, answer = await region.post({"model": "huge", "prompt": "x"})
    assert status == 404
    assert error_of(answer)["param"] == "model"
    assert region.engine.requests == []


async def test_no_model_means_the_only_one(region: Any, open_region: Any) -> None:
    status, _, _ = await region.post({"prompt": "x"})
    assert status == 200
    async with open_region(models=({"name": "a"}, {"name": "b"})) as two:
        status, _, _ = await two.post({"prompt": "x"})
        assert status == 404


async def test_bodies_that_are_too_long(open_region: Any) -> None:
    async with open_region(max_body_bytes=1000) as region:
        status, _, answer = await region.post({"model": "tiny", "prompt": "x" * 2000})
        assert status == 413
        assert error_of(answer)["code"] == "body_too_large"

        async def chunks() -> Any:
            for _ in range(100):
                yield b" " * 100

        headers = {"Content-Type": "application/json"}
        url = region.url + "/v1/completions"
        async with region.session.post(url, data=chunks(), headers=headers) as response:
            assert response.status == 413
        status, _, _ = await region.post(SHORT)
        assert status == 200


@pytest.mark.parametrize("packing", ["gzip", "deflate", "br", "zstd"])
async def test_a_packed_body_is_refused(region: Any, packing: str) -> None:
    raw = gzip.compress(json.dumps(SHORT).encode())
    status, answer = await send(region, raw, **{"Content-Encoding": packing})
    assert (status, error_of(answer)["code"]) == (415, "packed_body")
    assert region.engine.requests == []
    status, _ = await send(region, json.dumps(SHORT).encode(), **{"Content-Encoding": "identity"})
    assert status == 200


async def test_other_media_types_and_paths(region: Any) -> None:
    status, _ = await send(region, b"{}", **{"Content-Type": "text/plain"})
    assert status == 415
    async with region.session.post(region.url + "/v1/audio/speech", json={}) as response:
        assert response.status == 404
        assert error_of(await response.read())["code"] == "not_found"
    async with region.session.get(region.url + "/v1/completions") as response:
        assert response.status == 405
        assert response.headers["Allow"] == "POST"
        assert error_of(await response.read())["code"] == "method_not_allowed"


async def test_more_than_the_limit_is_turned_away(open_region: Any) -> None:
    async with open_region(max_in_flight=3, retry_after_s=7) as region:
        region.engine.first_token.clear()
        tasks = [asyncio.create_task(region.post(SHORT)) for _ in range(3)]
        await region.until(lambda: region.gateway.num_in_flight == 3)
        status, headers, answer = await region.post(SHORT)
        assert status == 429
        assert headers["retry-after"] == "7"
        assert error_of(answer)["type"] == "rate_limit_error"
        region.engine.first_token.set()
        assert [(await task)[0] for task in tasks] == [200, 200, 200]
        assert (await region.post(SHORT))[0] == 200


async def test_a_tenant_has_no_more_than_its_share(open_region: Any) -> None:
    limits = {"admission": {"tenants": {"acme": {"max_requests": 1}}}}
    keys = ("acme one", "acme two", "three")
    async with open_region(api_keys=keys, scheduling=limits) as region:

        async def ask(key: str) -> tuple[int, Any, bytes]:
            answer: tuple[int, Any, bytes] = await region.post(
                SHORT, headers={"Authorization": f"Bearer {key}"}
            )
            return answer

        region.engine.first_token.clear()
        first = asyncio.create_task(ask("one"))
        await region.until(lambda: len(region.engine.requests) == 1)
        status, headers, answer = await ask("two")
        assert status == 429
        assert int(headers["retry-after"]) >= 1
        assert error_of(answer)["code"] == "tenant_requests"
        assert "Tenant acme has 1 of at most 1 requests in flight" in error_of(answer)["message"]
        assert len(region.engine.requests) == 1
        other = asyncio.create_task(ask("three"))
        await region.until(lambda: len(region.engine.requests) == 2)
        region.engine.first_token.set()
        assert [(await task)[0] for task in (first, other)] == [200, 200]
        assert (await ask("two"))[0] == 200


async def test_a_client_that_leaves_gives_its_tenants_place_back(open_region: Any) -> None:
    limits = {"admission": {"default_tenant": {"max_requests": 1}}}
    async with open_region(scheduling=limits) as region:
        region.engine.first_token.clear()
        leaving = asyncio.create_task(region.post(SHORT))
        await region.until(lambda: len(region.engine.requests) == 1)
        assert (await region.post(SHORT))[0] == 429
        leaving.cancel()
        await region.until(lambda: region.gateway.num_in_flight == 0)
        region.engine.first_token.set()
        assert (await region.post(SHORT))[0] == 200


async def test_bodies_together_are_bounded(open_region: Any) -> None:
    async with open_region(max_body_bytes=2000, max_buffered_bytes=3000) as region:
        region.engine.first_token.clear()
        big = {"model": "tiny", "prompt": "x" * 1800, "n": 2}
        first = asyncio.create_task(region.post(big))
        await region.until(lambda: region.gateway.num_in_flight == 1)
        status, _, answer = await region.post(big, headers={"X-Request-Id": "second"})
        assert status == 429
        assert "memory" in error_of(answer)["message"]
        region.engine.first_token.set()
        assert (await first)[0] == 200
        assert (await region.post(big))[0] == 200


async def buffered_bytes(region: Any) -> int:
    async with region.session.get(region.url + "/prfaas/region") as response:
        return int((await response.json())["buffered_bytes"])


class Upload:
    """A chunked body that is sent as slowly as a test likes, its first byte at once."""

    def __init__(self, region: Any) -> None:
        self._chunks: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.send(b" ")
        headers = {"Content-Type": "application/json"}
        self._answer = asyncio.create_task(self._post(region, headers))

    def send(self, chunk: bytes) -> None:
        self._chunks.put_nowait(chunk)

    async def end(self) -> int:
        """Its status; 0 when the gateway cut it off before it was heard."""
        self._chunks.put_nowait(None)
        return await asyncio.wait_for(self._answer, 10)

    async def ended(self) -> int:
        """The same of a body whose end is not sent."""
        return await asyncio.wait_for(asyncio.shield(self._answer), 10)

    async def _post(self, region: Any, headers: dict[str, str]) -> int:
        async def body() -> Any:
            while (chunk := await self._chunks.get()) is not None:
                yield chunk

        try:
            url = region.url + "/v1/completions"
            async with region.session.post(url, data=body(), headers=headers) as response:
                error_of(await response.read())
                return int(response.status)
        except aiohttp.ClientError:
            return 0


async def test_chunked_uploads_together_are_bounded(open_region: Any) -> None:
    limit = 1 << 20
    async with open_region(max_body_bytes=limit, max_buffered_bytes=limit) as region:
        uploads = [Upload(region) for _ in range(40)]
        await region.until(lambda: region.gateway.num_in_flight == 40)
        most = 0
        for _ in range(8):
            for upload in uploads:
                upload.send(b" " * 20_000)
            for _ in range(5):
                most = max(most, await buffered_bytes(region))
        # Together they would be 6.4 MB. Those that are let through are refused for what they say.
        statuses = [await upload.end() for upload in uploads]
        assert 0 < most <= limit
        assert statuses.count(429) >= 20
        assert statuses.count(400) >= 2
        assert set(statuses) <= {429, 400, 0}
        assert await buffered_bytes(region) == 0
        assert (await region.post(SHORT))[0] == 200
        assert region.gateway.num_in_flight == 0


async def test_a_chunked_body_is_cut_off_while_it_arrives(open_region: Any) -> None:
    async with open_region(max_body_bytes=100_000) as region:
        upload = Upload(region)
        for _ in range(11):
            upload.send(b" " * 10_000)
        # Its end is never sent.
        assert await upload.ended() == 413
        await region.until(lambda: region.gateway.num_in_flight == 0)
        assert await buffered_bytes(region) == 0


async def test_uploads_that_trickle_are_given_up(open_region: Any) -> None:
    async with open_region(max_in_flight=8, timeouts={"body_s": 2.0}) as region:
        uploads = [Upload(region) for _ in range(8)]
        await region.until(lambda: region.gateway.num_in_flight == 8)
        assert (await region.post(SHORT))[0] == 429
        assert [await upload.ended() for upload in uploads] == [408] * 8
        assert await buffered_bytes(region) == 0
        assert (await region.post(SHORT))[0] == 200


async def test_an_error_carries_the_request_id(region: Any) -> None:
    _, headers, _ = await region.post({"model": "huge"}, headers={"X-Request-Id": "mine"})
    assert headers["x-request-id"] == "mine"


def echoed(answer: bytes, *, stream: object) -> dict[str, Any]:
    """The body that the engine was given, which is what it answers."""
    chunks = [answer]
    if stream:
        chunks = [event[6:] for event in answer.split(b"\n\n") if event.startswith(b"data: {")]
    choices = [choice for chunk in chunks for choice in json.loads(chunk)["choices"]]
    body: dict[str, Any] = json.loads("".join(choice["text"] for choice in choices))
    return body


@pytest.mark.many_at_once
async def test_many_at_once_stay_apart(open_region: Any) -> None:
    async def ask(seed: int) -> None:
        length = 300 if seed % 2 else 5
        body = {"model": "tiny", "prompt": "x" * length, "seed": seed, "stream": seed % 3 == 0}
        status, headers, answer = await region.post(body, headers={"X-Request-Id": f"r{seed}"})
        assert status == 200
        assert headers["x-request-id"] == f"r{seed}"
        assert echoed(answer, stream=body["stream"])["seed"] == seed
        assert headers["x-prfaas-route"] == ("prefill_cluster" if length == 300 else "local")

    # One loop serves all sides here: on a busy machine its turns outlast the default of connect_s.
    async with open_region(timeouts={"connect_s": 60.0}) as region:
        await asyncio.gather(*(ask(seed) for seed in range(200)))
        await region.assert_nothing_held()
        assert len(region.pd.released) == 100


async def test_draining_lets_the_running_end(region: Any) -> None:
    region.engine.first_token.clear()
    running = asyncio.create_task(region.post(region.long_body(stream=True)))
    await region.until(lambda: region.gateway.num_in_flight == 1)
    draining = asyncio.create_task(region.gateway.drain())
    await asyncio.sleep(0)
    status, headers, answer = await region.post(SHORT)
    assert status == 503
    assert headers["retry-after"]
    assert error_of(answer)["code"] == "shutting_down"
    for path, expected in (("/health", 503), ("/readyz", 503), ("/livez", 200)):
        async with region.session.get(region.url + path) as response:
            assert response.status == expected, path
    assert not draining.done()
    region.engine.first_token.set()
    status, _, answer = await running
    assert status == 200
    assert answer.endswith(b"data: [DONE]\n\n")
    await asyncio.wait_for(draining, 5)


async def test_stopping_with_requests_running_gives_everything_back(open_region: Any) -> None:
    async with open_region(timeouts={"drain_s": 0.1}) as region:
        region.far.gate.clear()
        running = asyncio.create_task(region.post(region.long_body()))
        await region.until(lambda: len(region.far.jobs) == 1)
        pd, far = region.pd, region.far
    # Cut off without an answer, or with an error: never a whole answer.
    ended = (await asyncio.gather(running, return_exceptions=True))[0]
    assert isinstance(ended, aiohttp.ClientError) or ended[0] >= 500
    assert pd.held == {}
    assert far.num_running == 0
