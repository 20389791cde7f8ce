"""Two gateways of one region with a real Redis server between them."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from eventually import eventually
from gateway_region import Region
from redis.exceptions import RedisError
from redis_server import RedisServer
from shared_gateways import MODEL, ask, body, gateways, limited, num_seen, page, served

from deploy.gateway.config import SharedSection
from deploy.gateway.sharing import redis_region
from deploy.gateway.sharing.redis_region import region_at
from scheduler.live.events import ThresholdPlanned
from scheduler.live.feedback import InstanceGiven


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path) as running:
        yield running


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine an answer of Redis may take longer than a request should wait for it."""
    monkeypatch.setattr(redis_region, "TIMEOUT_S", 20.0)


async def test_both_learn_from_the_requests_of_both(open_region: Any, server: RedisServer) -> None:
    async with gateways(open_region, server.url, prefill=()) as (one, two):
        await ask(one, 10)
        await ask(two, 7)
        # The first of all teaches no times, because its length was not known before its end.
        await eventually(lambda: num_seen(one) == num_seen(two) == 16)
        first, second = (item.gateway.scheduler.knowledge(MODEL) for item in (one, two))
        bytes_per_token = pytest.approx(first.lengths.bytes_per_token, rel=0.01)
        await eventually(lambda: second.lengths.bytes_per_token == bytes_per_token)
        traffic = [
            known.traffic.measured(item.gateway.scheduler.clock())
            for known, item in ((first, one), (second, two))
        ]
        assert [round(seen.num_requests) for seen in traffic if seen] == [17, 17]


async def test_a_gateway_that_starts_goes_on_from_what_the_region_knows(
    open_region: Any, server: RedisServer
) -> None:
    async with gateways(open_region, server.url, num=1, prefill=()) as (one,):
        await ask(one, 12)
        before = one.gateway.scheduler.knowledge(MODEL)
    # It has left, and with it everything that was not kept.
    async with gateways(open_region, server.url, num=1, prefill=()) as (two,):
        after = two.gateway.scheduler.knowledge(MODEL)
        assert num_seen(two) >= 8
        for place in before.places:
            expected_s = before.prefill(place).prefill_s(1000)
            assert after.prefill(place).prefill_s(1000) == pytest.approx(expected_s, rel=0.05)
        # The next one counts nothing twice, though all of the stream is there still.
        expected = num_seen(two)
    async with gateways(open_region, server.url, num=2, prefill=()) as (three, four):
        assert num_seen(three) == num_seen(four) == expected


async def test_each_sees_what_the_other_has_under_way(
    open_region: Any, server: RedisServer
) -> None:
    async with gateways(open_region, server.url) as (one, two):
        one.engine.next_token.clear()
        asking = asyncio.create_task(one.post(body(stream=True)))
        live = two.gateway.scheduler.live
        await eventually(lambda: live.ledger.requests == {"home/d0": 1})
        assert [peer.requests for peer in page(two).peers] == [1]
        one.engine.next_token.set()
        assert (await asking)[0] == 200
        await eventually(lambda: not live.ledger.requests)


async def test_nothing_is_left_of_a_gateway_that_vanished(
    open_region: Any, server: RedisServer
) -> None:
    async with gateways(open_region, server.url) as (one, two):
        one.gateway.scheduler.tell(InstanceGiven("home/d0"))
        live = two.gateway.scheduler.live
        await eventually(lambda: live.ledger.requests == {"home/d0": 1})
        sharing = one.gateway.sharing
        assert sharing is not None
        for task in sharing._tasks:
            task.cancel()  # it beats no more, as after a kill
        await eventually(lambda: not live.ledger.requests)
        await eventually(lambda: page(two).leads)
        assert page(two).peers == []


async def statuses(asked: list[Any]) -> list[int]:
    return sorted(answer[0] for answer in await asyncio.gather(*asked))


async def test_together_they_let_in_what_one_would(open_region: Any, server: RedisServer) -> None:
    async with gateways(open_region, server.url, **limited(max_requests=10)) as (one, two):
        for _ in range(3):
            one.engine.first_token.clear()
            asked = [
                asyncio.create_task(item.post(body())) for _ in range(20) for item in (one, two)
            ]
            await eventually(lambda asked=asked: sum(task.done() for task in asked) == 30)
            # Requests that are refused are answered at once; those that are let in wait.
            await eventually(lambda: one.engine.num_serving == 10)
            one.engine.first_token.set()
            assert await statuses(asked) == [200] * 10 + [429] * 30
            # What was given back in one gateway is there for the other.
            await eventually(lambda: not any(page(item).peers[0].requests for item in (one, two)))


async def test_a_budget_of_tokens_per_second_is_one_for_both(
    open_region: Any, server: RedisServer
) -> None:
    # So slow that nothing comes back during the test: what one would let in is known.
    limit = limited(tokens_per_s=0.001, burst_tokens=10_000)
    async with gateways(open_region, server.url, **limit) as (one, two):
        admitted = 0
        for number in range(120):
            item = (one, two)[number % 2]
            status, _, answer = await item.post(body(196, max_tokens=4))
            assert status in (200, 429), answer
            admitted += status == 200
        # Each was work of 200 tokens in the end.
        assert 0.95 * 10_000 <= admitted * 200 <= 1.05 * 10_000


async def test_one_after_the_other_is_one_at_a_time(open_region: Any, server: RedisServer) -> None:
    async with gateways(open_region, server.url, num=1, **limited(max_requests=1)) as (one,):
        await ask(one, 60)


async def test_a_request_that_is_given_up_gives_its_budget_back(
    open_region: Any, server: RedisServer
) -> None:
    async with gateways(open_region, server.url, **limited(max_requests=1)) as (one, two):
        one.engine.first_token.clear()
        asking = asyncio.create_task(one.post(body()))
        await eventually(lambda: one.engine.num_serving == 1)
        assert (await two.post(body()))[0] == 429
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        one.engine.first_token.set()
        await served(two)


async def test_one_leads_and_another_takes_over(open_region: Any, server: RedisServer) -> None:
    async with gateways(open_region, server.url) as (one, two):
        await eventually(lambda: page(one).leads != page(two).leads)
        leader, other = (one, two) if page(one).leads else (two, one)
        assert page(other).leader == page(leader).name
        await eventually(lambda: page(leader).token > 0)
        token = page(leader).token
        assert leader.gateway.sharing is not None
        await leader.gateway.sharing.close()
        await eventually(lambda: page(other).leads)
        assert page(other).token > token


async def test_the_plan_of_the_leader_holds_in_all(open_region: Any, server: RedisServer) -> None:
    async with gateways(open_region, server.url) as (one, two):
        await eventually(lambda: page(one).leads != page(two).leads)
        leader, other = (one, two) if page(one).leads else (two, one)
        leader.gateway.scheduler.tell(ThresholdPlanned("far", 4321.0, 5e8))
        await eventually(lambda: other.gateway.scheduler.base_tokens() == {"far": 4321.0})
        assert (await other.gateway.long_term.step()) == []  # it decides nothing itself


async def test_operators_are_sent_to_the_leader(open_region: Any, server: RedisServer) -> None:
    async with gateways(open_region, server.url) as (one, two):
        await eventually(lambda: page(one).leads != page(two).leads)
        other = two if page(one).leads else one
        one.pd.engine_numbers = {"role": "decode"}
        order = {"instance": "d0", "role": "prefill"}
        status, _, answer = await other.post(order, "/v1/pd_role")
        assert (status, b"not_leader" in answer) == (409, True)
        assert page(other).leader.encode() in answer
        async with other.session.get(other.url + "/prfaas/gateways") as response:
            assert (await response.json())["state"] == "joined"


class Load:
    """Requests one after the other, each to the next gateway. `wrong` are answers but 200."""

    def __init__(self, regions: list[Region]) -> None:
        self.regions = regions
        self.num_ok = 0
        self.wrong: list[Any] = []

    async def run(self) -> None:
        while True:
            for region in self.regions:
                status, _, answer = await region.post(body(150, stream=True))
                self.num_ok += status == 200
                if status != 200:
                    self.wrong.append((status, answer))


async def test_without_redis_they_go_on_alone_and_join_again(
    open_region: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = RedisServer(tmp_path)
    server.__enter__()
    limit = limited(max_requests=6)
    try:
        async with gateways(open_region, server.url, prefill=(), **limit) as regions:
            one, two = regions
            load = Load(regions)
            tasks = [asyncio.create_task(load.run()) for _ in range(2)]
            await eventually(lambda: load.num_ok >= 20)
            server.__exit__()
            await eventually(lambda: all(page(item).state == "alone" for item in regions))
            assert "Redis" in page(one).error
            assert "goes on alone" in caplog.text
            done = load.num_ok
            await eventually(lambda: load.num_ok >= done + 40)
            # Each holds its part of a limit: together they let in no more than one would.
            one.engine.first_token.clear()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await eventually(lambda: one.gateway.num_in_flight + two.gateway.num_in_flight == 0)
            asked = [asyncio.create_task(item.post(body())) for _ in range(8) for item in regions]
            await eventually(lambda: sum(task.done() for task in asked) == 10)
            await eventually(lambda: one.engine.num_serving == 6)
            server.__enter__()
            await eventually(lambda: all(page(item).state == "joined" for item in regions))
            # What was let in meanwhile counts: the limit is reached for everybody.
            assert (await one.post(body()))[0] == 429
            one.engine.first_token.set()
            assert await statuses(asked) == [200] * 6 + [429] * 10
            assert load.wrong == []
            await eventually(lambda: num_seen(one) == num_seen(two))
            await served(two)
            tasks = [asyncio.create_task(load.run())]
            done = load.num_ok
            await eventually(lambda: load.num_ok >= done + 20)
            tasks[0].cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert load.wrong == []
            metrics = await (await one.session.get(one.url + "/metrics")).text()
            assert "prfaas_gateway_shared_joined 1.0" in metrics
    finally:
        if server._process is not None and server._process.poll() is None:
            server.__exit__()


async def test_what_redis_lost_before_the_others_heard_it_is_told_again(
    open_region: Any, tmp_path: Path
) -> None:
    server = RedisServer(tmp_path)
    server.__enter__()
    try:
        async with gateways(open_region, server.url, prefill=()) as (one, two):
            deaf = two.gateway.sharing
            assert deaf is not None
            for task in deaf._tasks:
                task.cancel()
            await ask(one, 6)
            await eventually(lambda: page(one).pending == 0)
            server.__exit__()
            await eventually(lambda: page(one).state == "alone")
            server.__enter__()
            deaf._tasks = [asyncio.create_task(deaf._beat_on())]
            deaf._tasks += [asyncio.create_task(deaf._exchange_on())]
            await eventually(lambda: num_seen(one) == num_seen(two) == 5)
    finally:
        if server._process is not None and server._process.poll() is None:
            server.__exit__()


async def test_a_gateway_starts_without_redis_and_joins_later(
    open_region: Any, tmp_path: Path
) -> None:
    server = RedisServer(tmp_path)
    opened = open_region(
        prefill=(),
        owned={"shared": region_at(server.url, "r")},
        shared=SharedSection(redis=server.url, region="r", name="g0"),
    )
    async with opened as region:
        assert page(region).state == "alone"
        await ask(region, 6)
        before = num_seen(region)
        assert before >= 3
        with server:
            await eventually(lambda: page(region).state == "joined")
            assert num_seen(region) == before
            await eventually(lambda: page(region).pending == 0)


@pytest.fixture
def rights() -> list[str]:
    """The user that the documentation gives gateways, as words of an ACL."""
    text = Path("docs/security.md").read_text(encoding="utf-8")
    (line,) = [line for line in text.splitlines() if line.startswith("user ")]
    return line.replace("PASSWORD", "secret").split()[1:]


async def test_the_rights_in_the_documentation_are_enough(
    open_region: Any, server: RedisServer, rights: list[str]
) -> None:
    operator = redis_region.connect(server.url, timeout_s=20)
    await operator.execute_command("ACL", "SETUSER", rights[0], "reset", *rights[1:])
    url = server.url.replace("unix://", f"unix://{rights[0]}:secret@")
    limit = limited(max_requests=2)
    shared = SharedSection(redis=url, region="r", name="g0")
    opened = open_region(prefill=(), owned={"shared": region_at(url, "r")}, shared=shared, **limit)
    async with opened as region:
        await eventually(lambda: page(region).state == "joined")
        await ask(region, 5)
        await eventually(lambda: page(region).leads and page(region).pending == 0)
        assert page(region).error == ""
    assert await operator.exists("prfaas:gw1:r:learned")
    stranger = redis_region.connect(url, timeout_s=20)
    with pytest.raises(RedisError, match="permissions"):
        await stranger.flushall()
    await stranger.aclose()
    await operator.aclose()
