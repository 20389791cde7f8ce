"""A region with two PD and two prefill clusters: everything real but the engines' computing."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from engine_module import install
from region_hosts import PATIENCE_S

from deploy.region.launch.launcher import RunningRegion
from deploy.region.spec.loading import parse_region

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

KEYS = "carl key-of-carl\ndora key-of-dora\n"


@pytest.fixture
async def region(tmp_path: Path) -> AsyncIterator[RunningRegion]:
    python_path = install(tmp_path / "engine")
    (tmp_path / "keys").write_text(KEYS)
    (tmp_path / "keys").chmod(0o600)

    def cluster(name: str, kind: str, **more: Any) -> dict[str, Any]:
        agent = {"arena_gib": 0.01, "arena_dir": str(tmp_path)}
        node = {"name": f"{name}1", "agent": agent, "instances": [{"name": f"{name}-engine"}]}
        return {"name": name, "kind": kind, "nodes": [node]} | more

    file = {
        "name": "homes",
        "gateway": {
            "port": 0,
            "threshold_tokens": 100,
            "scheduling": {"routing": {"policy": "threshold"}},
            "api_keys_file": str(tmp_path / "keys"),
            "operators": ["carl"],
            "homes": {"dora": "d"},
        },
        "models": [
            {
                "name": "small",
                "path": str(tmp_path),
                "prefix_caching": False,
                "env": {"PYTHONPATH": python_path},
            }
        ],
        "clusters": [
            cluster("a", "prefill"),
            cluster("b", "prefill"),
            cluster("c", "pd"),
            cluster("d", "pd", spill="never"),
        ],
        "links": [{"from": "a", "to": "c"}, {"from": "b", "to": "d", "emulate": {"rtt": "1ms"}}],
    }
    async with RunningRegion(parse_region(json.dumps(file), {}), tmp_path / "run") as running:
        yield running


def asked(
    region: RunningRegion, path: str, key: str, body: Any = None, **headers: str
) -> tuple[int, dict[str, str], Any]:
    data = None if body is None else json.dumps(body).encode()
    sent = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"} | headers
    request = urllib.request.Request(region.gateway_url + path, data, sent)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
            return response.status, dict(response.headers), json.loads(response.read())
    except urllib.error.HTTPError as error:
        return error.code, dict(error.headers), json.loads(error.read())


async def test_every_request_is_decoded_in_its_home(region: RunningRegion) -> None:
    # The launcher looks after its processes meanwhile.
    await asyncio.to_thread(check_homes, region)


def check_homes(region: RunningRegion) -> None:
    def decoded(tenant: str, length: int, **headers: str) -> tuple[str, str, str]:
        """The PD cluster, the engine that decoded, and where the prompt was prefilled. A decode
        engine compares the KVCache that landed, and answers so only if it is right.
        """
        body = {"model": "small", "prompt": [*range(length)], "max_tokens": 4}
        status, found, answer = asked(
            region, "/v1/completions", f"key-of-{tenant}", body, **headers
        )
        assert status == 200, answer
        assert answer["choices"][0]["text"].startswith("answer ")
        page = f"/prfaas/requests/{found['x-request-id']}"
        (record, *_) = asked(region, page, "key-of-carl")[2]["requests"]
        assert (record["cluster"], record["home"]) == (found["x-prfaas-cluster"],) * 2
        return record["cluster"], record["decode_instance"], record["target"]

    for length, at_c, at_d in ((20, "one_engine", "one_engine"), (200, "a", "b")):
        assert decoded("carl", length) == ("c", "c-engine", at_c)
        assert decoded("dora", length) == ("d", "d-engine", at_d)
        assert decoded("carl", length, **{"x-prfaas-home": "d"}) == ("d", "d-engine", at_d)
        assert decoded("dora", length, **{"x-prfaas-home": "c"}) == ("c", "c-engine", at_c)
    body = {"model": "small", "prompt": "x"}
    header = {"x-prfaas-home": "a"}
    status, _, answer = asked(region, "/v1/completions", "key-of-dora", body, **header)
    assert (status, answer["error"]["code"]) == (400, "unknown_home")
    _, _, shown = asked(region, "/prfaas/region", "key-of-carl")
    assert shown["links"] == {"a": "a-to-c", "b": "b-to-d"}
    assert {item["name"] for pd in shown["pds"].values() for item in pd["instances"]} == {
        "c-engine",
        "d-engine",
    }
