"""Which instances fronts still know, asked of the gateway of one's own host."""

from __future__ import annotations

from answering_gateway import answering

from deploy.gateway.members.pages import InstanceNow, InstancesOverview
from deploy.region.launch.parts import part_of
from deploy.region.launch.probes import members_view
from deploy.region.spec.loading import parse_region

FILE = """
gateway:
  nodes: [b1, b2]
  ports: {{b1: 1, b2: {port}}}
  shared: {{redis: "redis://127.0.0.1:1"}}
models: [{{name: m, path: org/m}}]
clusters:
  - name: home
    kind: pd
    front_port: 2
    nodes:
      - {{name: b1, instances: [{{name: d}}]}}
      - {{name: b2, instances: [{{name: e}}]}}
security: {{trusted_network: true}}
"""


async def test_a_part_asks_its_own_gateway() -> None:
    staying = InstanceNow(cluster="home", instance="d", phase="serving", role="both")
    pages = {"/prfaas/instances": InstancesOverview([staying])}
    async with answering("127.0.0.1", pages) as port:
        region = parse_region(FILE.format(port=port), {})
        part = part_of(region, node="b2")
        async with members_view(region, part, lambda: "", None) as known:
            assert await known() == {"d"}
