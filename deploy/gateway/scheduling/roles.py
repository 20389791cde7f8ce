"""Converts instances of a PD cluster, as `scheduler.live.long_term.conversion` orders.

There is one conversion at a time. The long-term loop or an operator (role_pages.py) asks for it:

    ask -> drain at the front -> set_role there -> resume -> dwell

Effects are performed in order, and their results are reported back. Effects that give an instance
back (the old role, `resume`) are repeated until the front has answered, before anything else
begins: an instance that stays drained is lost to both roles. The same happens when the gateway ends
meanwhile. If the gateway is killed, the front gives the instance back after a while
(`drained_hold_s` there). Until then a restarted gateway begins no conversion.

A conversion that would leave a role without a usable instance does not begin. If others die while
its instance drains, it is given up.

It does not know why an instance should change, nor HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, Counter

from deploy.gateway.scheduling.leadership import Leadership
from local_pd.cluster import PdCluster
from local_pd.errors import PdError, RoleRefused
from prfaas.engines.errors import UnknownInstance
from scheduler.live.long_term.conversion import (
    Conversion,
    ConversionConfig,
    ConversionOutcome,
    ConversionPhase,
    ConversionWish,
    Converter,
    Drain,
    Effect,
    Ended,
    PdRole,
    Resume,
    RoleView,
    SetRole,
    Start,
)
from scheduler.reports import ClusterReport, InstanceReport, convertible_roles
from transport.rpc import RpcError
from transport.tasks import start_task

logger = logging.getLogger("prfaas.deploy.gateway")

TICK_S: Final = 1.0
CALL_S: Final = 10.0
"""The longest wait for one order to the front, seconds. It is at most the dwell time, so that no
order is late for the next conversion.
"""
CLOSE_S: Final = 3.0
"""How long giving an instance back may take when the gateway ends, seconds."""

_REFUSALS: Final = (RoleRefused, UnknownInstance)
_FAILURES: Final = (PdError, UnknownInstance, RpcError, OSError, TimeoutError)


class RoleMetrics:
    """Metrics of the roles in all PD clusters."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.changes = Counter(
            "prfaas_gateway_role_changes_total",
            "Conversions of instances that ended.",
            ["cluster", "to", "outcome"],
            registry=registry,
        )


class RoleKeeper:
    """Carries out a PD cluster's conversions, one after the other. Use it on one event loop."""

    def __init__(
        self,
        pd: PdCluster,
        report: Callable[[], ClusterReport | None],
        config: ConversionConfig,
        metrics: RoleMetrics,
        *,
        leadership: Leadership | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`report` gives the cluster's latest report, None while there is none or it is too old.
        `leadership` says whether this gateway may convert; without one it always may.
        """
        self._pd = pd
        self._report = report
        self._clock = clock
        self.leadership = leadership or Leadership()
        self._converter = Converter(config)
        self._call_s = min(CALL_S, config.relabel_limit_s, config.dwell_s or CALL_S)
        self._effects: deque[Effect] = deque()
        self._draining: asyncio.Task[None] | None = None
        self._ended: asyncio.Future[Ended] | None = None
        self._listeners: list[Callable[[Ended], None]] = []
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._last: tuple[Ended, float] | None = None
        self._metrics = metrics

    @property
    def current(self) -> Conversion | None:
        """The conversion under way, dwelling included."""
        return self._converter.current

    @property
    def current_s(self) -> float:
        """Seconds since the present phase of `current` began; 0 without one."""
        current = self._converter.current
        return 0.0 if current is None else max(0.0, self._clock() - current.since_s)

    @property
    def converting(self) -> frozenset[str]:
        """The cluster while it may not convert: a conversion runs, dwells or is undone."""
        return frozenset({self._pd.name} if self.busy_with else ())

    def leads(self) -> bool:
        """Whether this gateway may convert instances now."""
        return self.leadership.leads(self._clock())

    @property
    def busy_with(self) -> str:
        """Why no conversion can begin now; "" if one can."""
        if (current := self._converter.current) is not None:
            return f"{current.instance} is {current.phase}"
        owed = next((effect.instance for effect in self._effects), "")
        return f"{owed} is still being given back" if owed else ""

    @property
    def last(self) -> tuple[Ended, float] | None:
        """How the last conversion ended, and how many seconds ago."""
        return None if self._last is None else (self._last[0], self._clock() - self._last[1])

    def on_ended(self, listener: Callable[[Ended], None]) -> None:
        """Call `listener` whenever a conversion has ended, well or not."""
        self._listeners.append(listener)

    def ask(
        self, wish: ConversionWish, report: ClusterReport | None = None, *, only: str = ""
    ) -> Start:
        """Begin to convert the least loaded instance, or `only`; else say why not. Never waits.

        `report` is used instead of the latest one, where the caller has a newer one.
        """
        # A dwelling may have ended since the last step.
        self._effects.extend(self._converter.tick(self._clock()))
        if self.busy_with:
            return Start((), self.busy_with)
        if not self.leads():
            return Start((), self.leadership.why_not)
        report = report or self._report()
        if report is None or wish.cluster != report.name:
            return Start((), f"no report of a PD cluster {wish.cluster}")
        if left := drained_by_others(report, only):
            return Start((), left)
        start = self._converter.start(
            wish, _candidates(report, wish, only), self._clock(), only=only
        )
        if start.effects:
            logger.info("an instance of %s: %s", wish, start.reason)
            self._ended = asyncio.get_running_loop().create_future()
            self._effects.extend(start.effects)
            self._wake.set()
        return start

    async def ended(self) -> Ended:
        """How the conversion under way ends; it must not dwell. Cancelling the wait does not
        end it.
        """
        assert self._ended is not None
        return await asyncio.shield(self._ended)

    def start(self) -> None:
        """Perform effects from now on."""
        self._task = start_task(self._run(), "roles")

    async def close(self) -> None:
        """Give back an instance that is being converted. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        current = self._converter.current
        if current is not None and current.phase is not ConversionPhase.DWELLING:
            # The effects of the failure undo whatever was done, so what was not done yet is
            # dropped.
            self._effects.clear()
            self._effects.extend(self._converter.failed(current.instance, "the gateway ended"))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self._perform()
        await self._stop_draining()

    async def step(self) -> None:
        """Take in what happened since the last step, and perform what follows."""
        report = self._report()
        self._effects.extend(self._drain_ended(report))
        self._effects.extend(self._converter.tick(self._clock()))
        await self._perform()

    async def _run(self) -> None:
        while True:
            try:
                await self.step()
            except Exception:
                # Requests are served in any role, so no failure here may end the gateway.
                logger.exception("converting instances failed")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._wake.wait()
            self._wake.clear()

    def _drain_ended(self, report: ClusterReport | None) -> tuple[Effect, ...]:
        """The effects of the drain under way, if it has any."""
        current, task = self._converter.current, self._draining
        if current is None or task is None:
            return ()
        if report is not None and (lost := _lost_role(report, current)):
            return self._converter.failed(current.instance, lost)
        if not task.done():
            return ()
        self._draining = None
        if task.cancelled():
            return self._converter.failed(current.instance, "the drain was cut off")
        if (error := task.exception()) is not None:
            return self._converter.failed(current.instance, _said(error))
        return self._converter.drained(current.instance, self._clock())

    async def _perform(self) -> None:
        """Perform all effects in order. One without an answer stays first, for the next step."""
        while self._effects:
            effect = self._effects[0]
            try:
                following = await self._do(effect)
            except _FAILURES as error:
                logger.warning("%s: tried again soon: %s", effect, _said(error))
                return
            # Removed only now: an effect whose answer was lost is performed again.
            self._effects.popleft()
            self._effects.extend(following)

    async def _do(self, effect: Effect) -> tuple[Effect, ...]:
        match effect:
            case Drain(instance):
                self._draining = asyncio.get_running_loop().create_task(
                    self._pd.drain(instance, leader=self.leadership.token),
                    name=f"drain {instance}",
                )
                self._draining.add_done_callback(lambda _: self._wake.set())
            case SetRole():
                return await self._set_role(effect)
            case Resume(instance):
                await self._stop_draining()
                # Refused where another gateway leads now: the instance is that one's to resume.
                with contextlib.suppress(UnknownInstance, RoleRefused):
                    async with asyncio.timeout(self._call_s):
                        await self._pd.resume(instance, leader=self.leadership.token)
            case Ended():
                self._note(effect)
        return ()

    async def _set_role(self, effect: SetRole) -> tuple[Effect, ...]:
        """Order the new role of a conversion, which may fail, or undo one, which must not fail."""
        is_order = self._converter.current is not None
        try:
            async with asyncio.timeout(self._call_s):
                status = await self._pd.set_role(
                    effect.instance, effect.change, leader=self.leadership.token
                )
        except _FAILURES as error:
            if is_order:
                return self._converter.failed(effect.instance, _said(error))
            if not isinstance(error, _REFUSALS):
                raise
            # A later order than ours is in force, or there is no instance to give back.
            logger.warning("%s keeps its role: %s", effect.instance, error)
            return ()
        if not is_order:
            return ()
        return self._converter.relabelled(effect.instance, status.epoch, self._clock())

    async def _stop_draining(self) -> None:
        task, self._draining = self._draining, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _note(self, ended: Ended) -> None:
        wish, is_converted = ended.wish, ended.outcome is ConversionOutcome.CONVERTED
        level = logging.INFO if is_converted else logging.WARNING
        words = (ended.instance, wish, ended.outcome, ended.detail)
        logger.log(level, "%s of %s: %s: %s", *words)
        self._metrics.changes.labels(wish.cluster, wish.to_role, ended.outcome.value).inc()
        self._last = ended, self._clock()
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(ended)
        for listener in self._listeners:
            try:
                listener(ended)
            except Exception:
                logger.exception("a listener to conversions failed")


def drained_by_others(report: ClusterReport, wanted: str = "") -> str:
    """Why no conversion may begin though this gateway converts nothing; "" if one may.

    An instance other than the `wanted` one drains, for another caller or for a gateway that is
    gone.
    """
    draining = (item for item in report.instances if item.draining and not item.leaving)
    names = (item.name for item in draining if item.name != wanted)
    return next((f"{name} drains, and not for this gateway" for name in names), "")


def is_usable(instance: InstanceReport) -> bool:
    """Whether the instance serves its role now."""
    return instance.healthy and not instance.draining


def _candidates(report: ClusterReport, wish: ConversionWish, only: str) -> Sequence[RoleView]:
    """The instances of one model: the wish's model, else that of `only`, else the model with the
    most usable instances in the role.
    """
    by_model: dict[str, list[InstanceReport]] = {}
    for item in report.instances:
        by_model.setdefault(item.model or wish.model, []).append(item)
    groups = list(by_model.values())
    if wish.model:
        groups = [by_model.get(wish.model, [])]
    elif only:
        groups = [g for g in groups if any(item.name == only for item in g)]
    best = max(groups, key=lambda group: _num_usable(group, wish.from_role), default=[])
    return [_view(report, item) for item in best]


def _num_usable(instances: Iterable[InstanceReport], role: PdRole) -> int:
    return sum(item.role == role and is_usable(item) for item in instances)


def _view(report: ClusterReport, instance: InstanceReport) -> RoleView:
    return RoleView(
        name=instance.name,
        role=instance.role,
        epoch=instance.role_epoch,
        is_usable=is_usable(instance),
        roles=convertible_roles(instance),
        num_requests=instance.running,
        num_tokens=sum(j.uncached_tokens for j in report.jobs if j.instance == instance.name),
    )


def _lost_role(report: ClusterReport, current: Conversion) -> str:
    """Why the instance may not leave its role any more; "" while another one can replace it."""
    role = current.wish.from_role
    own = next((item for item in report.instances if item.name == current.instance), None)
    if own is None:
        return f"{report.name} has no instance {current.instance} any more"
    if role == "encode":  # Instances that prefill encode for themselves.
        return ""
    others = [i for i in report.instances if i.model == own.model and i.name != own.name]
    return "" if _num_usable(others, role) else f"no other usable {role} instance is left"


def _said(error: BaseException) -> str:
    return str(error) or type(error).__name__
