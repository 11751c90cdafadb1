"""The server accepts what the OpenAPI document offers, and refuses what it excludes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from outbox_api.routes import ROUTES
from packages.api.tests.walk import EXAMPLE, WALK, prepare
from tests.support.api import api_document, make_token, serving

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tests.support.postgres import Database

pytestmark = [pytest.mark.system, pytest.mark.one_major, pytest.mark.slow]

INVALID = (400, 413, 415, 422)
REFUSED = (*INVALID, 404, 409)
"""A name that cannot exist may also be one that does not exist."""


def resolved(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema in place of a reference to it."""
    if "$ref" not in schema:
        return schema
    found: Mapping[str, Any] = api_document()["components"]["schemas"][
        schema["$ref"].split("/")[-1]
    ]
    return found


def forms(schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The alternatives of a schema."""
    schema = resolved(schema)
    return [each for form in schema.get("anyOf", ()) for each in forms(form)] or [schema]


def content(operation: Mapping[str, Any]) -> Any:
    """What the document says of the body of an operation."""
    return operation.get("requestBody", {}).get("content", {}).get("application/json")


def models(operation: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The schemas of the objects that an operation takes."""
    if (body := content(operation)) is None:
        return []
    return [resolved(each) for each in body["schema"].get("oneOf", [body["schema"]])]


def excluded(schema: Mapping[str, Any]) -> Iterator[Any]:
    """Values of the type of a schema that it excludes."""
    for form in forms(schema):
        if form.get("enum") or form.get("pattern") or form.get("format") == "date-time":
            yield "\0~"
        if "minLength" in form:
            yield ""
        if "maxLength" in form:
            yield "a" * (form["maxLength"] + 1)
        if "minimum" in form:
            yield form["minimum"] - 1
        if "exclusiveMinimum" in form:
            yield form["exclusiveMinimum"]
        if "maximum" in form:
            yield form["maximum"] + 1
        if form.get("minItems"):
            yield []
        if form.get("type") == "array":
            yield from ([each] for each in excluded(form["items"]))


def filled(operation: Mapping[str, Any], body: Any) -> Any:
    """A body with each default, and null for each field that may be null."""
    if body is None:
        return None
    (model,) = [each for each in models(operation) if body.keys() <= each["properties"].keys()]
    more = {}
    for name, field in model["properties"].items():
        if "default" in field:
            more[name] = field["default"]
        elif any(form.get("type") == "null" for form in forms(field)):
            more[name] = None
    return more | body


async def test_the_server_accepts_what_is_described_and_refuses_what_is_not(
    database: Database,
) -> None:
    """In one walk: what is refused changes nothing."""
    await prepare(database)
    operations = api_document()["paths"]
    wrong = []
    refusals = 0
    async with serving(database, api_rate_max=100_000.0) as anonymous:
        api = anonymous.with_token(await make_token(database, "walker"))
        for step in WALK:
            operation = operations[step.declared.path][step.method.lower()]
            for name, field in (
                (name, field)
                for model in models(operation)
                for name, field in model["properties"].items()
            ):
                for value in excluded(field):
                    response = await step.send(
                        database, api, lambda body, name=name, value=value: body | {name: value}
                    )
                    refusals += 1
                    if response.status not in REFUSED:
                        wrong.append((step.route, name, str(value)[:20], response.status))
            for parameter in operation["parameters"]:
                for value in excluded(parameter["schema"]) if parameter["in"] == "query" else ():
                    response = await api.request(
                        step.method,
                        step.path.format(job=1, event="x"),
                        step.body and {},
                        **{**step.query, parameter["name"]: value},
                    )
                    refusals += 1
                    if response.status not in REFUSED:
                        wrong.append(
                            (step.route, parameter["name"], str(value)[:20], response.status)
                        )
            if step.body is not EXAMPLE:
                for example in (content(operation) or {}).get("examples", {}).values():
                    response = await step.send(database, api, lambda _, e=example: e["value"])
                    if response.status in INVALID:
                        wrong.append((step.route, "example", response.detail))
            response = await step.send(database, api, partial(filled, operation))
            if response.status not in (200, 201):
                wrong.append((step.route, "filled", response.detail))
    assert not wrong, "\n".join(map(str, wrong))
    assert refusals > 300


def test_every_body_has_an_example_that_its_schema_accepts() -> None:
    """Except a client certificate, whose example would have a private key."""
    without = [
        route.operation_id for route in ROUTES for model in route.bodies if model.example is None
    ]
    assert without == ["put_endpoints_name_certificate"]
