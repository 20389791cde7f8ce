"""Agents of one region for attacks, and what a process of any region and role shows to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from agent_process import AgentProcess
from certificates import make_authority, make_node
from granting import grant_files

from transport import Credentials, Identity, RegionKey, Role
from transport.grants import Granter
from transport.region_key import new_key

Way = Literal["tls", "key", "nothing"]
"""How processes know each other; "nothing": a trusted network, on which nobody is asked."""
SETTINGS: dict[str, Any] = {"block_bytes": 4096, "drain_s": 0.5, "arena_gib": 2 / 1024}


class AttackedRegion:
    """Its files are in `folder`. `granter` signs as its gateway does."""

    def __init__(self, folder: Path, way: Way) -> None:
        self._folder = folder
        self._way = way
        self.granting_key, self.granting_keys = grant_files(folder)
        self.granter = Granter(self.granting_key)
        if way == "tls":
            self._authority = make_authority(folder, "ca")
        elif way == "key":
            self._key = folder / "region.key"
            self._key.write_text(new_key())
            self._key.chmod(0o600)

    def shown(self, role: Role, region: str = "r") -> Credentials | None:
        """The credentials of a process of this role."""
        if self._way == "tls":
            name = f"{region}-{role}"
            uris = (f"spiffe://{region}/{role}/x",)
            return make_node(self._folder, name, self._authority, uris=uris)
        return RegionKey(self._key, Identity(region, role, "x")) if self._way == "key" else None

    def agent(self, name: str, *, grants: bool, **settings: Any) -> AgentProcess:
        """Not started. `grants`: it asks for grants."""
        known: dict[str, Any] = {}
        if self._way == "tls":
            own = make_node(self._folder, name, self._authority, uris=(f"spiffe://r/agent/{name}",))
            known = {"tls_cert": str(own.cert), "tls_key": str(own.key), "tls_ca": str(own.ca)}
        elif self._way == "key":
            known = {"region_key": {"file": str(self._key), "region": "r", "name": name}}
        if grants:
            known["granting_keys"] = {"file": str(self.granting_keys.path), "region": "r"}
        agent = AgentProcess(self._folder / name, **(SETTINGS | known | settings))
        agent.caller = self.shown("gateway")
        return agent
