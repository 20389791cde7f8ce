"""Each test sees the front in its own process and behind gRPC."""

from collections.abc import AsyncIterator

import pytest
from pd_front_rig import PdRig, make_rig


@pytest.fixture(params=["embedded", "remote"])
async def rig(request: pytest.FixtureRequest) -> AsyncIterator[PdRig]:
    async with make_rig(request.param) as made:
        yield made
