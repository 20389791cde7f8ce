"""Two tensor-parallel ranks on each side of a link: each sends its share, and each finds it again.

Every prompt is also asked of the decode engine itself under a salt of its own, so that nothing
cached or moved has a part in that answer: the same two ranks compute all of it.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from conversation import most_bytes
from engine_region import (
    WINDOW,
    agent_status,
    ask_region,
    everything_is_given_back,
    model_dir,
    prompt,
    region_spec,
    running,
    settled_record,
)

from deploy.lab.demo.answers import Answer
from deploy.lab.demo.scenario import DemoRequest
from deploy.region.launch.launcher import RunningRegion

pytestmark = pytest.mark.asyncio(loop_scope="module")

THRESHOLD_TOKENS = 100


@dataclass(frozen=True, slots=True)
class TwoRanks:
    """A region of engines of two ranks, and a session for asking one of them."""

    region: RunningRegion
    session: aiohttp.ClientSession

    async def computed_alone(self, request: DemoRequest) -> list[int]:
        """The decode engine's own answer to the whole prompt."""
        url = f"{self.region.engine('b1-decode').address}/v1/completions"
        body = request.body(WINDOW) | {"cache_salt": "alone", "stream": False}
        headers = self.region.engine_access().headers
        async with self.session.post(url, json=body, headers=headers) as response:
            answer = await response.json()
        assert response.status == 200, answer
        return list(answer["choices"][0]["token_ids"])

    async def ask(self, request: DemoRequest) -> Answer:
        answer = (await ask_region(self.region, WINDOW, [request]))[request.name]
        assert not answer.error, answer.error
        return answer


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ranks(
    models_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[TwoRanks]:
    spec = region_spec(
        model_dir(models_dir, WINDOW),
        WINDOW,
        tensor_parallel_size=2,
        threshold_tokens=THRESHOLD_TOKENS,
        local_prefill=False,
    )
    async with (
        running(spec, tmp_path_factory.mktemp("tp")) as region,
        aiohttp.ClientSession() as session,
    ):
        yield TwoRanks(region, session)


@pytest.mark.parametrize("length", [256, 1100, 3001])
async def test_shares_of_two_ranks_cross_the_link(ranks: TwoRanks, length: int) -> None:
    request = prompt(f"{length}", length, 300 + length)
    answer = await ranks.ask(request)
    record = await settled_record(ranks.region, answer.request_id)
    assert (record["route"], record["prefill_error"]) == ("prefill_cluster", ""), record
    assert answer.token_ids == await ranks.computed_alone(request)


async def test_a_second_turn_sends_what_is_new_of_both_ranks(ranks: TwoRanks) -> None:
    first = prompt("first", 1500, 41)
    said = first.prompt + bytes((await ranks.ask(first)).token_ids).decode()
    second = prompt("second", len(said) + 400, 42, prefix=said)
    answer = await ranks.ask(second)
    record = await settled_record(ranks.region, answer.request_id)
    model = (await agent_status(ranks.region, "b1")).engines[0].cache
    assert model is not None
    known = (first.num_bytes - 1) // model.block_tokens * model.block_tokens
    assert record["cached_tokens"] >= known, record
    assert record["landing_cached_tokens"] >= known, record
    assert 0 < record["transfer_bytes"] <= most_bytes(model, second.num_bytes - 1 - known), record
    assert answer.token_ids == await ranks.computed_alone(second)


async def test_every_engine_has_two_ranks_and_holds_nothing_at_the_end(ranks: TwoRanks) -> None:
    for node in ("a1", "b1"):
        status = await agent_status(ranks.region, node)
        assert [engine.tp_size for engine in status.engines] == [2]
    await everything_is_given_back(ranks.region)
