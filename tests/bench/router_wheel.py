"""The wheel of vllm-router, a router in Rust, for benches that measure beside it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

ROUTER = "vllm-router==0.1.17"


def router_path(folder: Path, *, may_install: bool) -> str | None:
    """What the router's PYTHONPATH must be; None where it is not installed and may not be."""
    if importlib.util.find_spec("vllm_router") is not None:
        return os.environ.get("PYTHONPATH", "")
    if not may_install:
        return None
    target = folder / "router"
    argv = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
    argv += [str(target), ROUTER, "orjson", "setproctitle"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{ROUTER} cannot be installed: {done.stderr.strip()[-300:]}", file=sys.stderr)
    return str(target)
