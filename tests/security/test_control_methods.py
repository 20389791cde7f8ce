"""Attacks on the control port of a real agent: reading and planting caches without the right role.

Every method of the agent is called as nobody, as every role and as another region, with TLS and
with the region's key. A call that is let in is answered too, mostly that its body is empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import msgspec
import pytest
from agent_process import AgentProcess
from certificates import make_authority, make_node

from kvmanager.agent import host_messages, messages, probe_messages
from kvmanager.agent.cache import move_messages
from kvmanager.agent.embeddings import messages as embedding_messages
from kvmanager.agent.links import messages as link_messages
from kvmanager.agent.messages import SERVICE
from kvmanager.directory.messages import SERVICE as DIRECTORY
from kvmanager.directory.service import DirectoryService
from local_pd.server import PdServer
from prfaas.server import PrefillServer
from transport import Credentials, Identity, RegionKey, Role
from transport.access import ACCESS
from transport.identity import ROLES
from transport.region_key import new_key
from transport.rpc import RpcClient, RpcError

METHODS = ACCESS[SERVICE].callers
Shown = Callable[[str, Role], Credentials]


class Empty(msgspec.Struct):
    """A body without fields."""


@pytest.fixture(scope="module", params=["tls", "key"])
def attacked(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Shown]]:
    """An agent's control address, and what a process of some region and role shows."""
    folder = tmp_path_factory.mktemp("agent")
    settings: dict[str, Any]
    if request.param == "tls":
        ca = make_authority(folder, "ca")
        own = make_node(folder, "own", ca, uris=("spiffe://r/agent/a",))
        settings = {"tls_cert": str(own.cert), "tls_key": str(own.key), "tls_ca": str(own.ca)}

        def shown(region: str, role: Role) -> Credentials:
            uris = (f"spiffe://{region}/{role}/x",)
            return make_node(folder, f"{region}-{role}", ca, uris=uris)
    else:
        path = folder / "key"
        path.write_text(new_key())
        path.chmod(0o600)
        settings = {"region_key": {"file": str(path), "region": "r", "name": "a"}}

        def shown(region: str, role: Role) -> Credentials:
            return RegionKey(path, Identity(region, role, "x"))

    with AgentProcess(folder / "run", **settings) as agent:
        yield agent.ready["control"], shown


async def answers(target: str, credentials: Credentials | None) -> dict[str, str]:
    """By method, the code of what the agent says to an empty body."""
    client = RpcClient(target, SERVICE, credentials)
    codes = {}
    try:
        for method in METHODS:
            try:
                await client.call(method, Empty(), Empty, 20)
                codes[method] = "OK"
            except RpcError as error:
                codes[method] = error.code
    finally:
        await client.close()
    return codes


@pytest.mark.parametrize("role", ROLES)
async def test_a_role_reaches_its_methods_and_no_other(
    attacked: tuple[str, Shown], role: str
) -> None:
    target, shown = attacked
    codes = await answers(target, shown("r", cast(Role, role)))
    for method, code in codes.items():
        assert code in ({"OK", "INVALID"} if role in METHODS[method] else {"REFUSED"}), method


async def test_nobody_and_other_regions_reach_nothing(attacked: tuple[str, Shown]) -> None:
    target, shown = attacked
    for credentials in (None, shown("other", "gateway")):
        codes = set((await answers(target, credentials)).values())
        assert codes <= {"REFUSED", "UNAVAILABLE"}


def test_every_method_of_fronts_and_directory_is_in_the_table() -> None:
    nothing: Any = None
    served = {
        **PrefillServer(nothing, "127.0.0.1:0")._services,
        **PdServer(nothing, "127.0.0.1:0")._services,
        DIRECTORY: DirectoryService(nothing).methods(),
    }
    assert {service: methods.keys() for service, methods in served.items()} == {
        service: access.callers.keys() for service, access in ACCESS.items() if service != SERVICE
    }


def test_every_method_of_an_agent_is_in_the_table() -> None:
    requests = {
        name.removesuffix("Reply")
        for module in (
            *(messages, probe_messages, move_messages, embedding_messages),
            *(link_messages, host_messages),
        )
        for name, kind in vars(module).items()
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and name.endswith("Reply")
    }
    assert requests <= METHODS.keys()
    assert METHODS.keys() - requests == {"Await", "WatchCache", "WatchLinks"}
