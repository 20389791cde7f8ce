"""The files that the gateway and the fronts of a region read. Pure: it takes a resolved region."""

from __future__ import annotations

from deploy.gateway.config import GatewayConfig, GatewaySection, ModelConfig
from deploy.gateway.file import GatewayFile, PdSource, PrefillSource
from deploy.region.launch.addresses import engine_url, front_address
from deploy.region.launch.parts import fronts_apart
from deploy.region.launch.ports import ResolvedRegion, advertised_address
from deploy.region.launch.rundir import RunDirectory
from deploy.region.launch.trust import engine_key_file, region_key_of, signs_grants
from deploy.region.spec.encoding import encoder_role_of
from deploy.region.spec.region import (
    ClusterSpec,
    RegionSpec,
    gateway_process,
    role_of,
    spill_of,
)
from local_pd.front_config import PdFrontConfig
from prfaas.engines.instance import InstanceSpec
from prfaas.front_config import PrefillFrontConfig
from scheduler.routing.front_placement import DEFAULT_PASS_TOKENS
from transport import Endpoint


def gateway_file(resolved: ResolvedRegion, directory: RunDirectory, node: str = "") -> GatewayFile:
    """The file of the process of a gateway on the host of `node` ("": the first one). Without parts
    all fronts are embedded in a region's only gateway.
    """
    region, security = resolved.region, resolved.region.security
    gateway = region.gateway
    settings = {name: getattr(gateway, name) for name in GatewaySection.model_fields}
    node = node or region.gateway_node.name
    settings["home"] = region.home_at(node)
    settings["port"] = gateway.ports.get(node, gateway.port)
    settings["state"] = gateway.state or directory.learned_file_of(gateway_process(region, node))
    if len(gateway.nodes) > 1:
        # Some may run on one host, and no two write to one file.
        if gateway.state is not None:
            settings["state"] = f"{gateway.state}.{node}"
        if gateway.recorder is not None:
            folder = gateway.recorder.dir / node
            settings["recorder"] = gateway.recorder.model_copy(update={"dir": folder})
    if gateway.shared is not None:
        own = {"region": region.name, "name": node}
        settings["shared"] = gateway.shared.model_copy(update=own)
    is_alone = resolved.part.is_whole and not resolved.part.fronts
    apart = () if is_alone else fronts_apart(region)

    def source(cluster: ClusterSpec) -> dict[str, object]:
        if cluster in apart:
            return {"name": cluster.name, "front": front_address(cluster)}
        own: dict[str, object] = {"name": cluster.name, "instances": _instances(region, cluster)}
        return own | ({"hand_off": cluster.hand_off} if cluster.kind == "pd" else {})

    def pd_source(cluster: ClusterSpec) -> PdSource:
        roles = {role_of(item, cluster) for item in cluster.instances}
        prefills = cluster in apart and "prefill" in roles
        return PdSource.of(
            **source(cluster), spill=spill_of(cluster), has_prefill_instances=prefills
        )

    return GatewayFile.of(
        gateway=GatewayConfig(
            **settings,
            models=tuple(
                ModelConfig(
                    name=model.name,
                    max_model_len=model.max_model_len,
                    root=model.path,
                    adapters=model.adapters,
                )
                for model in region.models
            ),
        ),
        api_keys_file=gateway.api_keys_file,
        api_keys_env=gateway.api_keys_env,
        engine_key_file=engine_key_file(region, directory),
        operator_key_file=directory.operator_key,
        pd=tuple(pd_source(cluster) for cluster in region.pd_clusters),
        prefill=tuple(
            PrefillSource.of(
                **source(cluster),
                link={link.to: link.name for link in region.links_from(cluster.name)},
                endpoints=_endpoints(region, cluster),
            )
            for cluster in region.prefill_clusters
        ),
        uplinks=region.uplinks,
        tls=security.tls,
        region_key=region_key_of(region, directory.region_key, "gateway"),
        granting_key=signs_grants(region, directory.granting_key),
        trusted_network=security.trusted_network,
        traces=region.traces,
    )


def front_file(
    resolved: ResolvedRegion, directory: RunDirectory, cluster: ClusterSpec
) -> PrefillFrontConfig | PdFrontConfig:
    """The file of a front that is a process of its own."""
    region, first = resolved.region, cluster.nodes[0]
    scheduling = region.gateway.scheduling
    settings = {
        "name": cluster.name,
        "listen": str(Endpoint(first.bound_host, cluster.front_port)),
        "metrics_port": cluster.front_metrics_port,
        "drain_s": region.gateway.timeouts.drain_s,
        "metrics_host": region.metrics_host(first),
        "metrics_key_file": region.security.metrics_key,
        "instances": _instances(region, cluster),
        "engine_key_file": engine_key_file(region, directory),
        "tls": region.security.tls,
        "region_key": region_key_of(region, directory.region_key, cluster.name),
        "trusted_network": region.security.trusted_network,
        "traces": region.receiver,
        "encoding": scheduling.encoding,
    }
    if cluster.kind == "prefill":
        return PrefillFrontConfig.of(**settings, queue=scheduling.queue)
    return PdFrontConfig.of(**settings, hand_off=cluster.hand_off)


def gateway_text(file: GatewayFile) -> str:
    """The file as the gateway reads it."""
    # Keys stay in their file or variable: the run directory must not have a second copy.
    return file.model_dump_json(exclude={"gateway": {"api_keys"}}, indent=1)


def region_text(region: RegionSpec) -> str:
    """The region as a run directory has it."""
    return region.model_dump_json(by_alias=True, exclude_none=True, indent=1)


def _instances(region: RegionSpec, cluster: ClusterSpec) -> tuple[InstanceSpec, ...]:
    return tuple(
        InstanceSpec(
            name=item.name,
            agent=str(Endpoint(node.host, node.agent.control_port)),
            node=node.name,
            url=engine_url(region, node, item),
            model=region.model_of(item).name,
            role=role_of(item, cluster),
            max_concurrent=item.max_concurrent,
            pass_tokens=region.model_of(item).max_num_batched_tokens or DEFAULT_PASS_TOKENS,
            decode_slots=region.decode_slots_of(item),
            encoder_role=encoder_role_of(region, cluster, item),
            encodes=item.encodes,
            paced=region.pace_of(item) is not None,
        )
        for node in cluster.nodes
        for item in node.instances
    )


def _endpoints(region: RegionSpec, cluster: ClusterSpec) -> dict[str, str]:
    receivers = {node.name: advertised_address(node) for node in region.nodes}
    links = region.links_from(cluster.name)
    return {receivers[name]: at for link in links for name, at in link.endpoints.items()}
