"""Requests to a region's gateways at a steady rate, and what became of each.

Every prompt has a known right answer. A gateway that does not accept the connection is passed over
for the next, as a load balancer in front of them does.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp

from deploy.lab.demo.answers import REQUEST_TIMEOUT_S, Answer, ask
from deploy.lab.demo.scenario import DemoRequest

CANNOT_CONNECT = "ClientConnectorError"


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: the host of the gateway that answered, the PD cluster that the client named as
    home, the answer, the gateway's record of it, and whether its tokens are one plain engine's.
    """

    gateway: str
    home: str
    answer: Answer
    record: Mapping[str, Any]
    is_right: bool

    @property
    def cluster(self) -> str:
        """The PD cluster that decoded, "" where the record is lost."""
        return str(self.record.get("cluster", ""))

    @property
    def prefill_cluster(self) -> str:
        """The prefill cluster that computed the prompt, if one did."""
        is_remote = self.record.get("route") == "prefill_cluster"
        return str(self.record["target"]) if is_remote else ""

    @property
    def prefill_instance(self) -> str:
        """The instance that computed it there."""
        return str(self.record.get("prefill_instance", ""))


@dataclass
class Phase:
    """What was asked during an act. Streams of the gateway on host `loses` may have ended."""

    name: str
    loses: str = ""
    asked: list[Asked] = field(default_factory=list)
    seconds: float = 0.0

    def prefilled(self, after: int = 0) -> set[str]:
        """The prefill clusters that computed prompts, after the first `after` answers."""
        return {one.prefill_cluster for one in self.asked[after:]}

    @property
    def failed(self) -> list[Asked]:
        """Requests that had to get a whole answer and did not."""
        return [one for one in self.asked if one.answer.error and one.gateway != self.loses]

    @property
    def lost(self) -> list[Asked]:
        """Requests that the killed gateway was answering."""
        return [one for one in self.asked if one.answer.error and one.gateway == self.loses]

    @property
    def wrong(self) -> list[Asked]:
        """Whole answers with other tokens than a plain engine's."""
        return [one for one in self.asked if not one.answer.error and not one.is_right]

    @property
    def num_remote(self) -> int:
        """Requests that a prefill cluster computed."""
        return sum(bool(one.prefill_cluster) for one in self.asked)

    @property
    def stayed(self) -> Counter[str]:
        """How many prompts no prefill cluster computed, by the reason of their route."""
        stayed = (one for one in self.asked if one.record and not one.prefill_cluster)
        return Counter(str(one.record.get("reason", "")) for one in stayed)

    @property
    def num_spilled(self) -> int:
        """Requests that another PD cluster than their home decoded."""
        return sum(bool(one.cluster) and one.cluster != one.home for one in self.asked)


class Client:
    """Asks gateways, given by the names of their hosts. `prompts` has what is asked in each act;
    `expected` has the right answers by the prompts' names.
    """

    def __init__(
        self,
        gateways: Mapping[str, str],
        model: str,
        homes: Sequence[str],
        prompts: Mapping[str, Sequence[DemoRequest]],
        expected: Mapping[str, Answer],
        key: str,
    ) -> None:
        self.prompts = prompts
        self._gateways, self._model, self._expected = gateways, model, expected
        self._turns: Iterator[tuple[str, str]] = itertools.cycle(itertools.product(homes, gateways))
        self._headers = {"Authorization": f"Bearer {key}"}

    async def ask(self, phase: Phase, request: DemoRequest, home: str = "") -> None:
        """Ask once, at the gateway whose turn it is, for the home given or whose turn it is."""
        turn_home, first = next(self._turns)
        home = home or turn_home
        headers = {**self._headers, "x-prfaas-home": home}
        timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout, headers=headers) as session:
            for gateway in (first, *(name for name in self._gateways if name != first)):
                answer = await ask(session, self._gateways[gateway], self._model, request)
                if not answer.error.startswith(CANNOT_CONNECT):
                    break
            record: dict[str, Any] = {}
            url = f"{self._gateways[gateway]}/prfaas/requests/{answer.request_id}"
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with session.get(url) as response:
                    if response.status == 200:
                        record = (await response.json())["requests"][0]
        is_right = answer.token_ids == self._expected[request.name].token_ids
        phase.asked.append(Asked(gateway, home, answer, record, is_right))

    async def keep_asking(self, phase: Phase, per_s: float, over: asyncio.Event) -> None:
        """Start `per_s` requests each second, in turn, until `over`; return when all are
        answered. No prompt is cached when it comes again: a PD cluster would compute it then.
        """
        async with asyncio.TaskGroup() as group:
            for number, request in enumerate(itertools.cycle(self.prompts[phase.name])):
                if over.is_set():
                    break
                salted = replace(request, salt=f"{phase.name} {number}")
                group.create_task(self.ask(phase, salted))
                await asyncio.sleep(1 / per_s)
