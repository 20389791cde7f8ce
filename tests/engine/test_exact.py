"""Greedy tokens through a region equal those of one plain engine, whatever the cache holds."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import pytest_asyncio
from engine_region import (
    RECURRENT,
    WINDOW,
    ask_region,
    everything_is_given_back,
    expected_answers,
    model_dir,
    prompt,
    records,
    region_spec,
    running,
)

from deploy.demo.answers import Answer
from deploy.demo.scenario import DemoRequest, text
from deploy.region.launcher import RunningRegion

pytestmark = pytest.mark.asyncio(loop_scope="module")

THRESHOLD_TOKENS = 100
LENGTHS = (1, 255, 256, 257, 1000, 1500, 5000)
SHARED = text(1300, seed=77)
AGAIN = " again"


def requests() -> Sequence[DemoRequest]:
    """Each length alone, then eight at once, then prompts that share parts of their prefix."""
    alone = [
        prompt(f"alone {length}", length, length, wave=index, stream=bool(index % 2))
        for index, length in enumerate(LENGTHS)
    ]
    together = [
        prompt(f"together {index} {length}", length, 100 + index, wave=20, stream=bool(index % 2))
        for index, length in enumerate((*LENGTHS, 700))
    ]
    # 1,500 tokens of which 256 are in the prefill engine's cache, and other shares of a prefix.
    shared = [
        prompt(f"shared {index}", length, 200 + index, wave=30 + index, prefix=SHARED[:common])
        for index, (length, common) in enumerate(
            ((1350, 1300), (1500, 256), (1500, 300), (2000, 1024), (1500, 256), (1310, 1300))
        )
    ]
    return [*alone, *together, *shared]


def again(asked: Sequence[DemoRequest]) -> Sequence[DemoRequest]:
    """The same requests once more, by other names and after the first."""
    return [
        replace(request, name=request.name + AGAIN, wave=request.wave + 100) for request in asked
    ]


@dataclass(frozen=True, slots=True)
class Served:
    """A region, the requests for it, and a plain engine's answers by the requests' names."""

    model: str
    prefix_caching: bool
    region: RunningRegion
    asked: list[DemoRequest]
    expected: dict[str, Answer]


_expected: dict[str, tuple[list[DemoRequest], dict[str, Answer]]] = {}


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=[(RECURRENT, True), (RECURRENT, False), (WINDOW, True), (WINDOW, False)],
    ids=["recurrent-cached", "recurrent-uncached", "window-cached", "window-uncached"],
)
async def served(
    request: pytest.FixtureRequest, models_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Served]:
    name, prefix_caching = request.param
    path = model_dir(models_dir, name)
    run_dir = tmp_path_factory.mktemp("r")
    if name not in _expected:
        _expected[name] = await expected_answers(path, name, requests(), run_dir)
    asked, expected = _expected[name]
    spec = region_spec(path, name, prefix_caching=prefix_caching, threshold_tokens=THRESHOLD_TOKENS)
    async with running(spec, run_dir / "region") as region:
        yield Served(name, prefix_caching, region, asked, expected)


async def test_tokens_equal_a_plain_engines(served: Served) -> None:
    name, asked, region = served.model, served.asked, served.region
    repeated = again(asked) if served.prefix_caching else []
    answers = await ask_region(region, name, [*asked, *repeated])
    wrong = [
        (
            tried,
            answer.error
            or f"{answer.token_ids}, not {served.expected[tried.removesuffix(AGAIN)].token_ids}",
        )
        for tried, answer in answers.items()
        if answer.error or answer.token_ids != served.expected[tried.removesuffix(AGAIN)].token_ids
    ]
    assert not wrong
    listed = await records(region)
    for request in asked:
        record = listed[answers[request.name].request_id]
        num_tokens = answers[request.name].num_prompt_tokens
        if num_tokens > THRESHOLD_TOKENS:
            assert record["route"] == "prefill_cluster", record
        assert record.get("prefill_error", "") == "", record
    await everything_is_given_back(region)
