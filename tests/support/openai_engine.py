"""The one stand-in for a vLLM engine: its OpenAI server, which computes nothing.

What it answers is up to a test. `reply` and `render_reply` take the place of its own answers:
`fixed`, `refusing`, `streamed` and `reset` make such functions, and those of `contract_engine`
answer in the shapes of the APIs. `load` brings the KVCache of a request; without it, `tell` says
that a landing came. A subclass that needs another answer to every request overrides `answer`.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Self

from aiohttp import web
from aiohttp.typedefs import Handler
from eventually import eventually

from deploy.gateway.intake.endpoints import ENDPOINTS

Reply = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


class OpenAiEngine:
    """`requests` are path, headers and body of all that it was posted; `num_serving` of them are
    not answered yet, `num_aborted` lost their client. Clear `first_token` or `next_token` to hold
    answers up.
    """

    def __init__(self, name: str = "engine") -> None:
        self.name = name
        self.url = ""
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        self.landings: dict[str, asyncio.Future[str]] = {}
        self.sources: list[str] = []
        """Where the KVCache of each request came from: "prompt", "landing" or "recomputed"."""
        self.remembers = True
        """Whether it keeps what it was asked."""
        self.num_aborted = 0
        self.num_serving = 0
        self.before_answer: Callable[[dict[str, Any]], None] | None = None
        self.reply: Reply | None = None
        self.render_reply: Reply | None = None
        self.load: Callable[[dict[str, Any]], Awaitable[str]] | None = None
        self.local_hit: int | None = None
        """What its prefix cache holds of any prompt; None: it does not say what was cached."""
        self.key = ""
        """What all callers must show as `Authorization`; "": nothing."""
        self.shown: list[str] = []
        """What they have shown."""
        self.healthy = True
        self.num_looks = 0
        """How often its metrics were asked."""
        # What its metrics tell besides the requests that it serves.
        self.waiting = 0
        self.deferred = 0
        self.kv_usage = 0.0
        self.num_kv_blocks: int | None = None
        self.first_token = asyncio.Event()
        self.first_token.set()
        self.next_token = asyncio.Event()
        self.next_token.set()
        self._runner: web.AppRunner | None = None

    async def start(
        self, host: str = "127.0.0.1", port: int = 0, tls: ssl.SSLContext | None = None
    ) -> Self:
        """Serve; `url` is the address afterwards."""
        app = web.Application(client_max_size=1 << 28, middlewares=[self._guard])
        for endpoint in ENDPOINTS.values():
            app.router.add_post(endpoint.path, self._serve)
            if endpoint.is_routed:
                app.router.add_post(endpoint.path + "/render", self._render)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port, ssl_context=tls).start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"{'https' if tls else 'http'}://{host}:{port}"
        return self

    async def stop(self) -> None:
        """Be gone, connections included, as a killed process is."""
        runner, self._runner = self._runner, None
        if runner is None:
            return
        assert runner.server is not None
        for protocol in list(runner.server.connections):
            if protocol.transport is not None:
                protocol.transport.abort()
        await runner.cleanup()

    @property
    def posted(self) -> list[dict[str, Any]]:
        """The bodies of all requests but those for a rendering."""
        return [json.loads(body) for path, _, body in self.requests if not path.endswith("/render")]

    def bodies(self, path: str = "/v1/completions") -> list[bytes]:
        return [body for seen, _, body in self.requests if seen == path]

    async def wait_requests(self, count: int) -> None:
        """Until `count` requests have arrived in all."""
        await eventually(lambda: len(self.posted) >= count)

    async def wait_aborts(self, count: int) -> None:
        """Until `count` clients have gone away in all."""
        await eventually(lambda: self.num_aborted >= count)

    def tell(self, transfer_id: str, source: str) -> None:
        """The landing came ("landing") or was given back ("recomputed")."""
        landing = self._landing(transfer_id)
        if not landing.done():
            landing.set_result(source)

    def after_landing(self, reply: Reply) -> Reply:
        """`reply`, once the KVCache of the request is there."""

        async def later(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            await self._load_landing(body)
            return await reply(request, body)

        return later

    def reply_once(self, reply: Reply) -> None:
        """Give this answer to the next request, and the own one to all others."""

        async def first(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            self.reply = None
            return await reply(request, body)

        self.reply = first

    async def answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        """Its own answer, which depends on everything but the transfer."""
        await self._load_landing(body)
        payload = completion(request, body)
        if self.local_hit is not None:
            # Like vLLM's, it counts what a connector brought as cached.
            has_landed = self.sources[-1] == "landing"
            num_tokens = len(token_ids(body)) - 1 if has_landed else self.local_hit
            payload["usage"]["prompt_tokens_details"] = {"cached_tokens": num_tokens}
        return await self.send(request, body, payload)

    async def send(
        self, request: web.Request, body: dict[str, Any], payload: dict[str, Any]
    ) -> web.StreamResponse:
        """Answer with a completion, as a stream if the client wants one."""
        if not body.get("stream"):
            await self.first_token.wait()
            return web.json_response(payload)
        return await _stream(request, events(payload, body), self.first_token, self.next_token)

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        shown = request.headers.get("Authorization", "")
        if self.remembers:
            self.shown.append(shown)
        if self.key not in ("", shown):
            raise web.HTTPUnauthorized
        return await handler(request)

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 503)

    async def _metrics(self, _request: web.Request) -> web.Response:
        self.num_looks += 1
        return web.Response(
            text=f'vllm:num_requests_running{{engine="0"}} {float(self.num_serving)}\n'
            f'vllm:num_requests_waiting{{engine="0"}} {float(self.waiting)}\n'
            f'vllm:num_requests_waiting_by_reason{{engine="0",reason="deferred"}} {self.deferred}\n'
            f'vllm:kv_cache_usage_perc{{engine="0"}} {self.kv_usage}\n'
            f'vllm:cache_config_info{{engine="0",num_gpu_blocks="{self.num_kv_blocks}"}} 1.0\n'
        )

    async def _render(self, request: web.Request) -> web.StreamResponse:
        body = await self._note(request)
        if self.render_reply is not None:
            return await self.render_reply(request, body)
        rendered = {"token_ids": token_ids(body), "features": None, "sampling_params": {"n": 1}}
        is_list = request.path.startswith("/v1/completions")
        return web.json_response([rendered] if is_list else rendered)

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        body = await self._note(request)
        self.num_serving += 1
        try:
            if self.before_answer is not None:
                self.before_answer(body)
            return await (self.reply or self.answer)(request, body)
        except (asyncio.CancelledError, ConnectionError):
            self.num_aborted += 1
            raise
        finally:
            self.num_serving -= 1

    async def _load_landing(self, body: dict[str, Any]) -> None:
        params = (body.get("kv_transfer_params") or {}).get("prfaas")
        if params is None:
            self.sources.append("prompt")
        elif self.load is not None:
            self.sources.append(await self.load(params))
        else:
            self.sources.append(await self._landing(params["transfer_id"]))

    def _landing(self, transfer_id: str) -> asyncio.Future[str]:
        new = asyncio.get_running_loop().create_future()
        return self.landings.setdefault(transfer_id, new)

    async def _note(self, request: web.Request) -> dict[str, Any]:
        raw = await request.read()
        headers = {key.lower(): value for key, value in request.headers.items()}
        if self.remembers:
            self.requests.append((request.path, headers, raw))
        body: dict[str, Any] = json.loads(raw)
        return body


def fixed(answer: object, status: int = 200, *, after: asyncio.Event | None = None) -> Reply:
    """The same answer to all, once `after` has happened: plain text, or JSON as bytes or object."""

    async def reply(_request: web.Request, _body: dict[str, Any]) -> web.Response:
        if after is not None:
            await after.wait()
        if isinstance(answer, str):
            return web.Response(text=answer, status=status)
        if isinstance(answer, bytes):
            return web.Response(body=answer, status=status, content_type="application/json")
        return web.json_response(answer, status=status)

    return reply


def refusing(status: int = 400, message: str = "no", **fields: Any) -> Reply:
    """An error object; its code is the status, as vLLM's is."""
    return fixed({"error": {"message": message, "code": status} | fields}, status)


def streamed(
    *pieces: bytes, before_last: asyncio.Event | None = None, then_reset: bool = False
) -> Reply:
    """A stream of these pieces. `before_last` is waited for before the last one; with `then_reset`
    the connection breaks off after it.
    """

    async def reply(request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
        response = await _stream(request, pieces[:-1])
        if before_last is not None:
            await before_last.wait()
        for piece in pieces[-1:]:
            await response.write(piece)
        if then_reset:
            await asyncio.sleep(0.05)  # so that the pieces arrive before
            await reset(request, {})
        return response

    return reply


async def reset(request: web.Request, _body: dict[str, Any]) -> web.Response:
    """A reply: the connection breaks off."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def _stream(
    request: web.Request,
    pieces: Sequence[bytes],
    first: asyncio.Event | None = None,
    following: asyncio.Event | None = None,
) -> web.StreamResponse:
    headers = {"Content-Type": "text/event-stream; charset=utf-8"}
    response = web.StreamResponse(headers=headers)
    await response.prepare(request)
    if first is not None:
        await first.wait()
    for piece in pieces:
        await response.write(piece)
        if following is not None:
            await following.wait()
    return response


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
