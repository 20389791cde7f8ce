"""How our processes log: as text or as JSON, a line each, with the request that a line is about,
and no message that fills a disk by repeating itself. No line holds text of a prompt or an answer.

A peer that sends garbage, or an agent that is down, sets off the same message again and again. The
first ones of a minute are worth reading, the rest only their number.

A thread of its own writes the lines, because a write may take long, on a disk that is busy or into
a pipe that nobody empties, and an event loop must not wait for it. It does not know where the lines
go.
"""

from __future__ import annotations

import atexit
import copy
import logging
import os
import queue
import threading
import time
from collections.abc import Hashable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from logging.handlers import QueueHandler
from typing import Annotated, Final, Literal

import typer
from pythonjsonlogger.json import JsonFormatter

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]
LEVEL_VARIABLE: Final = "PRFAAS_LOG_LEVEL"
FORMAT_VARIABLE: Final = "PRFAAS_LOG_FORMAT"
LevelOption = Annotated[
    LogLevel,
    typer.Option(
        help="Least level of the lines of this process's log.",
        envvar=LEVEL_VARIABLE,
        case_sensitive=False,
    ),
]
FormatOption = Annotated[
    LogFormat,
    typer.Option(
        help="Lines for people, or a JSON object each for what collects logs.",
        envvar=FORMAT_VARIABLE,
        case_sensitive=False,
    ),
]

PERIOD_S: Final = 60.0
MAX_A_PERIOD: Final = 100
"""Messages with one text, arguments aside, that are written in a period."""
MAX_TEXTS: Final = 1000
"""Texts whose number is kept; a program has a few hundred of them."""
CLOSE_S: Final = 2.0
"""How long an end of the process waits for a place behind the last lines, and then for these."""
MAX_WAITING: Final = 10_000
"""Lines that wait to be written. While so many do, further ones are lost."""


_REQUEST_FIELDS: Final = ("request_id", "trace_id")
_REQUEST: ContextVar[tuple[str, str]] = ContextVar("request", default=("", ""))


@contextmanager
def about_request(request_id: str, trace_id: str = "") -> Iterator[None]:
    """Lines that this task, and tasks that it starts, log meanwhile name the request and its W3C
    trace (32 hexadecimal digits).
    """
    token = _REQUEST.set((request_id, trace_id))
    try:
        yield
    finally:
        _REQUEST.reset(token)


@dataclass(slots=True)
class _Count:
    since_s: float
    num: int = 0


class Repeats:
    """Counts what repeats. Time is an argument."""

    def __init__(self) -> None:
        self._counts: dict[Hashable, _Count] = {}

    def __len__(self) -> int:
        return len(self._counts)

    def admit(self, key: Hashable, now_s: float) -> int | None:
        """None: leave it out. Else how many like it were left out since one was written last."""
        count = self._counts.get(key)
        num_left_out = 0
        if count is None:
            if len(self._counts) >= MAX_TEXTS:
                del self._counts[next(iter(self._counts))]  # the one that began first
            count = self._counts[key] = _Count(now_s)
        elif now_s - count.since_s >= PERIOD_S:
            num_left_out = max(0, count.num - MAX_A_PERIOD)
            del self._counts[key]
            count = self._counts[key] = _Count(now_s)
        count.num += 1
        return num_left_out if count.num <= MAX_A_PERIOD else None


class RepeatsFilter(logging.Filter):
    """Leaves out what repeats too often, whoever's logger it comes from."""

    def __init__(self) -> None:
        super().__init__()
        self._repeats = Repeats()
        self._lock = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        key = record.name, record.levelno, record.msg if isinstance(record.msg, str) else ""
        with self._lock:
            # Not the record's own time: a clock that is set back would keep messages out for long.
            num_left_out = self._repeats.admit(key, time.monotonic())
        if num_left_out:
            record.msg, record.args = (
                f"{record.getMessage()} ({num_left_out} more were left out)",
                (),
            )
        return num_left_out is not None


class _Waiting(QueueHandler):
    """Queues lines for a `LogWriter`. Counts those that it has lost, and says so with the next."""

    def __init__(self, lines: queue.Queue[logging.LogRecord | None]) -> None:
        super().__init__(lines)
        self.format_traceback = logging.Formatter().formatException
        self._num_lost = 0

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        prepared = copy.copy(record)
        # Here, because what the arguments stand for may change before the line is written.
        prepared.message = prepared.msg = record.getMessage()
        prepared.args = None
        if record.exc_info:
            prepared.exc_text = self.format_traceback(record.exc_info)
            prepared.exc_info = None
        # The thread that writes is in no request.
        for name, value in zip(_REQUEST_FIELDS, _REQUEST.get(), strict=True):
            if value:
                setattr(prepared, name, value)
        return prepared

    def enqueue(self, record: logging.LogRecord) -> None:
        if self._num_lost:
            record.msg = f"{record.msg} ({self._num_lost} lines before this one were lost)"
        try:
            self.queue.put_nowait(record)
        except queue.Full:
            self._num_lost += 1
        else:
            self._num_lost = 0


class LogWriter:
    """Hands lines to `handler` on a thread of its own, in their order. `front` takes them and never
    waits.
    """

    def __init__(self, handler: logging.Handler, max_waiting: int = MAX_WAITING) -> None:
        self._handler = handler
        self._lines: queue.Queue[logging.LogRecord | None] = queue.Queue(max_waiting)
        self.front: logging.Handler = _Waiting(self._lines)
        self._thread = threading.Thread(target=self._write_on, name="prfaas-log", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write what waits. Blocks, but not for long if nobody takes the lines; call it once."""
        with suppress(queue.Full):
            self._lines.put(None, timeout=CLOSE_S)
        self._thread.join(CLOSE_S)

    def _write_on(self) -> None:
        while (line := self._lines.get()) is not None:
            # Without the handler's lock, for which `logging` would wait when the process ends.
            self._handler.emit(line)


class _Stderr(logging.Handler):
    """Writes to the descriptor. Python would wait for the lock of `sys.stderr` when it ends, also
    while a write into a pipe that nobody empties has it.
    """

    def emit(self, record: logging.LogRecord) -> None:
        try:
            left = f"{self.format(record)}\n".encode(errors="backslashreplace")
            while left:
                left = left[os.write(2, left) :]
        except Exception:
            self.handleError(record)


class _Text(logging.Formatter):
    """Lines for people, which end with the request that they are about."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        known = [
            f"{name}={value}" for name in _REQUEST_FIELDS if (value := getattr(record, name, ""))
        ]
        return super().formatMessage(record) + (f" [{' '.join(known)}]" if known else "")


def json_formatter() -> logging.Formatter:
    """What makes a line a JSON object; see `set_up_logging`."""
    # Attributes that are no standard ones, such as request_id, are fields by themselves.
    return JsonFormatter(
        ["levelname", "name", "process", "message"],
        rename_fields={"levelname": "level", "name": "logger", "process": "pid"},
        timestamp="time",
        json_ensure_ascii=False,
    )


def set_up_logging(
    level: LogLevel = "info", form: LogFormat = "text", handler: logging.Handler | None = None
) -> None:
    """Log from now on, to stderr unless there is a handler, without endless repeats and without
    waiting for the writes. The last lines are written when the process ends. In JSON a line has
    `time` (RFC 3339, UTC), `level`, `logger`, `pid`, `message`, and where there are any
    `request_id`, `trace_id` and `exc_info`, a traceback.

    Does nothing in a process that logs already.
    """
    if logging.getLogger().handlers:
        return
    handler = handler or _Stderr()
    handler.setFormatter(json_formatter() if form == "json" else _Text())
    writer = LogWriter(handler)
    writer.front.addFilter(RepeatsFilter())
    logging.basicConfig(level=level.upper(), handlers=[writer.front])
    atexit.register(writer.close)
