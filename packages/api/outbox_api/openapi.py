"""OpenAPI 3.1 document, generated from the table of routes."""

from __future__ import annotations

import asyncio
import re
import sys
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import orjson
from aiohttp import web

from outbox.core.model.event import ONCE_BYTES_MAX
from outbox.version import __version__
from outbox_api import problem
from outbox_api.field_types import text_schema
from outbox_api.limits import EVENT_BYTES_MAX, PAYLOAD_BODY_BYTES_MAX
from outbox_api.route import PageOf, TenantAccess
from outbox_api.schemas import json_schemas

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from pydantic.json_schema import JsonSchemaMode

    from outbox_api.route import Route

DESCRIPTION = """
HTTP API for all operations of the command line. Create a token with `outbox token add`, and
send it as `Authorization: Bearer obx_…`. A revoked token is rejected within two seconds.

Scopes are independent: `read` reads everything, payloads included, except receivers' responses,
which also need `operate` and a token without a tenant; `publish` publishes events; `operate`
makes all other changes. A tenant token reads and changes the objects of its
tenant only; other objects respond with 404, and routes for the whole system with 403. Actors
outside the tenant are shown as `operator` or `relay`, and totals of the system are hidden. Ids
of events, dead letters, jobs and journal entries, and cursors, count over the whole system.
Endpoints and schedules created with a tenant token have names with the tenant's prefix
(`acme.shop`), because names are unique in the system.

Requests and requests in flight are limited per token, failed logins and requests in flight per
address; above a limit the response is 429 with Retry-After. The size of a body is limited by its
route; above this limit the response is 413. A request is in flight until its response is read.

Listings are paginated: pass `next` of a page as `after` of the next request; it is null on the
last page. Errors are problem details (RFC 9457) with a stable `type`. Responses may get further
fields; a request with an unknown field is refused. HEAD is available where GET is; another method
is refused with 405 and Allow.
""".strip()

PROBLEM = {
    "type": "object",
    "description": "Problem details (RFC 9457).",
    "required": ["type", "title", "status", "detail"],
    "properties": {
        "type": {"type": "string", "enum": [kind.type for kind in problem.ProblemKind]},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string", "description": "One line, with the next step."},
    },
}


@dataclass(frozen=True, slots=True)
class SchemaSet:
    """JSON schemas of queries, bodies and responses, and their shared definitions."""

    by_name: dict[str, Any]
    shared: dict[str, Any]

    def object(self, name: str) -> dict[str, Any]:
        """Return the schema of an object."""
        schema: dict[str, Any] = self.by_name[name]
        if "$ref" in schema:
            schema = self.shared[_name_in(schema["$ref"])]
        return schema


def document(routes: Sequence[Route]) -> dict[str, Any]:
    """Generate the document."""
    forms = SchemaSet(*json_schemas(_forms(routes)))
    paths: dict[str, Any] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, forms)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "outbox",
            "version": __version__,
            "description": DESCRIPTION,
            "license": {"name": "MIT", "identifier": "MIT"},
            "contact": {"name": "The outbox authors"},
        },
        # Relative to this document: a proxy may have it below a prefix.
        "servers": [{"url": ".", "description": "The server of this document."}],
        "security": [{"token": []}],
        "tags": _tags(routes),
        "paths": paths,
        "components": {
            "securitySchemes": {
                "token": {"type": "http", "scheme": "bearer", "bearerFormat": "obx_…"}
            },
            "schemas": {**_used(paths, forms.shared), "Problem": PROBLEM},
            "responses": {
                _response_name(status): _problem_response(status)
                for status in sorted({each.status for r in routes for each in r.expected_problems})
            },
        },
    }


def _tags(routes: Sequence[Route]) -> list[dict[str, str]]:
    """Tags, described by the first line of the first module that has a route of theirs."""
    modules: dict[str, str] = {}
    for route in routes:
        modules.setdefault(route.tag, route.handler.__module__)
    described = []
    for tag, module in modules.items():
        text = (sys.modules[module].__doc__ or "").partition("\n\n")[0].rpartition(": ")[2]
        described.append({"name": tag, "description": text[:1].upper() + text[1:]})
    return described


def _response_name(status: int) -> str:
    return HTTPStatus(status).phrase.title().replace(" ", "")


def _problem_response(status: int) -> dict[str, Any]:
    kinds = [kind for kind in problem.ProblemKind if kind.status == status]
    response: dict[str, Any] = {
        "description": "\n".join(f"- `{kind.type}`: {kind.title}" for kind in kinds),
        "content": {problem.MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
    }
    if status in problem.RETRIED_STATUSES:
        seconds = {"type": "integer", "minimum": 1}
        response["headers"] = {
            "Retry-After": {"description": "Seconds.", "required": True, "schema": seconds}
        }
    return response


def handler(routes: Sequence[Route]) -> Callable[[web.Request], Awaitable[web.Response]]:
    """Create a handler that serves the document, generated at the first request."""

    generating: asyncio.Future[bytes] | None = None

    def generate() -> bytes:
        return orjson.dumps(document(routes))

    async def handle(_: web.Request) -> web.Response:
        nonlocal generating
        # Once, in one thread: it takes half a second, and pydantic builds the models meanwhile.
        if generating is None:
            generating = asyncio.ensure_future(asyncio.to_thread(generate))
        body = await asyncio.shield(generating)
        return web.Response(body=body, content_type="application/json")

    return handle


def _forms(routes: Sequence[Route]) -> dict[str, tuple[Any, JsonSchemaMode]]:
    """Types of queries, bodies and responses by name."""
    forms: dict[str, tuple[Any, JsonSchemaMode]] = {}
    for route in routes:
        if route.query is not None:
            forms[f"{route.operation_id} query"] = route.query, "validation"
        for model in route.bodies:
            forms[f"{route.operation_id} {model.__name__}"] = model, "validation"
        for status, form in route.responses.items():
            name = f"{route.operation_id} {status}"
            if isinstance(form, PageOf):
                forms[name] = form.item, "serialization"
                if form.extra is not None:
                    forms[f"{name} rest"] = form.extra, "serialization"
            else:
                forms[name] = form, "serialization"
    return forms


def _operation(route: Route, forms: SchemaSet) -> dict[str, Any]:
    name = route.operation_id
    operation: dict[str, Any] = {
        "operationId": name,
        "summary": route.summary,
        "description": _description(route),
        "tags": [route.tag],
        "parameters": [*_in_path(route), *_in_query(route, forms), *_in_headers(route)],
        "responses": {
            str(status): {
                "description": "Success.",
                "content": {
                    "application/json": {"schema": _response_schema(name, status, form, forms)}
                },
            }
            for status, form in route.responses.items()
        }
        | {
            str(status): {"$ref": f"#/components/responses/{_response_name(status)}"}
            for status in sorted({kind.status for kind in route.expected_problems})
        },
        "x-scope": route.scope,
    }
    if route.bodies:
        schemas = [forms.by_name[f"{name} {model.__name__}"] for model in route.bodies]
        content = {"schema": schemas[0] if len(schemas) == 1 else {"oneOf": schemas}}
        if examples := {
            model.__name__: {"value": model.example} for model in route.bodies if model.example
        }:
            content["examples"] = examples
        operation["requestBody"] = {
            "required": route.body_required,
            "description": _body_limit(route),
            "content": {"application/json": content},
        }
    return operation


def _body_limit(route: Route) -> str:
    text = f"At most {route.body_bytes_max // 1024:,} KiB"
    if route.body_bytes_max != PAYLOAD_BODY_BYTES_MAX:
        return f"{text}."
    margin = f"{EVENT_BYTES_MAX // 1024} KiB"
    return f"{text}, or the maximum payload in Base64 and {margin}, whichever is larger."


def _description(route: Route) -> str:
    scope = (
        f"Requires the scope `{route.scope}`."
        if route.scope is not None
        else "Available to every token."
    )
    return (
        f"{scope} Not available to tenant tokens."
        if route.tenants is TenantAccess.SYSTEM
        else scope
    )


def _in_path(route: Route) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "path", "required": True, "schema": route.path_schema}
        for name in route.parameters
    ]


def _in_query(route: Route, forms: SchemaSet) -> list[dict[str, Any]]:
    if route.query is None:
        return []
    query = forms.object(f"{route.operation_id} query")
    required = query.get("required", ())
    return [
        {"name": name, "in": "query", "required": name in required} | _parameter(schema)
        for name, schema in query["properties"].items()
    ]


def _parameter(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema and the description of a parameter, which cannot be null."""
    schema = dict(schema)  # Other routes have the same query.
    forms = [each for each in schema.pop("anyOf", ()) if each != {"type": "null"}]
    description = schema.pop("description", None)
    if len(forms) == 1:
        schema |= forms[0]
    elif forms:
        schema["anyOf"] = forms
    inner = schema.pop("description", None) if "$ref" not in schema else None
    text = "  ".join(filter(None, (description, inner)))
    return {"schema": schema} | ({"description": text} if text else {})


def _in_headers(route: Route) -> list[dict[str, Any]]:
    return [
        {"name": n, "in": "header", "description": what, "schema": text_schema(ONCE_BYTES_MAX)}
        for n, what in route.headers.items()
    ]


def _response_schema(name: str, status: int, form: Any, forms: SchemaSet) -> dict[str, Any]:
    schema: dict[str, Any] = forms.by_name[f"{name} {status}"]
    if not isinstance(form, PageOf):
        return schema
    rest: dict[str, Any] = {}
    if form.extra is not None:
        rest = forms.object(f"{name} {status} rest")["properties"]
    return {
        "type": "object",
        "required": ["items", "next", *rest],
        "properties": {
            "items": {"type": "array", "items": schema},
            "next": {
                "type": ["string", "null"],
                "description": "Value of `after` for the next page; null: last page.",
            },
            **rest,
        },
    }


def _used(paths: dict[str, Any], shared: dict[str, Any]) -> dict[str, Any]:
    """Return the shared schemas that are referenced, directly or indirectly."""
    used: dict[str, Any] = {}
    unvisited = [paths]
    while unvisited:
        for name in map(_name_in, re.findall(r"#/components/schemas/\w+", str(unvisited.pop()))):
            if name in shared and name not in used:
                used[name] = shared[name]
                unvisited.append(shared[name])
    return dict(sorted(used.items()))


def _name_in(reference: str) -> str:
    return reference.rpartition("/")[2]
