"""Golden files: what a command printed once, beside the test that runs it again.

`make golden` writes all of them anew, and a review reads the difference.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import Final

import pytest

MOST_LINES: Final = 40


def check(path: Path, text: str) -> None:
    """Compare `text` with a golden file, or keep it there if PRFAAS_GOLDEN is `rewrite`."""
    if os.environ.get("PRFAAS_GOLDEN") == "rewrite":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return
    kept = path.read_text() if path.exists() else ""
    if kept == text:
        return
    names = f"{path.name}, kept", f"{path.name}, now"
    lines = list(
        difflib.unified_diff(kept.splitlines(), text.splitlines(), *names, n=1, lineterm="")
    )
    if len(lines) > MOST_LINES:
        lines[MOST_LINES:] = [f"... and {len(lines) - MOST_LINES} more lines"]
    advice = "If this is meant: make golden, and read the difference before you commit it."
    pytest.fail("\n".join([f"{path} differs.", *lines, advice]), pytrace=False)
