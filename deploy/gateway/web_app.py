"""A gateway as aiohttp applications, whose errors are those of the API that is asked.

They know a gateway's routes and when to start and close it, and nothing of requests.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterable
from typing import Final

from aiohttp import web

from deploy.gateway.app import Gateway
from deploy.gateway.errors import JSON_TYPE, ApiError
from deploy.gateway.intake.accept import usable_request_id
from deploy.gateway.intake.endpoints import KINDS, errors_at
from deploy.gateway.openapi.document import documented
from deploy.gateway.pages import Handler
from deploy.gateway.processes.siblings import Siblings
from deploy.gateway.ui.routes import ui_routes

logger = logging.getLogger("prfaas.deploy.gateway")

_INTERNAL_ERROR: Final = "The gateway failed to serve this request."
_GATEWAY: Final = web.AppKey("gateway", Gateway)


def create_app(gateway: Gateway, siblings: Siblings | None = None) -> web.Application:
    """The application, which starts and closes `gateway`. Serve it with handler cancellation on.

    With `siblings` its pages answer for all processes of the gateway.
    """
    app = _app(gateway, gateway.routes(), siblings)
    if gateway.config.allowed_origins:
        # The outermost: errors are for these pages, too.
        app.middlewares.insert(0, _preflights)
        app.on_response_prepare.append(_tell_origin)

    async def life(_app: web.Application) -> AsyncIterator[None]:
        await gateway.start()
        yield
        await gateway.close()

    app.cleanup_ctx.append(life)
    return app


def create_admin_app(gateway: Gateway, siblings: Siblings | None = None) -> web.Application:
    """The application of the pages for operators, for a gateway that another one starts."""
    return _app(gateway, gateway.admin_routes(), siblings)


def _app(
    gateway: Gateway, routes: Iterable[web.RouteDef], siblings: Siblings | None
) -> web.Application:
    if siblings is not None:
        routes = siblings.widened(gateway, routes)
    app = web.Application(client_max_size=gateway.config.max_body_bytes, middlewares=[_api_errors])
    app[_GATEWAY] = gateway
    routes = list(routes)
    app.add_routes([*documented(routes), *ui_routes(gateway.pages, routes)])
    return app


def _allowed_origin(request: web.Request) -> str:
    """The origin of a page in a browser that may have the answer; "" if there is none."""
    allowed, origin = request.app[_GATEWAY].config.allowed_origins, request.headers.get("Origin")
    # Pages for operators are for nobody else, as without API keys anybody may ask for them.
    is_for_clients = request.path in KINDS or request.path.startswith("/v1/models")
    return origin if origin and is_for_clients and {origin, "*"} & set(allowed) else ""


@web.middleware
async def _preflights(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer what a browser asks before it sends a page's request, which has no API key."""
    wanted = request.headers.get("Access-Control-Request-Method")
    if request.method != "OPTIONS" or wanted is None or not _allowed_origin(request):
        return await handler(request)
    headers = {
        "Access-Control-Allow-Methods": "GET, POST",
        "Access-Control-Allow-Headers": request.headers.get("Access-Control-Request-Headers", "*"),
        "Access-Control-Max-Age": "600",
    }
    return web.Response(status=204, headers=headers)


async def _tell_origin(request: web.Request, response: web.StreamResponse) -> None:
    response.headers.add("Vary", "Origin")
    if origin := _allowed_origin(request):
        response.headers["Access-Control-Allow-Origin"] = origin
        response.headers["Access-Control-Expose-Headers"] = "*"


@web.middleware
async def _api_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn every error into an error object of the API."""
    try:
        # Nothing here unpacks a body: a few bytes of strangers would become gigabytes.
        packing = request.headers.get("Content-Encoding", "identity")
        if packing.strip().lower() != "identity":
            message = "Send the body as it is, without a Content-Encoding."
            raise ApiError(415, "packed_body", message)
        return await handler(request)
    except ApiError as error:
        return _error_response(request, error)
    # aiohttp's own errors, such as an unknown path or method.
    except web.HTTPException as error:
        known = ApiError(error.status, error.reason.lower().replace(" ", "_"), error.reason)
        response = _error_response(request, known)
        # RFC 9110, 15.5.6: a 405 must name the allowed methods.
        if "Allow" in error.headers:
            response.headers["Allow"] = error.headers["Allow"]
        return response
    except Exception:
        # Not the decoded path, which may have line breaks and so look like other messages.
        logger.exception("%s %s failed", request.method, request.raw_path)
        return _error_response(request, ApiError(500, "internal_error", _INTERNAL_ERROR))


def _error_response(request: web.Request, error: ApiError) -> web.Response:
    gateway = request.app[_GATEWAY]
    gateway.metrics.rejected(error.code)
    response = web.Response(
        status=error.status,
        body=error.body(errors_at(request.path)),
        headers={"Content-Type": JSON_TYPE, **error.headers},
    )
    if request_id := usable_request_id(request.headers.get("X-Request-Id")):
        response.headers["x-request-id"] = request_id
    if not request.body_exists or request.content.at_eof():
        return response
    # The rest of the body will not be read, so the connection cannot be kept.
    response.force_close()
    return response
