"""`prfaas cache` without a gateway: prompt files, errors."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from deploy.cli import app
from deploy.gateway.cache.api import CacheOverview, NodeCacheStatus
from deploy.ops.cache import WrongPrompt, print_nodes, request_body
from deploy.region.client import CannotAsk, ask
from kvmanager.agent.messages import EmbeddingStatus

run = CliRunner().invoke


def body_of(path: Path, text: str, **options: Any) -> dict[str, Any]:
    path.write_text(text)
    values: dict[str, Any] = {"model": "", "is_chat": False}
    decoded: dict[str, Any] = json.loads(request_body(path, **(values | options)))
    return decoded


def test_nodes_with_embeddings_have_a_line_for_them() -> None:
    def shown(*nodes: NodeCacheStatus) -> list[str]:
        console = Console(file=io.StringIO(), width=80)
        print_nodes(console, CacheOverview(list(nodes)))
        assert isinstance(console.file, io.StringIO)
        return [" ".join(line.split()) for line in console.file.getvalue().splitlines()]

    plain = NodeCacheStatus(cluster="home", node="d0", agent="d0:1", embeddings=EmbeddingStatus())
    assert not any("embeddings" in line for line in shown(plain))
    kept = EmbeddingStatus(12, held_bytes=3 << 20, cap_bytes=8 << 20, num_queries=40, num_hits=30)
    having = NodeCacheStatus(
        cluster="far", node="e0", agent="e0:1", embeddings=kept, embedding_hit_share=0.75
    )
    lines = shown(plain, having)
    assert "far e0 12 3.0 MiB 8.0 MiB 40 75%" in lines
    assert sum(line.startswith("home d0") for line in lines) == 1


def test_a_text_is_a_prompt_or_a_message(tmp_path: Path) -> None:
    path = tmp_path / "prompt"
    assert body_of(path, "Once\n") == {"prompt": "Once\n"}
    assert body_of(path, '{"a": 1', model="m") == {"prompt": '{"a": 1', "model": "m"}
    assert body_of(path, "[1, 2]") == {"prompt": "[1, 2]"}
    message = {"role": "user", "content": "Once"}
    assert body_of(path, "Once", is_chat=True) == {"messages": [message]}


def test_a_request_body_stays_what_it_is(tmp_path: Path) -> None:
    path = tmp_path / "request.json"
    request = {"model": "a", "messages": [], "tools": [1]}
    assert body_of(path, json.dumps(request)) == request
    assert body_of(path, json.dumps(request), model="b")["model"] == "b"
    with pytest.raises(WrongPrompt, match="without prompt and messages"):
        body_of(path, '{"text": "x"}')


def test_what_is_no_prompt_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "prompt"
    with pytest.raises(WrongPrompt, match="is empty"):
        body_of(path, "")
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(WrongPrompt, match="is no text"):
        request_body(path, model="", is_chat=False)
    result = run(app, ["cache", "explain", str(tmp_path / "none"), "--gateway", "http://x"])
    assert result.exit_code == 2
    assert "none" in result.output


def test_a_gateway_that_is_not_there_is_named() -> None:
    for url in ("http://127.0.0.1:1", "no url"):
        with pytest.raises(CannotAsk, match=url):
            ask(url, "/prfaas/cache", CacheOverview)
    for command in ("ls", "top"):
        result = run(app, ["cache", command, "--gateway", "http://127.0.0.1:1"])
        assert result.exit_code == 3
        assert "127.0.0.1:1" in result.output
