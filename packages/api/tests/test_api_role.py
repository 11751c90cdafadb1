"""A role with the purpose `api` can do what the routes need, and nothing else.

The page docs/reference/api-role.md says which request needs each privilege.
"""

from __future__ import annotations

import re
from collections import defaultdict
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from outbox.core.model.endpoint_settings import SETTINGS
from outbox.operations.tokens import fetch as fetch_tokens
from outbox.store.privileges import require_privileges
from outbox_api import app
from outbox_api import database as database_module
from outbox_api.auth import API_TOKENS
from outbox_api.problem import NOT_GRANTED
from outbox_api.routes import ROUTES
from packages.api.tests.walk import WALK, prepare
from tests.support.api import make_token, serving
from tests.support.postgres import API_ROLE
from tests.support.ranges import next_pending
from tests.support.receivers_listener import listening
from tests.support.roles import dsn_of, role

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from asyncpg import Connection

    from tests.support.postgres import Database
    from tests.support.receivers_listener import Client

    Request = tuple[str, Callable[[], Awaitable[None]], Callable[[], Awaitable[None]]]

pytestmark = [pytest.mark.system, pytest.mark.one_major]

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "api-role.md"
EVERY_SETTING = "every setting"
PATH = {"server_settings": {"search_path": "relay"}}
CHECK = ("change_privileges", "EXECUTE", None)
"""What the check of the privileges needs, and no request."""

REQUIRED = """
SELECT name, privilege, unnest(coalesce(columns, '{NULL}')) FROM required_privileges('api')
EXCEPT
SELECT name, privilege, unnest(coalesce(columns, '{NULL}')) FROM required_privileges('reader')
"""
OBJECT = """
SELECT CASE kind WHEN 'function' THEN 'ROUTINE ' || (
            SELECT oid::regprocedure FROM pg_proc
             WHERE proname = $1 AND pronamespace = 'relay'::regnamespace)
       ELSE kind || ' ' || name END
  FROM required_privileges('api') WHERE name = $1 LIMIT 1
"""
UNUSED = "UPDATE token SET last_used_at = NULL; UPDATE fetch_token SET last_used_at = NULL"


class Privilege(NamedTuple):
    """A privilege on an object, or on a column of it."""

    name: str
    privilege: str
    column: str | None


def documented() -> dict[Privilege, list[str]]:
    """The requests that need each privilege, by the page."""
    found: dict[Privilege, list[str]] = {}
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) != 4 or not cells[0].startswith("`"):
            continue
        columns: list[Any] = re.findall(r"`(\w+)`", cells[2])
        if EVERY_SETTING in cells[2]:
            columns += [each.field for each in SETTINGS.values()]
        for column in columns or [None]:
            privilege = Privilege(cells[0].strip("`"), cells[1], column)
            assert privilege not in found, f"{privilege} is there twice"
            found[privilege] = re.findall(r"`([^`]+)`", cells[3])
    return found


def test_the_walk_has_every_route() -> None:
    walked = {step.name for step in WALK}
    assert walked == {f"{route.method} {route.path}" for route in ROUTES}


async def test_the_page_has_every_privilege(database: Database) -> None:
    async with database.connection(**PATH) as owner:
        required = {Privilege(*row) for row in await owner.fetch(REQUIRED)}
    assert set(documented()) == required - {CHECK}


@asynccontextmanager
async def without(owner: Connection[Any], privilege: Privilege) -> AsyncIterator[None]:
    """Revoke a privilege of the API's role while the block runs."""
    what = await owner.fetchval(OBJECT, privilege.name)
    right = privilege.privilege + (f" ({privilege.column})" if privilege.column else "")
    await owner.execute(f"REVOKE {right} ON {what} FROM {API_ROLE}; {UNUSED}")
    try:
        yield
    finally:
        await owner.execute(f"GRANT {right} ON {what} TO {API_ROLE}")


async def receivers_requests(database: Database) -> AsyncIterator[Request]:
    """The requests of the receivers' listener: with and without a privilege."""
    async with database.connection(**PATH) as owner:
        added = await fetch_tokens.add_fetch_token(owner, "relay", "shop", actor="test")
    lane, sequence = await next_pending(database, "shop")
    deliveries = "/v1/lanes/{lane}/deliveries"
    async with listening(database, added.token) as client:
        for route in ("/v1/lanes", deliveries, deliveries + "/{sequence}"):
            path = route.removeprefix("/v1/").replace("{lane}", lane)
            path = path.replace("{sequence}", str(sequence))

            async def refuse(client: Client = client, path: str = path) -> None:
                assert (await client.get(path, status=503))["detail"] == NOT_GRANTED

            async def work(client: Client = client, path: str = path) -> None:
                await client.get(path)

            yield f"receivers: GET {route}", refuse, work


async def api_requests(database: Database) -> AsyncIterator[Request]:
    """The requests of the API: with and without a privilege."""
    secret = await make_token(database, "walker")
    async with serving(database, api_rate_max=100_000.0) as anonymous:
        api = anonymous.with_token(secret)
        for step in WALK:

            async def refuse(step: Any = step) -> None:
                response = await step.send(database, api)
                assert response.status == 503, response.raw
                assert response.detail == NOT_GRANTED

            async def work(step: Any = step) -> None:
                response = await step.send(database, api)
                assert response.status in (200, 201), (step.route, response.raw)

            yield step.route, refuse, work


async def test_every_route_works_and_needs_the_privileges_that_the_page_names(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each request authenticates, and no request fails by the check that follows a refusal.
    monkeypatch.setattr(app, "API_TOKENS", replace(API_TOKENS, kept_s=0.0))
    monkeypatch.setattr(database_module, "require_privileges", _check_nothing)
    needed = defaultdict(list)
    for privilege, routes in documented().items():
        for route in routes:
            needed[route].append(privilege)
    await prepare(database)
    owner = await database.connect(**PATH)
    for requests in (receivers_requests, api_requests):
        async for route, refuse, work in requests(database):
            for privilege in needed.pop(route, ()):
                async with without(owner, privilege):
                    try:
                        await refuse()
                    except AssertionError as error:
                        raise AssertionError(f"{route} works without {privilege}") from error
            await work()
    assert not needed, "the page names requests that are not made"


async def _check_nothing(*_: object) -> None:
    """In place of the check of privileges."""


@pytest.mark.parametrize("purposes", [(), ("reader",), ("operator", "producer")])
async def test_a_role_of_another_purpose_is_named_in_the_log_only(
    database: Database, logs: list[dict[str, Any]], purposes: tuple[str, ...]
) -> None:
    secret = await make_token(database)
    async with (
        role(database, *purposes) as name,
        serving(database, dsn=dsn_of(database, name)) as anonymous,
    ):
        api = anonymous.with_token(secret)
        for _ in range(2):
            response = await api.get("/v1/me")
            assert (response.status, response.detail) == (503, NOT_GRANTED)
        (reported,) = [entry["reason"] for entry in logs if entry["log_level"] == "error"]
        assert "grant the role its purpose (outbox migrate --api ROLE)" in reported
        async with database.connection(**PATH) as owner:
            await owner.execute(f"SELECT grant_api('\"{name}\"')")
        assert (await api.get("/v1/me")).status == 200


async def test_a_role_is_checked_at_first_and_after_a_refusal(
    database: Database, logs: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = 0

    async def count(*arguments: Any) -> None:
        nonlocal checks
        checks += 1
        await require_privileges(*arguments)

    monkeypatch.setattr(database_module, "require_privileges", count)
    secret = await make_token(database)
    owner = await database.connect(**PATH)
    async with serving(database) as anonymous:
        api = anonymous.with_token(secret)
        for _ in range(3):
            assert (await api.get("/v1/tokens")).status == 200
        assert checks == 1
        async with without(owner, Privilege("token", "INSERT", "hash")):
            for _ in range(2):
                response = await api.post("/v1/tokens", {"name": "new", "scopes": ["read"]})
                assert (response.status, response.detail) == (503, NOT_GRANTED)
        refused, checked = [entry["reason"] for entry in logs if entry["log_level"] == "error"]
        assert refused == "InsufficientPrivilegeError: permission denied for table token"
        assert checked.startswith(f'the role "{API_ROLE}" lacks privileges of the purpose "api" ')
        assert checked.endswith(
            f"(INSERT on token); as the role that ran outbox migrate: "
            f"outbox migrate --api {API_ROLE}"
        )
        for _ in range(3):
            assert (await api.get("/v1/tokens")).status == 200
        assert checks == 3
