"""The process that one end of a peer runs in: commands on stdin, answers on stdout, JSON lines.

Run by `peers` in a session of its own: peer_worker.py KIND SIDE HOST NBYTES OPTIONS, where
`peer_KIND.py` has `open_end(place)`. What libraries print on stdout goes to stderr.
"""

from __future__ import annotations

import importlib
import json
import os
import queue
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, TextIO, cast

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from peer_end import Buffer, End, Job, Place, Side


class Worker:
    """Answers one command at a time; a method per command."""

    def __init__(self, end: End, buffer: Buffer) -> None:
        self.end = end
        self.buffer = buffer

    def hello(self) -> dict[str, Any]:
        return self.end.hello()

    def connect(self, other: dict[str, Any]) -> None:
        self.end.connect(other)

    def prepare(self, job: list[int], count: int = 1) -> None:
        for one in self._jobs(job, count):
            self.end.prepare(one)

    def run(self, job: list[int], count: int = 1) -> list[float]:
        """Seconds of each of `count` transfers, one at a time."""
        taken_s = []
        for one in self._jobs(job, count):
            start_s = time.perf_counter()
            reported_s = self.end.run(one)
            taken_s.append(reported_s or time.perf_counter() - start_s)
        return taken_s

    def run_blocks(self, job: list[int]) -> list[float]:
        """Seconds of each block of one transfer, one at a time."""
        return self.end.run_blocks(Job(*job))

    def settle(self) -> None:
        self.end.settle()

    def cpu(self) -> float:
        """CPU seconds of all threads and of children that have ended."""
        kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        return sum(used.ru_utime + used.ru_stime for used in map(resource.getrusage, kinds))

    def rss(self) -> int:
        """Resident bytes without the buffer."""
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") - self.buffer.nbytes

    def fill(self, value: int) -> None:
        self.buffer.fill(value)

    def digest(self, job: list[int]) -> str:
        """Hash of the job's bytes in the order of the transfer."""
        import xxhash  # only here: what a peer does not need must not count as its memory

        found = xxhash.xxh3_128()
        for view in self.buffer.views(Job(*job)):
            found.update(view)
        return found.hexdigest()

    def _jobs(self, job: list[int], count: int) -> Iterator[Job]:
        """`count` jobs like `job`, each with a number of its own and over the next blocks."""
        base = Job(*job)
        places = max(1, self.buffer.nbytes // base.nbytes)
        for index in range(count):
            yield replace(
                base,
                number=base.number + index,
                first=base.first + index % places * base.num_blocks,
            )


def main(argv: list[str]) -> None:
    kind, side, host, nbytes, options = argv
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    module = importlib.import_module(f"peer_{kind}")
    buffer = Buffer(int(nbytes), cast(Side, side))
    if side == "sender":
        buffer.randomise()
    end: End = module.open_end(Place(cast(Side, side), host, buffer, json.loads(options)))
    serve(Worker(end, buffer), answers)


def serve(worker: object, answers: TextIO) -> NoReturn:
    """Call the methods of `worker` that lines of standard input name, until there are no more."""
    commands: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(commands,), daemon=True).start()
    while True:
        name, arguments = json.loads(commands.get())
        try:
            answer = {"result": getattr(worker, name)(**arguments)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


def _read(commands: queue.SimpleQueue[str]) -> None:
    """End this process and its children with the bench, also in the midst of a command."""
    for line in sys.stdin:
        commands.put(line)
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
