"""Conversations of several turns: each prompt is the one before, its answer, and something new."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from engine_region import ask_at, engine_status, prompt, reference_answers, settled_record_at

from deploy.lab.demo.answers import Answer
from deploy.lab.demo.scenario import DemoRequest
from deploy.region.launch.launcher import RunningRegion
from kvmanager.agent.messages import CacheModel
from kvmanager.pool.shape import PartKind

TURNS = ((1500, 0), (400, 5), (300, 4))
"""How many tokens each turn adds to what was said before, and which draw of their text to try
first: one that the recurrent model is sure of.
"""
TURNS_OVER_SLOW_LINK = (*TURNS[:2], (1500, 0), (2000, 0))
"""The last two are above the threshold of a link that was slow, or down."""


def next_turn(
    name: str, before: DemoRequest, answer: Answer, num_new: int, seed: int
) -> DemoRequest:
    """The turn that follows `before` and its answer with `num_new` tokens more."""
    # The demo's tokenizer makes one token of each byte.
    said = before.prompt + bytes(answer.token_ids).decode()
    return prompt(name, len(said) + num_new, seed, prefix=said)


async def expected_turns(
    url: str, model: str, new: Sequence[tuple[int, int]], *, seed: int
) -> tuple[list[DemoRequest], list[Answer]]:
    """The turns of one conversation as the engine at `url` holds it."""
    turns: list[DemoRequest] = []
    answers: list[Answer] = []
    for index, (num_new, draw) in enumerate(new):
        name = f"turn {index + 1}"
        if turns:
            turn = next_turn(name, turns[-1], answers[-1], num_new, seed + index)
        else:
            turn = prompt(name, num_new, seed)
        asked, got = await reference_answers(url, model, [turn.redrawn(draw)])
        turns += asked
        answers.append(got[name])
    return turns, answers


@dataclass(slots=True)
class Talk:
    """One conversation with the gateway at `url`, and what that noted of each turn so far. The
    instance `decode` of the node b1 answers.
    """

    model: str
    region: RunningRegion
    url: str
    decode: str
    turns: list[DemoRequest]
    expected: list[Answer]
    held: list[dict[str, Any]] = field(default_factory=list)

    async def next_turn(self) -> dict[str, Any]:
        """Hold one more turn, check its tokens; the gateway's record once it has settled."""
        index = len(self.held)
        turn, expected = self.turns[index], self.expected[index]
        answer = (await ask_at(self.url, self.model, [turn]))[turn.name]
        assert not answer.error, answer.error
        assert answer.token_ids == expected.token_ids, turn.name
        record = await settled_record_at(self.url, answer.request_id)
        assert record["route"] == "prefill_cluster", (record["reason"], record["numbers"])
        assert not record.get("prefill_error"), record["prefill_error"]
        self.held.append(record)
        return record

    async def assert_only_the_new(self, record: dict[str, Any]) -> None:
        """Of the last turn, only what follows the last full block of the one before was computed,
        and its full-attention KVCache sent.
        """
        cache = await cache_of(self.region, self.decode)
        turn = len(self.held) - 1
        known = sends_only_the_new(cache, record, self.turns[turn - 1], self.turns[turn])
        assert record["cached_tokens"] >= known, record


def sends_only_the_new(
    cache: CacheModel, record: dict[str, Any], before: DemoRequest, now: DemoRequest
) -> int:
    """Fails unless a turn's transfer had only what follows the last full block of the turn before.
    Returns the number of tokens up to there.
    """
    # The decode engine computes the last token of every prompt itself.
    known = (before.num_bytes - 1) // cache.block_tokens * cache.block_tokens
    assert record["landing_cached_tokens"] >= known, record
    assert 0 < record["transfer_bytes"] <= most_bytes(cache, now.num_bytes - 1 - known), record
    return known


async def cache_of(region: RunningRegion, instance: str) -> CacheModel:
    """How an engine of the node b1 caches prompts."""
    cache = (await engine_status(region, "b1", instance)).cache
    assert cache is not None
    return cache


def most_bytes(model: CacheModel, num_new_tokens: int) -> int:
    """The KVCache of the new tokens, the final windows and states, in whole blocks."""
    num_blocks = -(-num_new_tokens // model.block_tokens)
    total = 0
    for kind, nbytes, window_tokens in model.parts:
        if kind == PartKind.KV:
            total += num_blocks * nbytes
        elif kind == PartKind.WINDOW:
            total += (-(-window_tokens // model.block_tokens) + 1) * nbytes
        else:
            total += nbytes
    return total
