"""A link that slows down, breaks and comes back under real engines: routes follow, nothing fails,
and the recording of it all gives the same decisions again.

The gateway has the scheduling that users get: nothing of it is set. Both engines have a core of
their own, as engines of two sites have. Requests run all the time, and the PD cluster's engine can
serve all of them, so that what is seen is the routing. Times are counted from the change of the
link; the first two seconds of a phase are for the change to be noticed by transfers under way.
"""

import asyncio
import itertools
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from engine_region import WINDOW
from flight_recording import holds_no_text, is_decided_again, link_conditions
from part_gateway import File, gateway_over
from served_region import DECODE, LONG_TOKENS, PREFILL, Served, serving

from deploy.lab.demo.scenario import THRESHOLD_TOKENS, text

pytestmark = [pytest.mark.asyncio(loop_scope="session"), serving(WINDOW)]

NUM_CLIENTS = 2
NOTICED_S = 2.0
BACK_S = 30.0
SLOW = "12Mbit"
"""A prompt's 22 MB then take 15 s, in which the PD cluster's engine computes several prompts:
clearly too slow by the default margin, also where the machine is busy."""
NUM_SLOW = 4
NUM_CUT = 2
SLOW_LIMIT_S = 90.0
"""Until so many were sent and answered on the slow link, or the cut one; those under way before
come first.
"""
NUM_TO_LEARN = 6
"""Answers of the prefill cluster before the link changes: by then its prefill times are known, and
predictions count as much as the threshold."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: when it was sent (seconds since the start), and its record at the gateway."""

    sent_s: float
    is_whole: bool
    record: dict[str, Any]

    @property
    def is_remote(self) -> bool:
        return bool(self.record["first_route"] == "prefill_cluster")


class Traffic:
    """Clients that ask for one long prompt after another, each for one that nobody has cached."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.asked: list[Asked] = []
        self._url = url
        self._session = session
        self._started_s = time.monotonic()
        self._numbers = itertools.count()
        self._tasks = [asyncio.create_task(self._ask_on()) for _ in range(NUM_CLIENTS)]

    def now_s(self) -> float:
        return time.monotonic() - self._started_s

    def since(self, from_s: float) -> list[Asked]:
        return [asked for asked in self.asked if asked.sent_s >= from_s]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        ended = await asyncio.gather(*self._tasks, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in ended), ended

    async def _ask_on(self) -> None:
        for number in self._numbers:
            await self._ask(number)

    async def _ask(self, number: int) -> None:
        request_id = f"congestion-{number}"
        body = {
            "model": WINDOW,
            "prompt": prompt_text(number),
            "max_tokens": 4,
            "stream": True,
        }
        sent_s = self.now_s()
        headers = {"X-Request-Id": request_id}
        url = f"{self._url}/v1/completions"
        async with self._session.post(url, json=body, headers=headers) as response:
            answer = await response.read()
        is_whole = response.status == 200 and answer.rstrip().endswith(b"data: [DONE]")
        async with self._session.get(f"{self._url}/prfaas/requests/{request_id}") as response:
            (record,) = (await response.json())["requests"]
        self.asked.append(Asked(sent_s, is_whole, record))


def prompt_text(number: int) -> str:
    """The prompt of a request: no other test asks for it."""
    return text(LONG_TOKENS, 50_000 + number)


async def test_routes_follow_the_link(served: Served, tmp_path: Path) -> None:
    recording = tmp_path / "flight"

    def with_defaults(file: File) -> None:
        file["gateway"] |= {
            "threshold_tokens": THRESHOLD_TOKENS,
            "scheduling": {},
            "recorder": {"dir": str(recording)},
        }

    relay = served.region.relay()
    async with (
        gateway_over(served.region, {PREFILL, DECODE}, tmp_path, with_defaults) as url,
        aiohttp.ClientSession() as session,
    ):
        traffic = Traffic(url, session)
        try:
            await _until_remote(traffic, 0.0, BACK_S, NUM_TO_LEARN)

            await asyncio.to_thread(relay.configure, rate=SLOW)
            slow_s = traffic.now_s()
            await _until_asked(traffic, slow_s + NOTICED_S, NUM_SLOW, SLOW_LIMIT_S)

            await asyncio.to_thread(relay.cut)
            cut_s = traffic.now_s()
            await _until_asked(traffic, cut_s + NOTICED_S, NUM_CUT, SLOW_LIMIT_S)

            await asyncio.to_thread(relay.configure, rate="1Gbit")
            await asyncio.to_thread(relay.heal)
            healed_s = traffic.now_s()
            back_s = await _until_remote(traffic, healed_s, BACK_S)
        finally:
            await traffic.stop()
            await asyncio.to_thread(relay.heal)
            await asyncio.to_thread(relay.configure, rate="1Gbit")
        async with session.get(f"{url}/metrics") as response:
            metrics = await response.text()
        assert link_conditions(recording) >= {"clear", "down"}
        prompts = (prompt_text(number) for number in range(len(traffic.asked)))
        await asyncio.to_thread(holds_no_text, recording, prompts)
        await is_decided_again(recording)
    await served.is_whole()

    assert all(asked.is_whole for asked in traffic.asked)
    slow = [a for a in traffic.since(slow_s + NOTICED_S) if a.sent_s < cut_s]
    assert slow
    remote = [(round(a.sent_s - slow_s, 1), a.record) for a in slow if a.is_remote]
    assert not remote, json.dumps(remote, indent=1)
    cut = [a for a in traffic.since(cut_s + NOTICED_S) if a.sent_s < healed_s]
    assert {asked.record["reason"] for asked in cut} == {"link_down"}
    assert back_s - healed_s <= BACK_S
    for reason in ("above_threshold", "link_down"):
        assert _decisions(metrics, reason) >= 1
    assert _decisions(metrics, "local_sooner") + _decisions(metrics, "link_congested") >= 1
    assert 'prfaas_gateway_link_condition{condition="clear",source="prefill-a"' in metrics


async def _until_asked(
    traffic: Traffic, since_s: float, num_answers: int, timeout_s: float
) -> None:
    """Return once so many requests that were sent after `since_s` have their answers."""
    while len(traffic.since(since_s)) < num_answers:
        assert traffic.now_s() < since_s + timeout_s, f"only {traffic.since(since_s)}"
        await asyncio.sleep(0.1)


async def _until_remote(
    traffic: Traffic, since_s: float, timeout_s: float, num_answers: int = 1
) -> float:
    """When the last of `num_answers` was sent that the prefill cluster had a part in, of those that
    were sent after `since_s`."""
    while traffic.now_s() < since_s + timeout_s:
        found = [
            asked.sent_s
            for asked in traffic.since(since_s)
            if asked.is_remote and asked.record["route"] == "prefill_cluster"
        ]
        if len(found) >= num_answers:
            return found[num_answers - 1]
        await asyncio.sleep(0.1)
    seen = [(round(a.sent_s, 1), a.record["reason"]) for a in traffic.since(since_s)]
    raise AssertionError(
        f"fewer than {num_answers} requests went to the prefill cluster in {timeout_s:g} s: {seen}"
    )


def _decisions(metrics: str, reason: str) -> float:
    """Routes taken for a reason."""
    return sum(
        float(line.rpartition(" ")[2])
        for line in metrics.splitlines()
        if line.startswith("prfaas_gateway_") and f'reason="{reason}"' in line
    )
