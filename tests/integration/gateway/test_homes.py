"""Several PD clusters behind one gateway: whose engines answer which request, and when others."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from cache_doubles import FakeDirectory
from openai_engine import reset

from deploy.gateway.api_keys import ApiKey
from deploy.gateway.cache.region_caches import RegionCaches
from kvmanager.agent.messages import CacheModel
from kvmanager.directory.messages import NodeName

CACHE = CacheModel("ab" * 16, 64, [(0, 6400, 0)])
TWO = {"pds": ("home", "north"), "prefill": ("near", "far")}
NORTH = {"x-prfaas-home": "north"}
SHORT = {"model": "tiny", "prompt": "hello"}


def api_key(key: str, name: str) -> ApiKey:
    return ApiKey.model_validate({"key": key, "name": name})


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def whole(engine: Any, region: Any, body: Any, headers: dict[str, str]) -> bytes:
    """The answer of an engine that nobody stands before."""
    url = engine.url + "/v1/completions"
    async with region.session.post(url, json=body, headers=headers) as response:
        answer: bytes = await response.read()
        return answer


async def served(region: Any, body: Any, headers: dict[str, str] | None = None) -> tuple[str, str]:
    """The PD cluster of a request that goes well, by the answer's header and by who served it."""
    before = {pd.name: _num_served(pd) for pd in region.pds.values()}
    status, found, _ = await region.post(body, headers=headers)
    assert status == 200
    after = {pd.name: _num_served(pd) for pd in region.pds.values()}
    (name,) = (name for name in after if after[name] > before[name])
    return found["x-prfaas-cluster"], name


def _num_served(pd: Any) -> int:
    return sum(len(engine.bodies()) for engine in pd.engines.values())


def no_agent(_target: str) -> Any:
    raise AssertionError("nobody asks agents here")


def lose(pd: Any) -> None:
    """All engines of a PD cluster are gone from now on, before any report says so."""
    pd.down = set(pd.engines)


@pytest.mark.parametrize("length", [5, 300])
async def test_the_header_names_the_home(open_region: Any, length: int) -> None:
    body = {"model": "tiny", "prompt": "x" * length}
    async with open_region(**TWO) as region:
        assert await served(region, body) == ("home", "home")
        assert await served(region, body, NORTH) == ("north", "north")
        record = await region.record()
        assert (record.home, record.cluster, record.spill) == ("north", "north", "")
        assert record.decode_instance == "north-d0"
        status, _, answer = await region.post(body, headers={"x-prfaas-home": "nowhere"})
        error = json.loads(answer)["error"]
        assert (status, error["code"], error["param"]) == (400, "unknown_home", "x-prfaas-home")
        assert "home, north" in error["message"]
        await region.assert_nothing_held()


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_is_that_of_the_homes_own_engine(open_region: Any, stream: bool) -> None:
    async with open_region(**TWO) as region:
        body = region.long_body(stream=stream)
        headers = {"X-Request-Id": "same"}
        for name in ("home", "north"):
            status, found, answer = await region.post(
                body, headers={"x-prfaas-home": name} | headers
            )
            assert (status, found["x-prfaas-route"]) == (200, "prefill_cluster")
            (engine,) = region.pds[name].engines.values()
            assert engine.sources == ["landing"]
            assert answer == await whole(engine, region, body, headers)
        await region.assert_nothing_held()


async def test_keys_and_the_gateway_have_homes(open_region: Any) -> None:
    keys = {
        "api_keys": (api_key("a", "ann"), api_key("b", "bob")),
        "homes": {"ann": "north"},
        "operators": ("ann",),
    }
    async with open_region(**TWO, **keys) as region:
        assert await served(region, SHORT, bearer("a")) == ("north", "north")
        assert await served(region, SHORT, bearer("b")) == ("home", "home")
        assert await served(region, SHORT, bearer("b") | NORTH) == ("north", "north")
        other = region.gateway.config.model_copy(update={"home": "north", "homes": {"ann": "home"}})
        region.gateway.use_live(other)
        assert await served(region, SHORT, bearer("a")) == ("home", "home")
        assert await served(region, SHORT, bearer("b")) == ("north", "north")


async def test_only_linked_prefill_clusters_prefill_for_a_home(open_region: Any) -> None:
    links = {("near", "home"): "near-to-home", ("far", "north"): "far-to-north"}
    async with open_region(**TWO, owned={"links": links}) as region:
        for headers, used, unused in ((None, "near", "far"), (NORTH, "far", "near")):
            idle = len(region.prefill[unused].jobs)
            status, found, _ = await region.post(region.long_body(), headers=headers)
            assert (status, found["x-prfaas-route"]) == (200, "prefill_cluster")
            assert (await region.record()).target == used
            assert len(region.prefill[unused].jobs) == idle
        async with region.session.get(region.url + "/prfaas/region") as response:
            shown = await response.json()
        assert shown["links"] == {"near": "near-to-home", "far": "far-to-north"}
        assert list(shown["pds"]) == ["home", "north"]
        pairs = [(item["cluster"], item["pd"]) for item in shown["thresholds"]]
        assert pairs == [("near", "home"), ("far", "north")]


async def test_a_prefill_instance_of_the_home_hands_over_there(open_region: Any) -> None:
    async with open_region(**TWO, hand_off_tokens=20, threshold_tokens=1000) as region:
        region.pds["north"].prefill = region.prefill["far"]
        reports = region.gateway._watcher.pd_reports
        await region.until(lambda: len(reports()["north"].instances) == 2)
        status, found, _ = await region.post(region.long_body(), headers=NORTH)
        assert (status, found["x-prfaas-cluster"]) == (200, "north")
        record = await region.record()
        assert (record.target, record.decode_instance) == ("hand_off", "north-d0")
        await region.assert_nothing_held()


@pytest.mark.parametrize("length", [5, 300])
async def test_a_request_whose_home_is_gone_spills(open_region: Any, length: int) -> None:
    body = {"model": "tiny", "prompt": "x" * length}
    async with open_region(**TWO, report_interval_s=5.0, report_stale_s=20.0) as region:
        lose(region.pds["north"])
        status, headers, answer = await region.post(body, headers=NORTH | {"X-Request-Id": "same"})
        assert (status, headers["x-prfaas-cluster"]) == (200, "home")
        assert (headers["x-prfaas-home"], headers["x-prfaas-spill"]) == (
            "north",
            "home_unable",
        )
        assert answer == await whole(region.engine, region, body, {"X-Request-Id": "same"})
        record = await region.record()
        assert (record.home, record.cluster, record.spill) == ("north", "home", "home_unable")
        async with region.session.get(region.url + "/metrics") as response:
            text = await response.text()
        labels = 'cluster="home",home="north",spill="home_unable"'
        assert f"prfaas_gateway_pd_requests_total{{{labels}}} 1.0" in text
        await region.assert_nothing_held()


@pytest.mark.parametrize("length", [5, 300])
@pytest.mark.parametrize("is_reported", [False, True])
async def test_never_means_never(open_region: Any, length: int, is_reported: bool) -> None:
    body = {"model": "tiny", "prompt": "x" * length}
    late = {} if is_reported else {"report_interval_s": 5.0, "report_stale_s": 20.0}
    async with open_region(**TWO, **late, owned={"spill": {"north": "never"}}) as region:
        lose(region.pds["north"])
        if is_reported:
            reports = region.gateway._watcher.pd_reports
            await region.until(lambda: not reports()["north"].healthy)
        status, headers, answer = await region.post(body, headers=NORTH)
        error = json.loads(answer)["error"]
        assert (status, error["code"]) == (503, "home_unavailable")
        assert "north" in error["message"]
        assert "spill: never" in error["message"]
        assert headers["retry-after"] == "1"
        assert await served(region, body) == ("home", "home")
        lose(region.pds["home"])
        status, _, answer = await region.post(body)
        assert (status, json.loads(answer)["error"]["code"]) == (503, "no_engine_available")
        await region.assert_nothing_held()


@pytest.mark.parametrize("length", [5, 300])
@pytest.mark.parametrize(("spill", "status"), [("overflow", 200), ("never", 502)])
async def test_a_decode_that_fails_before_its_first_token_is_tried_in_another_cluster(
    open_region: Any, length: int, spill: str, status: int
) -> None:
    async with open_region(**TWO, owned={"spill": {"north": spill}}) as region:
        (engine,) = region.pds["north"].engines.values()
        engine.reply = reset
        body = {"model": "tiny", "prompt": "x" * length}
        answered, headers, _ = await region.post(body, headers=NORTH)
        assert answered == status
        record = await region.record()
        assert record.num_retries == 1
        if status == 200:
            assert headers["x-prfaas-spill"] == "home_unable"
            assert record.decode_instance == region.engine.name
        await region.assert_nothing_held()


async def test_a_model_is_at_home_where_it_is_served(open_region: Any) -> None:
    models = ({"name": "tiny"}, {"name": "big"})
    async with open_region(**TWO, models=models) as region:
        region.pds["home"].engine_numbers = {"model": "big"}
        reports = region.gateway._watcher.pd_reports
        await region.until(lambda: reports()["home"].instances[0].model == "big")
        assert await served(region, SHORT) == ("north", "north")
        assert (await region.record()).home == "north"


async def test_a_gateway_lives_while_one_pd_cluster_does(open_region: Any) -> None:
    async with open_region(**TWO) as region:
        lose(region.pds["home"])
        reports = region.gateway._watcher.pd_reports
        await region.until(lambda: not reports()["home"].healthy)
        async with region.session.get(region.url + "/health") as response:
            assert response.status == 200
        assert await served(region, SHORT) == ("north", "north")
        lose(region.pds["north"])
        await region.until(lambda: not reports()["north"].healthy)
        async with region.session.get(region.url + "/health") as response:
            assert response.status == 503


async def test_roles_are_those_of_each_pd_cluster(open_region: Any) -> None:
    async with open_region(**TWO) as region:
        url = region.url + "/v1/pd_role"
        async with region.session.get(url) as response:
            first = await response.json()
        assert (first["cluster"], first["clusters"]) == ("home", ["home", "north"])
        async with region.session.get(url, params={"cluster": "north"}) as response:
            (instance,) = (await response.json())["instances"]
        assert (instance["cluster"], instance["instance"]) == ("north", "north-d0")
        async with region.session.get(url, params={"cluster": "x"}) as response:
            assert response.status == 404
        for name, status, code in (
            ("north-d0", 409, "role_both"),
            ("nobody", 404, "unknown_instance"),
        ):
            order = {"instance": name, "role": "prefill"}
            async with region.session.post(url, json=order) as response:
                assert response.status == status
                assert (await response.json())["error"]["code"] == code


async def test_what_is_cached_counts_where_a_request_spills_to(open_region: Any) -> None:
    directory = FakeDirectory()
    directory.held = {NodeName("home", "d0"): 2, NodeName("north", "north-d0"): 4}
    caches = RegionCaches(directory, no_agent, directory.follow)
    more = {"caches": caches, "cache_model": CACHE, "threshold_tokens": 1000}
    # The front knows sooner than its next report that no engine is left.
    late = {"report_interval_s": 5.0, "report_stale_s": 20.0}
    async with open_region(**TWO, **more, **late) as region:
        # Above what is certainly short, so that it is looked up.
        body = {"model": "tiny", "prompt": "x" * 1100}
        _, headers, answer = await region.post(body, "/prfaas/cache/explain", headers=NORTH)
        explained = json.loads(answer)
        assert (explained["home"], explained["cluster"]) == ("north", "north")
        status, headers, _ = await region.post(body, headers=NORTH)
        assert (status, headers["x-prfaas-cached-tokens"][:9]) == (200, "local=256")
        lose(region.pds["north"])
        status, headers, _ = await region.post(body, headers=NORTH)
        assert (status, headers["x-prfaas-cluster"]) == (200, "home")
        assert headers["x-prfaas-cached-tokens"].startswith("local=128")
        await region.assert_nothing_held()


@pytest.mark.parametrize("length", [5, 300])
@pytest.mark.parametrize("spill", ["overflow", "never"])
async def test_a_home_that_would_refuse_a_request_lets_it_overflow(
    open_region: Any, spill: str, length: int
) -> None:
    body = {"model": "tiny", "prompt": "x" * length}
    async with open_region(**TWO, owned={"spill": {"north": spill}}) as region:
        region.pds["north"].engine_numbers = {"decode_slots": 1, "running": 1}
        reports = region.gateway._watcher.pd_reports
        await region.until(lambda: reports()["north"].instances[0].running == 1)
        status, headers, answer = await region.post(body, headers=NORTH)
        if spill == "overflow":
            assert (status, headers["x-prfaas-cluster"]) == (200, "home")
            assert headers["x-prfaas-spill"] == "home_refuses"
        else:
            assert (status, json.loads(answer)["error"]["code"]) == (429, "decode_load")
        await region.assert_nothing_held()


@pytest.mark.parametrize(
    ("spill", "cluster"), [("never", "home"), ("overflow", "north"), ("nearest", "north")]
)
async def test_a_request_goes_where_it_is_predicted_clearly_sooner(
    open_region: Any, spill: str, cluster: str
) -> None:
    async with open_region(**TWO, owned={"spill": {"home": spill}}) as region:
        known = region.gateway.scheduler.knowledge("tiny")
        slow = {"one_engine": 0.1, "one_engine in north": 1e-6, "near": 0.1, "far": 0.1}
        for place, per_token_s in slow.items():
            for num_tokens in range(500, 4500, 500):
                known.learn(place, num_tokens, 0, num_tokens * per_token_s)
                known.reserved(num_tokens, 0, num_tokens * 512)
        status, headers, _ = await region.post(region.long_body())
        assert (status, headers["x-prfaas-cluster"]) == (200, cluster)
        record = await region.record()
        assert record.spill == ("" if spill == "never" else "sooner")
        assert record.numbers.get("home_ttft_s", 30) > 10
        await region.assert_nothing_held()


@pytest.mark.parametrize("same_names", [False, True])
async def test_a_full_cluster_does_not_fill_another_with_instances_of_the_same_names(
    open_region: Any, same_names: bool
) -> None:
    stream = SHORT | {"stream": True}
    regional = open_region(pds=("home", "north"), prefill=(), same_names=same_names)
    async with regional as region:
        home, north = region.pds.values()
        for pd in (home, north):
            pd.engine_numbers = {"decode_slots": 4}
            for engine in pd.engines.values():
                engine.first_token.clear()
        await region.heard()
        asked = [asyncio.create_task(region.post(stream)) for _ in range(4)]
        await region.until(lambda: _num_running(home) == 4)
        asked += [asyncio.create_task(region.post(stream, headers=NORTH)) for _ in range(3)]
        await region.until(lambda: _num_running(north) == 3)
        for engine in (*home.engines.values(), *north.engines.values()):
            engine.first_token.set()
        assert {status for status, *_ in await asyncio.gather(*asked)} == {200}


def _num_running(pd: Any) -> int:
    return sum(engine.num_serving for engine in pd.engines.values())
