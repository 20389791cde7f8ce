"""The file in which one gateway keeps what it has learnt, over a restart.

    a line with the format and its version, the BLAKE3 digest of the rest, msgpack of `_Kept`

It is written in one step and never in the middle of one, a few seconds after something was learnt
and when the gateway ends. Whatever is wrong with a file, the gateway starts without it and says
why. It does not know what was learnt.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import msgspec
from blake3 import blake3

from deploy.gateway.config import ModelConfig
from deploy.gateway.links.region_links import RegionLinks
from deploy.gateway.scheduling.scheduler import RegionScheduler
from kvmanager.latest_writer import LatestWriter
from kvmanager.private_files import open_private, write_private
from scheduler.live.core import Event
from scheduler.live.feedback import CacheMoveOver, Observation
from scheduler.live.long_term.events import ConversionAnswered, ConversionEnded, PlansAsked
from scheduler.live.sharing.events import ObservationsHeard
from scheduler.live.sharing.learned_state import (
    VERSION,
    LearnedState,
    PlanHeard,
    StateRestored,
    learned_state,
)
from transport.tasks import start_task

logger = logging.getLogger("prfaas.deploy.gateway")

SAVE_EVERY_S: Final = 5.0
"""The least time between two writes, seconds. A gateway that is killed loses at most this."""
MAX_BYTES: Final = 256 << 20
_MAGIC: Final = f"prfaas learned state {VERSION}\n".encode()
_DIGEST_BYTES: Final = 32
_TEACHES: Final = (
    Observation,
    ObservationsHeard,
    CacheMoveOver,
    PlanHeard,
    PlansAsked,
    ConversionAnswered,
    ConversionEnded,
)


class _Kept(msgspec.Struct, frozen=True, array_like=True):
    """The state, of which models it is, and the wall clock when it was made, seconds since 1970."""

    about: str
    saved_at: float
    state: LearnedState


class UnusableState(ValueError):
    """The file cannot be used; the message says why."""


def about(models: Iterable[ModelConfig]) -> str:
    """A digest of the models: a state that was learnt of others must not be used with these."""
    return blake3(repr([(model.name, model.root) for model in models]).encode()).hexdigest(16)


def encoded(state: LearnedState, of: str, wall_s: float) -> bytes:
    """The file of a state that was made at `wall_s`; `of` is the result of `about`."""
    body = msgspec.msgpack.encode(_Kept(of, wall_s, state))
    return _MAGIC + blake3(body).digest() + body


def decoded(data: bytes, of: str, wall_s: float) -> StateRestored:
    """The event that restores the state of a file. Raises UnusableState."""
    head, body = data[: len(_MAGIC)], data[len(_MAGIC) + _DIGEST_BYTES :]
    if head != _MAGIC:
        raise UnusableState("it is of another version, or no state at all")
    if blake3(body).digest() != data[len(_MAGIC) : len(_MAGIC) + _DIGEST_BYTES]:
        raise UnusableState("it is damaged")
    try:
        kept = msgspec.msgpack.decode(body, type=_Kept)
    except msgspec.MsgspecError as error:
        raise UnusableState(f"it cannot be read: {error}") from error
    if kept.about != of:
        raise UnusableState("it is of other models")
    # A wall clock that was set back must not make what was learnt come from the future.
    return StateRestored(kept.state, max(0.0, wall_s - kept.saved_at))


class StateFile:
    """Keeps the state of a scheduler in a file. `restore` before the first event, then `start`."""

    def __init__(
        self,
        path: Path,
        models: Iterable[ModelConfig],
        scheduler: RegionScheduler,
        links: RegionLinks | None = None,
        *,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`links` remember rates, too."""
        self._path = path
        self._about = about(models)
        self._scheduler = scheduler
        self._links = links
        self._wall_clock = wall_clock
        self._has_news = False
        self._writer = LatestWriter("what was learnt", self._write)
        self._task: asyncio.Task[None] | None = None

    async def restore(self) -> bool:
        """Let the scheduler go on from the file, if there is a usable one."""
        try:
            data = await asyncio.to_thread(_read, self._path)
            if data is None:
                return False
            event = decoded(data, self._about, self._wall_clock())
            self._scheduler.tell(event)
        except (OSError, ValueError) as error:
            logger.warning("%s is not used: %s; what was learnt is lost", self._path, error)
            return False
        if self._links is not None:
            self._links.remember(event.state.links, event.age_s)
        logger.info("goes on from %s, written %.0f s ago", self._path, event.age_s)
        return True

    def start(self) -> None:
        """Write from now on."""
        self._scheduler.on_taken(self._note)
        self._task = start_task(self._keep(), "the state file")

    async def close(self) -> None:
        """Write what was learnt last. Idempotent."""
        task, self._task = self._task, None
        if task is None:
            return
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        self._save()
        await self._writer.written()

    def _note(self, event: Event[Any], _now_s: float) -> None:
        self._has_news = self._has_news or isinstance(event, _TEACHES)

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(SAVE_EVERY_S)
            if self._has_news:
                self._save()

    def _save(self) -> None:
        self._has_news = False
        scheduler = self._scheduler
        rates = () if self._links is None else self._links.rates()
        # Copied here, where no event can come between; encoded and written in a thread.
        state = learned_state(scheduler.live, scheduler.clock(), rates)
        self._writer.put((state, self._wall_clock()))

    def _write(self, kept: tuple[LearnedState, float]) -> None:
        state, wall_s = kept
        write_private(self._path, encoded(state, self._about, wall_s))


def _read(path: Path) -> bytes | None:
    """The bytes of the file; None if there is none. Raises OSError, UnusableState."""
    try:
        fd = open_private(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    with open(fd, "rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise UnusableState(f"it has more than {MAX_BYTES} bytes")
    return data
