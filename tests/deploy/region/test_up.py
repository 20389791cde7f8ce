"""How `prfaas up` follows the file of its region."""

import asyncio
from pathlib import Path

import pytest
from eventually import eventually

from deploy.region.launch.parts import Part, UnknownPart
from deploy.region.launch.up import _follow
from deploy.region.spec.region import RegionSpec


class Running:
    """A running part. Fronts forget its instances when `forgotten` is set."""

    def __init__(self, part: Part) -> None:
        self.part = part
        self.forgotten = asyncio.Event()
        self.is_leaving = False

    async def part_left(self) -> None:
        self.is_leaving = True
        await self.forgotten.wait()


@pytest.mark.parametrize(
    ("part", "may_leave"),
    [
        (Part("a2", ("a2",)), True),
        (Part("a1", ("a1",), fronts=("prefill-a",)), False),
        (Part("b1", ("b1",), gateways=("b1",)), False),
        (Part("", ("a1", "b1")), False),
    ],
)
async def test_a_part_without_a_node_in_the_file_stops_once_it_has_no_work(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, part: Part, may_leave: bool
) -> None:
    file = tmp_path / "region.yaml"
    file.write_text("")
    running, again, stop = Running(part), asyncio.Event(), asyncio.Event()

    def load() -> tuple[RegionSpec, Part]:
        raise UnknownPart(f"--node: no node is called {part.name!r}")

    following = asyncio.create_task(_follow(file, load, running, again, stop))
    try:
        await eventually(lambda: running.is_leaving or "stays as it is" in caplog.text)
        assert running.is_leaving == may_leave
        assert not stop.is_set()
        running.forgotten.set()
        if may_leave:
            async with asyncio.timeout(30):
                await stop.wait()
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
