"""The document: every route is in it, with its scope, and it is what it says it is."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import jsonschema_rs
import pytest

from outbox.api import problem
from outbox.api.openapi import document
from outbox.api.route import TenantAccess
from outbox.api.routes import ROUTES
from outbox.cli.main import COMMANDS

if TYPE_CHECKING:
    from tests.support.api import Api

DOCUMENT = document(ROUTES)
OPERATIONS: dict[tuple[str, str], Any] = {
    (method.upper(), path): operation
    for path, methods in DOCUMENT["paths"].items()
    for method, operation in methods.items()
}


def test_every_route_is_in_it_once() -> None:
    assert list(OPERATIONS) == [(route.method, route.path) for route in ROUTES]
    names = [operation["operationId"] for operation in OPERATIONS.values()]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.operation_id)
def test_a_route_tells_its_scope_and_what_goes_in_and_out(route: Any) -> None:
    told = OPERATIONS[route.method, route.path]
    assert told["x-scope"] == route.scope
    scope = "every token" if route.scope is None else f"`{route.scope}`"
    assert scope in told["description"]
    assert ("Not available to tenant tokens" in told["description"]) == (
        route.tenants is TenantAccess.SYSTEM
    )
    assert told["summary"] == route.summary
    inside = {each["name"] for each in told["parameters"] if each["in"] == "path"}
    assert inside == set(re.findall(r"{(\w+)}", route.path))
    query = [each["name"] for each in told["parameters"] if each["in"] == "query"]
    assert query == list(route.query.model_fields if route.query else ())
    assert ("requestBody" in told) == (route.body is not None)
    assert set(told["responses"]) == {*map(str, route.responses), "429", "default"}


def test_gets_need_read_and_what_changes_something_needs_more() -> None:
    for route in ROUTES:
        if route.path == "/v1/me":
            assert route.scope is None
        elif route.path.startswith(("/v1/tokens", "/v1/declaration")):
            # Credentials are in what they show.
            assert route.scope == "operate"
        elif route.method == "GET":
            assert route.scope == "read"
        elif (route.method, route.path) == ("POST", "/v1/events"):
            assert route.scope == "publish"
        else:
            assert route.scope == "operate"


def test_every_reference_leads_somewhere_and_everything_is_referred_to() -> None:
    shared = DOCUMENT["components"]["schemas"]
    text = json.dumps(DOCUMENT)
    referred = set(re.findall(r'"#/components/schemas/([^"]+)"', text))
    assert referred == set(shared)
    assert "outbox__" not in text


def test_every_schema_is_one() -> None:
    for name, schema in DOCUMENT["components"]["schemas"].items():
        jsonschema_rs.meta.validate(
            {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
        )
        assert schema.get("description") or schema.get("enum"), name


def test_every_kind_of_problem_is_told() -> None:
    told = DOCUMENT["components"]["schemas"]["Problem"]["properties"]["type"]["enum"]
    assert told == [kind.type for kind in problem.ProblemKind]
    assert len({kind.type for kind in problem.ProblemKind}) == len(problem.ProblemKind)


def test_every_command_has_its_routes_or_is_said_to_have_none() -> None:
    without = {"alerts", "conform", "demo", "listen", "migrate", "prove", "rekey", "relay"}
    routes = {
        "apply": "/v1/declaration",
        "dead": "/v1/dead-letters",
        "endpoint": "/v1/endpoints",
        "publish": "/v1/events",
        "replay": "/v1/replays",
        "schedule": "/v1/schedules",
        "token": "/v1/tokens",
        "trace": "/v1/trace/{id}",
    }
    for command in COMMANDS:
        path = routes.get(command.name, f"/v1/{command.name}")
        assert (path in DOCUMENT["paths"]) == (command.name not in without), command.name


@pytest.mark.one_major
async def test_it_is_served_to_everybody(anybody: Api) -> None:
    response = await anybody.get("/openapi.json")
    assert response.json == json.loads(json.dumps(DOCUMENT))
    assert response.json["openapi"] == "3.1.0"
