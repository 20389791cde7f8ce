"""What is forwarded to an engine of a region: embeddings, scores, rankings and tokens.

OpenAI's own client and plain HTTP get from a region what a plain engine of the same model answers.
"""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from engine_region import RECURRENT, WINDOW, model_dir, records_at
from served_region import EMBED, POOLING, Served, serving

from deploy.lab.demo.reference import plain_engine
from deploy.lab.demo.scenario import text
from deploy.lab.demo.tiny_specs import MODELS

pytestmark = [pytest.mark.asyncio(loop_scope="session"), serving(RECURRENT)]

TEXTS = [text(num_bytes, seed) for seed, num_bytes in enumerate((1, 40, 600), start=8300)]
CALLS: dict[str, dict[str, Any]] = {
    "/v1/score": {"queries": TEXTS[0], "documents": TEXTS[1:]},
    "/v1/rerank": {"query": TEXTS[0], "documents": TEXTS[1:], "top_n": 1},
    "/tokenize": {"prompt": TEXTS[1]},
    "/detokenize": {"tokens": [72, 105]},
}


async def answers_of(url: str) -> dict[str, Any]:
    """The answers of an engine or a region, without what is of the moment."""
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        as_numbers = await client.embeddings.create(
            model=EMBED, input=TEXTS, encoding_format="float"
        )
        # What the client asks for by itself: numbers in base64.
        packed = await client.embeddings.create(model=EMBED, input=TEXTS[1])
    found: dict[str, Any] = {
        "embeddings": [item.embedding for item in as_numbers.data],
        "packed": packed.data[0].embedding,
        "usage": as_numbers.usage.model_dump(),
    }
    async with aiohttp.ClientSession() as session:
        for path, body in CALLS.items():
            async with session.post(url + path, json={"model": EMBED, **body}) as response:
                assert response.status == 200, (path, await response.text())
                found[path] = await response.json()
    for path in ("/v1/score", "/v1/rerank"):
        for name in ("id", "created"):
            found[path].pop(name, None)
    return found


async def test_forwarded_answers_equal_a_plain_engines(
    served: Served, models_dir: Path, tmp_path: Path
) -> None:
    before = await records_at(served.url)
    answers = await answers_of(served.url)
    vectors = answers["embeddings"]
    assert len({len(vector) for vector in vectors}) == 1
    assert len({tuple(vector) for vector in vectors}) == len(TEXTS)
    assert vectors[1] == pytest.approx(answers["packed"])
    listed = await records_at(served.url)
    made = [record for key, record in listed.items() if key not in before]
    assert {(record["route"], record["reason"]) for record in made} == {("direct", "forwarded")}

    args = (*MODELS[WINDOW].engine_args, *POOLING)
    model = replace(MODELS[WINDOW], name=EMBED, engine_args=args)
    path = await asyncio.to_thread(model_dir, models_dir, WINDOW)
    async with plain_engine(model, path, tmp_path) as url:
        expected = await answers_of(url)
    assert answers == nearly(expected)


def nearly(value: Any) -> Any:
    """The same value with numbers that may differ by what other batches round."""
    match value:
        case float():
            return pytest.approx(value, abs=1e-4)
        case list():
            return [nearly(item) for item in value]
        case dict():
            return {name: nearly(item) for name, item in value.items()}
        case _:
            return value


async def test_a_task_that_the_engine_does_not_have_is_its_own_error(served: Served) -> None:
    url = f"{served.url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        with pytest.raises(openai.APIStatusError) as refused:
            await client.completions.create(model=EMBED, prompt="x", max_tokens=1)
    assert 400 <= refused.value.status_code < 500
