"""Follows the gateway's own file: limits and rights of tenants change without a restart.

What else changed there is named in a warning and waits for a restart. A file that cannot be used
changes nothing, and a warning says so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

from deploy.gateway.config import GatewayConfig
from deploy.gateway.file import GatewayFile, load_gateway_file
from deploy.gateway.reload import changed_settings, with_live
from kvmanager.config_files.followed_files import follow
from kvmanager.config_files.problems import FileError
from transport.errors import LocalError

logger = logging.getLogger("prfaas.deploy.gateway")


async def follow_own_file(
    path: Path, running: GatewayFile, use: Callable[[GatewayConfig], None]
) -> None:
    """Call `use` with each gateway section that the file has and that changes anything live, until
    cancelled. `running` is what the gateway read there at its start.
    """

    def load() -> tuple[GatewayFile, GatewayFile, list[str]]:
        """The file, what becomes of the one that runs, and what is weak about it."""
        try:
            read = load_gateway_file(path)
            gateway = with_live(running.gateway, read.gateway)
            weak = list(weaknesses(read))
        except (FileError, ValueError, OSError) as error:
            message = f"the gateway's settings stay as they were: {error}"
            raise LocalError("gateway_file", message) from error
        return read, running.model_copy(update={"gateway": gateway}), weak

    def apply(loaded: tuple[GatewayFile, GatewayFile, list[str]]) -> None:
        nonlocal running
        read, after, weak = loaded
        made = changed_settings(running, after)
        if made:
            running = after
            use(after.gateway)
            logger.info("changed without a restart: %s", ", ".join(made))
            for weakness in weak:
                logger.warning("%s", weakness)
        if waiting := _needs_restart(after, read):
            logger.warning("changed, but needs a restart of the gateway: %s", ", ".join(waiting))

    # A tenant may get its limits before its key, which makes the file right without a change of it.
    keys = () if running.api_keys_file is None else (running.api_keys_file,)
    await follow((path, *keys), load, apply)


def weaknesses(file: GatewayFile) -> Iterator[str]:
    """Yield, for the log, what tenants and other users of the host may do. Looks at files."""
    config, path = file.gateway, file.api_keys_file
    if not config.operators and len({key.tenant for key in config.api_keys}) > 1:
        yield "no API key opens the pages of operators: name tenants in gateway.operators"
    if path is not None and path.stat().st_mode & 0o027:
        yield f"others may read {path}: chmod 600 it"


def _needs_restart(running: GatewayFile, read: GatewayFile) -> list[str]:
    changed = changed_settings(running, read)
    # Keys in a file of their own are followed there.
    is_followed = read.api_keys_file is not None and read.api_keys_file == running.api_keys_file
    return [path for path in changed if not (is_followed and path == "gateway.api_keys")]
