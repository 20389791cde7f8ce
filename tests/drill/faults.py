"""The faults of the drill: how each is caused, which alert must fire, what its page says to do."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from drill_region import LIMIT, SHORT, DrillRegion, ask

MANY = 24
"""Clients that ask at the same time, more than the tenant's limit."""


@dataclass(frozen=True)
class Fault:
    """`step` is a text of the alert's page: what `mend` does."""

    name: str
    alert: str
    step: str
    cause: Callable[[DrillRegion], None]
    mend: Callable[[DrillRegion], None]
    is_well: Callable[[DrillRegion], bool]


def _is_sent(region: DrillRegion) -> bool:
    return region.route() == "prefill_cluster"


def _is_answered(region: DrillRegion) -> bool:
    return region.route() in ("prefill_cluster", "local")


def _all_are_answered(region: DrillRegion) -> bool:
    """Whether nobody is refused who asks at the same time as others."""
    with ThreadPoolExecutor(MANY) as pool:
        answers = list(pool.map(lambda _: ask(region.gateway, SHORT), range(2 * MANY)))
    return not {"429", ""} & set(answers)


def _break(host: str) -> Callable[[DrillRegion], None]:
    """The engine of a host ends, and what it is started from is gone."""

    def cause(region: DrillRegion) -> None:
        region.module(host).rename(region.module(host).with_suffix(".gone"))
        region.kill(host, f"{host}-engine")

    return cause


def _repair(host: str) -> Callable[[DrillRegion], None]:
    """Read in the log why the engine does not start, and mend that."""

    def mend(region: DrillRegion) -> None:
        log = Path(region.hosts[host].run_dir, "logs", f"{host}-engine.log").read_text()
        assert "No module named" in log.splitlines()[-1], log
        region.module(host).with_suffix(".gone").rename(region.module(host))

    return mend


def _stop_host(region: DrillRegion) -> None:
    region.hosts["a1"].down()


def _start_host(region: DrillRegion) -> None:
    region.hosts["a1"].up()


def _cut(region: DrillRegion) -> None:
    region.disturb_link("cut")


def _heal(region: DrillRegion) -> None:
    region.disturb_link("heal")


class _Crowd:
    """Clients of one tenant that ask at the same time until the limit is raised."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []

    def come(self, region: DrillRegion) -> None:
        def keep_asking() -> None:
            # Short prompts: engines that compute nothing load one landing at a time. The pause
            # leaves ports for others.
            while not self._over.wait(0.05):
                ask(region.gateway, SHORT)

        self._over.clear()
        self._threads = [threading.Thread(target=keep_asking, daemon=True) for _ in range(MANY)]
        for thread in self._threads:
            thread.start()

    def raise_limit(self, region: DrillRegion) -> None:
        region.change({"max_requests": 10 * MANY})
        file = str(region.hosts["b1"].folder / "region.yaml")
        region.run("b1", "region", "reload", file, "--node", "b1")

    def are_all_answered(self, region: DrillRegion) -> bool:
        # Before the crowd comes, and before the limit is raised, one at a time is served.
        if not self._threads:
            return _is_answered(region)
        if not _all_are_answered(region):
            return False
        self._over.set()
        for thread in self._threads:
            thread.join()
        return True


_crowd = _Crowd()

FAULTS = (
    Fault(
        "a prefill engine does not start",
        "PrfaasNoPrefillInstance",
        "`logs/NAME.log`",
        _break("a1"),
        _repair("a1"),
        _is_sent,
    ),
    Fault(
        "the link is cut",
        "PrfaasLinkDown",
        "prfaas emulate fault SOCKET heal",
        _cut,
        _heal,
        _is_sent,
    ),
    Fault(
        "the prefill host stops",
        "PrfaasProcessDown",
        "prfaas up region.yaml --node NODE",
        _stop_host,
        _start_host,
        _is_sent,
    ),
    Fault(
        "the only decode engine does not start",
        "PrfaasNoDecodeInstance",
        "`logs/NAME.log`",
        _break("b1"),
        _repair("b1"),
        _is_answered,
    ),
    Fault(
        f"a tenant has more than {LIMIT} requests",
        "PrfaasTenantAtLimit",
        "prfaas region reload region.yaml",
        _crowd.come,
        _crowd.raise_limit,
        _crowd.are_all_answered,
    ),
)
