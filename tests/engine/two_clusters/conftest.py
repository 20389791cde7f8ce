"""The regions of these tests are started once for all files of this folder."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from served_region import Served, two_clusters


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def served(
    request: pytest.FixtureRequest, models_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Served]:
    async with two_clusters(request.param, models_dir, tmp_path_factory.mktemp("r")) as found:
        yield found
