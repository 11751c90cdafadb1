"""Error middleware of the authenticated listeners: every error becomes a problem."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import orjson
from aiohttp import web

from outbox.telemetry.logs import describe_without_text
from outbox_api import problem
from outbox_api.meters import REFUSAL
from outbox_api.problem import Problem, ProblemKind

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def log_unexpected(log: Any, error: Exception, request: web.Request, path: str) -> Problem:
    """Log an unexpected error under an id, and return a problem that contains the id."""
    error_id = str(uuid.uuid4())
    known = {"error_id": error_id, "method": request.method, "route": path}
    log.error("unexpected error", **known, **describe_without_text(error))
    return Problem(ProblemKind.INTERNAL, f"internal error {error_id}; see the log of the API")


def problem_middleware(no_such_path: str) -> Any:
    """Create a middleware that turns all errors, aiohttp's included, into problems.

    Args:
        no_such_path: detail of the 404 for unknown paths.
    """

    @web.middleware
    async def handle_problems(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except Problem as error:
            return problem_response(error)
        except web.HTTPMethodNotAllowed as error:
            allowed = ", ".join(sorted(error.allowed_methods))
            detail = f"{request.path} allows {allowed}"
            return problem_response(
                Problem(ProblemKind.METHOD_NOT_ALLOWED, detail, {"Allow": allowed})
            )
        except web.HTTPNotFound:
            return problem_response(Problem(ProblemKind.NOT_FOUND, no_such_path))

    return handle_problems


def problem_response(error: Problem) -> web.Response:
    """The response that reports a problem."""
    response = web.Response(
        body=orjson.dumps(error.to_json()),
        status=error.kind.status,
        headers=dict(error.headers),
        content_type=problem.MEDIA_TYPE,
    )
    if error.refusal is not None:
        response[REFUSAL] = error.refusal
    return response
