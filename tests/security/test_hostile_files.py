"""Files of others (a region, a config.json) end in a message, not in a hang or a traceback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from deploy.cli import app

REGION = """
models: [{name: m, path: org/m}]
clusters: [{name: pd, kind: pd, nodes: [{name: n, instances: [{name: i}]}]}]
gateway:
"""
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "head_dim": 64,
    "torch_dtype": "bfloat16",
}


def doubling(item: str) -> str:
    """Nine lines, each of which names the one before ten times."""
    lines = [f"  - &x{n} {item.format(','.join([f'*x{n - 1}'] * 10))}" for n in range(1, 10)]
    return "\n".join(["extra:", "  - &x0 {k: 1}", *lines])


def refused(path: Path, text: str, *command: str) -> str:
    path.write_text(text)
    result = CliRunner().invoke(app, [*command, str(path)])
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == 2
    return result.output


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (doubling("[{}]"), "more than 200000 values"),
        (doubling("{{<<: [{}]}}"), "more than 200000 keys are merged"),
        ("extra: &x [*x]", "an alias within what it names"),
        ("extra: " + "[" * 3000 + "]" * 3000, "too many levels"),
        ("extra: !!python/name:os.system x", "could not determine a constructor"),
        ("name: " + "9" * 5000, "not valid YAML"),
    ],
)
def test_yaml_that_means_to_harm(tmp_path: Path, text: str, message: str) -> None:
    assert message in refused(tmp_path / "r.yaml", f"{text}\n{REGION}", "region", "check")


def test_a_key_that_stands_twice_is_named_without_its_values(tmp_path: Path) -> None:
    text = REGION + "  shared: {region: r, redis: first}\ngateway: {shared: second}\n"
    output = refused(tmp_path / "r.yaml", text, "region", "check")
    assert "(line 6): not valid YAML: the key 'gateway' stands twice" in output
    assert "first" not in output
    assert "second" not in output


def test_off_is_a_word(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(REGION + "  scheduling: {admission: {policy: off}, long_term: {mode: off}}\n")
    result = CliRunner().invoke(app, ["region", "check", str(path)])
    assert result.exit_code == 0, result.output
    output = refused(path, path.read_text() + "  port: 1:30\n", "region", "check")
    assert "gateway.port (line 6): '1:30'" in output


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000: more than 10000"),
        ({"head_dim": 10**400}, "head_dim is 1000"),
        ({"extra": "DEEP"}, "not JSON"),
    ],
)
def test_a_model_of_absurd_numbers(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    text = json.dumps(CONFIG | changes).replace('"DEEP"', "[" * 100_000 + "]" * 100_000)
    assert message in refused(tmp_path / "config.json", text, "plan", "kv")
