"""What the listeners with tokens answer alike: errors as problems."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import orjson
from aiohttp import web

from outbox.api import problem
from outbox.api.problem import Kind, Problem
from outbox.api.request_parsing import too_large

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def unexpected(log: Any, error: Exception, request: web.Request, path: str) -> Problem:
    """An error that nobody expected: the log has it, under an id that is told."""
    error_id = str(uuid.uuid4())
    log.error(
        "unexpected error", error_id=error_id, method=request.method, route=path, exc_info=error
    )
    return Problem(Kind.INTERNAL, f"the log of this relay has it as error {error_id}")


def problems(no_such_path: str) -> Any:
    """A middleware that answers every error as a problem, aiohttp's own as well.

    Args:
        no_such_path: says where to look instead.
    """

    @web.middleware
    async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except Problem as told:
            return _response(told)
        except web.HTTPRequestEntityTooLarge:
            return _response(too_large())
        except web.HTTPMethodNotAllowed as error:
            allowed = ", ".join(sorted(error.allowed_methods))
            detail = f"{request.path} understands {allowed}"
            return _response(Problem(Kind.METHOD_NOT_ALLOWED, detail, {"Allow": allowed}))
        except web.HTTPNotFound:
            return _response(Problem(Kind.NOT_FOUND, no_such_path))

    return answer


def _response(told: Problem) -> web.Response:
    return web.Response(
        body=orjson.dumps(told.body()),
        status=told.kind.status,
        headers=dict(told.headers),
        content_type=problem.MEDIA_TYPE,
    )
