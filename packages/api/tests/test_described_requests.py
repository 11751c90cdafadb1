"""The server accepts what the OpenAPI document offers, and refuses what it excludes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import jsonschema_rs
import pytest

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


def excluded_fields(
    operation: Mapping[str, Any], sent: set[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Fields of bodies, or parameters, that an operation excludes, one at a time.

    Args:
        sent: titles of models that were sent before, with another operation.
    """
    for model in models(operation):
        if model["title"] not in sent:
            sent.add(model["title"])
            for name, field in model["properties"].items():
                yield from (("body", {name: value}) for value in excluded(field))
    for parameter in operation["parameters"]:
        if parameter["in"] == "query":
            values = excluded(parameter["schema"])
            yield from (("query", {parameter["name"]: value}) for value in values)


async def test_the_server_accepts_what_is_described_and_refuses_what_is_not(
    database: Database,
) -> None:
    """In one walk: what is refused changes nothing."""
    await prepare(database)
    wrong = []
    refusals = 0
    sent: set[str] = set()
    async with serving(database, api_rate_max=100_000.0) as anonymous:
        api = anonymous.with_token(await make_token(database, "walker"))
        for step in WALK:
            operation = api_document()["paths"][step.declared.path][step.method.lower()]
            for place, field in excluded_fields(operation, sent):
                if place == "query":
                    changed = replace(step, query={**step.query, **field})
                    response = await changed.send(database, api)
                else:
                    response = await step.send(database, api, partial(with_field, field))
                refusals += 1
                if response.status not in REFUSED:
                    wrong.append(f"{step.route} takes {str(field)[:60]}: {response.status}")
            if step.body is not EXAMPLE:
                for example in (content(operation) or {}).get("examples", {}).values():
                    response = await replace(step, body=example["value"]).send(database, api)
                    if response.status in INVALID:
                        wrong.append(f"{step.route} refuses its example: {response.detail}")
            response = await step.send(database, api, partial(filled, operation))
            if response.status not in (200, 201):
                wrong.append(f"{step.route} refuses what may be left out: {response.detail}")
    assert not wrong, "\n".join(wrong)
    assert refusals > 200


def with_field(field: dict[str, Any], body: Any) -> Any:
    return body | field


def test_every_body_has_an_example_that_its_schema_accepts() -> None:
    """Except a client certificate, whose example would have a private key."""
    without = []
    components = {"components": api_document()["components"]}
    for path, methods in api_document()["paths"].items():
        for operation in methods.values():
            for model in models(operation):
                examples = content(operation).get("examples", {})
                if model["title"] in examples:
                    schema = components | model
                    jsonschema_rs.validate(schema, examples[model["title"]]["value"])
                else:
                    without.append(path)
    assert without == ["/v1/endpoints/{name}/certificate"]
