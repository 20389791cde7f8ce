"""What engine tests ask of the recording that a gateway writes meanwhile."""

import asyncio
import json
import subprocess
import sys
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from scheduler.live.events import LinkHeard
from scheduler.replay.recording import Entry, Frame, Header, frames_in

TEXT_CHARS = 24
"""So much of a prompt's text in a file could be no accident."""
LOOK_EVERY_CHARS = 500


async def is_decided_again(directory: Path) -> None:
    """Fails unless `prfaas simulate` takes every decision of a whole recording the same again."""
    words = [sys.executable, "-m", "deploy.cli", "simulate", "--recording", str(directory)]
    told = await asyncio.to_thread(
        subprocess.run, [*words, "--json"], capture_output=True, text=True, check=False
    )
    assert told.returncode == 0, told.stdout + told.stderr
    found: dict[str, Any] = json.loads(told.stdout)
    assert (found["differences"], found["is_complete"]) == ([], True)
    asked = sum(row["recorded"] for row in found["outcomes"] if row["decision"] == "RouteAsked")
    assert found["decisions"] > asked > 10, found


def link_conditions(directory: Path) -> set[str]:
    """In what conditions the gateway heard of links."""
    events = (frame.event for frame in _frames(directory) if isinstance(frame, Entry))
    return {str(event.view.state) for event in events if isinstance(event, LinkHeard)}


def holds_no_text(directory: Path, prompts: Iterable[str]) -> None:
    """Fails where a part of a prompt is in a file or in the state that a file begins with."""
    states = [zlib.decompress(f.state) for f in _frames(directory) if isinstance(f, Header)]
    written = [path.read_bytes() for path in directory.iterdir()] + states
    assert written
    for prompt in prompts:
        for start in range(0, len(prompt) - TEXT_CHARS, LOOK_EVERY_CHARS):
            part = prompt[start : start + TEXT_CHARS].encode()
            assert not any(part in content for content in written), part


def _frames(directory: Path) -> Iterator[Frame]:
    for path in sorted(directory.iterdir()):
        with path.open("rb") as stream:
            yield from frames_in(stream)
