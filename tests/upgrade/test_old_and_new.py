"""The release before this one and this one work together, while hosts change one after another."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.upgrade.mixed_region import NEW, MixedRegion, unpack_previous

pytestmark = [pytest.mark.upgrade, pytest.mark.slow, pytest.mark.timeout(3000)]

ORDER = (
    *("agent-b1", "agent-b2", "agent-a1"),
    *("front-prefill", "front-pd", "directory"),
    *("b1-engine", "b2-engine", "a1-engine"),
    *("gateway-1", "gateway-2"),
)
"""As docs/upgrade.md says. Both ways the receiving agents change first, so that each end of a link
meets an older one and a newer one.
"""
BACK = (*ORDER[:2:-1], *ORDER[:3])


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack_previous(tmp_path_factory.mktemp("previous") / "tree")


@pytest.fixture
def folder() -> Iterator[Path]:
    # The paths of unix sockets must be short.
    path = Path(tempfile.mkdtemp(prefix="up-"))
    yield path
    shutil.rmtree(path)


async def test_a_region_is_upgraded_and_taken_back_without_a_failed_request(
    old: Path, folder: Path
) -> None:
    region = MixedRegion(folder)
    async with region.runs(old):
        for name in ORDER:
            await region.replace(name, NEW)
        for name in BACK:
            await region.replace(name, old)
    assert not region.failures
    assert not region.tracebacks()
