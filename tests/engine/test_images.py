"""Prompts with images: prefilled in another cluster, decoded here, answered as by one engine."""

import asyncio
import base64
import contextlib
import io
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from engine_region import (
    agent_status,
    everything_is_given_back,
    running,
    settled_record_at,
    until,
    with_engines,
)
from media_server import MediaServer, settings
from PIL import Image
from tiny_vision import IMAGE_ARGS, TINY_VISION, image_url, vision_environment

from deploy.gateway.media.config import MediaSection
from deploy.lab.demo.reference import MIN_MARGIN_NATS, plain_engine
from deploy.lab.demo.regions import demo_region
from deploy.lab.demo.scenario import text
from deploy.lab.demo.tiny_models import build_model
from deploy.region.launch.launcher import RunningRegion
from kvmanager.agent.messages import EmbeddingStatus

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODEL = replace(TINY_VISION, engine_args=(*TINY_VISION.engine_args, *IMAGE_ARGS))
THRESHOLD_TOKENS = 100
NUM_TOKENS = 8
SIDE = 128
"""Pixels; such an image becomes 64 tokens."""
QUESTIONS = ((1,), (2,), (1, 2), (2, 1), (3, 3, 1), (4, 5))
"""The images of each prompt, by their seeds. All have the same text."""
SHARED = text(300, seed=5)
LOCAL = text(300, seed=6)
"""Nothing of it is cached when the prefill cluster is gone."""
BROKEN = "data:image/png;base64,AAAA"
ENGINES: dict[str, list[dict[str, Any]]] = {
    "a1": [{"name": "a1-prefill"}, {"name": "a1-encode", "role": "encode"}],
    "b1": [
        {"name": "b1-prefill", "role": "prefill", "max_concurrent": 8},
        {"name": "b1-decode", "role": "decode", "encodes": True, "max_concurrent": 8},
    ],
}
"""One only encodes in the prefill cluster, and one decodes and encodes in the PD cluster."""
MAX_BYTES = 1 << 20
"""Of an image that the gateway fetches."""


Records = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Served:
    region: RunningRegion
    plain_url: str
    session: aiohttp.ClientSession
    server: MediaServer

    async def ask(
        self, url: str, urls: Sequence[str], words: str = SHARED, **fields: Any
    ) -> tuple[int, dict[str, Any]]:
        """The status and the answer of a chat about the images at `urls`."""
        images = [{"type": "image_url", "image_url": {"url": one}} for one in urls]
        body = {
            "model": MODEL.name,
            "max_tokens": NUM_TOKENS,
            "temperature": 0,
            "messages": [{"role": "user", "content": [{"type": "text", "text": words}, *images]}],
        }
        async with self.session.post(f"{url}/v1/chat/completions", json=body | fields) as response:
            return response.status, await response.json()

    async def about(
        self, url: str, seeds: Sequence[int], words: str = SHARED, **fields: Any
    ) -> dict[str, Any]:
        status, answer = await self.ask(url, list(map(picture, seeds)), words, **fields)
        assert status == 200, answer
        return answer

    async def expected(self, seeds: Sequence[int], words: str = SHARED, **fields: Any) -> str:
        """How the answer of a plain engine begins, up to the first token that it is not sure of:
        engines that cut a prompt elsewhere round otherwise.
        """
        wanted = {"logprobs": True, "top_logprobs": 2} | fields
        answer = await self.about(self.plain_url, seeds, words, **wanted)
        sure = ""
        for token in answer["choices"][0]["logprobs"]["content"]:
            first, second = (one["logprob"] for one in token["top_logprobs"])
            if first - second < MIN_MARGIN_NATS[MODEL.dtype]:
                break
            sure += token["token"]
        return sure

    async def are_right(self, asked: Sequence[Sequence[int]], words: str = SHARED) -> Records:
        """Ask for all answers at once, and hold them against the plain engine's. Returns their
        records.
        """
        url = self.region.gateway_url
        answers = await asyncio.gather(*(self.about(url, seeds, words) for seeds in asked))
        expected = {tuple(seeds): await self.expected(seeds, words) for seeds in asked}
        for seeds, answer in zip(asked, answers, strict=True):
            assert said(answer).startswith(expected[tuple(seeds)]), seeds
        assert sum(map(len, expected.values())) >= len(expected), "the plain engine is sure"
        return [await self.record(answer) for answer in answers]

    async def record(self, answer: dict[str, Any]) -> dict[str, Any]:
        request_id = answer["id"].removeprefix("chatcmpl-")
        return await settled_record_at(self.region.gateway_url, request_id)


def picture(seed: int) -> str:
    return image_url(seed, SIDE, SIDE)


def pixels(seed: int) -> bytes:
    return base64.b64decode(picture(seed).partition(",")[2])


def said(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(
    models_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Served]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in vision_environment().items():
            patch.setenv(name, value)
        path = await asyncio.to_thread(build_model, MODEL, models_dir)
        spec = with_engines(demo_region(MODEL, path, threshold_tokens=THRESHOLD_TOKENS), ENGINES)
        folder = tmp_path_factory.mktemp("images")
        async with MediaServer() as server, contextlib.AsyncExitStack() as stack:
            media = MediaSection.model_validate(settings(server, max_bytes=MAX_BYTES)["media"])
            gateway = spec.gateway.model_copy(update={"media": media})
            spec = spec.model_copy(update={"gateway": gateway})
            async with asyncio.TaskGroup() as group:
                starting = stack.enter_async_context(running(spec, folder / "region"))
                region = group.create_task(starting)
                plain = plain_engine(MODEL, path, folder / "plain")
                plain_url = group.create_task(stack.enter_async_context(plain))
            session = await stack.enter_async_context(aiohttp.ClientSession())
            yield Served(region.result(), plain_url.result(), session, server)


@pytest.mark.shows(
    kind="full attention with gated delta net",
    dtype="bfloat16",
    prefill="TP 1",
    decode="TP 1",
    more="images, eight prompts at a time (tiny Qwen3.5)",
)
async def test_images_are_prefilled_in_another_cluster(served: Served) -> None:
    url = served.region.gateway_url
    mixed = [QUESTIONS[number % len(QUESTIONS)] for number in range(8)]
    answers = await asyncio.gather(*(served.about(url, seeds) for seeds in mixed))
    expected = {seeds: await served.expected(seeds) for seeds in QUESTIONS}
    assert len(set(expected.values())) > len(QUESTIONS) // 2, "the images decide the answers"
    assert sum(map(len, expected.values())) >= 2 * len(QUESTIONS), "the plain engine is sure"
    for seeds, answer in zip(mixed, answers, strict=True):
        assert said(answer).startswith(expected[seeds]), seeds
    found = [await served.record(answer) for answer in answers]
    assert [one["route"] for one in found] == ["prefill_cluster"] * len(found), found
    assert [one["prefill_error"] for one in found] == [""] * len(found), found
    assert all(one["transfer_bytes"] > 0 for one in found[: len(QUESTIONS)])

    # The same token ids with another picture, where all caches have the first one's.
    assert expected[1,]
    for seed in itertools.count(20):
        sure = await served.expected((seed,))
        if not (sure.startswith(expected[1,]) or expected[1,].startswith(sure)):
            break
    other = await served.about(url, (seed,))
    assert said(other).startswith(sure)
    assert (await served.record(other))["route"] == "prefill_cluster"

    # What the caches hold is found again, and answers stay.
    for seeds in QUESTIONS:
        assert said(await served.about(url, seeds)).startswith(expected[seeds]), seeds


async def test_choices_and_tools_do_not_change_what_is_prefilled(served: Served) -> None:
    url, seeds = served.region.gateway_url, (7, 8)
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    fields: dict[str, Any] = {"n": 2, "temperature": 1.0, "top_k": 1}
    fields |= {"tools": [tool], "tool_choice": "none"}
    answer = await served.about(url, seeds, **fields)
    sure = await served.expected(seeds, **fields)
    assert len(answer["choices"]) == 2
    for choice in answer["choices"]:
        assert choice["message"]["content"].startswith(sure)
    record = await served.record(answer)
    assert (record["route"], record["prefill_error"]) == ("prefill_cluster", ""), record


async def test_what_is_no_image_is_refused(served: Served) -> None:
    status, answer = await served.ask(served.region.gateway_url, [BROKEN])
    assert status == 400
    assert "image" in answer["error"]["message"].lower()


async def test_images_at_addresses_are_fetched_once_for_both_clusters(served: Served) -> None:
    url, server = served.region.gateway_url, served.server
    server.bodies = {str(seed): ("image/png", pixels(seed)) for seed in (11, 12)}
    at = {seed: f"{server.url}/body/{seed}" for seed in (11, 12)}
    status, answer = await served.ask(url, [at[11], at[12], at[11]])
    assert status == 200, answer
    assert said(answer).startswith(await served.expected((11, 12, 11)))
    record = await served.record(answer)
    assert (record["route"], record["prefill_error"]) == ("prefill_cluster", ""), record
    assert record["parts"]["media_s"] > 0
    assert sorted(path for path, _ in server.requests) == ["/body/11", "/body/12"]


def bomb() -> bytes:
    """An image of few bytes and 400,000,000 pixels."""
    file = io.BytesIO()
    Image.new("1", (20_000, 20_000)).save(file, "PNG")
    return file.getvalue()


async def test_images_that_are_forbidden_too_large_or_broken_get_400(served: Served) -> None:
    url, server = served.region.gateway_url, served.server
    packed = await asyncio.to_thread(bomb)
    server.bodies = {
        "large": ("image/png", bytes(MAX_BYTES + 1)),
        "broken": ("image/png", b"AAAA"),
        "page": ("text/html", pixels(1)),
        "bomb": ("image/png", packed),
    }
    cases = {
        f"http://127.0.0.2:{server.port}/body/broken": "media_address",
        "http://169.254.169.254/a.png": "media_address",
        "file:///etc/passwd": "media_scheme",
        f"{server.url}/body/large": "media_too_large",
        f"{server.url}/body/page": "media_content_type",
        f"{server.url}/status/404": "media_status",
        # What it is shows when it is decoded, which engines do.
        f"{server.url}/body/broken": 400,
        BROKEN: 400,
        f"{server.url}/body/bomb": "media_pixels",
        "data:image/png;base64," + base64.b64encode(packed).decode(): "media_pixels",
    }
    for at, code in cases.items():
        status, answer = await served.ask(url, [picture(1), at])
        assert (status, answer["error"]["code"]) == (400, code), (at[:60], answer)
        if isinstance(code, str) and code != "media_pixels":
            assert answer["error"]["param"] == "messages[0].content[2].image_url"
    status, answer = await served.ask(url, [picture(1)] * 9)
    assert status == 400
    assert "At most 8 image" in answer["error"]["message"], answer
    # And the region serves on.
    assert said(await served.about(url, (1,))).startswith(await served.expected((1,)))


async def test_engines_fetch_nothing_by_themselves(served: Served) -> None:
    region, server = served.region, served.server
    server.bodies = {"1": ("image/png", pixels(1))}
    server.requests.clear()
    part = {"type": "image_url", "image_url": {"url": f"{server.url}/body/1"}}
    body = {"model": MODEL.name, "messages": [{"role": "user", "content": [part]}]}
    headers = region.engine_access().headers
    engines = [one for one in region.processes if one.kind == "engine"]
    assert engines
    for engine in engines:
        address = f"{engine.address}/v1/chat/completions"
        async with served.session.post(address, json=body, headers=headers) as response:
            assert response.status == 400, await response.text()
            assert "allowed domains" in await response.text()
    assert server.requests == []


async def test_other_apis_with_images(served: Served) -> None:
    url = served.region.gateway_url
    seeds = (21, 22)
    sure = await served.expected(seeds)
    images = [{"type": "input_image", "image_url": picture(seed)} for seed in seeds]
    body: dict[str, Any] = {
        "model": MODEL.name,
        "max_output_tokens": NUM_TOKENS,
        "temperature": 0,
        "input": [{"role": "user", "content": [{"type": "input_text", "text": SHARED}, *images]}],
    }
    headers = {"X-Request-Id": "a-response"}
    async with served.session.post(f"{url}/v1/responses", json=body, headers=headers) as response:
        answer = await response.json()
        assert response.status == 200, answer
    assert answer["output"][-1]["content"][0]["text"].startswith(sure), answer
    record = await settled_record_at(url, "a-response")
    assert (record["route"], record["prefill_error"]) == ("prefill_cluster", ""), record

    blocks = [
        {
            "type": "image",
            "source": {
                "type": "base64",
                "media_type": "image/png",
                "data": base64.b64encode(pixels(seed)).decode(),
            },
        }
        for seed in seeds
    ]
    body = {
        "model": MODEL.name,
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "messages": [{"role": "user", "content": [{"type": "text", "text": SHARED}, *blocks]}],
    }
    headers = {"X-Request-Id": "a-message"}
    async with served.session.post(f"{url}/v1/messages", json=body, headers=headers) as response:
        answer = await response.json()
        assert response.status == 200, answer
    assert answer["content"][-1]["text"].startswith(sure), answer
    record = await settled_record_at(url, "a-message")
    assert (record["route"], record["reason"].split(";")[0]) == ("direct", "multimodal")


async def test_names_of_clients_keep_a_prompt_on_one_engine(served: Served) -> None:
    part = {"type": "image_url", "image_url": {"url": picture(1)}, "uuid": "mine"}
    content = [{"type": "text", "text": SHARED}, part]
    fields: dict[str, Any] = {"messages": [{"role": "user", "content": content}]}
    status, answer = await served.ask(served.region.gateway_url, [], **fields)
    assert status == 200, answer
    assert said(answer).startswith(await served.expected((1,)))
    record = await served.record(answer)
    assert (record["route"], record["reason"].split(";")[0]) == ("direct", "multimodal")
    await everything_is_given_back(served.region)


async def embeddings(region: RunningRegion, node: str) -> EmbeddingStatus:
    found = (await agent_status(region, node)).embeddings
    assert found is not None
    return found


def became(records: Records) -> Counter[str]:
    """What became of all media, by the records of their requests."""
    return sum((Counter(one["media"]) for one in records), Counter())


@pytest.mark.shows(
    kind="full attention with gated delta net",
    dtype="bfloat16",
    prefill="TP 1",
    decode="TP 1",
    more="images encoded by an engine of their own, where they are prefilled, or where they are "
    "decoded",
)
async def test_answers_are_those_of_one_engine_wherever_images_are_encoded(served: Served) -> None:
    region = served.region
    # By an instance of the prefill cluster that does nothing else.
    asked = [(31,), (32,), (31, 33), (33, 31), (34, 34, 32), (35,), (36,), (37, 38)]
    before = await embeddings(region, "a1")
    found = await served.are_right(asked)
    assert {one["prefill_instance"] for one in found} == {"a1-prefill"}, found
    assert {"encoded", "shared", "found"} & set(became(found)), found
    after = await embeddings(region, "a1")
    assert after.num_embeddings > before.num_embeddings
    assert after.num_hits > before.num_hits
    # By the instance that prefills.
    await region.engine("a1-encode").kill(restart=False)
    asked = [(seed + 20, *more) for seed, *more in asked]
    found = await served.are_right(asked)
    assert {one["prefill_instance"] for one in found} == {"a1-prefill"}, found
    assert {one["prefill_error"] for one in found} == {""}, found
    # By the instance that decodes: without the prefill cluster, prompts are handed over locally.
    leave = f"{region.gateway_url}/prfaas/instances/a1-prefill?force=1"
    async with served.session.delete(leave) as response:
        assert response.status == 202, await response.text()

    async def is_gone() -> bool:
        async with served.session.get(f"{region.gateway_url}/prfaas/instances") as response:
            listed = (await response.json())["instances"]
        return all(one["instance"] != "a1-prefill" for one in listed)

    await until(is_gone, "the prefill cluster has no instance that prefills")
    found = await served.are_right(asked, LOCAL)
    handed_off = [one for one in found if one["target"] == "hand_off"]
    assert len(handed_off) > len(found) // 2, found
    assert {one["prefill_instance"] for one in handed_off} == {"b1-prefill"}, found
    assert {"encoded", "shared", "found"} & set(became(handed_off)), found
    await everything_is_given_back(region, without="a1-encode")
    # Without an agent as well: who answers encodes.
    await region.agent("b1").kill(restart=False)
    await served.are_right([(71,), (72, 73)], LOCAL)
