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
from deploy.gateway.intake.endpoints import errors_at
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


@web.middleware
async def _api_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn every error into an error object of the API."""
    try:
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
