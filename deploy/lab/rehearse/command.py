"""All regions of a rehearsal, one after the other, in a directory that is gone afterwards."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path

import psutil
from rich.console import Console

from deploy.lab.demo.leftovers import arenas, leftovers
from deploy.lab.demo.run import interruptible, keep_logs
from deploy.lab.rehearse.preparing import prepare
from deploy.lab.rehearse.report import Played
from deploy.lab.rehearse.run import Run, play
from deploy.lab.rehearse.traffic import Wanted
from deploy.region.launch.running import RegionStartFailed
from prfaas.engines.errors import EngineStartFailed

ENGINE_GIB = 2.5
"""The memory of one engine with its share of agents and gateway, about."""
LOGS = Path("rehearsal-logs")
"""Where logs of a failed start go, if nothing is kept."""


class Interrupted(Exception):
    """Ctrl-C or SIGTERM, after which nothing runs any more."""


def play_all(
    file: Path,
    compared: Sequence[str],
    wanted: Wanted,
    keep: Path | None,
    console: Console,
    *,
    again: bool,
) -> list[Played]:
    """Play `file` and then what it is compared with; with `again`, what was void once more. Raises
    `FileError`, ValueError, `RegionStartFailed`, `Interrupted`.
    """
    arenas_before = arenas()
    # A short path, since paths of unix sockets are limited to about a hundred bytes.
    with tempfile.TemporaryDirectory(prefix="prfaas-") as directory:
        root = Path(directory)
        try:
            run = prepare(file, compared, wanted, root, keep)
            return asyncio.run(interruptible(_play_each(run, root, console, again)))
        except (KeyboardInterrupt, asyncio.CancelledError):
            raise Interrupted from None
        except (EngineStartFailed, RegionStartFailed) as error:
            target = keep or LOGS
            text = str(error)
            for source, kept in keep_logs(root, target).items():
                text = text.replace(str(source), str(kept))
            raise RegionStartFailed(f"{text}\nlogs are in {target}") from error
        finally:
            for item in leftovers(root, arenas_before):
                console.print(f"left behind: {item}", style="red", soft_wrap=True)


async def _play_each(run: Run, root: Path, console: Console, again: bool) -> list[Played]:
    played = []
    for rehearsal in run.rehearsals:
        console.rule(f"{rehearsal.name}: {rehearsal.num_instances} engines")
        wanted, free = ENGINE_GIB * rehearsal.num_instances, psutil.virtual_memory().available
        if free < wanted * 2**30:
            console.print(
                f"{rehearsal.num_instances} engines take about {wanted:.0f} GiB, and "
                f"{free / 2**30:.0f} GiB are free",
                style="yellow",
            )
        one = await play(rehearsal, run, root / rehearsal.name, console)
        if again and one.verdict.reasons:
            console.print(f"void: {'; '.join(one.verdict.reasons)}; once more")
            folder = root / f"{rehearsal.name}-again"
            folder.mkdir()
            one = await play(rehearsal, run, folder, console)
        played.append(one)
    return played
