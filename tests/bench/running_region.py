"""A region that runs already, as benches find it behind `--gateway URL`."""

from __future__ import annotations

import aiohttp


async def served_model(url: str) -> str:
    """The first model that the gateway at `url` lists."""
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{url}/v1/models") as response:
            return str((await response.json())["data"][0]["id"])
