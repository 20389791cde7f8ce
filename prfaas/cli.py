"""`prfaas prefill`: a prefill cluster front as a process of its own.

It only makes the parts that the file describes; `front_process` runs them.
"""

from pathlib import Path
from typing import Annotated

import typer

from kvmanager.config_files.traces import open_tracer
from kvmanager.logs import FormatOption, LevelOption
from prfaas.embedded import EmbeddedPrefillCluster, PrefillClusterConfig
from prfaas.engines.front_process import run_front, serve_front
from prfaas.front_config import PrefillFrontConfig
from prfaas.server import PrefillServer


def prefill_command(
    config: Annotated[Path, typer.Option(help="YAML file that describes the cluster.")],
    listen: Annotated[
        str | None, typer.Option(help="host:port for gRPC; overrides the file.")
    ] = None,
    log_level: LevelOption = "info",
    log_format: FormatOption = "text",
) -> None:
    """Run the front of a prefill cluster: its queue, its instances, its engines if told to."""
    run_front(
        config, PrefillFrontConfig, serve_prefill, listen=listen, logs=(log_level, log_format)
    )


async def serve_prefill(config: PrefillFrontConfig, path: Path) -> None:
    """Serve the cluster of `config`, the content of `path`, until SIGTERM or SIGINT. RpcError:
    `listen` is not free.
    """
    tracer = open_tracer(config.traces, "prfaas-prefill", config.name)
    cluster = EmbeddedPrefillCluster(
        config.name,
        config.instances,
        PrefillClusterConfig(
            queue=config.queue_config(config.queue.order()),
            instances=config.instances_config(),
            encode=config.encoding.encode_config(),
        ),
        tracer=tracer,
    )
    await serve_front(
        cluster,
        PrefillServer(cluster, config.listen, config.credentials(config.role)),
        config,
        path,
        metrics_prefix="prfaas_prefill",
        tracer=tracer,
    )
