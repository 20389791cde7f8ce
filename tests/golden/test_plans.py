"""What commands print that plan, and those that ask a running region, from stored inputs."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
import yaml
from folding import folded
from golden import check
from prfaas_commands import ENVIRONMENT, ROOT, plain, refusals, said, shown
from stored_gateway import stored, stored_gateway

from kvmanager.agent.messages import SERVICE, Status, StatusReply
from transport.rpc import Method, RpcServer

FOLDER: Final = Path(__file__).parent / "plans"
PLANNED: Final = {
    "case-study": (
        "plan case-study",
        "plan case-study --json",
        "plan solve $EXAMPLES/case-study.yaml --requests 2000 --search",
        "plan solve $EXAMPLES/case-study.yaml --requests 2000 --json",
    ),
    "sites": ("plan solve $EXAMPLES/sites.yaml --requests 1000",),
    "images": ("plan solve $EXAMPLES/images.yaml --requests 2000",),
    "sweep": (
        "plan sweep $EXAMPLES/case-study.yaml --over link_gbps=1,5,25",
        "plan sweep $EXAMPLES/case-study.yaml --over hit_ratio=0:0.8:0.4 --over pd_instances=6,8",
        "plan sweep $EXAMPLES/case-study.yaml --over prefill_instances=2,4 --json",
        "plan sweep $EXAMPLES/case-study.yaml --over pd_instances=0",
        "plan sweep $EXAMPLES/case-study.yaml --over output_tokens=-1",
        "plan sweep $EXAMPLES/case-study.yaml --over output_tokens=nan",
    ),
    "kv": (
        "plan kv $ROOT/tests/docs/config.json",
        "plan kv $ROOT/tests/docs/config.json --prefill-s 0.44,0.72,1.84,7.40 --gpus 32",
        "plan kv $HERE/windows.json --dtype fp8 --tp 4 --lengths 100,1Ki,1M",
        "plan kv $HERE/windows.json --lengths 100,1Ki --json",
        "plan kv $HERE/windows.json --lengths 1Gi",
        "plan kv $HERE/windows.json --lengths 1Ki --prefill-s 1,2",
        "plan kv $HERE/windows.json --lengths 1Ki --prefill-s 0",
        "plan kv $HERE/windows.json --gpus 8",
        "plan kv $HERE/windows.json --lengths 1K --prefill-s 1 --gpus 8 --gpus-per-instance 16",
        "plan kv $HERE/windows.json --lengths 32KB",
        "plan kv $HERE/windows.json --dtype int4",
        "plan kv $HERE/windows.json --mamba-cache-dtype fp8",
        "plan kv $HERE/windows.json --tp 0",
        "plan kv $HERE/none.json",
        "plan kv $HERE/cases.yaml --json",
    ),
}
ASKED: Final = {
    "clusters": ("clusters", "clusters --json", "gateways", "gateways --json"),
    "requests": ("requests", "requests --limit 1", "requests --json"),
    "explain": (
        "explain far-1",
        "explain local-1",
        "explain a-rather-long-id-of-a-client-1",
        "explain refused-1",
        "explain image-1",
        "explain a/b",
        "explain far-1 --timeline",
        "explain far-1 --timeline --json",
        "explain local-1 --timeline",
        "explain refused-1 --timeline",
        "explain a-rather-long-id-of-a-client-1 --timeline",
        "explain a/b --timeline",
        "explain local-1 --json",
        "explain nobody",
        "explain nobody --gateway $GATEWAY/new",
    ),
    "words": (
        "explain reasons",
        "explain spills",
        "explain outcomes",
        "explain hand_offs",
        "explain placements",
    ),
    "cache": (
        "cache ls",
        "cache ls --json",
        "cache top",
        "cache top --limit 1 --order recent",
        "cache explain $TMP/prompt.txt",
        "cache explain --chat --model tiny $TMP/prompt.txt",
        "cache explain $TMP/prompt.txt --json",
        "cache explain $TMP/none.txt",
        "cache explain $TMP/empty.txt",
        "cache explain $TMP/object.json",
        "cache explain $TMP/list.json",
        "cache explain --model other $TMP/request.json",
        "cache explain $TMP/bytes",
    ),
    "links": (
        "link top",
        "link top --once --paths",
        "link top --once --json",
        "link top --gateway $GATEWAY/new",
    ),
    "roles": (
        "role ls",
        "role ls --json",
        "role set d1 prefill --no-wait --json",
        "role set d1 prefill --epoch 0",
        "role set w1 prefill --cluster west",
        "role set n0 prefill --cluster north",
        "role set p1 prefill --cluster east",
        "role set s1 prefill --cluster south",
        "role set d1 both",
    ),
    "instances": (
        "instance list",
        "instance add p9 --cluster east --url http://e:1 --agent a:1 --max-concurrent 2",
        "instance add p9 --cluster east --url http://e:1 --agent a:1 --no-wait --json",
        "instance add p9 --cluster east --url http://e:1 --agent a:1",
        "instance remove d9 --cluster home --limit 30s --force",
        "instance remove a/b --no-wait",
        "instance remove d8 --cluster home --json",
        "instance remove d0",
        "instance list --json",
    ),
    "plan-live": (
        "plan live",
        "plan live --decisions 1",
        "plan live --json",
        "plan live --gateway $GATEWAY/two",
        "plan live --gateway $GATEWAY/off",
    ),
    "trouble": (
        "clusters --api-key wrong",
        "plan live --api-key wrong --json",
        "gateways --gateway $GATEWAY/elsewhere",
        "cache ls --gateway $GATEWAY/nowhere",
        "clusters --gateway http://127.0.0.1:1",
        "link top --gateway http://127.0.0.1:1",
        "clusters --gateway 10.0.0.5:8000",
        "clusters --run-dir $TMP",
        "status --run-dir $TMP",
        "down --run-dir $TMP",
        "health $GATEWAY/livez",
        "health $GATEWAY/readyz",
        "health 9100",
        "health http://127.0.0.1:1/livez",
    ),
}
NOT_OF_A_GATEWAY: Final = ("status", "down", "health")
_REQUEST: Final = re.compile(r"^(?=request  )", re.MULTILINE)
_MOMENT: Final = re.compile(r'(?<="started_s": )1\d{9}\.\d+')
_DATE: Final = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:Z|\+00:00)")


def in_words(command: str, paths: dict[str, str]) -> list[str]:
    """The words of a command, with paths in place of their names."""
    words = command.split()
    for name, path in paths.items():
        words = [word.replace(name, path) for word in words]
    return words


@pytest.mark.parametrize("name", PLANNED)
def test_plans(name: str) -> None:
    paths = {"$EXAMPLES": str(ROOT / "deploy" / "plan" / "examples"), "$HERE": str(FOLDER)}
    paths["$ROOT"] = str(ROOT)
    texts = [said(in_words(command, paths)) for command in PLANNED[name]]
    check(FOLDER / f"{name}.txt", folded(dict(parts(texts))))


def test_every_mistake_in_a_plan_is_told_with_its_place_and_a_cure(tmp_path: Path) -> None:
    check(FOLDER / "messages.txt", refusals(FOLDER / "cases.yaml", tmp_path))


async def answered(commands: Iterable[str], folder: Path) -> str:
    """What commands print that ask a gateway with the stored answers, and what they order."""
    texts: list[str] = []
    orders: list[str] = []
    answers = stored(FOLDER / "answers.yaml")
    async with stored_gateway(answers, orders) as url:
        paths = {"$GATEWAY": url, "$TMP": str(folder)}
        names = {path: name for name, path in paths.items()}
        for command in commands:
            words = in_words(command, paths)
            if not {"--gateway", "--run-dir"} & {*words} and words[0] not in NOT_OF_A_GATEWAY:
                words += ["--gateway", url]
            orders.clear()
            text = await asyncio.to_thread(said, words, names)
            texts.append("".join([text, *orders]))
    # What a gateway answers is shown in `answers.yaml`.
    shown = {f"answer {name}": json.dumps(answer, indent=1) for name, answer in answers.items()}
    return _MOMENT.sub("<time>", folded(dict(parts(texts)), shown))


def parts(texts: Iterable[str]) -> Iterator[tuple[str, str]]:
    """What each command prints, by its command line, and each of several requests apart."""
    seen: Counter[str] = Counter()
    for text in texts:
        command, _, output = text.removeprefix("$ prfaas ").partition("\n")
        for part in filter(None, _REQUEST.split(output)):
            seen[command] += 1
            yield command if seen[command] == 1 else f"{command} ({seen[command]})", part


@pytest.mark.parametrize("name", ASKED)
async def test_commands_that_ask_a_gateway(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prompt.txt").write_text("Once upon a time")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "object.json").write_text('{"text": "x"}')
    (tmp_path / "list.json").write_text("[1, 2]")
    (tmp_path / "request.json").write_text('{"model": "tiny", "messages": [], "tools": [1]}')
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    monkeypatch.setattr(time, "sleep", lambda _: None)  # commands look again every second
    check(FOLDER / f"{name}.txt", await answered(ASKED[name], tmp_path))


async def test_a_profile_of_what_was_served(tmp_path: Path) -> None:
    out = tmp_path / "profile.yaml"
    commands = (
        "plan profile-live --out $TMP/profile.yaml",
        "plan profile-live --out $TMP/profile.yaml",
        "plan profile-live --out $TMP/profile.yaml --force --json",
        "plan profile-live --out $TMP/other.yaml --model small",
        "plan profile-live --out $TMP/other.yaml --instance p0 --config $TMP/none.json --json",
    )
    text = await answered(commands, tmp_path)
    assert os.listdir(tmp_path) == [out.name]
    file = plain(out.read_text(encoding="utf-8"))
    text = re.sub(r"http://127\.0\.0\.1:\d+", "$GATEWAY", f"{text}\n{file}")
    check(FOLDER / "profile-live.txt", _DATE.sub("<time>", text))


@asynccontextmanager
async def running(folder: Path, told: dict[str, Any]) -> AsyncIterator[dict[str, str]]:
    """Agents and an emulated link that answer as they did, and the files of their run in `folder`.
    Gives the names of paths and addresses.
    """
    reply = msgspec.convert(told["agent"], StatusReply)

    async def status(_: Status) -> StatusReply:
        return reply

    async def link(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(json.dumps(told["link"]).encode() + b"\n")
        await writer.drain()
        writer.close()

    agent = RpcServer("127.0.0.1:0", {SERVICE: {"Status": Method(Status, StatusReply, status)}})
    port = await agent.start()
    relay = await asyncio.start_unix_server(link, folder / "link.sock")
    try:
        async with stored_gateway(stored(FOLDER / "answers.yaml")) as url:
            paths = {"$GATEWAY": url, "$AGENT": f"127.0.0.1:{port}", "$RUN": str(folder)}
            for file in ("region.json", "state.json"):
                text = json.dumps(told[file])
                for name, path in paths.items():
                    text = text.replace(name, path)
                (folder / file).write_text(text)
            yield paths
    finally:
        relay.close()
        await agent.stop(grace_s=0)


async def status(folder: Path, *words: str) -> str:
    """What `prfaas status` prints of a run, as a process of its own: this one answers it."""
    given = {name: text for name, text in os.environ.items() if name not in ENVIRONMENT}
    given |= {name: text for name, text in ENVIRONMENT.items() if text is not None}
    words = ("status", "--run-dir", str(folder), *words)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "deploy.cli", *words),
        cwd=ROOT,
        env=given,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    return shown(words, process.returncode or 0, output.decode())


async def test_the_status_of_a_run(tmp_path: Path) -> None:
    told = yaml.safe_load((FOLDER / "status.yaml").read_text(encoding="utf-8"))
    demo = str(ROOT / "deploy" / "region" / "examples" / "demo.yaml")
    async with running(tmp_path, told) as paths:
        names = {path: name for name, path in paths.items()}
        with (tmp_path / "prfaas.lock").open("w") as lock:
            # Who holds the lock is the launcher.
            fcntl.flock(lock, fcntl.LOCK_EX)
            texts = [await status(tmp_path), await status(tmp_path, "--json")]
            words = ["region", "render", demo, "--set", "MODEL=/m", "--run-dir", str(tmp_path)]
            words += ["--prometheus", str(tmp_path / "watch")]
            texts.append(await asyncio.to_thread(said, words, names))
            texts.append((tmp_path / "watch" / "prometheus.yml").read_text(encoding="utf-8"))
        texts.append(await status(tmp_path))
    check(FOLDER / "status.txt", plain("\n".join(texts), names))
