"""A command that must end well within a time."""

import asyncio
import sys
from pathlib import Path


async def check_python(*words: str, directory: Path, limit_s: float, shown_chars: int) -> None:
    """Run this Python with `words` in `directory`. AssertionError with the last `shown_chars` of
    what it printed if it fails, TimeoutError after `limit_s`; then it is killed.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *words),
        cwd=directory,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(limit_s):
            told, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, told.decode(errors="replace")[-shown_chars:]
