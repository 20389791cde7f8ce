"""The connector's scheduler half over a client that stands for the agent's, and requests for it."""

from types import SimpleNamespace
from typing import Any

from simple_layouts import paged, state

from kvmanager.agent.engines.protocol import (
    CacheFound,
    CacheSlots,
    Landed,
    OutboxOpened,
    Welcome,
)
from kvmanager.hashing import token_digest
from kvmanager.layout import KVGroup, KVKind, KVLayout
from kvmanager.pool.placement import StatePlacement
from kvmanager.vllm_connector.cache.scheduler import PrefixCacheOptions
from kvmanager.vllm_connector.metadata import PrfaasMetadata
from kvmanager.vllm_connector.scheduler import SchedulerSide
from kvmanager.vllm_connector.weights import Adapters

LAYOUT = KVLayout(
    "m",
    "files:0",
    "digest",
    1,
    (
        KVGroup(KVKind.FULL, 16, (paged("full", 100),)),
        KVGroup(KVKind.WINDOW, 16, (paged("window", 100),), window_tokens=32),
        KVGroup(KVKind.RECURRENT, 1, (state("state", 100),)),
    ),
)
TRANSFER = bytes(range(16))
BLOCK_TABLES = ([10, 11, 12, 13, 14], [20, 21, 22, 23, 24], [30, 31, 32, 33, 34])
ALLOCATED: Any = SimpleNamespace(get_block_ids=lambda: BLOCK_TABLES)


class AnsweringClient:
    """Stands for the agent's client: answers `connected`, remembers what was said."""

    def __init__(self, connected: bool = True) -> None:
        self.connected = connected
        self.said: list[tuple[str, bytes]] = []

    def start(self, events: object) -> None: ...
    def close(self) -> None: ...

    def watch(self, transfer_id: bytes) -> bool:
        self.said.append(("watch", transfer_id))
        return self.connected

    def release(self, transfer_id: bytes) -> bool:
        self.said.append(("release", transfer_id))
        return self.connected


class CachingClient(AnsweringClient):
    """An agent that has the first `num_blocks` blocks of every prompt, and no memory to give."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.num_blocks = num_blocks
        self.handles: list[int] = []
        self.side: SchedulerSide | None = None

    def cache_find(self, handle: int, keys: list[bytes]) -> bool:
        self.handles.append(handle)
        return True

    def cache_free(self, handle: int) -> bool:
        self.handles.remove(handle)
        return True

    def cache_reserve(self, handle: int, *arguments: Any, **named: Any) -> bool:
        assert self.side is not None
        self.side.on_cache_slots(CacheSlots(handle, []))
        return True

    def answer(self) -> None:
        assert self.side is not None
        n = self.num_blocks
        slots = [(block, 0, [(block, 1)]) for block in range(n)]
        slots += [(block, 1, [(10 + block, 1)]) for block in range(max(0, n - 2), n)]
        slots += [(n - 1, 2, [(20, 1)])]
        self.side.on_cache_found(CacheFound(self.handles[-1], n, n, slots))


def scheduler_side(
    client: AnsweringClient,
    landing_timeout_s: float = 60,
    adapters: Adapters | None = None,
    is_lossy: bool = False,
    **roles: bool,
) -> SchedulerSide:
    spec = SimpleNamespace(block_size=16)
    config: Any = SimpleNamespace(
        transfer_groups=[SimpleNamespace(kv_cache_spec=spec)] * 3,
        transfer_group_ids=(0, 1, 2),
        select_transfer_block_ids=tuple,
    )
    any_client: Any = client
    side = SchedulerSide(
        LAYOUT,
        config,
        any_client,
        mamba_cache_mode="align",
        landing_timeout_s=landing_timeout_s,
        produces=roles.get("produces", True),
        consumes=roles.get("consumes", True),
        cache=PrefixCacheOptions(b"n" * 32)
        if isinstance(client, CachingClient)
        else PrefixCacheOptions(),
        adapters=adapters,
    )
    side.start()
    if isinstance(client, CachingClient):
        client.side = side
    arena: Any = None
    placement = StatePlacement()
    welcome = Welcome("e1", "/arena", 1 << 20, 4096, placement, is_lossy=is_lossy)
    side.on_connected(welcome, arena)
    return side


def request(role: str, num_prompt_tokens: int, *, said: Any = None, **changes: Any) -> Any:
    """A request of that many prompt tokens whose transfer holds all of them (producer) or all but
    the last (consumer). `changes` are of its parameters, and `said` of what the agent says of the
    transfer.
    """
    tokens = list(range(num_prompt_tokens))
    params: dict[str, Any] = {"role": role, "transfer_id": TRANSFER.hex()}
    about: dict[str, Any] = {"transfer_id": TRANSFER, "runs": [(0, 4)], "window_step": 16}
    if role == "producer":
        params["attempt"] = 1
        kind: Any = OutboxOpened
        about |= {"attempt": 1, "num_tokens": num_prompt_tokens}
    else:
        kind, held = Landed, tokens[:-1]
        about |= {"num_tokens": len(held), "token_digest": token_digest(held)}
    return SimpleNamespace(
        request_id="r1",
        prompt_token_ids=tokens,
        all_token_ids=tokens,
        prompt_embeds=None,
        pooling_params=None,
        resumable=False,
        skip_reading_prefix_cache=False,
        cache_salt=None,
        lora_request=None,
        mm_features=[],
        status=SimpleNamespace(name="FINISHED_ABORTED"),
        kv_transfer_params={"prfaas": params | changes},
        said=kind(**(about | (said or {}))),
    )


def arrive(side: SchedulerSide, asked: Any) -> None:
    """The request comes to the engine. The agent has told it of an outbox before."""
    if isinstance(asked.said, OutboxOpened):
        side.on_outbox_opened(asked.said)
    side.on_new_request(asked)


def step(side: SchedulerSide, scheduled: dict[str, tuple[int, int]], *new: str) -> PrfaasMetadata:
    """One engine step; `scheduled` maps a request to (tokens computed before, tokens now). Those in
    `new` are computed for the first time.
    """
    known = [name for name in scheduled if name not in new]
    output: Any = SimpleNamespace(
        total_num_scheduled_tokens=sum(now for _, now in scheduled.values()),
        num_scheduled_tokens={name: now for name, (_, now) in scheduled.items()},
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, num_computed_tokens=scheduled[name][0]) for name in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=known, num_computed_tokens=[scheduled[name][0] for name in known]
        ),
        kv_connector_block_state=SimpleNamespace(
            get_block_ids=lambda name: BLOCK_TABLES, boundary_state_offloads={}
        ),
        preempted_req_ids=None,
    )
    return side.build_connector_meta(output)


def finish_load(side: SchedulerSide, request_id: str = "r1") -> None:
    output: Any = SimpleNamespace(finished_recving={request_id})
    side.update_connector_output(output)


def check_never_loads(said: dict[str, Any]) -> None:
    """A landing of which the agent says this instead is given back and not loaded."""
    client = AnsweringClient()
    side = scheduler_side(client)
    consumer = request("consumer", 71, said=said)
    arrive(side, consumer)
    side.on_landed(consumer.said)
    assert side.get_num_new_matched_tokens(consumer, 0) == (0, False)
    assert client.said == [("watch", TRANSFER), ("release", TRANSFER)]
