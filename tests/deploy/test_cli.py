"""The command line: help without heavy imports, errors with exit status 2."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deploy.cli import app

run = CliRunner().invoke


def test_help_names_every_command() -> None:
    result = run(app, ["--help"])
    assert result.exit_code == 0
    for name in ("up", "status", "down", "region", "gateway", "prefill", "pd", "agent", "emulate"):
        assert f"\n  {name} " in result.output


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from deploy.cli import app\n"
        "CliRunner().invoke(app, ['--help'])\n"
        "heavy = {'aiohttp', 'grpc', 'numpy', 'pydantic', 'msgspec', 'torch', 'vllm'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    "words",
    [
        ["up"],
        ["status"],
        ["down"],
        ["cache", "ls"],
        ["cache", "top"],
        ["cache", "explain"],
        ["directory"],
        ["doctor", "link"],
        ["link", "top"],
        ["clusters"],
        ["requests"],
        ["gateways"],
        ["role", "ls"],
        ["role", "set"],
        ["instance", "list"],
        ["instance", "add"],
        ["instance", "remove"],
        ["region"],
        ["region", "check"],
        ["region", "schema"],
        ["gateway"],
        ["prefill"],
        ["pd"],
        ["agent"],
        ["emulate", "link"],
        ["emulate", "fault"],
        ["version"],
    ],
)
def test_every_command_has_help(words: list[str]) -> None:
    result = run(app, [*words, "--help"])
    assert result.exit_code == 0, result.output
    assert f"Usage: root {' '.join(words)}" in result.output


def test_unknown_commands_are_refused() -> None:
    result = run(app, ["dwn"])
    assert result.exit_code == 2
    assert "No such command 'dwn'. Did you mean 'down'?" in result.output
    assert "Did you mean 'top'?" in run(app, ["cache", "tpo"]).output


def test_the_version_is_an_option_too() -> None:
    result = run(app, ["--version"])
    assert (result.exit_code, result.output) == (0, run(app, ["version"]).output)


@pytest.mark.parametrize(
    ("typed", "offered"),
    [("ca", ["cache"]), ("cache t", ["top"]), ("role set --ep", ["--epoch"])],
)
def test_the_shell_completes_commands_that_are_not_imported_yet(
    typed: str, offered: list[str]
) -> None:
    words = f"prfaas {typed}"
    asked = {"COMP_WORDS": words, "COMP_CWORD": f"{len(words.split()) - 1}"}
    result = run(app, [], prog_name="prfaas", env={"_PRFAAS_COMPLETE": "complete_bash", **asked})
    assert result.output.split() == offered


@pytest.mark.parametrize("process", ["gateway", "pd", "prefill"])
def test_instances_of_one_cluster_with_one_name_are_refused(tmp_path: Path, process: str) -> None:
    one = {"name": "d0", "url": "http://127.0.0.1:8100", "agent": "127.0.0.1:7101"}
    cluster = {"name": "home", "instances": [one, one | {"url": "http://127.0.0.1:8101"}]}
    models = [{"name": "tiny", "max_model_len": 100}]
    whole = {"gateway": {"models": models}, "pd": cluster} if process == "gateway" else cluster
    path = tmp_path / "process.yaml"
    path.write_text(json.dumps(whole | {"trusted_network": True}))
    result = run(app, [process, "--config", str(path)])
    assert result.exit_code == 2
    assert "unique in a cluster; several are called d0" in " ".join(result.output.split())


def test_the_schema_is_json() -> None:
    result = run(app, ["region", "schema"])
    assert json.loads(result.output)["title"] == "RegionSpec"


def test_faults_of_a_link_that_is_not_there(tmp_path: Path) -> None:
    result = run(app, ["emulate", "fault", str(tmp_path / "x.sock"), "cut", "--for", "3s"])
    assert result.exit_code == 1
    assert "no relay answers" in result.output
