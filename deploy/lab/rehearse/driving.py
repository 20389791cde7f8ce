"""Sends the requests of a rehearsal to a gateway, and notes what became of each.

It knows an OpenAI URL and the gateway's records, and nothing of plans.
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
import msgspec

from deploy.lab.demo.byte_tokenizer import PRINTABLE_IDS
from deploy.lab.rehearse.columns import REMOTE, Served
from scheduler.replay.workload import Workload

_SETTLE_TRIES: Final = 20
_SETTLE_S: Final = 0.1


@dataclass(slots=True)
class Counts:
    """How far the requests are."""

    sent: int = 0
    done: int = 0
    refused: int = 0
    failed: int = 0


class Client:
    """Asks one model of one gateway. `seed` decides the tokens of prompts."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, model: str, workload: Workload, seed: int
    ) -> None:
        self.counts = Counts()
        self._session = session
        self._url = url
        self._model = model
        self._workload = workload
        self._seed = seed
        self._begun_s = time.monotonic()

    def begin(self) -> None:
        """Arrivals count from now on."""
        self._begun_s = time.monotonic()

    @property
    def now_s(self) -> float:
        return time.monotonic() - self._begun_s

    async def ask(self, index: int) -> tuple[Served, float]:
        """Send a request once. Returns also the Retry-After of a refusal. Never raises for a
        failure.
        """
        body = self._body(index)
        request_id = f"rehearsal-{self._seed}-{index}"
        served = Served(
            index=index,
            at_s=self.now_s,
            prompt_tokens=self._workload.prompt_tokens[index],
            output_tokens=self._workload.output_tokens[index],
            fate="failed",
        )
        headers = {"Content-Type": "application/json", "X-Request-Id": request_id}
        post = self._session.post(f"{self._url}/v1/completions", data=body, headers=headers)
        retry_after_s = 0.0
        try:
            async with post as response:
                served.status = response.status
                if response.status == 200:
                    await self._read(response, served)
                else:
                    served.reason = (await response.text())[:300]
                if response.status == 429:
                    served.fate = "refused"
                    retry_after_s = float(response.headers.get("Retry-After", 1))
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            served.reason = f"{type(error).__name__}: {error}"
        if served.fate == "ok":
            await self._take_record(request_id, served)
        return served, retry_after_s

    def _body(self, index: int) -> bytes:
        work = self._workload
        num = work.prompt_tokens[index]
        if work.block_ids is None or not work.block_ids[index]:
            prompt = _tokens(f"{self._seed}/{index}", num)
        else:
            blocks = (_tokens(f"block/{b}", work.block_tokens) for b in work.block_ids[index])
            prompt = [token for block in blocks for token in block][:num]
            prompt += _tokens(f"{self._seed}/{index}", num - len(prompt))
        output = work.output_tokens[index]
        return msgspec.json.encode(
            {
                "model": self._model,
                "prompt": prompt,
                "max_tokens": output,
                "min_tokens": output,
                "ignore_eos": True,
                "temperature": 0,
                "stream": True,
            }
        )

    async def _read(self, response: aiohttp.ClientResponse, served: Served) -> None:
        """Read the stream. ValueError if it is not whole."""
        first_s = last_s = None
        async for line in response.content:
            # Comments keep a connection alive and are no tokens.
            if not line.startswith(b"data:"):
                continue
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                break
            if b'"error"' in data[:20]:
                raise ValueError(f"error event: {data[:300].decode(errors='replace')}")
            last_s = self.now_s
            first_s = last_s if first_s is None else first_s
        else:
            raise ValueError("the stream ended without [DONE]")
        if first_s is None or last_s is None:
            raise ValueError("the stream has no token")
        served.fate, served.end_s = "ok", last_s
        served.ttft_s = first_s - served.at_s
        if served.output_tokens > 1:
            served.tpot_s = (last_s - first_s) / (served.output_tokens - 1)

    async def _take_record(self, request_id: str, served: Served) -> None:
        """What the gateway noted of an answered request, once both its legs are over."""
        record: dict[str, Any] = {}
        for _ in range(_SETTLE_TRIES):
            try:
                async with self._session.get(f"{self._url}/prfaas/requests/{request_id}") as found:
                    record = (await found.json())["requests"][0] if found.status == 200 else {}
            except (aiohttp.ClientError, TimeoutError):
                record = {}
            if record.get("is_settled"):
                break
            await asyncio.sleep(_SETTLE_S)
        served.remote = record.get("route") == REMOTE
        local = f"local {record.get('target', '')}"
        served.route = REMOTE if served.remote else local
        served.reason = record.get("reason", "")
        served.predicted_ttft_s = record.get("predicted_ttft_s")
        served.transfer_bytes = record.get("transfer_bytes") or 0
        served.cached_tokens = record.get("cached_tokens") or 0


def _tokens(seed: str, num: int) -> list[int]:
    return random.Random(seed).choices(PRINTABLE_IDS, k=num)


async def drive_open(client: Client, workload: Workload) -> list[Served]:
    """Each request is sent at its time, whatever became of those before it."""

    async def one(index: int, at_s: float) -> Served:
        await asyncio.sleep(max(0.0, at_s - client.now_s))
        client.counts.sent += 1
        served, _ = await client.ask(index)
        _count(client.counts, served)
        return served

    client.begin()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(i, at_s)) for i, at_s in enumerate(workload.arrivals_s)]
    return [task.result() for task in tasks]


async def drive_closed(
    client: Client, workload: Workload, num_clients: int, span_s: float
) -> list[Served]:
    """`num_clients` ask one request after the other for `span_s`, and wait as long as a refusal
    tells them. The requests are those of the workload in its order.
    """
    found: list[Served] = []
    numbers = iter(range(len(workload)))

    async def loop() -> None:
        for index in numbers:
            if client.now_s >= span_s:
                return
            client.counts.sent += 1
            num_refusals = 0
            served, wait_s = await client.ask(index)
            while served.fate == "refused" and client.now_s + wait_s < span_s:
                client.counts.refused += 1
                num_refusals += 1
                await asyncio.sleep(wait_s)
                served, wait_s = await client.ask(index)
            served.num_refusals = num_refusals
            _count(client.counts, served)
            found.append(served)
            if served.fate == "refused":
                # What it waits for comes after the end.
                return

    client.begin()
    async with asyncio.TaskGroup() as group:
        for _ in range(num_clients):
            group.create_task(loop())
    return sorted(found, key=lambda served: served.at_s)


def _count(counts: Counts, served: Served) -> None:
    if served.fate == "ok":
        counts.done += 1
    elif served.fate == "refused":
        counts.refused += 1
    else:
        counts.failed += 1
