"""The scheduler side's records of requests that use the prefix cache. Values, no rules."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from kvmanager.agent.engines.protocol import CacheFound, Slot
from kvmanager.vllm_connector.cache.keys import RequestKeys

if TYPE_CHECKING:
    from vllm.v1.request import Request

MAX_STATE_ENDS = 4


class Stage(Enum):
    """The stages of a request from its arrival to its first step.

    LANDING    its KVCache comes from elsewhere; the cache is asked only if that fails
    FINDING    the agent was asked for the cached prefix
    HOLDING    the agent has answered; other requests must be scheduled first
    RESERVING  memory for blocks that the agent lacks was asked for
    READY      it may be scheduled
    LOADING    the cached prefix is being copied into the engine
    RUNNING    it was scheduled, or needs nothing of the cache any more
    """

    LANDING = auto()
    FINDING = auto()
    HOLDING = auto()
    RESERVING = auto()
    READY = auto()
    LOADING = auto()
    RUNNING = auto()


@dataclass(slots=True)
class Find:
    """A question to the agent and its answer, which is pinned until the handle is freed."""

    handle: int
    asked_s: float
    found: CacheFound | None = None


@dataclass(slots=True)
class Store:
    """Memory that was asked for under one handle.

    slots: the slots that are not yet filled, by block; None: the agent has not answered yet.
    handed_over: the workers know the handle, so that only they may end it.
    """

    handle: int
    first_block: int
    asked_s: float
    slots: deque[Slot] | None = None
    handed_over: bool = False


@dataclass(slots=True)
class Tracked:
    """One request.

    kv_blocks: leading blocks whose KV the agent has, or is about to have.
    hit_tokens: length of the prefix that can be resumed from the agent's answer.
    branch_tokens: length at which the prompt parts from cached ones, if it does.
    num_tokens: length of the prompt, plus the answer so far if the request lost its blocks once.
    waits_since_s: time from which on it could have been scheduled (HOLDING, RESERVING); 0: not yet.
    is_planned: memory for the prompt was asked for.
    asked_blocks: number of blocks for which the question of memory is settled.
    state_ends: the last boundaries at which steps ended, in tokens.
    """

    request: Request
    keys: RequestKeys
    stage: Stage = Stage.READY
    waits_since_s: float = 0.0
    kv_blocks: int = 0
    hit_tokens: int = 0
    branch_tokens: int | None = None
    num_tokens: int = 0
    is_planned: bool = False
    asked_blocks: int = 0
    find: Find | None = None
    stores: list[Store] = field(default_factory=list)
    state_ends: deque[int] = field(default_factory=lambda: deque(maxlen=MAX_STATE_ENDS))

    def restart(self) -> None:
        """Begin anew: at the request's arrival, and when it has lost its blocks."""
        self.stage, self.waits_since_s = Stage.READY, 0.0
        self.kv_blocks = self.hit_tokens = 0
        self.branch_tokens = None
        self.num_tokens = len(self.request.all_token_ids)
        self.keys.extend(self.request.all_token_ids)
        self.is_planned = False
        self.asked_blocks = len(self.keys.keys)
        self.state_ends.clear()

    def note_step(self, computed_tokens: int, end_tokens: int) -> None:
        """Note a step that computes [computed_tokens, end_tokens)."""
        # A smaller start means that the request resumed elsewhere, so older ends do not count.
        if self.state_ends and computed_tokens < self.state_ends[-1]:
            self.state_ends.clear()
        for tokens in (computed_tokens, end_tokens):
            if tokens and tokens not in self.state_ends:
                self.state_ends.append(tokens)
