"""The scheduler's side of the prefix cache with an agent and an engine that are driven by hand."""

import threading
from types import SimpleNamespace
from typing import Any

from simple_layouts import paged, state

from kvmanager.agent.engines.protocol import CacheFound, CacheSlots, Slot, Welcome
from kvmanager.layout import KVGroup, KVKind, KVLayout
from kvmanager.pool.placement import StatePlacement
from kvmanager.pool.shape import CacheShape
from kvmanager.vllm_connector.cache.plan import CachePages
from kvmanager.vllm_connector.cache.scheduler import CacheScheduler, PrefixCacheOptions
from kvmanager.vllm_connector.metadata import StoreStep
from kvmanager.vllm_connector.weights import Adapters

NAMESPACE = b"n" * 32
LAYERS = (paged("layer", 100),)
FULL = KVGroup(KVKind.FULL, 16, LAYERS)
WINDOW = KVGroup(KVKind.WINDOW, 16, LAYERS, window_tokens=33)
STATE = KVGroup(KVKind.RECURRENT, 1, (state("layer", 100),))
HYBRID = (FULL, WINDOW, STATE)
"""Blocks of 16 tokens; a boundary needs the windows of its last two and one state."""
SHORT_WINDOW = (FULL, KVGroup(KVKind.WINDOW, 16, LAYERS, window_tokens=33))
"""Blocks of 64 tokens, of which the window needs the last two pages."""
KV, WIN, ST = 0, 1, 2
TABLE_PAGES = 40


def layout_of(*groups: KVGroup) -> KVLayout:
    return KVLayout("m", "files:0", "digest", 1, groups)


def tables_of(layout: KVLayout) -> list[list[int]]:
    """Page p of group g is engine block 100 g + p + 1."""
    return [[100 * g + p + 1 for p in range(TABLE_PAGES)] for g in range(len(layout.groups))]


class RecordingAgent:
    """The client as the scheduler's side sees it; says what an agent would when told to."""

    def __init__(self) -> None:
        self.connected = True
        self.said: list[tuple[Any, ...]] = []
        self.reserved: list[SimpleNamespace] = []

    def cache_find(self, handle: int, keys: list[bytes]) -> bool:
        self.said.append(("find", handle, len(keys)))
        return self.connected

    def cache_free(self, handle: int) -> bool:
        self.said.append(("free", handle))
        return self.connected

    def cache_cancel(self, handle: int) -> bool:
        self.said.append(("cancel", handle))
        return self.connected

    def cache_reserve(self, handle: int, keys: Any, parts: Any, **named: Any) -> bool:
        self.said.append(("reserve", handle))
        self.reserved.append(
            SimpleNamespace(handle=handle, keys=list(keys), parts=list(parts), **named)
        )
        return self.connected

    def names(self) -> list[str]:
        return [said[0] for said in self.said]

    def asked(self, index: int = -1) -> list[tuple[int, int]]:
        """(block of the prompt, part) pairs of a reservation."""
        reserve = self.reserved[index]
        return [(reserve.first_block + block, part) for block, part in reserve.parts]


class Engine:
    """One `CacheScheduler` with its agent, driven by hand."""

    def __init__(self, *groups: KVGroup, **options: Any) -> None:
        self.layout = layout_of(*(groups or HYBRID))
        self.shape = CacheShape.of(self.layout)
        self.agent = RecordingAgent()
        self.event = threading.Event()
        pages = CachePages(
            self.layout, self.shape, lambda group, tokens: (tokens - 1) // 16, [16] * 3
        )
        chosen: dict[str, Any] = {"namespace": NAMESPACE, "min_load_tokens": 1} | options
        client: Any = self.agent
        self.cache = CacheScheduler(
            self.shape,
            pages,
            PrefixCacheOptions(**chosen),
            self.event,
            client,
            adapters=Adapters(),
        )
        self.tables: list[list[int]] | None = tables_of(self.layout)
        self.offered: dict[tuple[int, int], int] = {}

    def welcome(self, **placement: Any) -> None:
        placed = StatePlacement(**placement)
        self.cache.on_connected(Welcome("e1", "/arena", 1 << 20, 4096, placed))

    def found(self, num_blocks: int, kv_blocks: int) -> None:
        handle = next(said[1] for said in reversed(self.agent.said) if said[0] == "find")
        slots = [
            (block, part, [(1000 * part + block, 1)])
            for block, part in self.shape.resume_parts(num_blocks)
        ]
        self.cache.on_found(CacheFound(handle, num_blocks, kv_blocks, slots))

    def give(self, *missing: tuple[int, int], index: int = -1) -> None:
        """Answer a reservation with all that was asked for but `missing` (block, part) pairs."""
        reserve = self.agent.reserved[index]
        slots: list[Slot] = [
            (block, part, [(50 + block, 1)])
            for block, part in reserve.parts
            if (reserve.first_block + block, part) not in missing
        ]
        self.cache.on_slots(CacheSlots(reserve.handle, slots))

    def step(self, request: Any, computed: int, end: int) -> list[StoreStep]:
        return self.cache.step(request.request_id, computed, end, lambda: self.tables, self.offered)

    def stored(self, request: Any, computed: int, end: int) -> list[tuple[int, int]]:
        """(block, part) pairs that the workers are told to copy in this step."""
        firsts = {reserve.handle: reserve.first_block for reserve in self.agent.reserved}
        return [
            (firsts[step.handle] + part.index, part.part)
            for step in self.step(request, computed, end)
            for part in step.cached.parts
        ]


def engine(*groups: KVGroup, **options: Any) -> Engine:
    made = Engine(*groups, **options)
    made.welcome()
    return made


def request(num_tokens: int, name: str = "r1", **changes: Any) -> Any:
    fields = {
        "request_id": name,
        "prompt_token_ids": list(range(num_tokens)),
        "all_token_ids": list(range(num_tokens)),
        "prompt_embeds": None,
        "pooling_params": None,
        "resumable": False,
        "skip_reading_prefix_cache": False,
        "cache_salt": None,
        "lora_request": None,
        "mm_features": [],
        "shared_prefix_boundary": 0,
    }
    return SimpleNamespace(**fields | changes)


def ready(made: Engine, asked: Any, num_blocks: int = 0, kv_blocks: int = 0) -> int | None:
    """Take a request from its arrival to where it may be scheduled."""
    made.cache.add(asked)
    made.found(num_blocks, kv_blocks)
    if made.agent.reserved:
        made.give()
    return made.cache.matched(asked, 0)
