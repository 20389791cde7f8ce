"""The gateway: its parts, start and stop, completions.

`Gateway` owns what lives as long as the process: the connection pool, the watcher, the records, the
scheduler. It gets its clusters from the caller, who also closes them.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from aiohttp import web

from deploy.gateway.api_keys import ApiKey
from deploy.gateway.cache.api import KeyNames
from deploy.gateway.cache.moves import CacheMoves, MoveMetrics
from deploy.gateway.cache.placement import PrefixPlacement, node_loads
from deploy.gateway.cache.region_caches import RegionCaches
from deploy.gateway.config import GatewayConfig, SharedUplink
from deploy.gateway.errors import ApiError
from deploy.gateway.intake.accept import Intake, ServedModels
from deploy.gateway.intake.auth import KeyRing
from deploy.gateway.intake.cache_salts import CacheSalts
from deploy.gateway.intake.endpoints import KINDS, Kind
from deploy.gateway.intake.homes import Homes
from deploy.gateway.intake.key_file import follow_keys
from deploy.gateway.intake.limits import Limits
from deploy.gateway.intake.traced import RequestTraces
from deploy.gateway.links.region_links import RegionLinks
from deploy.gateway.links.watcher import RegionWatcher
from deploy.gateway.media.fetcher import MediaFetcher
from deploy.gateway.members.keeper import MemberKeeper
from deploy.gateway.members.pages import MemberPages
from deploy.gateway.metrics import GatewayMetrics
from deploy.gateway.pages import Pages, shown_links
from deploy.gateway.proxy.engine import EngineHttpClient
from deploy.gateway.proxy.slow_client import ClientPatience, send_whole
from deploy.gateway.reload import with_live
from deploy.gateway.scheduling.admission import Admission
from deploy.gateway.scheduling.calibration import Calibration
from deploy.gateway.scheduling.collector import SchedulingCollector
from deploy.gateway.scheduling.leadership import Leadership
from deploy.gateway.scheduling.long_term import LongTermService
from deploy.gateway.scheduling.plan_metrics import PlanMetrics
from deploy.gateway.scheduling.recorder import Recorder
from deploy.gateway.scheduling.role_pages import RegionRolePages, RolePages
from deploy.gateway.scheduling.roles import RoleKeeper, RoleMetrics
from deploy.gateway.scheduling.scheduler import (
    RegionScheduler,
    live_settings,
    pd_settings,
)
from deploy.gateway.series.clusters import ClusterSeries
from deploy.gateway.serving.background import Background
from deploy.gateway.serving.exchange import Services
from deploy.gateway.serving.parameters import TakenParameters
from deploy.gateway.serving.records import RequestRecord
from deploy.gateway.serving.request import Serving
from deploy.gateway.sharing.state_file import StateFile
from kvmanager.logs import about_request
from kvmanager.program_version import program_version
from local_pd.cluster import PdCluster
from prfaas.cluster import PrefillCluster
from prfaas.engines.access import EngineAccess
from scheduler.live.snapshots import LinkPair
from scheduler.reports import ClusterReport
from scheduler.routing.spill import Spill
from transport.grants import Granter
from transport.tasks import start_task

if TYPE_CHECKING:
    from deploy.gateway.sharing.redis_region import RegionInRedis
    from deploy.gateway.sharing.region_sharing import RegionSharing

LINKS_WAIT_S: Final = 2.0
"""How long the start waits for the agents' first reports, seconds: without one, no link is used."""


class Gateway:
    """The region's entry endpoint. `start` it on the event loop that serves it."""

    def __init__(
        self,
        config: GatewayConfig,
        pds: Sequence[PdCluster],
        prefill_clusters: Mapping[str, PrefillCluster],
        links: Mapping[LinkPair, str] | None = None,
        caches: RegionCaches | None = None,
        *,
        region_links: RegionLinks | None = None,
        spill: Mapping[str, Spill] | None = None,
        uplinks: Iterable[SharedUplink] = (),
        granter: Granter | None = None,
        exposure: str | None = None,
        keys_file: Path | None = None,
        run_key: str = "",
        engine_access: EngineAccess | None = None,
        shared: RegionInRedis | None = None,
        names_key: bytes = b"",
        traces: RequestTraces | None = None,
    ) -> None:
        """`links` names each link from a prefill cluster to a PD cluster, "" for one without a
        name; without them, each is linked to each. `spill` is the rule of each PD cluster,
        "overflow" where it is left out. `uplinks` is bandwidth that links share.

        `caches` says what is cached of a prompt, `region_links` what links carry. The gateway
        closes both. `granter` signs for node agents what requests need of them.

        `exposure`, what everybody on the network may do, is shown by /health. `keys_file` is the
        source of `config.api_keys`, and is followed. `run_key` opens the pages of operators,
        `engine_access` the engines. `shared` is what the region's gateways share; None: this is the
        only one. Gateways with one `names_key` call cache keys alike; left out: like no other.
        `traces` says which requests are traced; None: none.
        """
        self._granter = granter
        self._exposure = exposure
        self._names_key = names_key or secrets.token_bytes(32)
        self.config = config
        self.metrics = GatewayMetrics()
        self.records: deque[RequestRecord] = deque(maxlen=config.num_records)
        self._pds = {pd.name: pd for pd in pds}
        if links is None:
            links = {(name, pd): "" for name in prefill_clusters for pd in self._pds}
        self._pd_settings = pd_settings(self._pds, links, spill or {})
        self._uplinks = tuple(uplinks)
        self._prefill_clusters = dict(prefill_clusters)
        self._caches = caches
        self._region_links = region_links
        self._keys = KeyRing(config.api_keys, config.operators, run_key)
        self._keys_file = keys_file
        self._engine_access = engine_access or EngineAccess()
        self._following: asyncio.Task[None] | None = None
        self._limits = Limits(config)
        self._serving: set[asyncio.Task[object]] = set()
        self._models = ServedModels(config.models)
        self._watcher = RegionWatcher(config, pds, prefill_clusters, on_report=self._note_nodes)
        self._intake = Intake(
            keys=self._keys,
            limits=self._limits,
            models=self._models,
            metrics=self.metrics,
            may_ask=lambda tenant: self.admission.asking(tenant),
            salts=CacheSalts(config.shared_caches),
            homes=self._homes(config),
            template_tokens=config.template_tokens,
            priority_tenants=frozenset(config.priority_tenants),
            traces=traces or RequestTraces(),
        )
        self.scheduler = self._build_scheduler()
        self._recorder = self._build_recorder()
        self.admission = Admission(
            config.scheduling.admission,
            self.metrics.registry,
            # A request is judged right after its route was asked for, on the same reports.
            self.scheduler.tell,
            self.metrics.tenants,
            hide=str if self._recorder is None else self._recorder.hide,
        )
        self.leadership = Leadership(
            is_shared=shared is not None, token=0 if shared else int(time.time() * 1000)
        )
        self.sharing = None if shared is None else self._build_sharing(shared)
        self.roles = self._build_roles()
        watcher, registry = self._watcher, self.metrics.registry
        plan_metrics = PlanMetrics(registry, (model.name for model in config.models))
        plan_metrics.watch(self._leads, watcher.reports)
        ClusterSeries(registry, watcher.by_name, self._leads)
        self.long_term = LongTermService(
            config.scheduling.long_term,
            self.scheduler,
            self.roles,
            plan_metrics,
        )
        self._state = self._build_state()
        self._calibration = Calibration(
            config.scheduling.calibration, self.scheduler, self._pds, self._prefill_clusters
        )
        self._background = Background()
        self.members = MemberKeeper(
            self._pds,
            self._prefill_clusters,
            None if caches is None else caches.open_agent,
            lambda: None if self._services is None else self._services.placement,
        )
        self.metrics.watch(lambda: self.num_in_flight, lambda: len(self._background))
        self.pages = self._build_pages(links)
        self._services: Services | None = None

    async def start(self) -> None:
        """Open the connection pool and take the first reports."""
        if self._state is not None:
            await self._state.restore()
            self._state.start()
        # Before anything else takes an event: a recording begins with the state that events
        # change.
        if self._recorder is not None:
            self.scheduler.record(self._recorder)
        self._services = self._build_services()
        if self._keys_file is not None:
            following = follow_keys(self._keys_file, self._replace_keys)
            self._following = start_task(following, "the file of API keys")
        if self._services.placement is not None:
            self._services.placement.start()
        # Roles and links are looked at by the first reports.
        await self._watcher.start()
        if self.sharing is not None:
            await self.sharing.start()
        for keeper in self.roles.values():
            keeper.start()
        self.long_term.start()
        if self._region_links is not None:
            await self._region_links.wait_heard(LINKS_WAIT_S)
        self._calibration.start()
        await self._calibration.settle()

    @property
    def num_in_flight(self) -> int:
        """Requests being served right now."""
        return self._limits.num_in_flight

    def use_live(self, config: GatewayConfig) -> None:
        """Take the settings of `config` that change live (`deploy.gateway.reload`). ValueError if
        they do not fit the others; nothing is changed then.
        """
        self.config = config = with_live(self.config, config)
        self._limits.use(config)
        self._keys.set_operators(config.operators)
        self._intake.salts = CacheSalts(config.shared_caches)
        self._intake.homes = self._homes(config)
        self._intake.priority_tenants = frozenset(config.priority_tenants)
        self.admission.use(config.scheduling.admission)

    def stop_accepting(self) -> None:
        """Answer new requests with 503 from now on; those in flight go on."""
        self._limits.stop_accepting()

    async def drain(self) -> None:
        """Stop accepting, and wait until no request is in flight, at most `timeouts.drain_s`."""
        self.stop_accepting()
        try:
            async with asyncio.timeout(self.config.timeouts.drain_s):
                await self._limits.wait_idle()
        except TimeoutError:
            for task in self._serving:
                task.cancel("The gateway is shutting down.")
            await asyncio.sleep(0)  # so that they say so to their clients

    async def close(self) -> None:
        """Give back what requests held, then close all connections. Idempotent."""
        self.stop_accepting()
        if self._following is not None:
            self._following.cancel()
        # First what gives orders: conversions and copies use the clients that are closed below.
        await self.long_term.close()
        await asyncio.gather(*(keeper.close() for keeper in self.roles.values()))
        await self._watcher.close()
        await self._calibration.close()
        await self.members.close()
        if self._services is not None and self._services.placement is not None:
            await self._services.placement.close()
        # Its tasks give landings and leases back, for which clusters and agents must still be
        # reachable.
        await self._background.drain(self.config.timeouts.cluster_s)
        if self.sharing is not None:
            await self.sharing.close()
        if self._state is not None:
            await self._state.close()
        if self._caches is not None:
            await self._caches.close()
        if self._region_links is not None:
            await self._region_links.close()
        if self._services is not None:
            self._services.media.close()
            await self._services.engines.close()
        if self._recorder is not None:
            # Closing writes what waits to disk, which may block.
            await asyncio.to_thread(self._recorder.close)

    def routes(self) -> Iterable[web.RouteDef]:
        """Every endpoint at `host` and `port`, for an application's router."""
        forwarded = (web.post(path, partial(self.complete, kind)) for path, kind in KINDS.items())
        pages = self.pages
        admin = () if self.config.admin is not None else pages.for_operators()
        return [*forwarded, *pages.for_clients(), *pages.for_everybody(), *admin]

    def admin_routes(self) -> Iterable[web.RouteDef]:
        """Every endpoint at `admin`, for an application's router."""
        return [*self.pages.for_operators(), *self.pages.for_everybody()]

    async def complete(self, kind: Kind, request: web.Request) -> web.StreamResponse:
        """POST to one of `KINDS`. Raises `ApiError` before routing."""
        services = self._started()
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        async with self._intake.received(request, kind) as exchange:
            record = exchange.record
            self.records.append(record)
            with about_request(record.request_id, record.trace_id):
                response = await Serving(services, exchange).answer(request)
                # Here, so that it counts towards the limits until the client has taken it.
                await send_whole(request, response, services.patience)
            return response

    async def _note_nodes(self, report: ClusterReport) -> None:
        for follower in (self._caches, self._region_links):
            if follower is not None:
                await follower.watch(report)
        self.members.heard(report)
        self._calibration.heard(report)

    def _replace_keys(self, keys: tuple[ApiKey, ...]) -> None:
        self._keys.replace(keys)
        self.admission.keep_series(key.tenant for key in keys)

    def _leads(self) -> bool:
        return self.leadership.leads(self.scheduler.clock())

    def _started(self) -> Services:
        if self._services is None:
            raise ApiError(503, "starting", "The gateway is starting.", retry_after_s=1)
        return self._services

    def _build_scheduler(self) -> RegionScheduler:
        links = self._region_links
        scheduler = RegionScheduler(
            live_settings(self.config, self._pd_settings, self._uplinks),
            self._watcher,
            None if links is None else lambda a, b: links.now(a, b).view(),
        )
        collector = SchedulingCollector(scheduler, None if links is None else links.links)
        self.metrics.registry.register(collector)
        return scheduler

    def _build_sharing(self, shared: RegionInRedis) -> RegionSharing:
        # The redis client is an extra that only users of several gateways install.
        from deploy.gateway.sharing.budgets import SharedBudgets
        from deploy.gateway.sharing.region_sharing import RegionSharing

        config = self.config
        assert config.shared is not None
        budgets = SharedBudgets(shared, self.admission.limit)
        self.admission.share(budgets)
        sharing = RegionSharing(
            shared,
            config.shared.name,
            config.models,
            self.scheduler,
            self.leadership,
            self.metrics.registry,
            budgets=budgets,
            links=self._region_links,
        )
        sharing.on_change(self.admission.divide)
        return sharing

    def _build_state(self) -> StateFile | None:
        config = self.config
        if config.state is None:
            return None
        return StateFile(config.state, config.models, self.scheduler, self._region_links)

    def _homes(self, config: GatewayConfig) -> Homes:
        return Homes(self._watcher.pd_reports, config.home, config.homes)

    def _build_roles(self) -> dict[str, RoleKeeper]:
        metrics = RoleMetrics(self.metrics.registry)
        config = self.config.scheduling.long_term.conversion()
        return {
            name: RoleKeeper(
                pd,
                partial(self._watcher.pd_report, name),
                config,
                metrics,
                leadership=self.leadership,
            )
            for name, pd in self._pds.items()
        }

    def _build_recorder(self) -> Recorder | None:
        config = self.config
        if config.recorder is None:
            return None
        return Recorder(
            config.recorder,
            self.metrics.registry,
            version=program_version(),
            named=config.scheduling.admission.tenants.keys(),
        )

    def _build_services(self) -> Services:
        config, caches, links = self.config, self._caches, self._region_links
        return Services(
            pds=self._pds,
            spill={pd.name: pd.spill for pd in self._pd_settings},
            reports=self._watcher.pd_reports,
            prefill_reports=self._watcher.prefill_reports,
            prefill_clusters=self._prefill_clusters,
            engines=EngineHttpClient(
                config.timeouts, self._engine_access, max_answer_bytes=config.max_answer_bytes
            ),
            background=self._background,
            timeouts=config.timeouts,
            patience=ClientPatience(
                config.timeouts.client_stall_s,
                config.min_client_bytes_per_s,
                config.stream_keep_alive_s,
            ),
            scheduler=self.scheduler,
            admission=self.admission,
            places=self._watcher.cache_places,
            media=MediaFetcher(
                config.media,
                self._limits,
                self.metrics.registry,
                max_body_bytes=config.max_body_bytes,
            ),
            limits=self._limits,
            taken=TakenParameters(
                {one.name: one.max_model_len for one in config.models if one.max_model_len}
            ),
            caches=caches,
            placement=None if caches is None else self._build_placement(caches),
            granter=self._granter,
            receivers=(lambda _: "") if links is None else links.receivers,
            refuses_local_prefill=config.scheduling.routing.local_prefill == "refuse",
        )

    def _build_placement(self, caches: RegionCaches) -> PrefixPlacement:
        moves = CacheMoves(
            lambda: caches.targets,
            caches.open_agent,
            self._background,
            MoveMetrics(self.metrics.registry),
            self.scheduler.tell,
        )
        return PrefixPlacement(moves, caches.directory, lambda: node_loads(self._watcher.reports()))

    def _build_pages(self, links: Mapping[LinkPair, str]) -> Pages:
        timeout_s = self.config.timeouts.cluster_s
        roles = {
            name: RolePages(keeper, self._pds[name], timeout_s)
            for name, keeper in self.roles.items()
        }
        return Pages(
            config=self.config,
            keys=self._keys,
            limits=self._limits,
            intake=self._intake,
            models=self._models,
            metrics=self.metrics,
            records=self.records,
            watcher=self._watcher,
            background=self._background,
            scheduler=self.scheduler,
            admission=self.admission,
            long_term=self.long_term,
            role_pages=RegionRolePages(roles),
            member_pages=MemberPages(self.members),
            caches=self._caches,
            links=self._region_links,
            link_names=shown_links(links),
            key_names=KeyNames(self._names_key),
            services=self._started,
            exposure=self._exposure,
            sharing=self.sharing,
        )
