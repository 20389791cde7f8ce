"""What a gateway logs of requests: which one a line is about, and no text of theirs."""

import json
import logging
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from kvmanager.logs import LogWriter, json_formatter
from prfaas.engines.errors import PrefillFailed

SECRET = "Xyzzy-plugh"


class Lines(logging.Handler):
    """Keeps every line, as JSON."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(json_formatter())
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


class Logged:
    """All that is logged, until it is read."""

    def __init__(self) -> None:
        self._kept = Lines()
        self.writer = LogWriter(self._kept)

    def read(self) -> list[dict[str, Any]]:
        self.writer.close()
        return [json.loads(line) for line in self._kept.lines]


@pytest.fixture
def logged() -> Iterator[Logged]:
    root, found = logging.getLogger(), Logged()
    level = root.level
    root.addHandler(found.writer.front)
    root.setLevel(logging.DEBUG)
    yield found
    root.removeHandler(found.writer.front)
    root.setLevel(level)


async def refuse(_request: web.Request, body: dict[str, Any]) -> web.Response:
    error = {"message": f"cannot read {body['prompt']}", "type": "Bad", "code": 400}
    return web.json_response({"error": error}, status=400)


async def fail(_request: web.Request, body: dict[str, Any]) -> web.Response:
    raise web.HTTPInternalServerError(text=f"Traceback: {body['prompt']}")


async def end_early(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(f'data: {{"choices": [{{"text": "{body["prompt"]}"}}]}}\n\n'.encode())
    assert request.transport is not None
    request.transport.abort()
    return response


async def test_no_line_has_text_of_a_prompt_or_an_answer(region: Any, logged: Logged) -> None:
    long = region.long_body(prompt=SECRET * 30)
    short = region.long_body(prompt=SECRET)
    for body in (long, short, long | {"stream": True}):
        assert (await region.post(body))[0] == 200
    region.far.error = PrefillFailed("engine_failed", "killed")
    assert (await region.post(long))[0] == 200
    assert (await region.post(short | {"model": "other"}))[0] == 404
    assert (await region.post(short | {"max_tokens": SECRET}))[0] < 500
    for reply, stream in ((refuse, False), (fail, False), (end_early, True)):
        region.engine.reply = reply
        # The gateway ends the connection of half an answer.
        with suppress(aiohttp.ClientError):
            await region.post(short | {"stream": stream})
    await region.assert_nothing_held()
    lines = logged.read()
    assert len([line for line in lines if line["logger"].startswith("prfaas")]) >= 6
    leaks = [line for line in lines if SECRET in json.dumps(line)]
    assert not leaks


async def test_lines_of_a_request_name_it_and_its_trace(region: Any, logged: Logged) -> None:
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    headers = {"X-Request-Id": "mine-1", "traceparent": f"00-{trace}-00f067aa0ba902b7-01"}
    assert (await region.post(region.long_body(), headers=headers))[0] == 200
    await region.record()
    (line,) = [line for line in logged.read() if "outcome=ok" in line["message"]]
    assert (line["request_id"], line["trace_id"]) == ("mine-1", trace)
