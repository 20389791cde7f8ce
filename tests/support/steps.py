"""Does work that yields between its steps."""

from typing import TypeVar

from kvmanager.token_ids import Steps

T = TypeVar("T")


def at_once(steps: Steps[T]) -> T:
    """The result of `steps`, done without a break."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
