"""The command `prfaas`, as benches ask it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any


def prfaas(*words: str) -> dict[str, Any]:
    """What `prfaas WORDS --json` prints; RuntimeError with its words if it prints no JSON."""
    argv = [sys.executable, "-m", "deploy.cli", *words, "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        raise RuntimeError(f"{' '.join(words)}: {done.stdout}{done.stderr}") from None
    return answer
