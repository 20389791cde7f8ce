"""An HTTP double of a vLLM engine for gateway tests."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from deploy.gateway.intake.endpoints import ENDPOINTS

Reply = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


class OpenAiEngine:
    """Speaks enough of vLLM's OpenAI server; `reply` replaces its way of answering."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.url = ""
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        self.waiting: dict[str, asyncio.Future[str]] = {}
        self.sources: list[str] = []
        self.num_aborted = 0
        self.num_serving = 0
        self.reply: Reply | None = None
        self.render_reply: Reply | None = None
        self.load: Callable[[dict[str, Any]], Awaitable[str]] | None = None
        # What its own prefix cache holds of any prompt; None: it does not say what was cached.
        self.local_hit: int | None = None
        self.first_token = asyncio.Event()
        self.first_token.set()
        self.next_token = asyncio.Event()
        self.next_token.set()
        self._runner: web.AppRunner | None = None

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> None:
        app = web.Application(client_max_size=1 << 28)
        for endpoint in ENDPOINTS.values():
            app.router.add_post(endpoint.path, self._serve)
            if endpoint.is_routed:
                app.router.add_post(endpoint.path + "/render", self._render)
        for path in ("/health", "/metrics"):
            app.router.add_get(path, self._healthy)
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port).start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def bodies(self, path: str = "/v1/completions") -> list[bytes]:
        return [body for seen, _, body in self.requests if seen == path]

    async def _healthy(self, _request: web.Request) -> web.Response:
        return web.Response()

    async def _render(self, request: web.Request) -> web.StreamResponse:
        body = await self._note(request)
        if self.render_reply is not None:
            return await self.render_reply(request, body)
        ids = token_ids(body)
        rendered = {"token_ids": ids, "features": None, "sampling_params": {"n": 1}}
        is_list = request.path.startswith("/v1/completions")
        return web.json_response([rendered] if is_list else rendered)

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        body = await self._note(request)
        self.num_serving += 1
        try:
            if self.reply is not None:
                return await self.reply(request, body)
            return await self.answer(request, body)
        except asyncio.CancelledError:
            self.num_aborted += 1
            raise
        except ConnectionError:
            self.num_aborted += 1
            raise
        finally:
            self.num_serving -= 1

    async def answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await self._load_landing(body)
        payload = completion(request, body)
        if self.local_hit is not None:
            # Like vLLM's, it counts what a connector brought as cached.
            has_landed = self.sources[-1] == "landing"
            num_tokens = len(token_ids(body)) - 1 if has_landed else self.local_hit
            payload["usage"]["prompt_tokens_details"] = {"cached_tokens": num_tokens}
        if not body.get("stream"):
            await self.first_token.wait()
            return web.json_response(payload)
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream; charset=utf-8", "x-engine": self.name}
        )
        await response.prepare(request)
        await self.first_token.wait()
        for event in events(payload, body):
            await response.write(event)
            await self.next_token.wait()
        return response

    async def _load_landing(self, body: dict[str, Any]) -> None:
        params = body.get("kv_transfer_params")
        if params is None:
            self.sources.append("prompt")
            return
        if self.load is not None:
            self.sources.append(await self.load(params["prfaas"]))
            return
        transfer_id = params["prfaas"]["transfer_id"]
        waiting = self.waiting.setdefault(transfer_id, asyncio.get_running_loop().create_future())
        self.sources.append(await waiting)

    async def _note(self, request: web.Request) -> dict[str, Any]:
        raw = await request.read()
        headers = {key.lower(): value for key, value in request.headers.items()}
        self.requests.append((request.path, headers, raw))
        body: dict[str, Any] = json.loads(raw)
        return body

    def tell(self, transfer_id: str, source: str) -> None:
        """The landing came ("landing") or was given back ("recomputed")."""
        waiting = self.waiting.setdefault(transfer_id, asyncio.get_running_loop().create_future())
        if not waiting.done():
            waiting.set_result(source)


def token_ids(body: dict[str, Any]) -> list[int]:
    if "prompt" in body:
        prompt = body["prompt"]
        return list(prompt) if isinstance(prompt, list) else list(prompt.encode())
    if isinstance(body.get("input"), str):
        return [1, *body["input"].encode(), 2]
    text = "".join(str(message.get("content")) for message in body["messages"])
    return [1, *text.encode(), 2]


def completion(request: web.Request, body: dict[str, Any]) -> dict[str, Any]:
    """An answer that depends on everything but the transfer and the usage of a stream."""
    left_out = ("kv_transfer_params", "stream_options")
    seen = {key: value for key, value in body.items() if key not in left_out}
    return {
        "id": f"cmpl-{request.headers.get('X-Request-Id')}",
        "object": "text_completion",
        "created": 1,
        "model": body.get("model"),
        "choices": [{"index": 0, "text": json.dumps(seen, sort_keys=True), "logprobs": None}],
        "usage": {"prompt_tokens": len(token_ids(body)), "completion_tokens": 4},
    }


def events(payload: dict[str, Any], body: dict[str, Any]) -> list[bytes]:
    text = payload["choices"][0]["text"]
    step = max(1, len(text) // 4)
    out = []
    for start in range(0, len(text), step):
        chunk = payload | {"choices": [{"index": 0, "text": text[start : start + step]}]}
        del chunk["usage"]
        out.append(b"data: " + json.dumps(chunk).encode() + b"\n\n")
    if (body.get("stream_options") or {}).get("include_usage"):
        out.append(b"data: " + json.dumps(payload | {"choices": []}).encode() + b"\n\n")
    return [*out, b"data: [DONE]\n\n"]
