"""Shares what a gateway learns and has under way with the other gateways of its region.

Two tasks do so, a few times a second each. One beats: it says in Redis what this gateway has under
way, and hears the same of the others and who leads. The other tells and hears observations, a
bounded number in a turn. So observations never delay a beat, however far Redis is. Nothing here is
on the way of a request.

While beats are not answered, the gateway goes on alone: with what it knows, and with its share of
the tenants' limits. What it observes meanwhile is told once Redis is back. An entry of another
gateway that cannot be used is left out and counted, and nothing else changes.

It does not know what is learnt from observations, nor how limits are shared (`budgets`).
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, Final

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from deploy.gateway.config import ModelConfig
from deploy.gateway.links.region_links import RegionLinks
from deploy.gateway.scheduling.leadership import Leadership
from deploy.gateway.scheduling.scheduler import RegionScheduler
from deploy.gateway.sharing.budgets import SharedBudgets
from deploy.gateway.sharing.overview import Peer, SharingOverview
from deploy.gateway.sharing.redis_region import (
    GONE_S,
    LEASE_S,
    MAX_BATCH_BYTES,
    MAX_BEAT_BYTES,
    MAX_STATE_BYTES,
    READ_BATCHES,
    Beat,
    Heard,
    Observations,
    RegionInRedis,
    SharedPlan,
    SharedState,
    decoded,
)
from deploy.gateway.sharing.state_file import about
from scheduler.live.core import Event
from scheduler.live.feedback import Observation
from scheduler.live.sharing.events import (
    MAX_AGE_S,
    ObservationsHeard,
    Observed,
    WorkHeard,
)
from scheduler.live.sharing.learned_state import (
    PlanHeard,
    StateRestored,
    learned_state,
    plan_state,
    rehearse,
)
from scheduler.live.sharing.peer_work import NO_WORK
from transport.tasks import start_task

logger = logging.getLogger("prfaas.deploy.gateway")

BEAT_S: Final = 0.2
"""The time between two beats, seconds. Clusters report every half second."""
KEEP_EVERY_S: Final = 10.0
"""The time between two writes of what was learnt, seconds."""
MAX_BATCH: Final = 50
"""Observations in one batch: learning from them takes about 10 ms of the event loop."""
TOLD_BATCHES: Final = 20
"""The most batches that are told in one turn, in one round trip."""
TOLD_AGAIN_S: Final = 5.0
"""Observations that were told within this time before Redis stopped answering are told again,
seconds: the others may not have heard them, and Redis may have lost them.
"""
MAX_PENDING: Final = 20_000
"""Observations that wait while Redis does not answer. Older ones are lost to the others."""
MAX_PEERS: Final = 256
"""The most other gateways that are heard."""
_POSITION: Final = re.compile(rb"\d{1,13}-\d{1,19}")


class SharingMetrics:
    """Metrics `prfaas_gateway_shared_*`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        prefix = "prfaas_gateway_shared_"
        self.joined = Gauge(
            prefix + "joined", "1 while Redis answers, 0 while it goes on alone.", registry=registry
        )
        self.peers = Gauge(prefix + "peers", "Other gateways of the region.", registry=registry)
        self.heard = Counter(
            prefix + "observations", "Observations heard of other gateways.", registry=registry
        )
        self.lost = Counter(
            prefix + "lost_observations",
            "Own observations that waited too long for Redis.",
            registry=registry,
        )
        self.entry_failures = Counter(
            prefix + "entry_failures",
            "Entries of others in Redis that could not be used, by what they are.",
            ["entry"],
            registry=registry,
        )


class RegionSharing:
    """The sharing of one gateway, on one event loop."""

    def __init__(
        self,
        region: RegionInRedis,
        name: str,
        models: Iterable[ModelConfig],
        scheduler: RegionScheduler,
        leadership: Leadership,
        registry: CollectorRegistry,
        *,
        budgets: SharedBudgets,
        links: RegionLinks | None = None,
    ) -> None:
        """`name` is what operators call this gateway. `leadership` is kept up to date."""
        self.region = region
        self._name = name
        self._about = about(models)
        self._scheduler = scheduler
        self._leadership = leadership
        self._budgets = budgets
        self._links = links
        self._metrics = SharingMetrics(registry)
        self._peers: dict[str, Beat] = {}
        self._is_joined = False
        self._has_history = False
        self._error = "it has not answered yet"
        self._since_s = scheduler.clock()
        self._pending: deque[tuple[float, Any]] = deque()
        self._told: deque[tuple[float, tuple[float, Any]]] = deque()
        """The observations that were told within `TOLD_AGAIN_S`, each with the time of telling."""
        self._num_told = 0
        """The number of the first pending observation."""
        self._position = b"0-0"
        self._time_ms = 0
        """Redis's clock at the last beat."""
        self._planned: object = None
        self._number = 0
        """The number of the present plan, if this gateway leads."""
        self._heard_plan = 0, 0
        """Token and number of the plan that was heard last."""
        self._kept_s = scheduler.clock()
        self._listeners: list[Callable[[int], None]] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._bad: set[str] = set()
        """The kinds of entries of which one was left out; the log names the first of each."""
        scheduler.on_taken(self._note)

    @property
    def num_gateways(self) -> int:
        """The gateways of the region as last heard, this one included."""
        return 1 + len(self._peers)

    def on_change(self, listener: Callable[[int], None]) -> None:
        """Call `listener` whenever Redis stops or begins to answer, with the number of gateways
        among which limits are to be divided: 1 while it answers.
        """
        self._listeners.append(listener)

    async def start(self) -> None:
        """Join the others, if Redis answers, and go on in the background."""
        self._budgets.start()
        await self._beat_once()
        await self._exchange()
        self._tasks = [
            start_task(self._beat_on(), "beats to other gateways"),
            start_task(self._exchange_on(), "observations of other gateways"),
        ]

    async def close(self) -> None:
        """Tell the rest, and leave. Idempotent."""
        tasks, self._tasks = self._tasks, []
        if not tasks:
            return
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        try:
            await self._budgets.close()
            for _ in range(MAX_PENDING // (MAX_BATCH * TOLD_BATCHES)):
                await self._tell()
            if self._leadership.leads(self._scheduler.clock()):
                await self._keep()
            await self.region.leave()
        except (RedisError, OSError) as error:
            logger.warning("the other gateways could not be told that this one ends: %s", error)
        await self.region.redis.aclose()

    def overview(self) -> SharingOverview:
        """The state of the sharing, as `prfaas status` shows it."""
        now_s = self._scheduler.clock()
        return SharingOverview(
            name=self._name,
            state="joined" if self._is_joined else "alone",
            for_s=max(0.0, now_s - self._since_s),
            error=self._error,
            leads=self._leadership.leads(now_s),
            leader=self._leadership.leader,
            token=self._leadership.token,
            peers=[
                Peer(name=beat.name, requests=sum(beat.work.requests.values()))
                for beat in self._peers.values()
            ],
            pending=len(self._pending),
        )

    def _note(self, event: Event[Any], now_s: float) -> None:
        if not isinstance(event, Observation):
            return
        self._pending.append((now_s, event))
        self._drop_oldest()
        # Own observations are part of what was learnt, whoever restores it.
        self._scheduler.live.heard[self.region.me] = self._num_told + len(self._pending)

    def _drop_oldest(self) -> None:
        while len(self._pending) > MAX_PENDING:
            self._pending.popleft()
            self._num_told += 1
            self._metrics.lost.inc()

    def _leave_out(self, entry: str, why: object, num: int = 1) -> None:
        """What another wrote cannot be used. It must end neither the sharing nor the gateway."""
        self._metrics.entry_failures.labels(entry).inc(num)
        if entry not in self._bad:
            self._bad.add(entry)
            logger.warning("%s in Redis cannot be used and is left out: %s", entry, why)

    async def _beat_on(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            await self._beat_once()

    async def _exchange_on(self) -> None:
        while True:
            has_more = await self._exchange()
            await asyncio.sleep(0 if has_more else BEAT_S)

    async def _beat_once(self) -> None:
        """Beat, and join if Redis answers. Beats alone decide whether this gateway is alone."""
        try:
            heard = await self._beat()
            if not self._is_joined:
                await self._join(heard.time_ms)
            elif not self._budgets.is_joined:
                await self._budgets.join()
        except (RedisError, OSError) as error:
            self._went_alone(f"Redis: {error}")
        except Exception as error:  # an answer of another version must not end the gateway
            if repr(error) != self._error:
                logger.exception("sharing failed")
            self._went_alone(repr(error))
        self._show()

    async def _exchange(self) -> bool:
        """Tell and hear some observations, and keep what was learnt if that is due. Returns
        whether there may be more. Joined only: a gateway that is alone tells everything later.
        """
        if not self._is_joined:
            return False
        try:
            await self._tell()
            num_heard = await self._hear()
            now_s = self._scheduler.clock()
            if self._leadership.leads(now_s) and now_s - self._kept_s >= KEEP_EVERY_S:
                await self._keep()
        except (RedisConnectionError, RedisTimeoutError, OSError) as error:
            # The next beat finds out what holds for all of the sharing.
            logger.debug("observations are told and heard later: %s", error)
            return False
        except Exception as error:
            self._leave_out("an answer about observations", error)
            return False
        return num_heard == READ_BATCHES or len(self._pending) >= MAX_BATCH

    async def _beat(self) -> Heard:
        scheduler, leadership = self._scheduler, self._leadership
        sent_s = scheduler.clock()
        beat = Beat(self._name, scheduler.live.peers.own(sent_s))
        heard = await self.region.beat(
            msgspec.msgpack.encode(beat), plan=self._plan_to_tell(sent_s)
        )
        self._time_ms = heard.time_ms
        self._hear_peers(heard.others)
        if heard.leader == self.region.me:
            # From when it was asked for: the lease began at the earliest then.
            if not leadership.leads(sent_s):
                logger.info("this gateway leads: it acts on the long term")
            leadership.granted(heard.token, sent_s + LEASE_S, self._name)
        else:
            if leadership.leads(sent_s):
                logger.warning("another gateway leads now")
            peer = self._peers.get(heard.leader)
            leadership.taken("" if peer is None else peer.name)
        self._hear_plan(heard)
        return heard

    def _plan_to_tell(self, now_s: float) -> bytes:
        """The plan of a gateway that leads; empty for another one."""
        if not self._leadership.leads(now_s):
            return b""
        live = self._scheduler.live
        plan, changed = (
            plan_state(live, now_s),
            [(dict(item.changed), dict(item.changed_encode)) for item in live.plans.values()],
        )
        if (plan.thresholds, changed) != self._planned:
            self._planned = plan.thresholds, changed
            self._number += 1
        return msgspec.msgpack.encode(SharedPlan(self._leadership.token, self._number, plan))

    def _hear_plan(self, heard: Heard) -> None:
        if not heard.plan or self._leadership.leads(self._scheduler.clock()):
            return
        try:
            said = decoded(heard.plan, SharedPlan, MAX_BEAT_BYTES)
        except Exception as error:
            self._leave_out("a plan", error)
            return
        # Only the leader writes it, so another plan is a later one.
        if (said.token, said.number) != self._heard_plan:
            self._heard_plan = said.token, said.number
            self._scheduler.tell(PlanHeard(said.plan))

    def _hear_peers(self, others: dict[bytes, bytes]) -> None:
        found: dict[str, Beat] = {}
        for name, said in islice(others.items(), MAX_PEERS):
            gateway = name.decode(errors="replace")
            try:
                found[gateway] = decoded(said, Beat, MAX_BEAT_BYTES)
            except Exception as error:
                # It lives, so it has its share of the limits when nobody can be asked.
                found[gateway] = Beat(gateway, NO_WORK)
                self._leave_out("a beat", error)
        if len(others) > MAX_PEERS:
            self._leave_out("a beat", f"there are {len(others)}", len(others) - MAX_PEERS)
        for gateway in self._peers.keys() - found.keys():
            logger.info("gateway %s is gone", self._peers.pop(gateway).name)
            self._scheduler.tell(WorkHeard(gateway, None))
        for gateway, beat in found.items():
            known = self._peers.get(gateway)
            if known is None:
                logger.info("gateway %s is there", beat.name)
            # Gateways without work are not worth an event several times a second.
            if beat.work != NO_WORK or (known is not None and known.work != NO_WORK):
                self._scheduler.tell(WorkHeard(gateway, beat.work))
            self._peers[gateway] = beat

    async def _join(self, time_ms: int) -> None:
        """Go on from what the region has learnt, once, and say that Redis answers."""
        if not self._has_history:
            kept = await self.region.kept()
            try:
                if kept is not None:
                    self._restore(decoded(kept, SharedState, MAX_STATE_BYTES), time_ms)
            except Exception as error:
                self._leave_out("what was learnt", error)
            self._has_history = True
        await self._budgets.join()
        self._is_joined, self._error = True, ""
        self._since_s = self._scheduler.clock()
        logger.info("joined: %d gateways share what they learn", self.num_gateways)
        self._changed(1)

    def _restore(self, kept: SharedState, time_ms: int) -> None:
        if kept.about != self._about:
            logger.warning("what was learnt of other models is not used")
            return
        if not _POSITION.fullmatch(kept.position):
            raise ValueError(f"its position in the stream is {kept.position!r}")
        rehearse(kept.state, self._scheduler.live.settings)
        age_s = max(0.0, (time_ms - kept.made_ms) / 1000)
        self._scheduler.tell(StateRestored(kept.state, age_s))
        self._position = kept.position
        if self._links is not None:
            self._links.remember(kept.state.links, age_s)
        # The restored state lacks what this gateway has observed before it joined.
        now_s, first = self._scheduler.clock(), self._num_told
        observed = [_observed(now_s - at_s, event) for at_s, event in self._pending]
        self._scheduler.tell(ObservationsHeard(self.region.me, first, observed))

    async def _tell(self) -> None:
        """Tell the oldest observations, `TOLD_BATCHES` batches at most."""
        now_s, first = self._scheduler.clock(), self._num_told
        telling = [
            _observed(now_s - at_s, event)
            for at_s, event in islice(self._pending, MAX_BATCH * TOLD_BATCHES)
        ]
        if telling:
            await self.region.tell(
                Observations(self.region.me, first + at, telling[at : at + MAX_BATCH])
                for at in range(0, len(telling), MAX_BATCH)
            )
        # Only now: what may not have arrived is told again, and counts once by its number. A beat
        # that failed meanwhile wants all of it told again.
        while self._is_joined and self._pending and self._num_told < first + len(telling):
            self._told.append((now_s, self._pending.popleft()))
            self._num_told += 1
        while self._told and self._told[0][0] < self._scheduler.clock() - TOLD_AGAIN_S:
            self._told.popleft()

    async def _hear(self) -> int:
        """Hear the next batches. Returns how many there were, `READ_BATCHES` at most."""
        batches = await self.region.hear(self._position)
        for at, said in batches:
            self._position = at
            try:
                batch = decoded(said, Observations, MAX_BATCH_BYTES)
            except Exception as error:
                self._leave_out("a batch of observations", error)
                continue
            if batch.gateway == self.region.me:
                continue
            late_s = max(0.0, (self._time_ms - int(at.partition(b"-")[0])) / 1000)
            observed = [_observed(item.age_s + late_s, item.event) for item in batch.observed]
            heard = ObservationsHeard(batch.gateway, batch.first, observed)
            if num_bad := self._scheduler.tell(heard):
                self._leave_out("an observation", f"gateway {batch.gateway}", num_bad)
            self._metrics.heard.inc(len(observed))
            await asyncio.sleep(0)  # requests go first
        return len(batches)

    async def _keep(self) -> None:
        scheduler = self._scheduler
        self._kept_s = now_s = scheduler.clock()
        rates = () if self._links is None else self._links.rates()
        seconds, micros = await self.region.redis.time()
        # After the last await: what is heard until `position` is in the state, and nothing else.
        state = learned_state(scheduler.live, now_s, rates)
        made_ms = int(seconds) * 1000 + int(micros) // 1000
        await self.region.keep(SharedState(self._about, made_ms, self._position, state))

    def _went_alone(self, error: str) -> None:
        now_s = self._scheduler.clock()
        self._leadership.cut_off()
        self._budgets.went_alone()
        if self._is_joined:
            self._is_joined, self._since_s = False, now_s
            self._pending.extendleft(item for _, item in reversed(self._told))
            self._num_told -= len(self._told)
            self._told.clear()
            self._drop_oldest()
            logger.warning("%s; this gateway goes on alone", error)
            self._changed(self.num_gateways)
        elif error != self._error:
            logger.warning("%s; this gateway is alone", error)
        self._error = error
        # What the others have under way is not known any more.
        if self._peers and now_s - self._since_s > GONE_S:
            for gateway in self._scheduler.live.peers.gateways:
                self._scheduler.tell(WorkHeard(gateway, None))

    def _changed(self, num_shares: int) -> None:
        for listener in self._listeners:
            listener(num_shares)

    def _show(self) -> None:
        self._metrics.joined.set(self._is_joined)
        self._metrics.peers.set(len(self._peers) if self._is_joined else 0)


def _observed(age_s: float, event: Any) -> Observed:
    return Observed(min(max(0.0, age_s), MAX_AGE_S), event)
