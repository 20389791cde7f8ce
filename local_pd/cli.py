"""`prfaas pd`: a local PD cluster front as a process of its own.

It only reads the configuration file and runs the parts; see front_process for the life of it.
"""

import asyncio
import logging
from pathlib import Path
from typing import Annotated

import typer

from local_pd.embedded import EmbeddedPdCluster, PdClusterConfig
from local_pd.server import PdServer
from prfaas.engines.front_config import FrontConfig, FrontConfigError, load_front_config
from prfaas.engines.front_process import serve_front
from prfaas.engines.instances import InstancesConfig
from transport import Endpoint
from transport.rpc import RpcError


def pd_command(
    config: Annotated[Path, typer.Option(help="YAML file that describes the cluster.")],
    listen: Annotated[str, typer.Option(help="host:port for gRPC; overrides the file.")] = "",
    log_level: Annotated[str, typer.Option(help="Level of this process's log.")] = "INFO",
) -> None:
    """Run the front of a local PD cluster: its instances, landings, engines if told to."""
    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(name)s %(message)s")
    try:
        loaded = load_front_config(config, FrontConfig)
    except FrontConfigError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
    if listen:
        loaded = loaded.model_copy(update={"listen": listen})
    try:
        asyncio.run(serve_pd(loaded))
    except RpcError as error:
        typer.echo(error.message, err=True)
        raise typer.Exit(1) from error


async def serve_pd(config: FrontConfig) -> None:
    """Serve the cluster of `config` until SIGTERM or SIGINT. RpcError: `listen` is not free."""
    tls = config.tls.files() if config.tls is not None else None
    cluster = EmbeddedPdCluster(
        config.name,
        config.instances,
        PdClusterConfig(
            lease_s=config.lease_s,
            affinity_slack=config.affinity_slack,
            keep_leases=False,
            instances=InstancesConfig(
                log_dir=config.log_dir,
                tls=tls,
                poll_load=True,
                drained_hold_s=config.drained_hold_s,
            ),
        ),
    )
    host = Endpoint.parse(config.listen).host
    server = PdServer(cluster, config.listen, tls)
    await serve_front(
        cluster, server, host, metrics_prefix="prfaas_pd", metrics_port=config.metrics_port
    )
