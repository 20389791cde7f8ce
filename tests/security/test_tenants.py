"""Attacks of one tenant on what another one cached: a real gateway, doubles of fronts and engines.

The directory knows which keys are cached, and learns the keys of each prompt that was looked up.
"""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from cache_doubles import coverage
from live_region_cases import teach

from deploy.gateway.api_keys import ApiKey
from deploy.gateway.cache.region_caches import RegionCaches
from deploy.gateway.intake.cache_salts import CacheSalts
from kvmanager.agent.messages import CacheModel, ListCacheReply, PrefixLeaf
from kvmanager.directory.messages import NodeCoverage, NodeName, NodeState, ResumeRule
from kvmanager.hashing import block_keys, root_key
from scheduler.routing.decision import ONE_ENGINE

MODEL = CacheModel("ab" * 16, 64, [(0, 6400, 0)])
NODE = NodeName("home", "d0")
KEYS = tuple(ApiKey.model_validate(f"{name} key-of-{name}") for name in ("alice", "bob", "mallory"))
PROMPT = "x" * 300


class KnowingDirectory:
    """Holds what `cached` names; whatever is looked up is named by `asked`."""

    def __init__(self) -> None:
        self.cached: set[bytes] = set()
        self.asked: list[list[bytes]] = []

    async def match(self, rule: ResumeRule, keys: Sequence[bytes]) -> list[NodeCoverage]:
        self.asked.append(list(keys))
        held = 0
        while held < len(keys) and keys[held] in self.cached:
            held += 1
        return [coverage(NODE, held)] if held else []

    async def nodes(self) -> list[NodeState]:
        return []

    async def close(self) -> None: ...


class ListingAgent:
    """An agent that lists the last key of what the directory holds."""

    directory: KnowingDirectory

    def __init__(self, target: str) -> None: ...

    async def list_cache(self, limit: int, order: str, timeout_s: float) -> ListCacheReply:
        prefixes = [
            PrefixLeaf(key.hex(), 256, {"arena/kv": 1}, 1, 0.0, 0, 256, False)
            for key in sorted(self.directory.cached)
        ]
        return ListCacheReply(prefixes, len(prefixes))

    async def close(self) -> None: ...


@pytest.fixture
def directory() -> KnowingDirectory:
    made = ListingAgent.directory = KnowingDirectory()
    return made


@pytest.fixture
def opened(open_region: Any, directory: KnowingDirectory) -> Any:
    """Opens a region with three tenants; arguments are further settings of the gateway."""
    caches: Any = RegionCaches(directory, ListingAgent)  # type: ignore[arg-type]
    return lambda **config: open_region(caches=caches, cache_model=MODEL, api_keys=KEYS, **config)


async def ask(
    region: Any, tenant: str, body: Any = None, path: str = "/v1/completions"
) -> tuple[int, dict[str, str], Any]:
    body = {"model": "tiny", "prompt": PROMPT} if body is None else body
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer key-of-{tenant}", "Content-Type": "application/json"}
    async with region.session.post(region.url + path, data=raw, headers=headers) as response:
        answer = json.loads(await response.read())
        return response.status, {k.lower(): v for k, v in response.headers.items()}, answer


def guesses(victim: str) -> list[Any]:
    """Bodies of a client that wants the salt of `victim`."""
    plain = {"model": "tiny", "prompt": PROMPT}
    salts = CacheSalts({})
    wanted = [victim, f"tenant{victim}", salts.salt(victim, None), salts.salt(victim, ""), ""]
    escaped = json.dumps(plain).encode()[:-1]
    stolen = json.dumps(salts.salt(victim, None)).encode()
    return [
        plain,
        *(plain | {"cache_salt": salt} for salt in wanted),
        plain | {"cache_salt": None},
        escaped + b',"cache\\u005fsalt":' + stolen + b"}",
        escaped + b',"cache_salt":"a","cache_salt":' + stolen + b"} \n",
    ]


async def test_no_salt_that_a_client_sends_reaches_what_another_tenant_cached(
    opened: Any, directory: KnowingDirectory
) -> None:
    async with opened() as region:
        await ask(region, "alice")
        directory.cached = set(directory.asked[-1])
        assert len(directory.cached) == 4
        status, headers, _ = await ask(region, "alice")
        assert status == 200
        assert headers["x-prfaas-cached-tokens"] == "local=256, prefill=0, landing=256"
        alices = {_salt(raw) for _, _, raw in region.engine.requests}
        assert len(alices) == 1
        region.engine.requests.clear()
        for guess in guesses("alice"):
            status, headers, _ = await ask(region, "mallory", guess)
            assert status == 200
            assert headers["x-prfaas-cached-tokens"] == "local=0, prefill=0, landing=0"
            assert not directory.cached & set(directory.asked[-1])
        # What engines get, by themselves, with a landing and to render, never has the salt either.
        mallorys = {_salt(raw) for _, _, raw in region.engine.requests}
        mallorys |= {job.cache_salt for job in region.far.jobs if job.tenant == "mallory"}
        assert not alices & mallorys
        assert {"landing", "prompt"} <= set(region.engine.sources)


def image(**fields: Any) -> dict[str, Any]:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}} | fields
    return {"model": "tiny", "messages": [{"role": "user", "content": ["look", part]}]}


NAMED = [
    image(uuid="logo"),
    image(uuid="logo", image_url=None),
    image(uuid="logo", type="text", text="x"),
    image(uuid="logo", type=5),
    json.dumps(image(uuid="logo")).replace('"uuid"', '"u\\u0075id"').encode(),
    json.dumps(image(uuid="x")).replace('"uuid": "x"', '"uuid": "x", "uuid": "logo"').encode(),
]


@pytest.mark.parametrize("body", NAMED)
async def test_no_tenant_names_the_media_of_another(opened: Any, body: Any) -> None:
    """Engines keep media by their names, and ask for neither bytes nor salt."""
    names: dict[str, set[str]] = {"alice": set(), "mallory": set()}
    async with opened() as region:
        for tenant, seen in names.items():
            for asked in (body, NAMED[0]):
                region.engine.requests.clear()
                status, _, _ = await ask(region, tenant, asked, "/v1/chat/completions")
                assert status == 200
                seen.update(_media_name(raw) for _, _, raw in region.engine.requests)
    assert len(names["alice"]) == len(names["mallory"]) == 1, "a tenant finds its own"
    assert not names["alice"] & names["mallory"]
    assert "logo" not in names["alice"] | names["mallory"]


def _media_name(body: bytes) -> str:
    """As an engine reads it."""
    text, part = json.loads(body)["messages"][0]["content"]
    assert text == "look"
    return str(part["uuid"])


def _salt(body: bytes) -> str:
    """As an engine reads it: the last of fields of one name counts."""
    salt = json.loads(body)["cache_salt"]
    assert isinstance(salt, str)
    assert len(salt) == 64
    return salt


async def test_an_explanation_tells_nothing_of_another_tenants_prompts(
    opened: Any, directory: KnowingDirectory
) -> None:
    async with opened() as region:
        await ask(region, "alice")
        directory.cached = set(directory.asked[-1])
        _, _, own = await ask(region, "alice", path="/prfaas/cache/explain")
        assert [node["node"] for node in own["nodes"]] == ["d0"]
        for guess in guesses("alice"):
            status, _, told = await ask(region, "mallory", guess, "/prfaas/cache/explain")
            assert status == 200
            assert told["nodes"] == []
            assert told["key"] != own["key"]
            assert all(route["computed_tokens"] == 300 for route in told["routes"])


async def test_those_of_a_group_share_and_others_do_not(
    opened: Any, directory: KnowingDirectory
) -> None:
    async with opened(shared_caches={"team": ("alice", "bob")}) as region:
        await ask(region, "alice")
        directory.cached = set(directory.asked[-1])
        cached = {
            name: (await ask(region, name))[1]["x-prfaas-cached-tokens"]
            for name in ("alice", "bob", "mallory")
        }
    assert cached["alice"] == cached["bob"] == "local=256, prefill=0, landing=256"
    assert cached["mallory"] == "local=0, prefill=0, landing=0"


async def test_what_is_listed_confirms_no_guess_of_a_prompt(
    opened: Any, directory: KnowingDirectory
) -> None:
    tokens = list(PROMPT.encode())[:-1]
    salts = CacheSalts({})
    roots = [
        root_key(bytes.fromhex(MODEL.namespace), tenant=salt or "")
        for salt in (None, "alice", salts.salt("alice", None))
    ]
    guessed = {key.hex() for root in roots for key in block_keys(tokens, 64, root)}
    async with opened(operators=("bob",)) as region:
        await ask(region, "alice")
        directory.cached = set(directory.asked[-1])
        assert {key.hex() for key in directory.cached} <= guessed, "the guess is right"
        headers = {"Authorization": "Bearer key-of-bob"}
        url = region.url + "/prfaas/cache/top"
        async with region.session.get(url, headers=headers) as response:
            top = await response.json()
        _, _, own = await ask(region, "alice", path="/prfaas/cache/explain")
    shown = {prefix["key"] for prefix in top["prefixes"]}
    assert len(shown) == 4
    assert own["key"] in shown, "operators still see which prefix a prompt is"
    assert not shown & guessed


async def test_memory_and_links_are_used_in_the_name_of_the_tenant(opened: Any) -> None:
    async with opened() as region:
        for salt in ("a", "b", "alice"):
            body = {"model": "tiny", "prompt": PROMPT, "cache_salt": salt}
            assert (await ask(region, "mallory", body))[0] == 200
        assert region.pd.tenants == ["mallory"] * 3
        assert [job.tenant for job in region.far.jobs] == ["mallory"] * 3


@pytest.mark.parametrize("name", ["kv_transfer_params", "ec_transfer_params"])
async def test_no_client_names_memory_of_the_region(opened: Any, name: str) -> None:
    landing = {"prfaas": {"role": "consumer", "transfer_id": "00" * 16}}
    plain = {"model": "tiny", "prompt": PROMPT}
    async with opened() as region:
        for fields in ({name: landing}, {"vllm_xargs": {name: "x"}}, {"vllm_xargs": {name: []}}):
            status, _, answer = await ask(region, "mallory", plain | fields)
            assert status == 400
            assert answer["error"]["param"] == name
        escaped = json.dumps(plain | {"vllm_xargs": {name: "x"}}).replace(
            "_params", "\\u005fparams"
        )
        assert (await ask(region, "mallory", escaped.encode()))[0] == 400
        assert region.engine.requests == []
        status, _, _ = await ask(region, "mallory", plain | {"vllm_xargs": {"other": 1}})
        assert status == 200


async def test_explanations_are_no_work_ahead_of_the_prompts_of_others(opened: Any) -> None:
    async with opened() as region:
        for place, token_s in (("far", 1e-2), (ONE_ENGINE, 2e-2)):
            teach(region.gateway.scheduler, place, token_s)
        told = [await ask(region, "mallory", path="/prfaas/cache/explain") for _ in range(5)]
        assert {answer["target"] for _, _, answer in told} == {"far"}
        _, headers, _ = await ask(region, "alice")
        assert headers["x-prfaas-route"] == "prefill_cluster"
        assert "queue_s=0.0;" in headers["x-prfaas-reason"]


async def test_explanations_count_towards_the_rate_of_a_tenant(opened: Any) -> None:
    limit = {"tokens_per_s": 1e-3, "burst_tokens": 700}
    async with opened(scheduling={"admission": {"tenants": {"mallory": limit}}}) as region:
        explain = "/prfaas/cache/explain"
        statuses = [(await ask(region, "mallory", path=explain))[0] for _ in range(10)]
        assert statuses == [200] * 2 + [429] * 8
        assert len(region.engine.requests) == 2, "an engine renders each prompt"
        assert (await ask(region, "alice", path=explain))[0] == 200
