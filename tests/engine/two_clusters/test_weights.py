"""An engine that loads another checkpoint of the same name uses no KVCache of the others.

The last file about this region: its decode engine comes back with the other checkpoint.
"""

import asyncio
import json
from dataclasses import replace

import pytest
from engine_region import (
    WINDOW,
    computed_alone,
    engine_metrics,
    engine_status,
    everything_is_given_back,
    prompt,
    until,
)
from served_region import DECODE, DECODE_TWO, PREFILL, PREFILL_TWO, REDIRECT, Served, serving

from deploy.lab.demo.tiny_models import build_model
from deploy.lab.demo.tiny_specs import MODELS
from deploy.region.launch.probes import cluster_reports

pytestmark = [pytest.mark.asyncio(loop_scope="session"), serving(WINDOW)]

PROMPT = prompt("long", 1100, 62_000)


async def test_kvcache_of_the_other_checkpoint_is_never_used(served: Served) -> None:
    answers = [await computed_at(served, name) for name in (PREFILL, DECODE)]
    before = await loaded_bytes(served)

    async def is_loaded() -> bool:
        await computed_at(served, DECODE_TWO)
        return await loaded_bytes(served) > before

    await until(is_loaded, "the KVCache is in the arena of the decode engine")
    await with_other_weights(served)
    answer = (await served.ask([PROMPT]))[PROMPT.name]
    assert not answer.error, answer.error
    record = await served.record(answer)
    assert record["cached_tokens"] in (0, None), record
    assert record["local_cached_tokens"] in (0, None), record
    assert record["landing_cached_tokens"] in (0, None), record
    assert set(record["prefill_cached_tokens"].values()) <= {0}, record
    assert record["route"] == "local", record
    assert answer.token_ids == await served.gateways.alone(DECODE, PROMPT)
    assert answers[0] == answers[1] != answer.token_ids, "the checkpoints answer differently"


async def test_the_region_says_which_weights_differ(served: Served) -> None:
    (sentence,) = await served.region.differences()
    assert " are files:" in sentence
    assert f" at {PREFILL}, {PREFILL_TWO}, {DECODE_TWO}" in sentence
    caches = [
        (await engine_status(served.region, node, instance)).cache
        for node, instance in (("a1", PREFILL), ("b1", DECODE_TWO), ("b1", DECODE))
    ]
    same, near, other = (cache.namespace for cache in caches if cache is not None)
    assert same == near != other
    await everything_is_given_back(served.region)


async def computed_at(served: Served, instance: str) -> list[int]:
    """One engine's own answer, with what is cached."""
    gateways = served.gateways
    return await computed_alone(served.region, gateways.session, instance, WINDOW, PROMPT)


async def loaded_bytes(served: Served) -> float:
    """What the other engine of the decode engine's node has loaded from the arena."""
    metrics = await engine_metrics(served.region, DECODE_TWO)
    return metrics.get("vllm:prfaas_cache_loaded_bytes_total", 0.0)


async def with_other_weights(served: Served) -> None:
    """Return once the decode engine has the other checkpoint, and the gateway knows."""
    region, model = served.region, MODELS[WINDOW]
    changed = replace(model, seed=model.seed + 1)
    other = await asyncio.to_thread(build_model, changed, served.folder / "swapped")
    # As if the folder had something else in it now.
    redirect = json.dumps({str(served.path): str(other)})
    await asyncio.to_thread((served.folder / REDIRECT).write_text, redirect)
    await region.engine(DECODE).kill()

    async def is_known() -> bool:
        reports = await cluster_reports(served.url, region.operator_key)
        found = {item.name: item for report in reports for item in report.instances}
        return found[DECODE].layout_fingerprint not in ("", found[PREFILL].layout_fingerprint)

    await served.is_whole()
    await until(is_known, "the gateway knows of the other checkpoint")
