"""Headless Chromium over its DevTools protocol, for tests of pages."""

import asyncio
import base64
import itertools
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = shutil.which("chromium")
_FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--remote-debugging-port=0", "--hide-scrollbars", "about:blank",
)  # fmt: skip


class Tab:
    """A tab. `requested` has the address of everything that it asked for, `logged` its errors."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.requested: list[str] = []
        self.logged: list[str] = []
        self.reader = asyncio.create_task(self._read())

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        waiting = self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        try:
            async with asyncio.timeout(15):
                answer = await waiting
        finally:
            # The reader finds it here until it is answered.
            del self._waiting[number]
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    async def open(self, url: str, *, width: int = 1280, height: int = 900) -> None:
        for domain in ("Page", "Runtime", "Network", "Log"):
            await self.call(f"{domain}.enable")
        await self.resize(width, height)
        await self.call("Page.navigate", url=url)

    async def resize(self, width: int, height: int = 900) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        await self.call("Emulation.setDeviceMetricsOverride", **metrics)

    async def colours(self, scheme: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited."""
        params = {"expression": expression, "returnByValue": True, "awaitPromise": True}
        answer = await self.call("Runtime.evaluate", **params)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def until(self, expression: str, timeout_s: float = 8.0) -> None:
        """Wait until the expression is true."""
        try:
            async with asyncio.timeout(timeout_s):
                # A page that still loads lacks elements.
                while not await self.ask(
                    f"(() => {{ try {{ return {expression}; }} catch {{}} }})()"
                ):
                    await asyncio.sleep(0.02)
        except TimeoutError:
            shown = await self.ask("document.body.innerText")
            raise AssertionError(f"not {expression}:\n{shown[:3000]}\n{self.logged}") from None

    async def press(self, key: str, text: str = "") -> None:
        codes = {"Tab": 9, "Enter": 13}
        params = {"key": key, "code": key, "windowsVirtualKeyCode": codes.get(key, 0)}
        await self.call("Input.dispatchKeyEvent", type="keyDown", **params, text=text)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **params)

    async def type(self, text: str) -> None:
        await self.call("Input.insertText", text=text)

    async def shoot(self, at: Path, *, whole: bool = False) -> None:
        """Keep a picture of what is in sight, or of the whole page."""
        width, height, page_height = await self.ask(
            "[innerWidth, innerHeight, document.documentElement.scrollHeight]"
        )
        if whole:
            # A browser does not draw what it need not show.
            await self.resize(width, page_height)
        await self.ask("new Promise(r => requestAnimationFrame(() => requestAnimationFrame(r)))")
        answer = await self.call("Page.captureScreenshot")
        await asyncio.to_thread(at.write_bytes, base64.b64decode(answer["data"]))
        if whole:
            await self.resize(width, height)

    async def _read(self) -> None:
        async for message in self._socket:
            said = json.loads(message.data)
            if "id" in said:
                waiting = self._waiting.get(said["id"])
                if waiting is not None and not waiting.done():
                    waiting.set_result(said)
            elif said["method"] == "Network.requestWillBeSent":
                self.requested.append(said["params"]["request"]["url"])
            elif said["method"] in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.logged.append(json.dumps(said["params"])[:600])


@asynccontextmanager
async def open_tab(directory: Path) -> AsyncIterator[Tab]:
    """A tab of a browser of its own, whose profile is in `directory`."""
    assert CHROMIUM is not None
    process = await asyncio.create_subprocess_exec(
        CHROMIUM,
        f"--user-data-dir={directory}",
        *_FLAGS,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        port_file = directory / "DevToolsActivePort"
        async with asyncio.timeout(15):
            while not port_file.exists() or not (words := port_file.read_text().split()):
                await asyncio.sleep(0.05)
        base = f"http://127.0.0.1:{words[0]}"
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{base}/json/list") as answer:
                (target,) = [item for item in await answer.json() if item["type"] == "page"]
            url = target["webSocketDebuggerUrl"]
            async with session.ws_connect(url, max_msg_size=0) as socket:
                tab = Tab(socket)
                try:
                    yield tab
                finally:
                    tab.reader.cancel()
                    process.kill()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
