"""Carries out what leaving a cluster means: drain, give up what takes too long, forget.

    leave -> no new work -> idle, and let go -> stopped and forgotten

Queued jobs of a cluster belong to no instance, so they go to the others by themselves. It does not
know jobs or requests: the front says when an instance is idle and forgets what it knows of one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

from prfaas.engines.errors import UnknownInstance
from prfaas.engines.instance import Instance, InstanceSpec
from prfaas.engines.instances import Instances
from prfaas.engines.members import (
    Join,
    Leave,
    LetGo,
    MemberChanges,
    MemberOrder,
    MemberRefused,
)
from transport.tasks import start_task

logger = logging.getLogger("prfaas.engines")

_LOOK_S: Final = 0.5
"""How often a leaving instance is looked at for a node agent that died, seconds."""


@dataclass(slots=True)
class _Departure:
    let_go: asyncio.Event = field(default_factory=asyncio.Event)
    successor: InstanceSpec | None = None
    """An instance of the same name that joins when this one is gone."""
    task: asyncio.Task[None] | None = None


class Departures:
    """The orders to join and leave of one front, on one event loop. `close` it first."""

    def __init__(
        self,
        instances: Instances,
        *,
        idle: Callable[[Instance], Awaitable[None]],
        forget: Callable[[Instance], Awaitable[None]],
    ) -> None:
        """`idle` waits until an instance has nothing to do. `forget` waits until the prefills that
        were given up there are over, and drops what the front knows of the instance.
        """
        self._instances = instances
        self._idle = idle
        self._forget = forget
        self._leaving: dict[str, _Departure] = {}

    def order(self, order: MemberOrder) -> None:
        """Begin to carry out an order. Raises MemberRefused, UnknownInstance."""
        match order:
            case Join():
                try:
                    spec = order.spec()
                except ValueError as error:
                    raise MemberRefused(f"{order.name}: {error}") from error
                self.join(spec)
            case Leave():
                self.leave(order.name, order.limit_s)
            case LetGo():
                if found := self._leaving.get(order.name):
                    found.let_go.set()

    def join(self, spec: InstanceSpec) -> None:
        """Add an instance now, or when a leaving one of its name is gone. Raises MemberRefused."""
        departure = self._leaving.get(spec.name)
        if departure is None:
            self._instances.join(spec)
            logger.info("%s joins", spec.name)
        elif departure.successor not in (None, spec):
            raise MemberRefused(f"another {spec.name} waits until the one that leaves is gone")
        else:
            departure.successor = spec

    def leave(self, name: str, limit_s: float) -> None:
        """Let an instance leave. Again: changes nothing, but nothing of its name joins afterwards.
        Raises UnknownInstance.
        """
        if (known := self._leaving.get(name)) is not None:
            known.successor = None
            return
        instance = self._instances.set_leaving(name)
        departure = self._leaving[name] = _Departure()
        departure.task = start_task(self._depart(instance, departure, limit_s), f"{name} leaves")

    async def close(self) -> None:
        """Stop waiting for instances that leave. Idempotent."""
        tasks = [item.task for item in self._leaving.values() if item.task is not None]
        self._leaving.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _depart(self, instance: Instance, departure: _Departure, limit_s: float) -> None:
        name = instance.name
        logger.info("%s leaves: it finishes its work within %g s", name, limit_s)
        waits = [
            asyncio.ensure_future(self._idle(instance)),
            asyncio.ensure_future(self._let_go(instance, departure.let_go)),
        ]
        try:
            _, late = await asyncio.wait(waits, timeout=limit_s)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
        if late:
            logger.warning("%s is given up after %g s: it was not drained", name, limit_s)
        await self._instances.stop_serving(name)
        await self._forget(instance)
        await self._instances.remove(name)
        self._leaving.pop(name, None)
        logger.info("%s has left", name)
        if departure.successor is not None:
            self.join(departure.successor)

    async def _let_go(self, instance: Instance, let_go: asyncio.Event) -> None:
        # The cache of a dead agent is lost already.
        while not let_go.is_set() and not instance.agent_health.gone:
            try:
                async with asyncio.timeout(_LOOK_S):
                    await let_go.wait()
            except TimeoutError:
                continue


def follow_changes(departures: Departures, changes: MemberChanges) -> dict[str, str]:
    """Carry out what a changed list of instances means. Returns why instances cannot join, by
    name.
    """
    refused = {}
    for name in changes.leaving:
        try:
            departures.order(Leave(name=name))
        except UnknownInstance as error:
            # Somebody has removed it already.
            logger.info("%s", error)
    for spec in changes.joining:
        try:
            departures.join(spec)
        except MemberRefused as error:
            refused[spec.name] = error.message
    return refused
