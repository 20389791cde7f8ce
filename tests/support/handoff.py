"""One hand-off by hand, so that a test sees the bytes: prefill here, land there, load there."""

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from engine_region import granter_of

from deploy.gateway.grants import granted_job, reservation_grant
from deploy.region.launch.launcher import RunningRegion
from kvmanager.agent.client import AgentClient
from kvmanager.agent.messages import Reserve, ReserveReply, StatusReply
from kvmanager.hashing import token_digest
from kvmanager.landing import ReservedLanding, consumer_params, reserved_landing
from kvmanager.token_ids import TokenIds
from prfaas.engines.client import EngineHttp
from prfaas.engines.prefill_run import PrefillPlace, PrefillRunner
from prfaas.jobs import PrefillJob, PrefillResult

TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Landed:
    """KVCache in the receiving agent's arena. `data`: all of its bytes, in transfer order."""

    landing: ReservedLanding
    result: PrefillResult
    data: bytes

    @property
    def consumer_params(self) -> dict[str, Any]:
        """What makes an engine load it."""
        return consumer_params(self.landing.transfer_id, adapter=self.landing.adapter)


class Handoff:
    """Hand-offs from any instance of a region to its receiving node."""

    def __init__(self, region: RunningRegion, model: str, session: aiohttp.ClientSession) -> None:
        self._region = region
        self._model = model
        self._session = session
        self._receiver = AgentClient(region.agent_control("b1"), region.credentials("gateway"))
        self._granter = granter_of(region)
        self._runner = PrefillRunner()

    async def close(self) -> None:
        await self._runner.close()
        await self._receiver.close()

    async def land(
        self,
        instance: str,
        node: str,
        token_ids: Sequence[int],
        *,
        by_transport: bool = False,
        adapter: str = "",
        identity: str = "",
        last_token: int | None = None,
    ) -> Landed:
        """Let the instance prefill these tokens and send them to the receiving node. An instance of
        that node writes into the landing, unless `by_transport`. The landing is for the `identity`
        of the LoRA adapter of this name. `last_token` follows the tokens in the prompt.
        """
        digest = token_digest(token_ids).hex()
        grant = reservation_grant(self._granter, len(token_ids), digest, b"")
        wanted = Reserve(len(token_ids), 60.0, token_digest=digest, grant=grant)
        status = await self._receiver.status(TIMEOUT_S)
        used_map = _arena(status).with_suffix(".used")
        # An arena that is not kept has no map of its blocks, so the landing must be the first.
        while not used_map.exists() and status.free_bytes < status.arena_bytes:
            await asyncio.sleep(0.05)
            status = await self._receiver.status(TIMEOUT_S)
        used = _used(used_map)
        reply = await self._receiver.reserve(wanted, TIMEOUT_S)
        num_blocks = -(-reply.nbytes // status.block_bytes)
        blocks = sorted(_used(used_map) - used) if used_map.exists() else [*range(num_blocks)]
        landing = reserved_landing(reply, len(token_ids), digest, identity)
        agent = AgentClient(self._region.agent_control(node), self._region.credentials("gateway"))
        try:
            place = PrefillPlace(
                instance, self._http(instance), agent, asyncio.Event(), self._model
            )
            job = PrefillJob(
                request_id=f"by-hand-{reply.transfer_id[:8]}",
                prompt_token_ids=TokenIds.of(token_ids),
                landing=landing,
                adapter=adapter,
                last_token=TokenIds.of([] if last_token is None else [last_token]),
            )
            job = granted_job(self._granter, job)
            result = await self._runner.run(job, place, by_transport=by_transport)
        finally:
            await agent.close()
        return Landed(landing, result, _bytes(status, blocks, reply))

    async def load(self, instance: str, landed: Landed, token_ids: Sequence[int]) -> None:
        """Let the instance decode a token after loading what landed."""
        await self._http(instance).prefill(
            "by-hand", TokenIds.of(token_ids), landed.consumer_params, model=self._model
        )

    async def drop(self, landed: Landed) -> None:
        """Free a landing that nobody will load."""
        await self._receiver.cancel(landed.landing.transfer_id, "the test is over", TIMEOUT_S)

    def _http(self, instance: str) -> EngineHttp:
        access = self._region.engine_access()
        return EngineHttp(self._region.engine(instance).address, self._session, access)


# Only engines are told where a landing is, and a landing belongs to the engine that is told. So
# this looks at the files of the agent's arena.


def _arena(status: StatusReply) -> Path:
    maps = Path(f"/proc/{status.pid}/maps").read_text().splitlines()
    return next(Path(line.split()[-1]) for line in maps if line.endswith(".arena"))


def _used(used_map: Path) -> set[int]:
    """The blocks of a kept arena that are in use."""
    used = used_map.read_bytes() if used_map.exists() else b""
    return {block for block, is_used in enumerate(used) if is_used}


def _bytes(status: StatusReply, blocks: list[int], reply: ReserveReply) -> bytes:
    size = status.block_bytes
    assert len(blocks) == -(-reply.nbytes // size), "something else has taken blocks meanwhile"
    with _arena(status).open("rb") as file:
        data = b"".join(os.pread(file.fileno(), size, block * size) for block in blocks)
    return data[: reply.nbytes]
