"""Follows the file of API keys, so that keys are given and taken away without a restart.

Does not know requests.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from deploy.gateway.api_keys import ApiKey, load_api_keys, tenants_by_key
from kvmanager.config_files.followed_files import follow
from transport.errors import LocalError


async def follow_keys(path: Path, replace: Callable[[tuple[ApiKey, ...]], None]) -> None:
    """Call `replace` with what the file has, now and about a second after each change, until
    cancelled.
    """

    def load() -> tuple[ApiKey, ...]:
        # Names that settings mention may lose their last key: that must not keep it valid.
        try:
            keys = load_api_keys(path)
            tenants_by_key(keys)
        except (OSError, ValueError) as error:
            raise LocalError("api_keys", f"the API keys stay as they were: {error}") from error
        return keys

    await follow((path,), load, replace)
