"""Conversations of several turns: each prompt is the one before, its answer, and something new."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from engine_region import (
    agent_status,
    ask_region,
    prompt,
    reference_answers,
    settled_record,
    until,
)

from deploy.lab.demo.answers import Answer
from deploy.lab.demo.scenario import DemoRequest
from deploy.region.launch.launcher import RunningRegion
from deploy.region.launch.running import RunningProcess
from kvmanager.agent.messages import CacheModel
from kvmanager.pool.shape import PartKind
from transport.rpc import RpcError

TURNS = ((1500, 0), (400, 5), (300, 4), (350, 0))
"""How many tokens each turn adds to what was said before, and which draw of their text to try
first: one that the recurrent model is sure of.
"""


async def expected_turns(
    url: str, model: str, new: Sequence[tuple[int, int]], *, seed: int
) -> tuple[list[DemoRequest], list[Answer]]:
    """The turns of one conversation as the engine at `url` holds it."""
    said, turns, answers = "", [], []
    for index, (num_new, draw) in enumerate(new):
        turn = prompt(f"turn {index + 1}", len(said) + num_new, seed + index, prefix=said)
        drawn = [turn.redrawn(draw)]
        asked, got = await reference_answers(url, model, drawn)
        turns += asked
        answers.append(got[turn.name])
        # The demo's tokenizer makes one token of each byte.
        said = asked[0].prompt + bytes(got[turn.name].token_ids).decode()
    return turns, answers


@dataclass(slots=True)
class Talk:
    """One conversation with a region, and what the gateway noted of each turn so far."""

    model: str
    region: RunningRegion
    turns: list[DemoRequest]
    expected: list[Answer]
    held: list[dict[str, Any]] = field(default_factory=list)

    async def next_turn(self) -> dict[str, Any]:
        """Hold one more turn, check its tokens; the gateway's record once it has settled."""
        index = len(self.held)
        turn, expected = self.turns[index], self.expected[index]
        answer = (await ask_region(self.region, self.model, [turn]))[turn.name]
        assert not answer.error, answer.error
        assert answer.token_ids == expected.token_ids, turn.name
        record = await settled_record(self.region, answer.request_id)
        assert record["route"] == "prefill_cluster", (record["reason"], record["numbers"])
        assert not record.get("prefill_error"), record["prefill_error"]
        self.held.append(record)
        return record

    async def assert_only_the_new(self, record: dict[str, Any]) -> None:
        """Of the last turn, only what follows the last full block of the one before was computed,
        and its full-attention KVCache sent.
        """
        model = await cache_model(self.region)
        turn = len(self.held) - 1
        # The decode engine computes the last token of every prompt itself.
        before, now = self.turns[turn - 1].num_bytes - 1, self.turns[turn].num_bytes - 1
        known = before // model.block_tokens * model.block_tokens
        assert record["cached_tokens"] >= known, record
        assert record["landing_cached_tokens"] >= known, record
        assert record["transfer_bytes"] <= most_bytes(model, now - known), record


async def kill(region: RunningRegion, *processes: RunningProcess) -> None:
    """Kill them, and return when all is as it was."""
    connected = await num_connections(region)
    for process in processes:
        await process.kill()
    for process in processes:
        await process.wait_restarted(180)

    async def engines_are_connected() -> bool:
        # Until then nothing can land, and prompts stay local.
        try:
            return await num_connections(region) == connected
        except RpcError:
            return False

    await until(engines_are_connected, "every engine is connected to its agent", 180)
    await region.wait_settled(60)


async def num_connections(region: RunningRegion) -> dict[str, int]:
    """Of each engine instance, a worker's and a scheduler's."""
    states = [await agent_status(region, node) for node in ("a1", "b1")]
    return {e.instance: e.num_connections for state in states for e in state.engines}


async def cache_model(region: RunningRegion) -> CacheModel:
    status = await agent_status(region, "b1")
    model = status.engines[0].cache
    assert model is not None
    return model


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
