"""What `prfaas region check` says of hosts that people write, at each key that takes one."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from deploy.cli import app

REGION = """\
gateway: {{host: "{gateway}"}}
models: [{{name: demo, path: /models/x}}]
clusters:
  - name: far
    kind: prefill
    nodes: [{{name: p1, host: "{host}", listen: "{listen}", instances: [{{name: p1-e}}]}}]
  - name: home
    kind: pd
    nodes:
      - {{name: d1, host: 127.0.0.1, agent: {{advertise: "{advertise}"}}, instances: [{{name: e}}]}}
links: [{{from: far, to: home, endpoints: {{d1: "{endpoint}"}}}}]
"""
GOOD = {
    "gateway": "127.0.0.1",
    "host": "127.0.0.1",
    "listen": "127.0.0.1",
    "advertise": "127.0.0.1:7100",
    "endpoint": "127.0.0.1:7100",
}
ADDRESSES = ("advertise", "endpoint")
"""The keys that take host:port."""


def check(tmp_path: Path, **changes: str) -> tuple[int, str]:
    path = tmp_path / "region.yaml"
    path.write_text(REGION.format(**(GOOD | changes)), encoding="utf-8")
    result = CliRunner().invoke(app, ["region", "check", str(path)], terminal_width=1000)
    return result.exit_code, " ".join(result.output.split())


@pytest.mark.parametrize("key", GOOD)
@pytest.mark.parametrize(
    ("wrong", "fix"),
    [
        ("http://gpu1.example", "write gpu1.example"),
        ("gpu1.example/", "write gpu1.example"),
        ("gpu1.example.", "write gpu1.example"),
        ("bücher.example", "write xn--bcher-kva.example"),
        ("gpu 1", "names have letters"),
        ("10.0.0.300", "IPv4 has four numbers"),
        ("[fe80::1%eth0]", "needs a zone"),
    ],
)
def test_what_is_no_host_is_refused_with_the_right_spelling(
    tmp_path: Path, key: str, wrong: str, fix: str
) -> None:
    wrong = f"{wrong}:7100" if key in ADDRESSES else wrong.strip("[]")
    status, said = check(tmp_path, **{key: wrong})
    assert status == 2
    assert fix in said


@pytest.mark.parametrize("key", ["gateway", "host", "listen"])
@pytest.mark.parametrize(
    ("wrong", "fix"), [("[fd00::2]", "write fd00::2"), ("10.0.0.7:7100", "write 10.0.0.7")]
)
def test_a_host_has_no_brackets_and_no_port(tmp_path: Path, key: str, wrong: str, fix: str) -> None:
    status, said = check(tmp_path, **{key: wrong})
    assert status == 2
    assert fix in said


@pytest.mark.parametrize("wildcard", ["0.0.0.0", "::"])
def test_a_wildcard_is_for_listening(tmp_path: Path, wildcard: str) -> None:
    status, said = check(tmp_path, host=wildcard)
    assert status == 2
    assert f"{wildcard} at `listen`" in said
    for key in ADDRESSES:
        status, said = check(tmp_path, **{key: f"[{wildcard}]:7100"})
        assert status == 2
        assert f"nobody can connect to {wildcard}" in said


@pytest.mark.parametrize(
    "host", ["localhost", "GPU_Node-A.example", "10.0.0.7", "FD00:0::2", "xn--bcher-kva.example"]
)
def test_names_and_addresses_are_hosts(tmp_path: Path, host: str) -> None:
    at = f"[{host}]:7100" if ":" in host else f"{host}:7100"
    _, said = check(tmp_path, gateway=host, host=host, listen=host, advertise=at, endpoint=at)
    assert "is no name" not in said
    assert "nobody can connect" not in said
