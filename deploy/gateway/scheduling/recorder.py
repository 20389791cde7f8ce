"""The flight recorder: writes every event that the live scheduler takes, and every answer.

Requests only append a frame to a queue; a thread writes the queue a few times a second. Files
rotate within a bound. Each begins with the present state of the scheduler, so each can be played by
itself, and a file that lost events is followed by a whole one. Nothing here knows a prompt: events
have counts and names, and tenants without limits of their own are written as keyed hashes.

`scheduler.replay.recording` has the format.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Set
from datetime import UTC, datetime
from typing import Any, BinaryIO, Final

from prometheus_client import CollectorRegistry, Counter

from deploy.gateway.config import RecorderSection
from kvmanager.private_files import open_private
from scheduler.live.core import Event, LiveScheduler
from scheduler.replay.recording import Gap, Header, entry_frame, frame_of, header_of

logger = logging.getLogger("prfaas.deploy.gateway")

SUFFIX: Final = ".recording"
NUM_FILES: Final = 8
"""The number of files in the bound: the oldest eighth is deleted when it is reached."""
WRITE_EVERY_S: Final = 0.25
MAX_WAITING_BYTES: Final = 32 << 20
"""The most that may wait for a slow disk, bytes. Further events are lost, and the file says so."""
PAUSE_S: Final = 5.0
"""The pause after a loss before a new file begins, seconds: its state is copied on the event
loop.
"""


class Recorder:
    """The recorder of one gateway. `start` it, `note` events on the event loop, then `close` it."""

    def __init__(
        self,
        config: RecorderSection,
        registry: CollectorRegistry,
        *,
        version: str = "",
        named: Set[str] = frozenset(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`version` is the program's. `named` are tenants with limits of their own, who are written
        by name.
        """
        self._version = version
        self._directory = config.dir
        self._keep_bytes = config.keep
        self._file_limit_bytes = max(1, config.keep // NUM_FILES)
        self._named = named
        self._clock = clock
        # New with each process, so that hashes of two recordings cannot be joined.
        self._key = secrets.token_bytes(32)
        # What the thread has to write, in order. Each header begins a file.
        self._frames: deque[bytes | Header] = deque()
        self._num_put_bytes = 0
        self._num_written_bytes = 0
        self._num_file_bytes = 0
        self._num_lost = 0
        self._broken = threading.Event()
        self._retry_s = 0.0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._write_on, name="recorder", daemon=True)
        self._file: BinaryIO | None = None
        prefix = "prfaas_gateway_recorder_"
        self._noted = Counter(prefix + "events", "Events recorded.", registry=registry)
        self._lost = Counter(
            prefix + "lost_events", "Events that a recording lacks.", registry=registry
        )

    def start(self, live: LiveScheduler) -> None:
        """Begin the first file. Raises OSError if the directory cannot be made."""
        self._directory.mkdir(parents=True, exist_ok=True)
        self._begin(live)
        self._thread.start()

    def hide(self, tenant: str) -> str:
        """The name by which a tenant is written."""
        if not tenant or tenant in self._named:
            return tenant
        return hashlib.blake2b(tenant.encode(), key=self._key, digest_size=8).hexdigest()

    def note(self, live: LiveScheduler, event: Event[Any], answer: object, now_s: float) -> None:
        """Record an event that `live` has taken. Never waits and never raises."""
        try:
            if self._num_lost or self._broken.is_set():
                self._go_on_after_loss(live)
            elif self._put(entry_frame(event, answer, now_s)):
                self._noted.inc()
                if self._num_file_bytes >= self._file_limit_bytes:
                    self._begin(live)
            else:
                logger.warning("the disk is too slow for the recorder: events are lost")
                self._lose()
        except Exception:
            # A request must not fail because it cannot be recorded.
            logger.exception("the recorder cannot write a %s", type(event).__name__)
            self._lose()

    def close(self) -> None:
        """Write what waits, and end the file. Blocks; idempotent."""
        if self._stopping.is_set():
            return
        if self._num_lost:
            self._queue(frame_of(Gap(self._num_lost)))
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def _lose(self) -> None:
        """Count an event as lost; the first one sets when recording goes on."""
        if not self._num_lost:
            self._retry_s = self._clock() + PAUSE_S
        self._num_lost += 1
        self._lost.inc()

    def _go_on_after_loss(self, live: LiveScheduler) -> None:
        """Lose one more event, or go on in a new file whose state contains the effect of the
        event.
        """
        self._lose()
        if not self._frames and self._clock() >= self._retry_s:
            self._broken.clear()
            self._begin(live)
            self._queue(frame_of(Gap(self._num_lost)))
            self._num_lost = 0

    def _begin(self, live: LiveScheduler) -> None:
        """Begin a new file. Copying the state takes milliseconds, once in many thousand events."""
        self._queue(header_of(live, self._version, time.time()))
        # A file has room for events however large the state is.
        self._num_file_bytes = 0

    def _put(self, frame: bytes) -> bool:
        """Queue an event's frame. False: too much waits."""
        num_waiting_bytes = self._num_put_bytes - self._num_written_bytes
        if num_waiting_bytes + len(frame) > MAX_WAITING_BYTES:
            return False
        self._queue(frame)
        return True

    def _queue(self, item: bytes | Header) -> None:
        self._num_put_bytes += _num_bytes(item)
        self._num_file_bytes += _num_bytes(item)
        self._frames.append(item)

    # ---- the thread

    def _write_on(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._stopping.wait(WRITE_EVERY_S)
            try:
                self._write_waiting()
            except OSError as error:
                # What was written of the file can be played. The next one will be whole.
                logger.warning("the recorder cannot write: %s", error)
                self._drop()
        self._end_file()

    def _write_waiting(self) -> None:
        while self._frames:
            item = self._frames.popleft()
            # Counted as taken before it is written, so that a failed write does not count as
            # waiting for ever.
            self._num_written_bytes += _num_bytes(item)
            frame = frame_of(item.packed()) if isinstance(item, Header) else item
            if isinstance(item, Header):
                self._open_next(len(frame))
            if self._file is not None:
                self._file.write(frame)
        if self._file is not None:
            self._file.flush()

    def _drop(self) -> None:
        self._broken.set()
        self._end_file()
        while self._frames:
            self._num_written_bytes += _num_bytes(self._frames.popleft())

    def _open_next(self, header_bytes: int) -> None:
        self._end_file()
        self._make_room(header_bytes + self._file_limit_bytes)
        began = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
        path = self._directory / f"{began}-{os.getpid()}{SUFFIX}"
        # Exclusively: never add to a file of another process.
        self._file = os.fdopen(open_private(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb")
        logger.info("recording to %s", path)

    def _make_room(self, nbytes: int) -> None:
        """Delete the oldest files until `nbytes` more fit into the bound."""
        files = sorted(self._directory.glob(f"*{SUFFIX}"))
        total = sum(path.stat().st_size for path in files)
        for path in files:
            if total + nbytes <= self._keep_bytes:
                return
            total -= path.stat().st_size
            path.unlink(missing_ok=True)

    def _end_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                logger.warning("the end of a recording could not be written: %s", error)


def _num_bytes(item: bytes | Header) -> int:
    return len(item.state) if isinstance(item, Header) else len(item)
