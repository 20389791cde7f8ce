"""`prfaas pd`: a local PD cluster front as a process of its own.

It only makes the parts that the file describes, and `front_process` runs them.
"""

from pathlib import Path
from typing import Annotated

import typer

from kvmanager.config_files.traces import open_tracer
from kvmanager.logs import FormatOption, LevelOption
from local_pd.embedded import EmbeddedPdCluster
from local_pd.front_config import PdFrontConfig
from local_pd.server import PdServer
from prfaas.engines.front_process import run_front, serve_front


def pd_command(
    config: Annotated[Path, typer.Option(help="YAML file that describes the cluster.")],
    listen: Annotated[
        str | None, typer.Option(help="host:port for gRPC; overrides the file.")
    ] = None,
    log_level: LevelOption = "info",
    log_format: FormatOption = "text",
) -> None:
    """Run the front of a local PD cluster: its instances, landings, engines if told to."""
    logs = log_level, log_format
    run_front(config, PdFrontConfig, serve_pd, listen=listen, logs=logs)


async def serve_pd(config: PdFrontConfig, path: Path) -> None:
    """Serve the cluster of `config`, the content of `path`, until SIGTERM or SIGINT. RpcError:
    `listen` is not free.
    """
    instances = config.instances_config(poll_load=True)
    # The gateways that call this front keep the leases of their landings.
    cluster_config = config.cluster_config(
        instances, config.encoding.encode_config(), keep_leases=False
    )
    tracer = open_tracer(config.traces, "prfaas-pd", config.name)
    cluster = EmbeddedPdCluster(config.name, config.instances, cluster_config, tracer=tracer)
    await serve_front(
        cluster,
        PdServer(cluster, config.listen, config.credentials(config.role)),
        config,
        path,
        metrics_prefix="prfaas_pd",
        tracer=tracer,
    )
