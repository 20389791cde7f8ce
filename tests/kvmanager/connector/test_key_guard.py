"""Without its key an engine answers nothing, on any path."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kvmanager.private_files import NotPrivate
from kvmanager.vllm_connector.key_guard import KEY_FILE_VARIABLE, KeyGuard

KEY = "ab" * 32


class App:
    """An ASGI application that notes what reaches it."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    async def __call__(self, scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        self.seen.append(scope["type"])


@pytest.fixture
def key_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "engine.key"
    path.touch(0o600)
    path.write_text(f"{KEY}\n")
    monkeypatch.setenv(KEY_FILE_VARIABLE, str(path))
    return path


async def asked(guard: KeyGuard, kind: str = "http", *headers: tuple[bytes, bytes]) -> list[Any]:
    """The status that the guard sends for a request with these headers."""
    sent: list[Any] = []

    async def send(message: Mapping[str, Any]) -> None:
        sent.append(message)

    async def receive() -> None:
        raise AssertionError("nothing is read of a request that is refused")

    await guard({"type": kind, "headers": list(headers)}, receive, send)
    return sent


@pytest.mark.parametrize(
    "header", [b"", b"Bearer", b"Bearer ", b"Basic " + KEY.encode(), b"Bearer \xff", b"Bearer x"]
)
@pytest.mark.usefixtures("key_file")
async def test_without_the_key_nothing_reaches_the_engine(header: bytes) -> None:
    app = App()
    headers = [(b"authorization", header)] if header else []
    start, body = await asked(KeyGuard(app), "http", *headers)
    assert start["status"] == 401
    assert KEY.encode() not in body["body"]
    (close,) = await asked(KeyGuard(app), "websocket", *headers)
    assert close["type"] == "websocket.close"
    assert app.seen == []


@pytest.mark.usefixtures("key_file")
async def test_with_the_key_everything_does() -> None:
    app = App()
    header = (b"Authorization", f"bearer {KEY}".encode())
    for kind in ("http", "websocket"):
        assert await asked(KeyGuard(app), kind, (b"x", b"y"), header) == []
    assert await asked(KeyGuard(app), "lifespan") == []
    assert app.seen == ["http", "websocket", "lifespan"]


@pytest.mark.usefixtures("key_file")
async def test_only_the_first_of_two_keys_counts() -> None:
    wrong, right = (b"authorization", b"Bearer x"), (b"authorization", b"Bearer " + KEY.encode())
    start, _ = await asked(KeyGuard(App()), "http", wrong, right)
    assert start["status"] == 401


def test_an_engine_without_a_usable_key_does_not_start(
    key_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key_file.chmod(0o644)
    with pytest.raises(NotPrivate):
        KeyGuard(App())
    key_file.chmod(0o600)
    key_file.write_text("")
    with pytest.raises(ValueError, match="0 words"):
        KeyGuard(App())
    monkeypatch.delenv(KEY_FILE_VARIABLE)
    with pytest.raises(KeyError):
        KeyGuard(App())
