"""Engines with and without a drafter on both sides of a link, guessing different numbers of tokens.

The model's MTP module repeats its attention layer, so that its guesses are good where its KVCache
of the prompt is right. Prefix caching is off: with it vLLM's CPU backend cannot speculate in a
model with recurrent layers, since a kernel for that is in Triton alone.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from engine_region import (
    agent_status,
    engine_status,
    everything_is_given_back,
    prompt,
    running,
    with_engines,
)
from handoff import Handoff, Landed
from landed_items import items_of
from part_gateway import PartGateways, part_gateways
from tiny_draft import TINY_DRAFT

from deploy.lab.demo.answers import Answer
from deploy.lab.demo.reference import decided_answers
from deploy.lab.demo.regions import demo_region
from deploy.lab.demo.scenario import DemoRequest, text
from deploy.lab.demo.tiny_models import build_model

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.kinds]

MODEL = TINY_DRAFT.name
NUM_GUESSES = {"a1": 1, "b1": 2}
PAIRS = [("draft", "draft"), ("draft", "plain"), ("plain", "draft")]
"""The engine that prefills and the one that decodes: with a drafter, or without."""
LENGTHS = (130, 257, 700, 1500)
NUM_ASKED = 24
_COUNTER = r"^vllm:spec_decode_num_{}_total{{[^}}]*}} (\S+)$"


@dataclass(slots=True)
class Sites:
    """The gateways of a region, and hand-offs by hand."""

    gateways: PartGateways
    hand: Handoff

    async def ask(self, pair: tuple[str, str], request: DemoRequest) -> tuple[Answer, int]:
        """The answer by way of this pair, and the bytes that were sent for it."""
        answer, record = await self.gateways.ask(request, f"a1-{pair[0]}", f"b1-{pair[1]}")
        return answer, record["transfer_bytes"]

    async def guesses(self) -> tuple[int, int]:
        """Tokens that the decoding drafter has guessed, and those of them that were right. An
        engine counts a step's a little after it has answered.
        """
        last = None
        while (found := await self._guesses()) != last:
            last = found
            await asyncio.sleep(0.25)
        return found

    async def _guesses(self) -> tuple[int, int]:
        region = self.gateways.region
        url = f"{region.engine('b1-draft').address}/metrics"
        headers = region.engine_access().headers
        async with self.gateways.session.get(url, headers=headers) as response:
            told = await response.text()
        found = (
            re.search(_COUNTER.format(name), told, re.MULTILINE)
            for name in ("draft_tokens", "accepted_tokens")
        )
        guessed, accepted = (0 if one is None else int(float(one[1])) for one in found)
        return guessed, accepted

    async def land(self, instance: str, token_ids: Sequence[int], last: int | None) -> Landed:
        """What the instance sends of these tokens, which nobody will load."""
        landed = await self.hand.land(instance, "a1", token_ids, last_token=last)
        await self.hand.drop(landed)
        return landed


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sites(models_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Sites]:
    def engines(node: str, role: str) -> list[dict[str, Any]]:
        guesses = f'{{"method": "mtp", "num_speculative_tokens": {NUM_GUESSES[node]}}}'
        drafts = {"draft": ("--speculative-config", guesses), "plain": ()}
        return [
            {"name": f"{node}-{name}", "role": role, "args": args} for name, args in drafts.items()
        ]

    spec = demo_region(
        TINY_DRAFT,
        build_model(TINY_DRAFT, models_dir),
        threshold_tokens=100,
        prefix_caching=False,
        local_prefill=False,
    )
    spec = with_engines(spec, {"a1": engines("a1", "prefill"), "b1": engines("b1", "decode")})
    folder = tmp_path_factory.mktemp("drafts")
    async with (
        running(spec, folder / "region") as region,
        part_gateways(region, MODEL, folder) as gateways,
    ):
        hand = Handoff(region, MODEL, gateways.session)
        yield Sites(gateways, hand)
        await hand.close()


async def decided(sites: Sites) -> dict[str, tuple[DemoRequest, list[int]]]:
    """Requests of which an engine without a drafter is sure, and what it answers to them."""
    asked = [prompt(f"{length}", length, 500 + length) for length in LENGTHS]
    url = await sites.gateways.url("a1-plain", "b1-plain")

    def check(request: DemoRequest, answer: Answer) -> None:
        assert not answer.error, answer.error

    chosen, answers = await decided_answers(url, TINY_DRAFT, asked, check)
    return {one.name: (one, list(answers[one.name].token_ids)) for one in chosen}


@pytest.mark.shows(
    kind="full attention with gated delta net",
    dtype="bfloat16",
    prefill="TP 1",
    decode="TP 1",
    more="MTP with one and two guesses, or none, on each side",
)
async def test_a_drafter_changes_no_token_on_either_side(sites: Sites) -> None:
    sent: dict[tuple[str, str], list[int]] = {}
    for request, expected in (await decided(sites)).values():
        for pair in PAIRS:
            answer, nbytes = await sites.ask(pair, request)
            assert answer.token_ids == expected, (pair, request.name)
            sent.setdefault(pair, []).append(nbytes)
    # A landing has room for the drafter of any engine of its node, and the sender's fills it.
    assert sent["draft", "plain"] == sent["draft", "draft"]
    assert all(
        both > one for both, one in zip(sent["draft", "draft"], sent["plain", "draft"], strict=True)
    )


async def test_the_drafter_guesses_as_well_as_without_a_hand_off(sites: Sites) -> None:
    asked = [prompt(f"guess {n}", 130 + 15 * n, 900 + n) for n in range(NUM_ASKED)]
    guesses: dict[str, list[tuple[int, int]]] = {"alone": [], "draft": [], "plain": []}
    for request in asked:
        answers: set[tuple[int, ...]] = set()
        counted: dict[str, tuple[int, int]] = {}
        for way in guesses:
            before = await sites.guesses()
            if way == "alone":
                tokens = await sites.gateways.alone("b1-draft", request)
            else:
                tokens = list((await sites.ask((way, "draft"), request))[0].token_ids)
            after = await sites.guesses()
            answers.add(tuple(tokens))
            counted[way] = after[0] - before[0], after[1] - before[1]
        # In bfloat16 near ties may go either way, and then other tokens are guessed.
        if len(answers) == 1:
            for way, counts in counted.items():
                guesses[way].append(counts)
    assert len(guesses["alone"]) >= NUM_ASKED / 3
    shares = {
        way: sum(right for _, right in counts) / sum(guessed for guessed, _ in counts)
        for way, counts in guesses.items()
    }
    print("shares of right guesses:", shares, "of", len(guesses["alone"]))
    assert shares["alone"] > 0.25
    for (alone, alone_right), (guessed, right) in zip(
        guesses["alone"], guesses["draft"], strict=True
    ):
        assert right == alone_right
        # Behind a load, vLLM counts the guesses of one step more.
        assert guessed - alone in (0, NUM_GUESSES["b1"])
    # Without the drafter's KVCache of the prompt it guesses badly: that is what the landing brings.
    assert shares["plain"] < shares["alone"] - 0.1


@pytest.mark.shows(
    kind="full attention with gated delta net",
    dtype="bfloat16",
    prefill="TP 1",
    more="pages of the drafter, byte for byte",
)
async def test_the_last_slot_of_the_drafter_has_the_prompts_own_last_token(sites: Sites) -> None:
    """Of the prompt without its last token the drafter's pages are those of the whole prompt.

    It is computed in one chunk: at the end of any other chunk vLLM 0.32 lets the drafter see the
    prompt's last token instead of the next one (`prepare_next_token_ids_padded`).
    """
    tokens = list(text(400, seed=77).encode())
    one_more = (tokens[-1] + 1) % 64 + 32
    described = (await engine_status(sites.gateways.region, "a1", "a1-draft")).layout
    layer_types = [*TINY_DRAFT.config["layer_types"], "full_attention"]
    draft = len(layer_types) - 1

    async def drafted(token_ids: Sequence[int], last: int | None) -> dict[tuple[int, int], bytes]:
        landed = await sites.land("a1-draft", token_ids, last)
        found = items_of(described, layer_types, landed)
        return {(u, i): data for (layer, u, i), data in found.items() if layer == draft}

    whole = await drafted(tokens, one_more)
    right = await drafted(tokens[:-1], tokens[-1])
    sampled = await drafted(tokens[:-1], None)
    last = len(tokens) - 2
    assert right == {place: data for place, data in whole.items() if place[1] <= last}
    wrong = {item for (unit, item), data in sampled.items() if data != right[unit, item]}
    assert wrong == {last}


async def test_a_sender_without_the_drafter_leaves_zeros_behind(sites: Sites) -> None:
    tokens = list(text(300, seed=78).encode())
    full = await sites.land("a1-draft", tokens[:-1], tokens[-1])
    short = await sites.land("a1-plain", tokens[:-1], tokens[-1])
    assert short.landing.nbytes == full.landing.nbytes == full.result.nbytes
    num_sent = short.result.nbytes
    assert num_sent < full.result.nbytes
    assert not any(short.data[num_sent:])
    assert any(full.data[num_sent:])


async def test_engines_share_one_layout_and_hold_nothing_at_the_end(sites: Sites) -> None:
    engines = [
        engine
        for node in ("a1", "b1")
        for engine in (await agent_status(sites.gateways.region, node)).engines
    ]
    assert len(engines) == 4
    assert len({engine.layout_fingerprint for engine in engines}) == 1
    await everything_is_given_back(sites.gateways.region)
