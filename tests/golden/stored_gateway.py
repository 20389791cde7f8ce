"""Serves what a gateway answered once, in place of a gateway."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web

_AGO = '"$AGO"'
_AGO_S = 600.0


def stored(path: Path) -> dict[str, Any]:
    """The answers of a file by method and path, and those that follow from its records."""
    told = yaml.safe_load(path.read_text(encoding="utf-8"))
    answers: dict[str, Any] = told["answers"]
    usual = {"started_s": "$AGO", "model": "tiny", "home": "home", "cluster": "home"}
    records = {
        name: {"request_id": name} | usual | record for name, record in told["records"].items()
    }
    lists = {name: [record] for name, record in records.items()}
    # One request for each word that has an explanation.
    local, far = records["local-1"], records["far-1"]
    for list_name, field, record in (
        ("reasons", "reason", local | {"first_reason": ""}),
        ("spills", "spill", far),
        ("outcomes", "outcome", local),
        ("hand_offs", "hand_off", far),
        ("placements", "placement", far),
    ):
        lists[list_name] = [record | {field: word} for word in told[list_name]]
    for name, found in lists.items():
        answers[f"GET /prfaas/requests/{name}"] = {"requests": found}
    for limit in (10, 20):  # of `explain` for an unknown id, and of `requests`
        answers[f"GET /prfaas/requests?limit={limit}"] = {"requests": list(records.values())}
    answers["GET /prfaas/requests?limit=1"] = {"requests": []}
    answers["GET /prfaas/requests?limit=1000"] = {"requests": [_prefill(n) for n in range(30)]}
    return answers


def _prefill(number: int) -> dict[str, Any]:
    """One of many requests that an instance prefills one after the other."""
    tokens, prefill_s = 1000 + 500 * (number % 4), 1.0 + 0.5 * (number % 4)
    ttft_s = 0.6 + prefill_s
    return {
        "request_id": f"r{number}",
        "started_s": 100.0 + 3 * number,
        "endpoint": "completion",
        "model": "tiny",
        "outcome": "ok",
        "is_stream": True,
        "num_prompt_tokens": tokens,
        "cached_tokens": 0,
        "num_prefill_attempts": 1,
        "prefill_instance": "p0",
        "decode_instance": "d0",
        "ttft_s": ttft_s,
        "total_s": ttft_s + 1.0,
        "output_tokens": 11,
        "parts": {"read_s": 0.1, "queue_s": 0.3, "engine_queue_s": 0.1, "prefill_s": prefill_s},
    }


@asynccontextmanager
async def stored_gateway(
    answers: dict[str, Any], orders: list[str] | None = None
) -> AsyncIterator[str]:
    """Serve the answers; gives the URL. The key `wrong` opens nothing. `orders` gets what was
    asked for otherwise than by GET.
    """

    async def answer(request: web.Request) -> web.Response:
        if request.headers.get("Authorization") == "Bearer wrong":
            return _refusal(401, "No tenant has this key.")
        if orders is not None and request.method != "GET":
            body = await request.text()
            orders.append(f"> {request.method} {request.path_qs} {body}".rstrip() + "\n")
        found = answers.get(f"{request.method} {request.path_qs}")
        if isinstance(found, list):
            found = found.pop(0) if len(found) > 1 else found[0]
        if found is None:
            return _refusal(404, f"There is no {request.path}.")
        error = found.get("error")
        status = error.get("status", 200) if isinstance(error, dict) else 200
        text = json.dumps(found).replace(_AGO, f"{time.time() - _AGO_S:.1f}")
        return web.Response(text=text, status=status, content_type="application/json")

    served = web.Application()
    served.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(served, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def _refusal(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status)
