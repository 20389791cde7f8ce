"""KVCache gets from a prefill to a decode engine of a PD cluster in each way, with equal tokens.

One region (`hand_off_ways`), whose engines have NixlConnector beside ours, and for each way a
gateway of its own. The right answers are those of the decode engine alone. Nothing is cached, so
that every hand-off brings a whole prompt.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
from bench_smoke import run_smoke
from engine_region import (
    WINDOW,
    everything_is_given_back,
    model_dir,
    prompt,
    reference_answers,
    region_spec,
    running,
    settled_record,
    until,
)
from hand_off_ways import WAYS, gateway, two_nodes

from deploy.gateway.members.pages import InstancesOverview
from deploy.lab.demo.answers import Answer, ask_all
from deploy.lab.demo.scenario import DemoRequest
from deploy.region.client import asked as asked_page
from deploy.region.launch.launcher import RunningRegion

pytestmark = pytest.mark.asyncio(loop_scope="module")

LENGTHS = (300, 512, 513, 1500)
"""More than `hand_off_tokens`; one fills its blocks, one has a token more."""
TOGETHER = 4
"""As many as a prefill engine takes at a time; more would be computed where they are decoded."""


@dataclass(frozen=True, slots=True)
class Served:
    """The region, and what its decode engine alone answers to `asked`."""

    region: RunningRegion
    asked: list[DemoRequest]
    expected: dict[str, Answer]


def requests() -> list[DemoRequest]:
    alone = [
        prompt(f"alone {length}", length, length, wave=index, stream=bool(index % 2))
        for index, length in enumerate(LENGTHS)
    ]
    together = [
        prompt(f"together {seed}", 400 + 150 * seed, seed, wave=100) for seed in range(TOGETHER)
    ]
    return [*alone, *together]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(
    models_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Served]:
    spec = region_spec(model_dir(models_dir, WINDOW), WINDOW, prefix_caching=False)
    async with running(two_nodes(spec, "nixl"), tmp_path_factory.mktemp("r")) as region:
        async with gateway(region.directory.gateway_file, "auto") as (url, _):
            asked, expected = await reference_answers(url, WINDOW, requests())
        yield Served(region, asked, expected)


@pytest.mark.parametrize("name", WAYS)
async def test_tokens_are_those_of_one_engine(served: Served, name: str) -> None:
    way, file = WAYS[name], served.region.directory.gateway_file
    async with gateway(file, way.hand_off, [way.prefills]) as (url, made):
        answers = await ask_all(url, WINDOW, served.asked, lambda request, answer: None)
        for asked, answer in answers.items():
            assert not answer.error, (asked, answer.error)
            assert answer.token_ids == served.expected[asked].token_ids, asked
        records = {record.request_id: record for record in made.records}
        for request in served.asked:
            record = records[answers[request.name].request_id]
            assert (record.target, record.prefill_error) == ("hand_off", ""), record
            assert (record.hand_off, record.prefill_instance) == (way.taken, way.prefills), record
    await everything_is_given_back(served.region, nodes=("b1", "b2"))


async def test_the_regions_own_gateway_takes_the_arena_where_it_can(served: Served) -> None:
    """It knows both prefill engines; of idle ones that beside the decode engine comes first."""
    for asked in served.asked[:3]:
        await no_request_is_known_of(served.region)
        answers = await ask_all(
            served.region.gateway_url, WINDOW, [asked], lambda request, answer: None
        )
        answer = answers[asked.name]
        assert answer.token_ids == served.expected[asked.name].token_ids, (asked, answer.error)
        record = await settled_record(served.region, answer.request_id)
        assert (record["hand_off"], record["prefill_instance"]) == ("arena", "b2-prefill"), record


async def no_request_is_known_of(region: RunningRegion) -> None:
    """What the gateway last heard of every engine is that it has no request."""

    async def is_so() -> bool:
        found = await asked_page(region.gateway_url, "/prfaas/instances", InstancesOverview)
        return not any(item.requests for item in found.instances)

    await until(is_so, "the gateway knows of no request")


async def test_the_bench_of_hand_offs_runs_on_this_region(served: Served, tmp_path: Path) -> None:
    region = str(served.region.directory.root)
    least = ("--blocks", "1", "--prompts", "1")  # `test_smoke` runs this part, too
    await asyncio.to_thread(run_smoke, "handoff", tmp_path, *least, "--region", region)
    await everything_is_given_back(served.region, nodes=("b1", "b2"))
