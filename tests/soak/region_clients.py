"""Tenants of `make soak-region` that come and go with their API keys, and what they ask.

Does not know processes or faults, but when a fault explains a failure.
"""

from __future__ import annotations

import asyncio
import json
import random
import secrets
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from kvmanager.private_files import write_private
from tests.soak.stand_in_engine import answer_to

NUM_TENANTS = 6
NUM_CLIENTS = 6
NUM_PROMPTS = 8
"""Latest prompts of a tenant, which its next ones may continue."""
THINK_S = 0.3
SHORT_TOKENS, LONG_TOKENS = (40, 500), (700, 2500)
KNOWN_S = 30.0
"""Longest until the gateway has read the keys again, seconds; it looks about once a second."""
HANG_S = 60.0


Asked = tuple[str | None, str]
"""A prompt, behind the salt that its client sent."""


@dataclass(slots=True)
class Tenant:
    """One tenant. `is_leaving`: it asks nothing any more. `is_cut_off`: its key may be taken away
    while it asks, so that its requests may end with an error.
    """

    name: str
    key: str
    salts: list[str | None]
    prompts: deque[tuple[str | None, str]] = field(
        default_factory=lambda: deque(maxlen=NUM_PROMPTS)
    )
    num_asking: int = 0
    is_leaving: bool = False
    is_cut_off: bool = False


class Clients:
    """All tenants' clients. `outcomes` counts answers by route, `wrongs` says what went wrong."""

    def __init__(self, url: str, model: str, keys_file: Path, dice: random.Random) -> None:
        self.outcomes: Counter[str] = Counter()
        self.wrongs: list[str] = []
        self.num_tenants = 0
        self.killed_s = -1.0
        """When a process was killed last (monotonic)."""
        self._url = url
        self._model = model
        self._keys_file = keys_file
        self._dice = dice
        self._tenants: list[Tenant] = []
        # Every storm opens connections of its own.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=1.0)
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=aiohttp.ClientTimeout(total=HANG_S)
        )

    async def close(self) -> None:
        await self._session.close()

    def wrong(self, what: str) -> None:
        self.wrongs.append(what)
        print(f"WRONG {what}", flush=True)

    # Who there is.

    async def change_tenants(self, num_new: int) -> None:
        """Let as many tenants come, and so many of the oldest go; returns once both hold."""
        leaving = self._tenants[: max(0, len(self._tenants) + num_new - NUM_TENANTS)]
        for tenant in leaving:
            tenant.is_leaving = True
            tenant.is_cut_off = self._dice.random() < 0.25
        while any(tenant.num_asking and not tenant.is_cut_off for tenant in leaving):
            await asyncio.sleep(0.05)
        coming = [self._new_tenant() for _ in range(num_new)]
        staying = [tenant for tenant in self._tenants if tenant not in leaving]
        await asyncio.to_thread(write_keys, self._keys_file, [*staying, *coming])
        await self._until_known(coming, leaving)
        self._tenants = [*staying, *coming]

    def _new_tenant(self) -> Tenant:
        self.num_tenants += 1
        salts: list[str | None] = [None, secrets.token_hex(8), secrets.token_hex(8)]
        return Tenant(f"tenant-{self.num_tenants}", secrets.token_hex(16), salts)

    async def _until_known(self, coming: list[Tenant], leaving: list[Tenant]) -> None:
        deadline_s = time.monotonic() + KNOWN_S
        wanted = [(tenant, 200) for tenant in coming] + [(tenant, 401) for tenant in leaving]
        while wanted:
            if time.monotonic() > deadline_s:
                names = ", ".join(tenant.name for tenant, _ in wanted)
                self.wrong(f"{KNOWN_S:g} s after the keys changed they do not hold for {names}")
                return
            wanted = [item for item in wanted if await self._knows(item[0]) != item[1]]
            await asyncio.sleep(0.2)

    async def _knows(self, tenant: Tenant) -> int:
        async with self._session.get(f"{self._url}/v1/models", headers=_headers(tenant)) as answer:
            return answer.status

    # What they ask.

    async def ask_until(self, end_s: float) -> None:
        """Ask, many at a time, until then; returns when everything was answered."""
        async with asyncio.TaskGroup() as group:
            for _ in range(NUM_CLIENTS):
                group.create_task(self._keep_asking(end_s))

    async def _keep_asking(self, end_s: float) -> None:
        while time.monotonic() < end_s:
            staying = [tenant for tenant in self._tenants if not tenant.is_leaving]
            if staying:
                await self._ask(self._dice.choice(staying))
            await asyncio.sleep(self._dice.uniform(0, 2 * THINK_S))

    async def _ask(self, tenant: Tenant) -> None:
        salt, prompt = self._prompt(tenant)
        is_stream = self._dice.random() < 0.5
        body = {"prompt": prompt, "max_tokens": 4, "stream": is_stream, "model": self._model}
        if salt is not None:
            body["cache_salt"] = salt
        begun_s = time.monotonic()
        tenant.num_asking += 1
        try:
            status, route, text = await self._answer(tenant, body, is_stream=is_stream)
        except (aiohttp.ClientError, TimeoutError, ValueError, LookupError) as error:
            status, route, text = 0, "", repr(error)
        finally:
            tenant.num_asking -= 1
        if status == 200 and text == answer_to(prompt.encode()):
            self.outcomes[route] += 1
            tenant.prompts.append((salt, prompt))
        elif status == 200:
            self.wrong(f"{len(prompt)} tokens of {tenant.name} by {route}: {text!r}")
        elif tenant.is_cut_off:
            self.outcomes["cut off with its key"] += 1
        elif begun_s <= self.killed_s:
            self.outcomes["failed at a kill"] += 1
        else:
            self.wrong(f"{len(prompt)} tokens of {tenant.name} failed: {status} {text[:300]}")

    async def _answer(
        self, tenant: Tenant, body: dict[str, object], *, is_stream: bool
    ) -> tuple[int, str, str]:
        """Status, route and text."""
        async with self._session.post(
            f"{self._url}/v1/completions", json=body, headers=_headers(tenant)
        ) as response:
            raw = (await response.read()).decode()
            route = response.headers.get("x-prfaas-route", "")
            if response.status != 200:
                return response.status, route, raw
            if not is_stream:
                return 200, route, json.loads(raw)["choices"][0]["text"]
            events = [line.removeprefix("data: ") for line in raw.splitlines() if line]
            if events[-1:] != ["[DONE]"]:
                return 0, route, f"the stream broke off after {len(events)} events"
            return (
                200,
                route,
                "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1]),
            )

    def _prompt(self, tenant: Tenant) -> Asked:
        """A salt and a text: new, a continuation, or what another tenant asked."""
        drawn = self._dice.random()
        if drawn < 0.4 and tenant.prompts:
            salt, before = self._dice.choice(tenant.prompts)
            if len(before) < LONG_TOKENS[1]:
                return salt, before + self._text(*SHORT_TOKENS)
        if drawn > 0.9:
            others = [prompt for other in self._tenants for _, prompt in other.prompts]
            if others:
                return None, self._dice.choice(others)
        lengths = SHORT_TOKENS if drawn < 0.6 else LONG_TOKENS
        return self._dice.choice(tenant.salts), self._text(*lengths)

    def _text(self, least: int, most: int) -> str:
        return self._dice.randbytes(most).hex()[: self._dice.randint(least, most)]


def write_keys(path: Path, tenants: list[Tenant]) -> None:
    """Replace the file; besides those of tenants it has an operator's key."""
    lines = [f"ops {secrets.token_hex(16)}", *(f"{item.name} {item.key}" for item in tenants)]
    write_private(path, "\n".join([*lines, ""]).encode())


def _headers(tenant: Tenant) -> dict[str, str]:
    return {"Authorization": f"Bearer {tenant.key}"}
