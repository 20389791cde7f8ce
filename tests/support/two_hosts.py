"""A region of two hosts, which are two addresses of this machine: a1 prefills, b1 has the gateway.

Everything is real but the engines' computing.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine_module import install
from region_hosts import RegionHost, make_keys

MADE = "made"
"""The folder of what `prfaas certs init` made."""


def two_hosts(
    folder: Path, adapt: Callable[[dict[str, Any]], None] = lambda region: None
) -> dict[str, RegionHost]:
    """Both hosts with their files below `folder`; nothing runs yet, and the caller closes them.
    `adapt` may change the region's file first.
    """
    python_path = install(folder / "engine")
    # Other addresses for every run, so that the ports that hosts work out are free.
    net = f"127.{random.randint(1, 254)}.{random.randint(1, 254)}"

    def node(name: str, host: int, role: str) -> dict[str, Any]:
        agent = {"arena_gib": 0.01, "arena_dir": str(folder)}
        instances = [{"name": f"{name}-engine", "role": role}]
        return {"name": name, "host": f"{net}.{host}", "agent": agent, "instances": instances}

    region: dict[str, Any] = {
        "name": "two",
        "gateway": {
            "port": 0,
            "host": f"{net}.1",
            "threshold_tokens": 100,
            "scheduling": {"routing": {"policy": "threshold"}},
        },
        "models": [
            {
                "name": "small",
                "path": str(folder),
                "prefix_caching": False,
                "env": {"PYTHONPATH": python_path},
            }
        ],
        "clusters": [
            {"name": "far", "kind": "prefill", "nodes": [node("a1", 2, "prefill")]},
            {"name": "home", "kind": "pd", "nodes": [node("b1", 1, "both")]},
        ],
        "links": [{"from": "far", "to": "home"}],
        "security": {
            "tls": {name: f"keys/{name}.pem" for name in ("cert", "key", "ca")},
            "engine_key": "keys/engine.key",
            "granting_key": "keys/granting.key",
            "granting_keys": "keys/granting.pub",
        },
    }
    adapt(region)
    file = folder / "region.yaml"
    file.write_text(json.dumps(region))
    make_keys(folder / MADE, file)
    both = {}
    for name in ("a1", "b1"):
        at = folder / f"host-{name}"
        shutil.copytree(folder / MADE / name, at / "keys")
        shutil.copy(file, at)
        both[name] = RegionHost(name, at)
    return both
