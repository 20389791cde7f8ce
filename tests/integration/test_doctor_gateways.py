"""`prfaas doctor region` asks every gateway of a region that has several."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
from answering_gateway import answering
from report_cases import cluster

from deploy.gateway.sharing.overview import Peer, SharingOverview
from deploy.region.doctor.findings import Check
from deploy.region.doctor.region import examine
from deploy.region.doctor.viewpoint import Viewpoint
from deploy.region.launch.parts import part_with
from deploy.region.launch.ports import resolve_part
from deploy.region.launch.rundir import RunDirectory
from deploy.region.spec.loading import parse_region

FILE = """
name: two
gateway:
  host: 0.0.0.0
  nodes: [b1, b2]
  ports: {{b1: {b1}, b2: {b2}}}
  shared: {{redis: "redis://127.0.0.1:1"}}
models: [{{name: m, path: org/m}}]
clusters:
  - name: home
    kind: pd
    nodes:
      - {{name: b1, host: {net}.1, instances: [{{name: d}}]}}
      - {{name: b2, host: {net}.2, instances: [{{name: e}}]}}
security: {{trusted_network: true}}
"""


def pages(version: str, sharing: SharingOverview) -> dict[str, object]:
    """The pages of a gateway that the doctor asks for."""
    report = cluster("home")
    return {
        "/version": {"version": version},
        "/prfaas/region": {"pds": {"home": report}, "prefill": {}},
        "/prfaas/gateways": sharing,
    }


async def test_each_gateway_is_asked(tmp_path: Path) -> None:
    # Other addresses for every run, so that nothing else listens there.
    net = f"127.{random.randint(1, 254)}.{random.randint(1, 254)}"
    joined = SharingOverview(
        name="b1",
        state="joined",
        for_s=9.0,
        leads=True,
        leader="b1",
        token=1,
        peers=[Peer(name="b2", requests=0)],
        pending=0,
    )
    alone = msgspec.structs.replace(joined, name="b2", state="alone", error="Redis: no answer")
    async with (
        answering(f"{net}.1", pages("1.0", joined)) as b1,
        answering(f"{net}.2", pages("2.0", alone)) as b2,
    ):
        region = parse_region(FILE.format(net=net, b1=b1, b2=b2), {})
        resolved = resolve_part(region, part_with(region, "all", ("b1", "b2"))).region
        view = Viewpoint(resolved, None, RunDirectory(tmp_path, tmp_path))
        checks = await examine(view)

    def told(level: str) -> list[Check]:
        return [one for one in checks if one.level == level and one.about.startswith("gateway")]

    (trouble,) = told("problem")
    assert (trouble.about, trouble.what.rpartition(": ")[2]) == ("gateway b2", "no answer")
    fine = {one.what for one in told("ok") if one.about == "gateway b1"}
    assert "it shares through Redis with b2" in fine
    versions = next(one for one in checks if one.about == "versions of prfaas")
    assert versions.what == "1.0: gateway b1; 2.0: gateway b2"
