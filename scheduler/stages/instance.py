"""One instance of the simulation: its requests in each stage, and its passes.

Progress of decodes is kept as one number, the steps done so far, so that a pass touches none of the
requests that only decode. Steps in which nothing else happens are one pass of several steps, which
is cut short when something comes.

This file knows no arrangement and no events.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from heapq import heappop, heappush

from scheduler.encoding.values import Medium, StartPass
from scheduler.stages.arrangement import Stage
from scheduler.stages.profile import Chunk, StageProfile, StageSizes
from scheduler.stages.traffic import StageRequest

NEVER = math.nan


class Running:
    """A request under way. Times are on the simulation's clock, `NEVER` until they are known."""

    __slots__ = (
        "decode_s",
        "done_s",
        "embedding_pull_s",
        "encode_s",
        "encoded_s",
        "first_token_s",
        "home",
        "kv_bytes",
        "kv_pull_s",
        "late_steps",
        "late_steps_before",
        "prefill_s",
        "prefilled",
        "request",
        "unencoded",
    )

    def __init__(self, request: StageRequest) -> None:
        self.request = request
        self.unencoded: tuple[Medium, ...] = ()
        """Media that the instance which prefills has still to encode."""
        self.prefilled = 0
        """Prompt tokens that are computed."""
        self.kv_bytes = 0.0
        """What is reserved for it on the instance where it is."""
        self.home: Instance | None = None
        """The instance where its KVCache is."""
        self.encode_s = NEVER
        """When the pass began that encodes it."""
        self.encoded_s = NEVER
        self.prefill_s = NEVER
        """When its first chunk began."""
        self.first_token_s = NEVER
        self.decode_s = NEVER
        """When it was there where it decodes."""
        self.done_s = NEVER
        self.embedding_pull_s = 0.0
        """How long it took to pull its embeddings, with the pulls before it; 0: there was none."""
        self.kv_pull_s = 0.0
        self.late_steps = 0
        """Tokens that came later than the objective after the one before."""
        self.late_steps_before = 0


@dataclass(frozen=True, slots=True)
class Batch:
    """The work of one pass. `num_steps` above 1: so many passes of decodes alone."""

    decodes: bool
    chunks: tuple[tuple[Running, Chunk], ...] = ()
    media: tuple[tuple[Running, tuple[Medium, ...]], ...] = ()
    """Media that are encoded in the pass, with the requests that they are encoded for."""
    passes: tuple[StartPass, ...] = ()
    """Passes that the encode stage's queue gave."""
    in_parallel: bool = False
    num_steps: int = 1

    @property
    def media_tokens(self) -> int:
        own = sum(one.num_tokens for _, media in self.media for one in media)
        return own + sum(one.num_tokens for given in self.passes for one in given.media)


class Instance:
    """An instance that runs the stages of its group."""

    def __init__(
        self, name: str, group: str, profile: StageProfile, sizes: StageSizes, tpot_s: float
    ) -> None:
        self.name = name
        self.group = group
        self.encodes = Stage.ENCODE in group
        self.prefills = Stage.PREFILL in group
        self.decodes = Stage.DECODE in group
        self.profile = profile
        self.sizes = sizes
        self._tpot_s = tpot_s
        self.to_encode: deque[Running] = deque()
        self.given: deque[StartPass] = deque()
        """Passes of the encode stage's queue that have not begun."""
        self.to_prefill: deque[Running] = deque()
        self.incoming: deque[Running] = deque()
        """Requests whose KVCache it will pull when it has room."""
        self.pull_free_s = 0.0
        self.num_pulling = 0
        self.num_admitted = 0
        """Requests that are prefilled here and will decode here."""
        self.kv_used_bytes = 0.0
        self.pending_tokens = 0
        """Prompt tokens to prefill here."""
        self.num_requests = 0
        self.batch: Batch | None = None
        """What it computes now."""
        self.batch_started_s = 0.0
        self.version = 0
        """The version of the only valid end of its pass."""
        self.busy_s = 0.0
        self.num_decoding = 0
        self._finish: list[tuple[int, int, Running]] = []
        self._joining: list[Running] = []
        self._joined: list[Running] = []
        """Those that joined with the pass that runs."""
        self._steps = 0
        self._late_steps = 0
        self._context_tokens = 0
        self._last_step_s = 0.0
        self._num_joined = 0

    # ---- room

    def reserve(self, running: Running, num_tokens: int) -> bool:
        """Take room for the KVCache of a request of so many tokens, if there is some."""
        num_bytes = self.sizes.kv.size_bytes(num_tokens)
        if self.kv_used_bytes + num_bytes > self.sizes.kv_room_bytes and self.kv_used_bytes:
            return False
        self.kv_used_bytes += num_bytes
        running.kv_bytes, running.home = num_bytes, self
        return True

    def release(self, num_bytes: float) -> None:
        """Give back the room of a request."""
        self.kv_used_bytes = max(0.0, self.kv_used_bytes - num_bytes)

    def has_slot(self) -> bool:
        """Whether one more request may decode here."""
        return self.num_decoding + self.num_pulling + self.num_admitted < self.profile.slots

    # ---- passes

    def begin(self, batch: Batch, now_s: float) -> float:
        """Start a pass. Returns when it ends."""
        self.batch, self.batch_started_s = batch, now_s
        if batch.decodes:
            joining, self._joining = self._joining, []
            for running in joining:
                self._join(running)
        for running, _ in batch.media:
            running.encode_s = now_s
        for running, (start, _) in batch.chunks:
            if not start:
                running.prefill_s = now_s
        self.version += 1
        return now_s + self._pass_s(batch) * batch.num_steps

    def _pass_s(self, batch: Batch) -> float:
        profile, num = self.profile, self.num_decoding if batch.decodes else 0
        # In several steps contexts grow; the step in the middle stands for all of them.
        context = self._context_tokens + num * (batch.num_steps - 1) / 2
        language_s = profile.language_s(num, context, (chunk for _, chunk in batch.chunks))
        return profile.pass_s(language_s, batch.media_tokens, in_parallel=batch.in_parallel)

    def cut(self, now_s: float) -> float | None:
        """End a pass of several steps with the step that runs. Returns when that is; None: it ends
        then anyway.
        """
        batch = self.batch
        if batch is None or batch.num_steps == 1:
            return None
        step_s = self._pass_s(batch)
        done = max(1, math.ceil((now_s - self.batch_started_s) / step_s - 1e-9))
        if done >= batch.num_steps:
            return None
        self.batch = Batch(decodes=True, num_steps=done)
        self.version += 1
        return self.batch_started_s + step_s * done

    def end(self, now_s: float) -> tuple[Batch, list[Running]]:
        """The pass is over. Returns it, and the requests that have all their tokens."""
        batch = self.batch
        assert batch is not None
        self.batch = None
        self.busy_s += now_s - self.batch_started_s
        for running, (start, end) in batch.chunks:
            running.prefilled = end
            self.pending_tokens -= end - start
        return batch, self._stepped(batch, now_s) if batch.decodes else []

    def _stepped(self, batch: Batch, now_s: float) -> list[Running]:
        steps = batch.num_steps
        step_s = (now_s - self.batch_started_s) / steps
        first_s = self.batch_started_s + step_s
        self._late_steps += first_s - self._last_step_s > self._tpot_s
        # The first interval of those that joined began with their own last token.
        for running in self._joined:
            since_s = running.decode_s if running.request.is_prefilled else running.first_token_s
            running.late_steps = int(first_s - since_s > self._tpot_s)
            running.late_steps_before = self._late_steps
        self._joined = []
        self._late_steps += (steps - 1) * (step_s > self._tpot_s)
        self._last_step_s = now_s
        self._steps += steps
        self._context_tokens += self.num_decoding * steps
        done = []
        while self._finish and self._finish[0][0] <= self._steps:
            _, _, running = heappop(self._finish)
            running.late_steps += self._late_steps - running.late_steps_before
            request = running.request
            self._context_tokens -= request.prompt_tokens + request.output_tokens
            self.num_decoding -= 1
            self.release(running.kv_bytes)
            done.append(running)
        return done

    # ---- decodes

    def add_decode(self, running: Running, now_s: float) -> None:
        """The request decodes from the next pass on."""
        running.decode_s = now_s
        self._joining.append(running)
        self.num_decoding += 1

    def _join(self, running: Running) -> None:
        request = running.request
        self._num_joined += 1
        # The first token came with the prefill.
        last = self._steps + request.output_tokens - 1
        heappush(self._finish, (last, self._num_joined, running))
        self._context_tokens += request.prompt_tokens + 1
        self._joined.append(running)

    def steps_alone(self) -> int:
        """Steps until the first of the requests that decode has all its tokens."""
        joining = min((one.request.output_tokens - 1 for one in self._joining), default=1 << 30)
        running = self._finish[0][0] - self._steps if self._finish else 1 << 30
        return min(joining, running)
