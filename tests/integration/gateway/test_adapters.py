"""Requests for LoRA adapters: routed like those of their model, with keys of their own."""

from __future__ import annotations

import json
from typing import Any

import pytest
from cache_doubles import FakeDirectory

from deploy.gateway.api_keys import ApiKey
from deploy.gateway.cache.region_caches import RegionCaches
from deploy.gateway.config import ModelConfig
from kvmanager.agent.messages import CacheModel
from kvmanager.hashing import block_keys, join_keys, root_key

CACHE = CacheModel("ab" * 16, 64, [(0, 6400, 0)])
MODELS = {
    "models": (ModelConfig(name="tiny", max_model_len=8192, adapters={"poet": "/adapters/poet"}),)
}
POET = {"poet": "files:1"}


async def have_adapters(region: Any, home: dict[str, str], far: dict[str, str]) -> None:
    """The engines of both clusters tell that they have these from now on; those of the PD cluster
    that prefill have what the prefill cluster has.
    """
    region.pd.engine_numbers = {"adapters": home}
    region.far.adapters = far
    watcher = region.gateway._watcher

    def is_told() -> bool:
        told = *watcher.pd_reports()["home"].instances, *watcher.prefill_reports()["far"].instances
        return all(item.adapters == (far if item.role == "prefill" else home) for item in told)

    await region.until(is_told)


def no_agent(_target: str) -> Any:
    raise AssertionError("nobody asks agents here")


@pytest.fixture
def directory() -> FakeDirectory:
    return FakeDirectory()


@pytest.fixture
def caches(directory: FakeDirectory) -> RegionCaches:
    return RegionCaches(directory, no_agent, directory.follow)


async def test_an_adapters_request_is_prefilled_and_decoded_with_it(open_region: Any) -> None:
    async with open_region(**MODELS) as region:
        await have_adapters(region, POET, POET)
        body = region.long_body(model="poet")
        status, headers, answer = await region.post(body)
        assert (status, headers["x-prfaas-route"]) == (200, "prefill_cluster")
        assert json.loads(answer)["model"] == "poet"
        (job,) = region.far.jobs
        assert (job.model, job.adapter, job.landing.adapter) == ("tiny", "poet", "files:1")
        params = json.loads(region.engine.bodies()[0])["kv_transfer_params"]["prfaas"]
        assert params["adapter"] == "files:1"
        record = await region.record()
        assert (record.model, record.adapter) == ("tiny", "poet")
        await region.post(region.long_body())
        assert (region.far.jobs[1].adapter, region.far.jobs[1].landing.adapter) == ("", "")
        await region.assert_nothing_held()


@pytest.mark.parametrize(
    ("home", "far"),
    [(POET, {"poet": "files:2"}), (POET, {}), ({}, POET), ({}, {})],
)
async def test_without_the_same_weights_at_both_ends_nothing_is_sent(
    open_region: Any, home: dict[str, str], far: dict[str, str]
) -> None:
    async with open_region(**MODELS) as region:
        await have_adapters(region, home, far)
        status, headers, _ = await region.post(region.long_body(model="poet"))
        assert (status, headers["x-prfaas-route"]) == (200, "local")
        assert headers["x-prfaas-reason"].startswith("adapter_differs")
        assert region.far.jobs == []
        assert region.engine.sources == ["prompt"]
        _, headers, _ = await region.post(region.long_body())
        assert headers["x-prfaas-route"] == "prefill_cluster", "the model itself is the same"


async def test_a_hand_off_needs_the_identity_too(open_region: Any) -> None:
    async with open_region(**MODELS, hand_off_tokens=20, threshold_tokens=1000) as region:
        region.pd.prefill = region.far
        reports = region.gateway._watcher.pd_reports
        await region.until(lambda: len(reports()["home"].instances) == 2)
        for lacking in ({}, {"poet": "files:2"}):
            await have_adapters(region, POET, lacking)
            status, headers, _ = await region.post(region.long_body(model="poet"))
            assert (status, headers["x-prfaas-route"]) == (200, "local")
            assert headers["x-prfaas-reason"].startswith("adapter_differs")
            assert region.pd.num_reserved == 0
        await have_adapters(region, POET, POET)
        await region.post(region.long_body(model="poet"))
        (job,) = region.far.jobs
        assert (job.adapter, job.landing.adapter) == ("poet", "files:1")
        await region.assert_nothing_held()


async def test_keys_are_of_the_adapters_weights(
    open_region: Any, caches: RegionCaches, directory: FakeDirectory
) -> None:
    async with open_region(**MODELS, caches=caches, cache_model=CACHE) as region:
        await have_adapters(region, POET, POET)
        body = region.long_body(model="poet")
        await region.post(body)
        await region.post(region.long_body())
        root = root_key(bytes.fromhex(CACHE.namespace), lora="files:1")
        keys = block_keys(list(body["prompt"].encode())[:-1], 64, root)
        (_, own), (_, plain) = directory.asked
        assert own == keys
        assert not set(own) & set(plain)
        assert region.pd.reserved_with[0][0] == join_keys([root, *keys])
        # Of an adapter that nobody identifies, nothing is looked up.
        await have_adapters(region, {}, {})
        status, _, _ = await region.post(body)
        assert (status, len(directory.asked)) == (200, 2)


async def test_tenants_of_an_adapter_have_keys_of_their_own(
    open_region: Any, caches: RegionCaches, directory: FakeDirectory
) -> None:
    api_keys = tuple(ApiKey.model_validate({"key": one, "name": one}) for one in ("ann", "bob"))
    async with open_region(
        **MODELS, caches=caches, cache_model=CACHE, api_keys=api_keys, operators=("ann",)
    ) as region:
        await have_adapters(region, POET, POET)
        for name in ("ann", "bob"):
            headers = {"Authorization": f"Bearer {name}"}
            status, _, _ = await region.post(region.long_body(model="poet"), headers=headers)
            assert status == 200
            body = json.loads(region.engine.bodies()[-1])
            assert (body["model"], len(body["cache_salt"])) == ("poet", 64)
            status, _, answer = await region.post(
                region.long_body(model="poet", priority=-1), headers=headers
            )
            assert (status, json.loads(answer)["error"]["code"]) == (403, "priority_not_allowed")
        first, second = (set(keys) for _, keys in directory.asked)
        assert len(first) == len(second) == 4
        assert not first & second


async def test_models_list_adapters_and_others_are_refused(open_region: Any) -> None:
    async with open_region(**MODELS) as region:
        async with region.session.get(region.url + "/v1/models") as response:
            cards = (await response.json())["data"]
        assert [(card["id"], card["parent"]) for card in cards] == [
            ("tiny", None),
            ("poet", "tiny"),
        ]
        async with region.session.get(region.url + "/v1/models/poet") as response:
            assert (await response.json())["root"] == "/adapters/poet"
        status, _, answer = await region.post(region.long_body(model="judge"))
        error = json.loads(answer)["error"]
        assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")
        assert region.engine.requests == []


async def test_an_adapters_pictures_stay_on_one_engine(open_region: Any) -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    body = {"model": "poet", "messages": [{"role": "user", "content": [picture]}]}
    async with open_region(**MODELS) as region:
        await have_adapters(region, POET, POET)
        status, headers, _ = await region.post(body, "/v1/chat/completions")
        assert (status, headers["x-prfaas-route"]) == (200, "direct")
        assert headers["x-prfaas-reason"].startswith("multimodal")
