"""Looks for what a stopped region left behind: processes, sockets, shared memory.

It knows where they would be, not who made them.
"""

from collections.abc import Iterable
from pathlib import Path

import psutil

SHARED_MEMORY = Path("/dev/shm")


def arenas() -> set[Path]:
    """Arena files of all regions on this machine, and the files beside kept arenas."""
    return {*SHARED_MEMORY.glob("prfaas-*.arena"), *SHARED_MEMORY.glob("prfaas-kept-*")}


def leftovers(run_dir: Path, arenas_before: Iterable[Path]) -> list[str]:
    """One line for each thing that the region in `run_dir` left behind."""
    found = [f"shared memory {path}" for path in sorted(arenas() - set(arenas_before))]
    # By command line: a process that lost its parent is no child of ours any more.
    found += [f"socket {path}" for path in sorted(run_dir.rglob("*")) if path.is_socket()]
    for process in psutil.process_iter(["pid", "cmdline"]):
        command = " ".join(process.info["cmdline"] or ())
        if str(run_dir) in command and process.pid != psutil.Process().pid:
            found.append(f"process {process.pid}: {command[:120]}")
    ours = psutil.Process().children(recursive=True)
    return found + [f"child process {child.pid}: {child.name()}" for child in ours]
