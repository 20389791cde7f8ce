"""Doubles on loopback: an engine's OpenAI server and a node agent's control port.

They compute and move nothing. For tests of fronts and gateways; what only real engines and agents
can show is tested with those.
"""

import asyncio
import inspect
import math
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, get_type_hints

import msgspec
from aiohttp import web
from eventually import eventually
from openai_engine import OpenAiEngine
from report_cases import agent_status

from kvmanager.agent.embeddings.messages import HasEmbeddings, HasEmbeddingsReply
from kvmanager.agent.messages import (
    SERVICE,
    Await,
    CacheModel,
    Cancel,
    CancelReply,
    EmbeddingStatus,
    EncoderStatus,
    EngineStatus,
    OpenOutbox,
    OpenOutboxReply,
    Renew,
    RenewReply,
    Reserve,
    ReserveReply,
    Status,
    StatusReply,
    TransferReport,
)
from kvmanager.hashing import split_keys, token_digest
from kvmanager.landing import ReservedLanding
from kvmanager.load_times import LoadTimes
from kvmanager.media_items import MediaItem
from kvmanager.token_ids import TokenIds
from prfaas.engines.instance import InstanceSpec
from prfaas.jobs import PrefillJob
from transport.rpc import Method, RpcError, RpcServer

FINGERPRINT = "ab" * 32
BYTES_PER_TOKEN = 512


async def looked_at(engine: "FakeEngine") -> None:
    """Wait until a front that drains the engine has seen twice in a row that it does nothing, which
    is what the front waits for.
    """
    # It also looks by itself, at less than half of the rate.
    wanted = engine.num_looks + 8
    await eventually(lambda: engine.num_looks >= wanted)


def prefill_job(
    number: int, *, num_tokens: int = 8, priority: int = 0, model: str = ""
) -> PrefillJob:
    """A job whose landing is where nobody listens; the fakes never connect."""
    token_ids = TokenIds.of([number % 256] * num_tokens)
    landing = ReservedLanding(
        transfer_id=f"{number:032x}",
        token="cd" * 32,
        nbytes=num_tokens * BYTES_PER_TOKEN,
        num_tokens=num_tokens,
        host="127.0.0.1",
        port=9,
        layout_fingerprint=FINGERPRINT,
        token_digest=token_digest(token_ids).hex(),
    )
    return PrefillJob(
        request_id=f"r{number}",
        prompt_token_ids=token_ids,
        landing=landing,
        priority=priority,
        model=model,
    )


def image_part(name: str) -> dict[str, Any]:
    """An image in a chat, as the gateway passes it on."""
    return {
        "type": "image_url",
        "image_url": {"url": f"data:image/png;base64,{name}"},
        "uuid": name,
    }


def image_job(number: int, *names: str, model: str = "") -> PrefillJob:
    """A job whose prompt has these images, each of two tokens."""
    job = prefill_job(number, num_tokens=2 * len(names) + 4, model=model)
    media = tuple(MediaItem(name, 2 * index, 2) for index, name in enumerate(names))
    digest = token_digest(job.prompt_token_ids, media).hex()
    content = [image_part(name) for name in names]
    chat = {"messages": [{"role": "user", "content": [*content, {"type": "text", "text": "?"}]}]}
    return msgspec.structs.replace(
        job,
        media=media,
        chat=msgspec.json.encode(chat),
        landing=msgspec.structs.replace(job.landing, token_digest=digest),
    )


def encoded_names(engine: "FakeEngine") -> list[str]:
    """The images of the chats that an engine got with one medium alone, in their order."""
    found = []
    for body in engine.posted:
        parts = body["messages"][0]["content"]
        if [part["type"] for part in parts] == ["image_url"]:
            found.append(parts[0]["uuid"])
    return found


def methods_of(double: object) -> dict[str, Method[Any, Any]]:
    """What a double of an agent answers: its methods from one message to another. A method's name
    at an agent is that of its request.
    """
    found: dict[str, Method[Any, Any]] = {}
    for _, handler in inspect.getmembers(double, inspect.iscoroutinefunction):
        *asked, reply = get_type_hints(handler).values()
        if len(asked) == 1 and isinstance(asked[0], type) and issubclass(asked[0], msgspec.Struct):
            found[asked[0].__name__] = Method(asked[0], reply, handler)
    return found


@dataclass(slots=True)
class _End:
    """One end of a transfer."""

    nbytes: int
    state: str = "open"
    error: str = ""
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def become(self, state: str, error: str = "") -> None:
        self.state, self.error = state, error
        self.changed.set()


class FakeAgent:
    """A node agent without an arena. `outboxes` and `landings` are what it holds now.

    `outbox_room`, `landing_room`: how many of each it has memory for. `renewals` counts calls,
    `num_awaiting` those that wait for an end now. `cached_tokens`: what landings with block keys
    build on; `cache_model`: how its engines say that they cache; `kv_block_bytes`: what a block of
    theirs holds. `landing_bytes` of its 1 MiB hold landings of others; `tells_room` is False for an
    agent of a version that does not say what is left. `fingerprints` has the KVCache layouts of
    instances whose layout is not `fingerprint`, and `model` is what they serve. `prefill_s` is what
    its engines say that a prefill took, `load_times` what they say of every landing.
    """

    def __init__(self, *instances: str) -> None:
        self.instances = list(instances)
        self.kv_block_bytes = 0
        self.fingerprint, self.weights = FINGERPRINT, "weights-1"
        self.fingerprints: dict[str, str] = {}
        self.model = ""
        self.adapters: dict[str, str] = {}
        self.embeddings: EmbeddingStatus | None = None
        self.encoder = ""
        """What its engines say that the keys of their embeddings are made of."""
        self.has: dict[bytes, int] = {}
        """The embeddings that it has, and their bytes."""
        self.asked_for: list[bytes] = []
        """Keys of embeddings that somebody has asked for."""
        self.landing_bytes = 0
        self.tells_room = True
        self.outboxes: dict[str, _End] = {}
        self.landings: dict[str, Reserve] = {}
        self.num_awaiting = 0
        self._landing_ends: dict[str, _End] = {}
        self.cancelled: list[str] = []
        self.renewals = 0
        self.max_lease_s = math.inf
        self.prefill_s = 1e-6
        self.load_times: LoadTimes | None = None
        self.outbox_room = 100
        self.landing_room = 100
        self.cached_tokens = 0
        self.cache_model: CacheModel | None = None
        self._by_transport: set[str] = set()
        self.grants: list[bytes] = []
        """The grants of the outboxes that were opened."""
        self.before_reply: Callable[[str], Any] | None = None
        self._server: RpcServer | None = None
        self.target = ""

    async def start(self, bind: str = "127.0.0.1:0") -> "FakeAgent":
        """Serve; `target` is the address afterwards."""
        self._server = RpcServer(bind, {SERVICE: methods_of(self)})
        self.target = f"127.0.0.1:{await self._server.start()}"
        return self

    async def stop(self) -> None:
        """Be gone."""
        if self._server is not None:
            await self._server.stop(grace_s=0)

    def end_outbox(self, transfer_id: str, state: str, error: str = "") -> None:
        """Let an outbox end as the transport would report it."""
        self.outboxes[transfer_id].become(state, error)

    def end_landing(self, transfer_id: str, state: str, error: str = "") -> None:
        """The same for a landing."""
        self._landing_ends[transfer_id].become(state, error)

    @property
    def landing_room_bytes(self) -> int | None:
        held = sum(landing.num_tokens for landing in self.landings.values()) * BYTES_PER_TOKEN
        return (1 << 20) - self.landing_bytes - held if self.tells_room else None

    async def _reserve(self, request: Reserve) -> ReserveReply:
        await self._pause("Reserve")
        if len(self.landings) >= self.landing_room:
            raise RpcError("NO_ROOM", "the landing cap is reached")
        transfer_id = uuid.uuid4().hex
        self.landings[transfer_id] = request
        self._landing_ends[transfer_id] = _End(request.num_tokens * BYTES_PER_TOKEN)
        return ReserveReply(
            transfer_id=transfer_id,
            token="cd" * 32,
            nbytes=request.num_tokens * BYTES_PER_TOKEN,
            host="127.0.0.1",
            port=9,
            layout_fingerprint=request.layout_fingerprint or self.fingerprint,
            lease_s=min(request.lease_s, self.max_lease_s),
            cached_tokens=self.cached_tokens if request.block_keys else 0,
            landing_room_bytes=self.landing_room_bytes,
        )

    async def _renew(self, request: Renew) -> RenewReply:
        self.renewals += 1
        await self._pause("Renew")
        if request.transfer_id not in self.landings and request.transfer_id not in self.outboxes:
            raise RpcError("NOT_FOUND", "no live transfer")
        return RenewReply(min(request.lease_s, self.max_lease_s))

    async def _cancel(self, request: Cancel) -> CancelReply:
        self.cancelled.append(request.transfer_id)
        outbox = self.outboxes.pop(request.transfer_id, None)
        if outbox is not None:
            outbox.become("cancelled")
        landing = self.landings.pop(request.transfer_id, None)
        if landing is not None:
            self._landing_ends[request.transfer_id].become("cancelled")
        cancelled = outbox is not None or landing is not None
        return CancelReply(cancelled, self.landing_room_bytes, self.load_times)

    async def _open_outbox(self, request: OpenOutbox) -> OpenOutboxReply:
        await self._pause("OpenOutbox")
        self.grants.append(request.grant)
        if request.instance not in self.instances:
            raise RpcError("NOT_FOUND", f"engine {request.instance} is not connected")
        if len(self.outboxes) >= self.outbox_room:
            raise RpcError("NO_ROOM", "the arena is full")
        self.outboxes[request.transfer_id] = _End(request.nbytes)
        if request.by_transport:
            self._by_transport.add(request.transfer_id)
        return OpenOutboxReply(lease_s=min(request.lease_s, self.max_lease_s), attempt=1)

    async def _await(self, request: Await) -> TransferReport:
        is_landing = request.kind == "landing"
        ends = self._landing_ends if is_landing else self.outboxes
        end = ends.get(request.transfer_id)
        if end is None:
            raise RpcError("NOT_FOUND", "unknown transfer")
        self.num_awaiting += 1
        try:
            async with asyncio.timeout(request.timeout_s):
                await end.changed.wait()
        except TimeoutError:
            pass
        finally:
            self.num_awaiting -= 1
        done = end.state == "complete"
        if end.state != "open" and not is_landing:
            self.outboxes.pop(request.transfer_id, None)
        return TransferReport(
            transfer_id=request.transfer_id,
            kind="landing" if is_landing else "outbox",
            state=end.state,  # type: ignore[arg-type]
            nbytes=end.nbytes,
            error=end.error,
            acked_bytes=end.nbytes if done else 0,
            sent_bytes_at_prefill_end=end.nbytes // 2 if done else 0,
            prefill_end_to_complete_s=0.125 if done else 0.0,
            prefill_s=self.prefill_s if done else 0.0,
            progress=((0.5, end.nbytes, end.nbytes // 2),) if done else (),
            hand_off="arena" if self._is_here(request.transfer_id) else "transport",
        )

    def _is_here(self, transfer_id: str) -> bool:
        return transfer_id in self.landings and transfer_id not in self._by_transport

    async def _has_embeddings(self, request: HasEmbeddings) -> HasEmbeddingsReply:
        keys = split_keys(request.keys)
        self.asked_for += keys
        return HasEmbeddingsReply([self.has.get(key, 0) for key in keys])

    async def _status(self, _request: Status) -> StatusReply:
        await self._pause("Status")
        engines = [
            EngineStatus(
                instance=name,
                num_connections=2,
                tp_size=1,
                layout="fake",
                layout_fingerprint=self.fingerprints.get(name, self.fingerprint),
                cache=self.cache_model,
                kv_block_bytes=self.kv_block_bytes,
                model=self.model,
                weights=self.weights,
                adapters=self.adapters,
            )
            for name in self.instances
        ]
        return agent_status(
            arena_bytes=1 << 20,
            free_bytes=1 << 20,
            landing_bytes=self.landing_bytes,
            landing_cap_bytes=1 << 20,
            engines=engines,
            data_endpoint="127.0.0.1:9",
            landing_room_bytes=self.landing_room_bytes,
            embeddings=self.embeddings,
            encoders=[EncoderStatus(name, 2, self.encoder) for name in self.instances]
            if self.encoder
            else [],
        )

    async def _pause(self, method: str) -> None:
        if self.before_reply is not None:
            await self.before_reply(method)


class FakeEngine(OpenAiEngine):
    """Answers prefills at once; with an agent it lets their transfers complete.

    With `keeps_kvcache` it has a NixlConnector.
    """

    def __init__(self, agent: FakeAgent | None = None) -> None:
        super().__init__()
        self.agent = agent
        self.completes_transfer = True
        self.keeps_kvcache = True

    def spec(self, name: str, role: str, **fields: Any) -> InstanceSpec:
        """What a front knows of it."""
        assert self.agent is not None
        known = {"name": name, "url": self.url, "agent": self.agent.target, "role": role}
        return InstanceSpec.model_validate(known | fields)

    async def answer(self, request: web.Request, body: dict[str, Any]) -> web.Response:
        await self.first_token.wait()
        asked = body.get("kv_transfer_params", {})
        transfer_id = asked.get("prfaas", {}).get("transfer_id", "")
        if self.completes_transfer and self.agent and transfer_id in self.agent.outboxes:
            self.agent.end_outbox(transfer_id, "complete")
        usage = {
            "prompt_tokens": len(body.get("prompt", ())),
            "prompt_tokens_details": {"cached_tokens": 3},
        }
        answer: dict[str, Any] = {"choices": [], "usage": usage}
        if self.keeps_kvcache and asked.get("do_remote_decode"):
            answer["kv_transfer_params"] = {"do_remote_prefill": True, "remote_block_ids": [[1]]}
        return web.json_response(answer)
