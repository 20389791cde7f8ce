"""A prompt handed over inside the PD cluster: what its decode engine is told, and what is recorded.

Fake engines and agents; two nodes, the prefill instance on the first.
"""

import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from eventually import eventually
from pd_front_rig import CONFIG, PdRig, make_rig
from rich.console import Console
from untimed_gateway import NOT_TIMED

from deploy.gateway.app import Gateway
from deploy.gateway.config import GatewayConfig, ModelConfig
from deploy.gateway.scheduling.config import RoutingSection, SchedulingConfig
from deploy.gateway.server import start_server
from deploy.gateway.serving.records import RequestRecord
from deploy.ops.explain_view import print_records

BODY = {"model": "tiny", "prompt": "x" * 600}


@asynccontextmanager
async def gateway(rig: PdRig) -> AsyncIterator[tuple[str, Gateway]]:
    routing = RoutingSection.of(policy="threshold")
    config = GatewayConfig(
        port=0,
        models=(ModelConfig(name="tiny"),),
        report_interval_s=0.05,
        scheduling=SchedulingConfig(routing=routing, calibration=NOT_TIMED),
    )
    made = Gateway(config, [rig.front], {})
    runner = await start_server(made)
    try:
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}/v1/completions", made
    finally:
        await runner.cleanup()


async def ask(url: str, made: Gateway) -> RequestRecord:
    """The record of one request that was answered, once nothing in it changes any more."""
    async with aiohttp.ClientSession() as session, session.post(url, json=BODY) as response:
        assert response.status == 200, await response.text()
    await eventually(lambda: made.records[-1].is_settled)
    return made.records[-1]


@pytest.mark.parametrize(("decodes", "way"), [("d0", "arena"), ("d1", "nixl")])
async def test_the_decode_engine_is_told_where_the_kvcache_is(decodes: str, way: str) -> None:
    async with make_rig("remote", replace(CONFIG, hand_off="nixl")) as rig, gateway(rig) as served:
        await rig.front.drain("d1" if decodes == "d0" else "d0")
        record = await ask(*served)
        assert (record.target, record.hand_off, record.prefill_error) == ("hand_off", way, "")
        assert (record.prefill_instance, record.decode_instance) == ("p0", decodes)
        shown = io.StringIO()
        print_records(Console(width=200, file=shown), [record], record.started_s)
        assert f"hand_off={way}: " in shown.getvalue()
        (asked,) = rig.engines[decodes].posted
        params: dict[str, Any] = asked["kv_transfer_params"]
        if way == "nixl":
            assert params == {"do_remote_prefill": True, "remote_block_ids": [[1]]}
            assert len(rig.engines["p0"].posted[0]["prompt"]) == len(BODY["prompt"])
        else:
            assert params["prfaas"]["role"] == "consumer"
        await eventually(lambda: rig.num_landings == 0)


async def test_a_nixl_prefill_that_fails_is_computed_by_the_decode_engine() -> None:
    async with make_rig("remote", replace(CONFIG, hand_off="nixl")) as rig, gateway(rig) as served:
        await rig.front.drain("d0")
        rig.engines["p0"].keeps_kvcache = False
        record = await ask(*served)
        assert "NixlConnector" in record.prefill_error
        assert record.hand_off == ""
        (asked,) = rig.engines["d1"].posted
        assert "kv_transfer_params" not in asked
        await eventually(lambda: rig.num_landings == 0)
