"""A region on loopback for gateway tests: HTTP doubles of engines, in-process doubles of fronts.

The doubles keep the promises of the real ones that the gateway relies on: an engine that was given
a landing waits for it and prefills by itself once the landing is given back.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import report_cases
from eventually import eventually
from msgspec import structs
from openai_engine import OpenAiEngine
from report_cases import cluster

from deploy.gateway.app import Gateway
from deploy.gateway.cache.region_caches import RegionCaches
from deploy.gateway.config import GatewayConfig, ModelConfig, TimeoutConfig
from deploy.gateway.server import start_admin_server, start_server
from kvmanager.agent.grants import reservation
from kvmanager.agent.messages import CacheModel
from kvmanager.landing import ReservedLanding
from local_pd.cluster import PdCluster
from local_pd.errors import NoInstance, NoLandingRoom, PdError, RoleRefused
from local_pd.messages import (
    DecodeSlot,
    DirectRequest,
    DirectTarget,
    LandingReport,
    ReserveRequest,
)
from prfaas.cluster import PrefillCluster
from prfaas.encoding.values import EncodeDone, EncodeOrder
from prfaas.engines.errors import PrefillFailed
from prfaas.engines.members import MemberOrder
from prfaas.engines.timing import TimedPrefills, TimingOrder
from prfaas.jobs import PrefillJob, PrefillResult
from scheduler.live.long_term.conversion import RoleChange, RoleStatus
from scheduler.reports import ClusterReport, EncodeReport, InstanceReport
from transport.grants import Granted, Granter


class _Front:
    """What doubles of both kinds of fronts have in common. Each inherits the interface of its kind,
    whose methods do nothing: those that no test is about need no line here.
    """

    def __init__(self) -> None:
        self.orders: list[MemberOrder] = []
        self.num_reports = 0
        self.set_report: ClusterReport | None = None
        """What a test lets it report in place of its own state."""

    def state(self) -> ClusterReport:
        raise NotImplementedError

    async def report(self) -> ClusterReport:
        self.num_reports += 1
        return self.set_report or self.state()

    async def change_members(self, order: MemberOrder) -> None:
        self.orders.append(order)

    async def time_prefills(self, order: TimingOrder) -> TimedPrefills:
        return TimedPrefills(reason="nothing to time here")


class FakePd(_Front, PdCluster):
    """A local PD cluster front over fake engines. `index` makes its transfers its own."""

    name = ""

    def __init__(self, engines: list[OpenAiEngine], name: str = "home", index: int = 0) -> None:
        super().__init__()
        self.name = name
        self.index = index
        self.engines = {engine.name: engine for engine in engines}
        self.held: dict[str, str] = {}
        self.landings: dict[str, asyncio.Future[LandingReport]] = {}
        self.awaiting: set[str] = set()
        self.agent_is_gone = False
        self.reports_landings = True
        self.released: list[str] = []
        self.ended_at: list[str] = []
        self.num_reserved = 0
        self.reserved_with: list[tuple[bytes, tuple[str, ...]]] = []
        self.tenants: list[str] = []
        """The tenant of each reservation of memory for KVCache."""
        self.grants: list[tuple[Granted, bytes]] = []
        """Each reservation, and the grant that came with it."""
        self.direct_preferences: list[tuple[str, ...]] = []
        self.cache_model: CacheModel | None = None
        self.cached_tokens = 0
        self.is_full = False
        self.down: set[str] = set()
        self.reserving = asyncio.Event()
        self.reserve_gate = asyncio.Event()
        self.reserve_gate.set()
        self.prefill: FakePrefill | None = None
        self.layouts: dict[str, str] = {}
        """The fingerprints of the KVCache layouts of the engines that say which they have."""
        self.engine_numbers: dict[str, Any] = {}
        """Fields that reports of engines have besides."""
        self.stage: EncodeReport | None = None
        """Its encode stage, if a test gives it one."""
        self.encode_orders: list[EncodeOrder] = []
        self.encode_done: EncodeDone | PdError = EncodeDone()
        self.encode_gate = asyncio.Event()
        self.encode_gate.set()

    @property
    def has_prefill_instances(self) -> bool:
        return self.prefill is not None

    async def reserve(self, request: ReserveRequest) -> DecodeSlot:
        self.reserved_with.append((request.block_keys, request.prefer_nodes))
        self.tenants.append(request.tenant)
        granted = reservation(request.num_tokens, request.token_digest, request.block_keys)
        self.grants.append((granted, request.grant))
        self.reserving.set()
        await self.reserve_gate.wait()
        if self.is_full:
            raise NoLandingRoom("every landing is full")
        engine = next(
            (item for item in self._usable() if self._fits(item.name, request.layouts)), None
        )
        if engine is None:
            raise NoInstance("no engine has one of these layouts")
        self.num_reserved += 1
        transfer_id = f"{self.index:08x}{self.num_reserved:024x}"
        self.held[transfer_id] = engine.name
        self.landings[transfer_id] = asyncio.get_running_loop().create_future()
        landing = ReservedLanding(
            transfer_id=transfer_id,
            token="ab" * 32,
            nbytes=(request.num_tokens - self.cached_tokens) * 512,
            num_tokens=request.num_tokens,
            cached_tokens=self.cached_tokens,
            host="127.0.0.1",
            port=7100,
            layout_fingerprint=self.layouts.get(engine.name, "cd" * 32),
            token_digest=request.token_digest,
            adapter=request.adapter,
        )
        return DecodeSlot(
            landing=landing,
            instance=engine.name,
            engine_url=engine.url,
            lease_s=30.0,
        )

    async def await_landing(self, slot: DecodeSlot, timeout_s: float) -> LandingReport:
        transfer_id = slot.landing.transfer_id
        if self.agent_is_gone:
            return LandingReport(state="unknown", error="no answer from the node agent")
        self.awaiting.add(transfer_id)
        try:
            await asyncio.wait((self.landings[transfer_id],), timeout=timeout_s)
        finally:
            self.awaiting.remove(transfer_id)
        landing = self.landings[transfer_id]
        return landing.result() if landing.done() else LandingReport(state="open")

    def end_landing(self, transfer_id: str, state: Any, error: str = "") -> None:
        """Say so to whoever waits for it, and to the engine."""
        landing = self.landings[transfer_id]
        if self.reports_landings and not landing.done():
            landing.set_result(LandingReport(state=state, error=error))
        source = "landing" if state == "landed" else "recomputed"
        self.engines[self.held[transfer_id]].tell(transfer_id, source)

    def request_ended(self, instance: str) -> None:
        self.ended_at.append(instance)

    async def release(self, slot: DecodeSlot, reason: str) -> None:
        transfer_id = slot.landing.transfer_id
        self.held.pop(transfer_id, None)
        self.released.append(transfer_id)
        self.engines[slot.instance].tell(transfer_id, "recomputed")

    async def direct(self, request: DirectRequest) -> DirectTarget:
        self.direct_preferences.append(request.prefer_nodes)
        usable = self._usable()
        engine = next((item for item in usable if item.name not in request.exclude), usable[0])
        return DirectTarget(instance=engine.name, engine_url=engine.url)

    async def encode(self, order: EncodeOrder) -> EncodeDone:
        self.encode_orders.append(order)
        await self.encode_gate.wait()
        if isinstance(self.encode_done, PdError):
            raise self.encode_done
        return self.encode_done

    async def prefill_locally(self, job: PrefillJob) -> PrefillResult:
        assert self.prefill is not None
        return await self.prefill.submit(job)

    def state(self) -> ClusterReport:
        instances = [
            report("both", engine.name, engine.name not in self.down, self.cache_model)
            for engine in self.engines.values()
        ]
        instances = [
            structs.replace(
                item, layout_fingerprint=self.layouts.get(item.name, ""), **self.engine_numbers
            )
            for item in instances
        ]
        if self.prefill is not None:
            prefill = report("prefill", "p0", True)
            instances.append(structs.replace(prefill, adapters=self.prefill.adapters))
        healthy = len(self.down) < len(self.engines)
        return cluster(self.name, *instances, healthy=healthy, encode=self.stage)

    async def set_role(self, instance: str, change: RoleChange, *, leader: int = 0) -> RoleStatus:
        raise RoleRefused(f"{self.name}: {instance} never changes")

    def _fits(self, engine: str, layouts: Sequence[str]) -> bool:
        return not layouts or self.layouts.get(engine, "") in ("", *layouts)

    def _usable(self) -> list[OpenAiEngine]:
        usable = [engine for name, engine in self.engines.items() if name not in self.down]
        if not usable:
            raise NoInstance("no healthy engine")
        return usable


class FakePrefill(_Front, PrefillCluster):
    """A prefill cluster front whose KVCache lands at once when `gate` is open."""

    name = ""

    def __init__(self, name: str, *pds: FakePd) -> None:
        super().__init__()
        self.name = name
        self.pds = pds
        self.jobs: list[PrefillJob] = []
        self.num_cancelled = 0
        self.num_running = 0
        self.error: Exception | None = None
        self.late_error: Exception | None = None
        self.cached_tokens = 0
        self.adapters: dict[str, str] = {}
        self.is_healthy = True
        self.layout = ""
        """The fingerprint of its KVCache layout; "": it does not say."""
        self.started = asyncio.Event()
        self.gate = asyncio.Event()
        self.gate.set()
        self.report_gate = asyncio.Event()
        self.report_gate.set()

    async def submit(self, job: PrefillJob) -> PrefillResult:
        self.jobs.append(job)
        self.num_running += 1
        self.started.set()
        try:
            await self.gate.wait()
            if self.layout not in ("", job.landing.layout_fingerprint):
                raise PrefillFailed("no_instance", "KVCache is laid out otherwise")
            if self.error is not None:
                raise self.error
            transfer_id = job.landing.transfer_id
            pd = next((pd for pd in self.pds if transfer_id in pd.held), None)
            if pd is None:
                raise PrefillFailed("transfer_failed", "the landing is gone")
            pd.end_landing(transfer_id, "landed")
            await self.report_gate.wait()
            if self.late_error is not None:
                raise self.late_error
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        finally:
            self.num_running -= 1
        return PrefillResult(
            instance=f"{self.name}-0",
            queue_s=1e-6,
            prefill_s=2e-6,
            transfer_tail_s=3e-6,
            nbytes=job.landing.nbytes,
            sent_share_at_prefill_end=0.9,
            cached_tokens=self.cached_tokens,
        )

    def state(self) -> ClusterReport:
        instance = structs.replace(
            report("prefill", f"{self.name}-0", self.is_healthy),
            adapters=self.adapters,
            layout_fingerprint=self.layout,
        )
        changes = {"healthy": self.is_healthy, "running": self.num_running, "max_queued": 64}
        return cluster(self.name, instance, **changes)


def report(role: Any, name: str, healthy: bool, cache: CacheModel | None = None) -> InstanceReport:
    """Every instance has a node of its own name, whose agent is at NAME:1."""
    where = {"node": f"{name}:1", "node_name": name}
    return report_cases.instance(name, role, model="tiny", healthy=healthy, cache=cache, **where)


class Region:
    """The parts of a region that a test asks and changes."""

    def __init__(self, gateway: Gateway, url: str, pds: Sequence[FakePd], session: Any) -> None:
        self.gateway = gateway
        self.url = self.admin_url = url
        self.pds = {pd.name: pd for pd in pds}
        self.pd = pds[0]
        self.engines = [engine for pd in pds for engine in pd.engines.values()]
        self.prefill: dict[str, FakePrefill] = {}
        self.session: aiohttp.ClientSession = session
        self.until = eventually

    @property
    def engine(self) -> OpenAiEngine:
        return self.engines[0]

    @property
    def far(self) -> FakePrefill:
        return self.prefill["far"]

    def long_body(self, **fields: Any) -> dict[str, Any]:
        """Above the threshold of 100 tokens."""
        return {"model": "tiny", "prompt": "x" * 300} | fields

    async def post(
        self, body: Any, path: str = "/v1/completions", **kwargs: Any
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and whole body."""
        async with self.session.post(self.url + path, json=body, **kwargs) as response:
            headers = {key.lower(): value for key, value in response.headers.items()}
            return response.status, headers, await response.read()

    async def record(self) -> Any:
        """The latest record, once nothing about it changes any more."""
        records = self.gateway.records
        await eventually(lambda: records and records[-1].is_settled)
        return records[-1]

    async def heard(self) -> None:
        """Wait until the gateway knows of every cluster what it is now."""
        fronts: list[FakePd | FakePrefill] = [*self.pds.values(), *self.prefill.values()]
        # It asks a cluster again only after it has taken the answer before.
        wanted = [front.num_reports + 2 for front in fronts]
        await self.until(
            lambda: all(front.num_reports >= n for front, n in zip(fronts, wanted, strict=True))
        )

    async def assert_nothing_held(self) -> None:
        """Both legs are over, the landing is back and nobody waits for it."""
        pds = self.pds.values()
        await self.until(lambda: not any(pd.awaiting or pd.held for pd in pds))
        await self.until(lambda: all(cluster.num_running == 0 for cluster in self.prefill.values()))
        await self.until(lambda: all(engine.num_serving == 0 for engine in self.engines))
        await self.until(lambda: self.gateway.num_in_flight == 0)
        for pd in pds:
            assert len(set(pd.released)) == len(pd.released), "released twice"


@asynccontextmanager
async def open_region(
    *,
    num_engines: int = 1,
    prefill: Sequence[str] = ("far",),
    pds: Sequence[str] = ("home",),
    caches: RegionCaches | None = None,
    cache_model: CacheModel | None = None,
    granter: Granter | None = None,
    owned: Mapping[str, Any] | None = None,
    around: Region | None = None,
    same_names: bool = False,
    **config: Any,
) -> AsyncIterator[Region]:
    """`config` are settings of the gateway, `owned` further arguments of `Gateway`. The engines of
    all PD clusters but the first have its name before theirs, except with `same_names`. With
    `around` it is one more gateway of that region.
    """
    fronts = list(around.pds.values()) if around else []
    for index, name in enumerate(() if around else pds):
        prefix = f"{name}-" if index and not same_names else ""
        names = [f"{prefix}d{number}" for number in range(num_engines)]
        engines = [await OpenAiEngine(name).start() for name in names]
        fronts.append(FakePd(engines, name, index))  # type: ignore[abstract]
        fronts[-1].cache_model = cache_model
    clusters = around.prefill if around else {}
    for name in () if around else prefill:
        clusters[name] = FakePrefill(name, *fronts)  # type: ignore[abstract]
    settings: dict[str, Any] = {
        "port": 0,
        "models": (ModelConfig(name="tiny", max_model_len=8192),),
        "threshold_tokens": 100,
        "template_tokens": 20,
        "report_interval_s": 0.02,
        "report_stale_s": 2.0,
        "timeouts": TimeoutConfig(result_grace_s=0.5, drain_s=5.0, cluster_s=2.0),
    }
    whole = GatewayConfig(**(settings | config))
    gateway = Gateway(whole, fronts, clusters, caches=caches, granter=granter, **(owned or {}))
    runner = await start_server(gateway)
    admin = await start_admin_server(gateway)
    host, port = runner.addresses[0][:2]
    try:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:
            region = Region(gateway, f"http://{host}:{port}", fronts, session)
            region.prefill = clusters
            if admin is not None:
                region.admin_url = "http://{}:{}".format(*admin.addresses[0][:2])
            yield region
    finally:
        if admin is not None:
            await admin.cleanup()
        await runner.cleanup()
        for front in () if around else fronts:
            for engine in front.engines.values():
                await engine.stop()
