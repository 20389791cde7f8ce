"""Prompts that are timed on an idle engine: what is sent, and when it ends early."""

from __future__ import annotations

import asyncio
from typing import Any

from kvmanager.token_ids import TokenIds
from prfaas.engines.client import EngineLoad, EnginePrefill
from prfaas.engines.errors import EngineUnreachable
from prfaas.engines.instance import Instance, InstanceSpec
from prfaas.engines.timing import NUM_IDS, TimingOrder, time_prefills

ORDER = TimingOrder(instance="p0", lengths=(16, 16, 64), limit_s=5.0)


class Engine:
    """Stands in for `EngineHttp`. `loads` are what it reports, the last one for ever."""

    def __init__(self, *loads: int) -> None:
        self.loads = list(loads) or [0]
        self.prompts: list[TokenIds] = []
        self.salts: list[Any] = []
        self.error: Exception | None = None
        self.gate = asyncio.Event()
        self.gate.set()

    async def load(self) -> EngineLoad:
        num = self.loads.pop(0) if len(self.loads) > 1 else self.loads[0]
        return EngineLoad(
            num_running=num, num_waiting=0, num_deferred=0, kv_usage=0.0, num_kv_blocks=0
        )

    async def prefill(
        self, request_id: str, token_ids: TokenIds, params: dict[str, Any], **fields: Any
    ) -> EnginePrefill:
        assert params == {}
        assert fields["model"] == "tiny"
        self.prompts.append(token_ids)
        self.salts.append(fields["cache_salt"])
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return EnginePrefill(num_prompt_tokens=len(token_ids), cached_tokens=0)


def on(engine: Engine) -> Instance:
    spec = InstanceSpec(name="p0", agent="h:1", url="http://h:2", model="tiny")
    http: Any = engine
    agent: Any = None
    return Instance(spec, http, agent)


async def test_prompts_are_new_to_every_cache() -> None:
    engine = Engine()
    found = await time_prefills(on(engine), ORDER)
    assert [num for num, _ in found.prefills] == [16, 16, 64]
    assert all(seconds > 0 for _, seconds in found.prefills)
    assert found.reason == ""
    assert len({item.packed[:64] for item in engine.prompts}) == 3
    assert len(set(engine.salts)) == 3
    assert all(0 <= one < NUM_IDS for item in engine.prompts for one in item.tolist())


async def test_work_that_comes_meanwhile_goes_first() -> None:
    engine = Engine(0, 0, 1)
    found = await time_prefills(on(engine), ORDER)
    assert [num for num, _ in found.prefills] == [16, 16]
    assert found.reason == "p0 is busy"


async def test_an_engine_that_fails_or_hangs_keeps_what_was_timed() -> None:
    engine = Engine()
    engine.error = EngineUnreachable("gone")
    found = await time_prefills(on(engine), ORDER)
    assert (found.prefills, found.reason) == ((), "p0: gone")
    engine.error = None
    engine.gate.clear()
    order = TimingOrder(instance="p0", lengths=(16,), limit_s=0.01)
    found = await time_prefills(on(engine), order)
    assert (found.prefills, found.reason) == ((), "p0 took longer than 0.01 s")
