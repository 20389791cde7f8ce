"""What stays in a region that follows its file keeps its ports."""

from __future__ import annotations

import pytest

from deploy.region.launch.members import resolve_again, with_members
from deploy.region.launch.parts import part_of
from deploy.region.launch.ports import resolve_part, resolve_ports
from deploy.region.spec.loading import parse_region
from kvmanager.config_files.problems import FileError

SEVERAL_GATEWAYS = """
gateway: {nodes: [b1, b2], shared: {redis: "redis://127.0.0.1:1"}}
models: [{name: m, path: org/m}]
clusters:
  - name: home
    kind: pd
    nodes:
      - {name: b1, instances: [{name: d}]}
      - {name: b2, instances: [{name: e}]}
"""
NIXL = """
models: [{name: m, path: org/m}]
clusters:
  - name: home
    kind: pd
    hand_off: nixl
    nodes:
      - {name: b1, host: 10.1.0.1, instances: [{name: d, port: 7400}]}
      - {name: b2, host: 10.1.0.2, instances: [{name: e}]}
security: {trusted_network: true}
"""


def test_several_gateways_of_one_machine_keep_their_ports() -> None:
    before = parse_region(SEVERAL_GATEWAYS, {})
    wanted = parse_region(SEVERAL_GATEWAYS.replace("{name: d}", "{name: d}, {name: f}"), {})
    running = resolve_ports(before, is_free=lambda _host, _port: True)
    after = with_members(before, wanted)
    again = resolve_again(after, running, running.part, is_free=lambda _host, _port: True)
    assert [item.name for item in again.region.pd_clusters[0].instances] == ["d", "f", "e"]
    assert again.region.gateway.ports == running.region.gateway.ports


def test_a_host_refuses_a_file_that_moves_the_nixl_port_of_an_engine() -> None:
    before = parse_region(NIXL, {})
    part = part_of(before, node="b1")
    running = resolve_part(before, part)
    old, new = "{name: d, port: 7400}", "{name: n, port: 7401}"
    first = parse_region(NIXL.replace(old, f"{new}, {old}"), {})
    with pytest.raises(FileError, match="its ports would change"):
        resolve_again(with_members(before, first), running, part)
    last = parse_region(NIXL.replace(old, f"{old}, {new}"), {})
    again = resolve_again(with_members(before, last), running, part).region
    assert [item.nixl_port for item in again.clusters[0].instances] == [7600, 7601, 7600]
