"""Every file that a process of a region reads explains mistakes in the same way."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from deploy.cli import app

REGION = """
models: [{name: m, path: org/m}]
clusters:
  - name: home
    kind: pd
    nodes: [{name: n, instances: [{name: d}]}]
security: {trusted_network: true}
gateway:
"""
GATEWAY = """
pd: {name: home, front: "127.0.0.1:7301"}
gateway:
  models: [{name: m}]
"""
FRONT = """
name: home
instances: [{name: d, agent: "127.0.0.1:7101", url: "http://127.0.0.1:8100"}]
"""


def output_of(command: list[str], path: Path) -> str:
    """What a command says of a file that it refuses with exit status 2."""
    result = CliRunner().invoke(app, [*command, str(path)])
    assert result.exit_code == 2, result.output
    return result.output


@pytest.mark.parametrize(
    ("command", "text", "known", "quantity"),
    [
        (["region", "check"], REGION, "  threshold_tokens", "  threshold_tokens"),
        (["gateway", "--config"], GATEWAY, "  threshold_tokens", "  report_stale_s"),
        (["prefill", "--config"], FRONT, "max_queued", "max_wait_s"),
        (["pd", "--config"], FRONT, "affinity_slack", "lease_s"),
        (["agent", "--config"], "", "arena_gib", "arena_gib"),
        (["directory", "--config"], 'agents: {c/n: "h:1"}\n', "forget_s", "forget_s"),
    ],
)
def test_mistakes_have_a_line_a_path_and_a_fix(
    tmp_path: Path, command: list[str], text: str, known: str, quantity: str
) -> None:
    path = tmp_path / "file.yaml"
    line = len(text.splitlines()) + 1
    path.write_text(f"{text}{known}x: 1\n")
    said = output_of(command, path)
    name = known.strip()
    assert f"{name}x (line {line}): unknown key; did you mean '{name}'?" in said
    path.write_text(f"{text}{quantity}: 3 parsec\n")
    said = output_of(command, path)
    assert f"{quantity.strip()} (line {line}): '3 parsec' is not a" in said
    path.write_text(f"{text}{quantity}: 3 parsec\n{known}x: 1\n")
    assert "2 problems" in output_of(command, path)
    path.write_text(text + "[")
    assert "not valid YAML" in output_of(command, path)
    path.write_text("- 1\n")
    assert "is a mapping" in output_of(command, path)


@pytest.mark.parametrize(
    ("command", "other"), [("prefill", "affinity_slack: 1"), ("pd", "max_queued: 1")]
)
def test_a_front_refuses_what_only_the_other_kind_knows(
    tmp_path: Path, command: str, other: str
) -> None:
    path = tmp_path / "front.yaml"
    path.write_text(f"{FRONT}{other}\n")
    assert "unknown key" in output_of([command, "--config"], path)


def test_options_are_told_from_lines_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "front.yaml"
    path.write_text(FRONT + "listen: 127.0.0.1:0\n")
    said = output_of(["pd", "--listen", "7200", "--config"], path)
    assert "listen: '7200' is not host:port" in said


def test_no_error_shows_a_secret(tmp_path: Path) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text(GATEWAY + "  api_keys: [a b hunter2, {kee: hunter2}, {key: [hunter2]}]\n")
    said = output_of(["gateway", "--config"], path)
    assert "gateway.api_keys[0] (line 5): 3 words" in said
    assert "hunter2" not in said
    path.write_text('agents: {c/n: "h:1"}\nredis: 1234567\n')
    assert "1234567" not in output_of(["directory", "--config"], path)
