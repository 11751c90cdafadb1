"""The OpenAPI 3.1 document, made of the table of routes."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import orjson
from aiohttp import web

import outbox
from outbox.api import problem
from outbox.api.route import For, PageOf
from outbox.api.schemas import schemas

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from pydantic.json_schema import JsonSchemaMode

    from outbox.api.route import Route

PATH = "/openapi.json"

ABOUT = """
Everything that the commands do, for programs. `outbox token add` makes a token, which
goes as `Authorization: Bearer obx_…`; a revoked one is refused within two seconds.

A token has scopes, of which none stands for another one: `read` looks at everything,
payloads included, `publish` publishes, `operate` changes everything else. A token of a
tenant sees and touches what is that tenant's own; everything else is as if it did not
exist, and what is about the system as a whole is not for it. It is told neither who runs
the system (`operator`, `relay`) nor how much there is of others; the numbers of events,
dead letters, jobs and journal rows are counted over everything, though, and so are
cursors. The endpoints and schedules that it makes have names that begin with its tenant's
own and a dot (`acme.shop`): names are unique in all of the system, and whether somebody
else has one is not told.

Each token has a rate, and so has each address from which tokens come that are not good:
beyond it the answer is 429, with Retry-After.

Listings are in pages: `next` of one is `after` of the following, and null at the end.
Errors are problems after RFC 9457, with a `type` that does not change.
""".strip()

PROBLEM = {
    "type": "object",
    "description": "What went wrong (RFC 9457).",
    "required": ["type", "title", "status", "detail"],
    "properties": {
        "type": {"type": "string", "enum": [kind.type for kind in problem.Kind]},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string", "description": "In one line, with what to do next."},
    },
}


@dataclass(frozen=True, slots=True)
class Forms:
    """The schemas of what goes in and comes out, and what they share."""

    found: dict[str, Any]
    shared: dict[str, Any]

    def fields(self, name: str) -> dict[str, Any]:
        """The fields of one of them, each with its schema."""
        schema = self.found[name]
        if "$ref" in schema:
            schema = self.shared[_name_in(schema["$ref"])]
        fields: dict[str, Any] = schema["properties"]
        return fields


def document(routes: Sequence[Route]) -> dict[str, Any]:
    """The whole document."""
    forms = Forms(*schemas(_forms(routes)))
    paths: dict[str, Any] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, forms)
    return {
        "openapi": "3.1.0",
        "info": {"title": "outbox", "version": outbox.__version__, "description": ABOUT},
        "security": [{"token": []}],
        "paths": paths,
        "components": {
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            "schemas": {**_used(paths, forms.shared), "Problem": PROBLEM},
            "responses": {
                "TooManyRequests": {
                    "description": "Too many tokens from this address were not good, or this "
                    "one asks too often.",
                    "headers": {
                        "Retry-After": {
                            "description": "Seconds.",
                            "schema": {"type": "integer"},
                        }
                    },
                    "content": {
                        problem.MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}
                    },
                },
                "Problem": {
                    "description": "What went wrong.",
                    "content": {
                        problem.MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}
                    },
                },
            },
        },
    }


def handler(routes: Sequence[Route]) -> Callable[[web.Request], Awaitable[web.Response]]:
    """What answers with the document; it is made when it is asked for the first time."""

    @lru_cache(1)
    def made() -> bytes:
        return orjson.dumps(document(routes))

    async def handle(_: web.Request) -> web.Response:
        # It takes a third of a second, the first time, which deliveries need not wait for.
        body = await asyncio.to_thread(made)
        return web.Response(body=body, content_type="application/json")

    return handle


def _forms(routes: Sequence[Route]) -> dict[str, tuple[Any, JsonSchemaMode]]:
    """What goes in and comes out, each by a name."""
    forms: dict[str, tuple[Any, JsonSchemaMode]] = {}
    for route in routes:
        if route.query is not None:
            forms[f"{route.operation} query"] = route.query, "validation"
        if route.body is not None:
            forms[f"{route.operation} body"] = route.body, "validation"
        for status, form in route.answers.items():
            name = f"{route.operation} {status}"
            if isinstance(form, PageOf):
                forms[name] = form.item, "serialization"
                if form.rest is not None:
                    forms[f"{name} rest"] = form.rest, "serialization"
            else:
                forms[name] = form, "serialization"
    return forms


def _operation(route: Route, forms: Forms) -> dict[str, Any]:
    name = route.operation
    told: dict[str, Any] = {
        "operationId": name,
        "summary": route.summary,
        "description": _description(route),
        "tags": [route.tag],
        "parameters": [*_in_path(route), *_in_query(route, forms), *_in_headers(route)],
        "responses": {
            str(status): {
                "description": "Done.",
                "content": {"application/json": {"schema": _answer(name, status, form, forms)}},
            }
            for status, form in route.answers.items()
        }
        | {"429": {"$ref": "#/components/responses/TooManyRequests"}}
        | {"default": {"$ref": "#/components/responses/Problem"}},
        "x-scope": route.scope,
    }
    if route.body is not None:
        told["requestBody"] = {
            "required": route.body_required,
            "content": {"application/json": {"schema": forms.found[f"{name} body"]}},
        }
    return told


def _description(route: Route) -> str:
    scope = f"Needs the scope `{route.scope}`." if route.scope is not None else "For every token."
    return f"{scope} Not for a tenant's token." if route.tenants is For.SYSTEM else scope


def _in_path(route: Route) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", route.path)
    ]


def _in_query(route: Route, forms: Forms) -> list[dict[str, Any]]:
    if route.query is None:
        return []
    return [
        {"name": name, "in": "query", "required": False, "schema": schema}
        for name, schema in forms.fields(f"{route.operation} query").items()
    ]


def _in_headers(route: Route) -> list[dict[str, Any]]:
    return [
        {"name": n, "in": "header", "description": what, "schema": {"type": "string"}}
        for n, what in route.headers.items()
    ]


def _answer(name: str, status: int, form: Any, forms: Forms) -> dict[str, Any]:
    schema: dict[str, Any] = forms.found[f"{name} {status}"]
    if not isinstance(form, PageOf):
        return schema
    rest: dict[str, Any] = {}
    if form.rest is not None:
        rest = forms.fields(f"{name} {status} rest")
    return {
        "type": "object",
        "required": ["items", "next", *rest],
        "properties": {
            "items": {"type": "array", "items": schema},
            "next": {
                "type": ["string", "null"],
                "description": "`after` of the following page; null: this is the last one.",
            },
            **rest,
        },
    }


def _used(paths: dict[str, Any], shared: dict[str, Any]) -> dict[str, Any]:
    """What of the shared schemas something refers to, at last."""
    used: dict[str, Any] = {}
    look = [paths]
    while look:
        for name in map(_name_in, re.findall(r"#/components/schemas/\w+", str(look.pop()))):
            if name in shared and name not in used:
                used[name] = shared[name]
                look.append(shared[name])
    return dict(sorted(used.items()))


def _name_in(reference: str) -> str:
    return reference.rpartition("/")[2]
