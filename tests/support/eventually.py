"""How tests wait for what happens in the background: `eventually` on an event loop, `wait_until` in
a plain test. Both look again and again, and say what they saw last if it never comes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from inspect import isawaitable
from typing import Any

PAUSE_S = 0.01
Look = Callable[[], Any]
IsRight = Callable[[Any], object]


async def eventually(
    look: Look,
    is_right: IsRight = bool,
    *,
    what: object = "",
    timeout_s: float = 60.0,
    pause_s: float = PAUSE_S,
) -> Any:
    """Call `look`, which may be a coroutine function, until what it returns is right, and return
    that. AssertionError with `what` when the time is over.
    """
    seen: Any = None
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                seen = look()
                if isawaitable(seen):
                    seen = await seen
                if is_right(seen):
                    return seen
                await asyncio.sleep(pause_s)
    except TimeoutError:
        raise _late(seen, what, timeout_s) from None


def wait_until(
    look: Look, is_right: IsRight = bool, *, what: object = "", timeout_s: float = 60.0
) -> Any:
    """The same where no event loop runs."""
    deadline_s = time.monotonic() + timeout_s
    while not is_right(seen := look()):
        if time.monotonic() > deadline_s:
            raise _late(seen, what, timeout_s)
        time.sleep(PAUSE_S)
    return seen


def _late(seen: object, what: object, timeout_s: float) -> AssertionError:
    return AssertionError(f"not within {timeout_s:g} s: {what or 'what was waited for'}; {seen!r}")
