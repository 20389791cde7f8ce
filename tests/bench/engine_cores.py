"""Which cores the engines of a bench compute on, and how all else is kept off them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final

import psutil

WORKER: Final = "VLLM::Worker"
"""How vLLM names the processes that compute."""


class CannotRunError(Exception):
    """This machine lacks what a system needs; the text says what."""


def cores_of(num_engines: int, cores: Sequence[int]) -> list[str]:
    """Equal shares of the cores, spelled for VLLM_CPU_OMP_THREADS_BIND; CannotRunError if an engine
    would get none.
    """
    share = len(cores) // num_engines
    if not share:
        raise CannotRunError(f"{len(cores)} cores cannot give {num_engines} engines one each")
    starts = range(0, share * num_engines, share)
    return [",".join(map(str, cores[start : start + share])) for start in starts]


@contextmanager
def left_alone(cores: str) -> Iterator[None]:
    """Keep this process and all that it has started off these cores, but for engines' workers,
    which bind themselves. What is started meanwhile inherits it.
    """
    own, taken = os.sched_getaffinity(0), {int(core) for core in cores.split(",")}
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            if not process.name().startswith(WORKER):
                for thread in process.threads():
                    os.sched_setaffinity(thread.id, own - taken)
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)
