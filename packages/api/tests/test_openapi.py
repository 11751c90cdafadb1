"""The OpenAPI document has every route with its scope, and is valid."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from typing import TYPE_CHECKING, Any

import jsonschema_rs
import pytest
from click.testing import CliRunner

from outbox.cli.main import COMMANDS, cli
from outbox_api import openapi, problem
from outbox_api.route import TenantAccess
from outbox_api.routes import ROUTES
from tests.support.api import api_document
from tests.support.waiting import LIVE_S, until

if TYPE_CHECKING:
    from tests.support.api import Api

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def described() -> dict[str, Any]:
    """The document: not made at import, which takes as long as that of all other tests' modules."""
    return api_document()


@pytest.fixture(scope="session")
def operations(described: dict[str, Any]) -> dict[tuple[str, str], Any]:
    return {
        (method.upper(), path): operation
        for path, methods in described["paths"].items()
        for method, operation in methods.items()
    }


def test_every_route_is_documented_once(operations: dict[tuple[str, str], Any]) -> None:
    assert sorted(operations) == sorted((route.method, route.path) for route in ROUTES)
    names = [operation["operationId"] for operation in operations.values()]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.operation_id)
def test_a_route_documents_its_scope_request_and_response(
    operations: dict[tuple[str, str], Any], route: Any
) -> None:
    reported = operations[route.method, route.path]
    assert reported["x-scope"] == route.scope
    scope = "every token" if route.scope is None else f"`{route.scope}`"
    assert scope in reported["description"]
    assert ("Not available to tenant tokens" in reported["description"]) == (
        route.tenants is TenantAccess.SYSTEM
    )
    assert reported["summary"] == route.summary
    inside = {each["name"] for each in reported["parameters"] if each["in"] == "path"}
    assert inside == set(re.findall(r"{(\w+)}", route.path))
    query = [each["name"] for each in reported["parameters"] if each["in"] == "query"]
    assert query == list(route.query.model_fields if route.query else ())
    assert ("requestBody" in reported) == bool(route.bodies)
    problems = {str(kind.status) for kind in route.expected_problems}
    assert set(reported["responses"]) == {*map(str, route.responses), *problems}


def test_get_requires_read_and_changes_require_more() -> None:
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


def test_every_schema_reference_resolves_and_every_schema_is_used(
    described: dict[str, Any],
) -> None:
    shared = described["components"]["schemas"]
    text = json.dumps(described)
    referred = set(re.findall(r'"#/components/schemas/([^"]+)"', text))
    assert referred == set(shared)
    assert "outbox__" not in text


def test_every_schema_is_valid(described: dict[str, Any]) -> None:
    for name, schema in described["components"]["schemas"].items():
        jsonschema_rs.meta.validate(
            {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
        )
        assert schema.get("description") or schema.get("enum"), name


def test_generators_find_nothing_that_they_would_send_or_require_by_mistake(
    described: dict[str, Any],
) -> None:
    """A generated client sends a default, or requires the property that has one."""

    def check(schema: Any, place: str) -> None:
        if isinstance(schema, list):
            for each in schema:
                check(each, place)
        elif isinstance(schema, dict):
            assert "default" not in schema or place.endswith("/properties"), place
            assert "prefixItems" not in schema, place
            for name, each in schema.items():
                check(each, f"{place}/{name}")

    check(described, "")
    schemas = described["components"]["schemas"]
    assert schemas["NewEndpointBody"]["required"] == ["name", "url"]
    assert schemas["NewEvent"]["required"] == ["type"]
    assert schemas["NewEvents"]["required"] == ["events"]
    for name, schema in schemas.items():
        if not name.endswith("Body") and name not in ("NewEvent", "NewEvents", "Problem"):
            assert schema.get("required", []) == list(schema.get("properties", ())), name


def test_one_event_or_several_are_two_schemas(operations: dict[tuple[str, str], Any]) -> None:
    publish = operations["POST", "/v1/events"]
    content = publish["requestBody"]["content"]["application/json"]
    assert [each["$ref"].split("/")[-1] for each in content["schema"]["oneOf"]] == [
        "NewEvent",
        "NewEvents",
    ]
    response = publish["responses"]["201"]["content"]["application/json"]["schema"]
    assert len(response["oneOf"]) == 2


def test_every_tag_is_described(
    described: dict[str, Any], operations: dict[tuple[str, str], Any]
) -> None:
    tags = {each["name"]: each["description"] for each in described["tags"]}
    assert set(tags) == {tag for each in operations.values() for tag in each["tags"]}
    for tag, text in tags.items():
        assert re.fullmatch(r"[A-Z][^/]*\.", text), (tag, text)


def test_the_command_prints_the_document_without_settings(described: dict[str, Any]) -> None:
    done = CliRunner(env={"OUTBOX_DSN": "no dsn"}).invoke(cli, ["api", "--openapi"])
    assert done.exit_code == 0
    assert json.loads(done.stdout) == json.loads(json.dumps(described))


def test_every_problem_type_is_documented(described: dict[str, Any]) -> None:
    reported = described["components"]["schemas"]["Problem"]["properties"]["type"]["enum"]
    assert reported == [kind.type for kind in problem.ProblemKind]
    assert len({kind.type for kind in problem.ProblemKind}) == len(problem.ProblemKind)


def test_every_command_has_routes_or_is_listed_as_without(described: dict[str, Any]) -> None:
    without = {
        "adopt",
        "alerts",
        "api",
        "completion",
        "conform",
        "demo",
        "listen",
        "migrate",
        "prove",
        "rekey",
        "relay",
        "snapshot",
    }
    routes = {
        "apply": "/v1/declaration",
        "dead": "/v1/dead-letters",
        "endpoint": "/v1/endpoints",
        "publish": "/v1/events",
        "quota": "/v1/quotas",
        "replay": "/v1/replays",
        "schedule": "/v1/schedules",
        "token": "/v1/tokens",
        "trace": "/v1/trace/{id}",
    }
    for command in COMMANDS:
        path = routes.get(command.name, f"/v1/{command.name}")
        assert (path in described["paths"]) == (command.name not in without), command.name


@pytest.mark.one_major
async def test_the_document_needs_no_token(client: Api, described: dict[str, Any]) -> None:
    response = await client.get("/openapi.json")
    assert response.json == json.loads(json.dumps(described))
    assert response.json["openapi"] == "3.1.0"


async def test_the_document_is_made_once_for_all_who_ask_first(
    client: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the first of them disconnects."""
    begun: list[Any] = []
    goes_on = threading.Event()

    def make(routes: Any) -> dict[str, Any]:
        begun.append(routes)
        assert goes_on.wait(LIVE_S)
        return {"openapi": "3.1.0"}

    monkeypatch.setattr(openapi, "document", make)
    first = asyncio.create_task(client.get("/openapi.json"))
    await until(lambda: begun, what="the document to be begun")
    first.cancel()
    others = asyncio.gather(*(client.get("/openapi.json") for _ in range(4)))
    await client.get("/v1/me")  # Arrives after them, and after the end of the first connection.
    goes_on.set()
    assert [each.status for each in await others] == [200] * 4
    assert len(begun) == 1
