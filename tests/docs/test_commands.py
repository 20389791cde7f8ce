"""Commands of the documentation: options exist, and a test runs each or its page says why not.

A block of commands is fenced as `bash`, or as `console` where its output stands with it.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands_of_pages import (
    NOT_RUN,
    ROOT,
    SHELLS,
    Block,
    blocks,
    command_of,
    inline_commands,
    pages,
)
from gateway_fixtures import region

__all__ = ["region"]

BLOCKS = [block for page in pages() for block in blocks(page)]
SHELL_BLOCKS = [block for block in BLOCKS if block.language in SHELLS]

RUN_BY = {
    "prfaas up": "tests/support/region_hosts.py",
    "prfaas status": "tests/support/region_hosts.py",
    "prfaas down": "tests/support/region_hosts.py",
    "prfaas doctor region": "tests/integration/test_doctor_region.py",
    "prfaas doctor link": "tests/integration/test_doctor.py",
    "prfaas explain": "tests/golden/test_plans.py",
    "prfaas link top": "tests/golden/test_plans.py",
    "prfaas cache ls": "tests/golden/test_plans.py",
    "prfaas cache top": "tests/golden/test_plans.py",
    "prfaas cache explain": "tests/golden/test_plans.py",
    "prfaas role ls": "tests/golden/test_plans.py",
    "prfaas role set": "tests/golden/test_plans.py",
    "prfaas instance list": "tests/golden/test_plans.py",
    "prfaas instance add": "tests/golden/test_plans.py",
    "prfaas instance remove": "tests/golden/test_plans.py",
    "prfaas region check": "tests/golden/test_region_check.py",
    "prfaas region reload": "tests/integration/test_parts.py",
    "prfaas region diff": "tests/deploy/region/test_diff.py",
    "prfaas region render": "tests/golden/test_region_render.py",
    "prfaas certs init": "tests/deploy/region/test_certs.py",
    "prfaas health": "tests/golden/test_plans.py",
    "prfaas plan kv": "tests/golden/test_plans.py",
    "prfaas plan profile": "tests/deploy/plan/test_cli.py",
    "prfaas plan profile-live": "tests/golden/test_plans.py",
    "prfaas plan live": "tests/golden/test_plans.py",
    "prfaas plan example": "tests/deploy/plan/test_cli.py",
    "prfaas plan case-study": "tests/golden/test_plans.py",
    "prfaas plan solve": "tests/golden/test_plans.py",
    "prfaas plan sweep": "tests/golden/test_plans.py",
    "prfaas simulate example": "tests/deploy/plan/test_simulate.py",
    "prfaas simulate run": "tests/deploy/plan/test_simulate.py",
    "prfaas simulate recording": "tests/deploy/gateway/test_recorder.py",
    "prfaas simulate study": "tests/deploy/plan/test_simulate.py",
    "prfaas rehearse": "tests/deploy/lab/rehearse/test_command.py",
    "make test": ".ci/run",
    "make lint": ".ci/run",
}
"""A test that runs the command, or what tests run it with."""

RUN_HERE = {
    "docs/quickstart.md": ("prfaas plan",),
    "docs/sizing.md": ("prfaas plan kv",),
    "docs/two-sites.md": ("prfaas region check", "prfaas certs init"),
    "docs/security.md": ("openssl genpkey",),
}
"""By page, beginnings of commands whose blocks run in order in a folder with a region's file."""

ENVIRONMENT = {"MODEL": "/models/chat", "HOST_A": "10.0.0.1", "HOST_B": "10.1.0.1"}
LOCAL = "http://127.0.0.1:8000"


def _is_run_here(block: Block) -> bool:
    beginnings = RUN_HERE.get(block.page, ())
    return any(" ".join(words).startswith(beginnings) for words in block.commands())


def _is_curl_of_the_api(block: Block) -> bool:
    return not block.mark and f"curl -i {LOCAL}/v1/" in block.text


@pytest.mark.parametrize("block", SHELL_BLOCKS, ids=lambda block: block.name)
def test_commands_are_run_or_marked(block: Block) -> None:
    assert block.commands(), "a block without a command is no `bash`"
    for words in block.commands():
        is_own = Path(words[0]).name == "prfaas"
        name = command_of(words, is_whole=True) if is_own else " ".join(words[:2])
        is_run = name in RUN_BY or _is_run_here(block) or _is_curl_of_the_api(block)
        assert is_run or block.mark, (
            f"{block.name}: no test runs `{' '.join(words)}`: name one in RUN_BY, or write"
            f" '{NOT_RUN}: REASON' behind the block"
        )


def test_a_mark_gives_a_reason() -> None:
    assert [b.name for b in BLOCKS if b.mark and len(b.mark) < len(NOT_RUN) + 12] == []


def test_blocks_of_commands_say_that_they_are() -> None:
    others = [block for block in BLOCKS if not block.language]
    first = [(block, block.text.lstrip().split(maxsplit=1)[0]) for block in others]
    assert [b.name for b, word in first if word in {"$", "prfaas", "curl", "make", "pip"}] == []


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_in_sentences_exist(page: Path) -> None:
    for words in inline_commands(page):
        command_of([*words, "X"] if words[-1].startswith("--") else words, is_whole=False)


def test_what_the_table_names_runs_the_command() -> None:
    for name, file in RUN_BY.items():
        text = (ROOT / file).read_text()
        # `simulate FILE` needs no word for its command.
        word = "simulate" if name.startswith("prfaas simulate") else name.split()[-1]
        written = (name, f'"{name.removeprefix("prfaas ")}', f'"{word}"', f"{word}_app")
        assert any(form in text for form in written), (name, file)


def test_a_renamed_option_is_found() -> None:
    with pytest.raises(Exception, match="--knode"):
        command_of(["prfaas", "up", "region.yaml", "--knode", "a1"], is_whole=True)
    with pytest.raises(Exception, match="upp"):
        command_of(["prfaas", "upp", "region.yaml"], is_whole=True)
    with pytest.raises(ValueError, match="file"):
        command_of(["prfaas", "up", "--node", "a1"], is_whole=True)


def _shell(script: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script in `folder`, where `prfaas` is this tree's."""
    programs = folder / "bin"
    programs.mkdir()
    (programs / "prfaas").write_text(f'#!/bin/sh\nexec {sys.executable} -m deploy.cli "$@"\n')
    (programs / "prfaas").chmod(0o755)
    path = os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PATH": path} | environment,
    )


@pytest.mark.skipif(shutil.which("openssl") is None, reason="`make system` installs openssl")
@pytest.mark.parametrize("page", RUN_HERE)
def test_blocks_that_run_here(page: str, tmp_path: Path) -> None:
    chosen = [b for b in SHELL_BLOCKS if b.page == page and not b.mark and _is_run_here(b)]
    assert chosen
    example = ROOT / "deploy" / "region" / "examples" / "two_hosts.yaml"
    (tmp_path / "region.yaml").write_text(example.read_text())
    config = ROOT / "tests" / "docs" / "config.json"
    (tmp_path / "config.json").write_text(config.read_text())
    done = _shell("\n".join(block.script() for block in chosen), tmp_path, **ENVIRONMENT)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(shutil.which("curl") is None, reason="`make system` installs curl")
async def test_curl_lines_get_an_answer(region: Any, tmp_path: Path) -> None:
    chosen = [block for block in SHELL_BLOCKS if _is_curl_of_the_api(block)]
    assert len(chosen) >= 2
    for number, block in enumerate(chosen):
        folder = tmp_path / str(number)
        folder.mkdir()
        script = block.script().replace(LOCAL, region.url).replace('"demo"', '"tiny"')
        done = await asyncio.to_thread(_shell, script, folder)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("HTTP/1.1 200"), (block.name, done.stdout)
