"""Responses to a tenant do not depend on other tenants and operators.

Two installations have the same history of acme; one of them also has a second, larger tenant
and named operators.  Responses to acme's token are equal byte by byte, except for times, random
ids and sequential ids, which are counted over the whole installation.
"""

from __future__ import annotations

import re
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import pytest

from outbox.operations.endpoints import states as endpoint_states
from outbox_api.route import TenantAccess
from outbox_api.routes import ROUTES
from outbox_api.tenancy import name_prefix
from tests.support.api import make_token, serving
from tests.support.relay import OK, REFUSED, Network, add_endpoint, all_ended, publish, running

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.api import Api
    from tests.support.postgres import Database, Server

pytestmark = pytest.mark.one_major

URL = "http://127.0.0.1:9/"
ORDER = ("GET", "POST", "PATCH", "DELETE")
NUMBERED = {
    "again",
    "backfill",
    "blocked_by",
    "dead",
    "dead_letter",
    "id",
    "job",
    "next",
    "outbox_id",
}
"""Fields whose numbers are counted over everything."""
RANDOM = {"secret", "lane", "body"}
CLOCKS = {"elapsed_ms", "oldest_s"}


def plain(reported: Any, name: str = "") -> Any:
    """A response without the values that differ between any two runs."""
    if isinstance(reported, dict):
        return {n: plain(value, n) for n, value in reported.items()}
    if isinstance(reported, list):
        return [plain(each, name) for each in reported]
    if reported is not None and name in NUMBERED | RANDOM | CLOCKS:
        return f"a {name}"
    if isinstance(reported, str):
        reported = re.sub(r"\d{4}-\d\d-\d\d[T ][0-9:.]+(Z|\+00:00)", "a time", reported)
        reported = re.sub(r"^1\d{9}$", "a second", reported)
        reported = re.sub(r"[0-9a-f]{8}-[0-9a-f-]{27}", "a uuid", reported)
        reported = re.sub(
            r"(dead letter |dead replay |dead discard |job |/replays/)\d+", r"\1N", reported
        )
        reported = re.sub(r"\b[0-9a-f]{12}-\d+-\d+\b|\d+ [smhd]\b|a moment", "…", reported)
    return reported


def differences(one: Any, other: Any, where: str = "") -> Iterator[str]:
    """The places where two responses differ."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        for name, value in one.items():
            yield from differences(value, other[name], f"{where}.{name}")
    elif isinstance(one, list | tuple) and isinstance(other, list | tuple):
        for n, (mine, yours) in enumerate(zip_longest(one, other)):
            yield from differences(mine, yours, f"{where}[{n}]")
    elif one != other:
        yield f"{where}: {one!r}, among others {other!r}"


ONE_INTERVAL = """
UPDATE delivery_history SET began_at = (SELECT max(began_at) FROM delivery_history)
"""


class World:
    """An installation, and the rows of acme in it."""

    def __init__(self, database: Database, api: Api, *, alone: bool) -> None:
        self.database, self.api, self.alone = database, api, alone
        self.ids: dict[str, Any] = {}

    async def live_through(self) -> None:
        """Create the same history of acme in every installation."""
        database = self.database
        await self._others(0)
        operator = self.api.with_token(await make_token(database, "globex-operator"))
        await add_endpoint(database, "acme-shop", tenant="acme", url=URL)
        network = Network(lambda sent: REFUSED if sent.body["data"] == "bad" else OK)
        async with running(database, network):
            for n, payload in enumerate(("good", "bad", "fine")):
                await publish(database, payload, key="same-key", tenant="acme")
                await all_ended(database)
                await self._others(n + 1)
                await all_ended(database)
        secret = await make_token(database, "acme-helper", ("operate",), tenant="acme")
        helper = self.api.with_token(secret)
        await helper.post("/v1/schedules", {**self.schedule("acme.nightly")})
        await operator.post("/v1/endpoints/acme-shop/resume", {})
        await helper.post("/v1/endpoints/acme-shop/resume", {})
        made = await operator.post("/v1/replays", {"endpoint": "acme-shop", "since": "1h"})
        async with running(database, network):
            await all_ended(database)
        async with database.connection(server_settings={"search_path": "relay"}) as connection:
            await endpoint_states.pause_endpoints(
                connection, "relay", ["acme-shop"], actor=f"root@{self._operators}"
            )
            # An interval may have ended meanwhile.
            await connection.execute(ONE_INTERVAL)
        secret = await make_token(database, "acme", ("read", "publish", "operate"), tenant="acme")
        self.api = self.api.with_token(secret)
        once = await self.api.post("/v1/events", {"type": "a.b", "once": "same-once", "key": "k"})
        letter, *_ = await self.api.items("/v1/dead-letters")
        (sent, *_) = (await self.api.get("/v1/deliveries")).json["items"]
        self.ids = {
            "letter": letter["id"],
            "event": letter["event"],
            "waits": once.json["id"],
            "job": made.json["id"],
            "delivery": sent["delivery"],
        }

    @property
    def _operators(self) -> str:
        return "lonely" if self.alone else "globex-host"

    async def _others(self, round_: int) -> None:
        """Create the history of others."""
        if self.alone:
            return
        if round_ == 0:
            await add_endpoint(self.database, "globex-shop", tenant="globex")
            await add_endpoint(self.database, "globex-all", all_tenants=True, types=("x.y",))
            everything = self.api.with_token(await make_token(self.database, "globex-ops"))
            await everything.post("/v1/schedules", self.schedule("globex-nightly"))
            await everything.post("/v1/events", {"type": "x.y", "once": "same-once"})
            later = {"type": "x.y", "key": "same-key", "deliver_at": "2999-01-01T00:00:00Z"}
            await everything.post("/v1/events", later)
        payloads = "bad", *range(1, 20)
        await publish(self.database, *payloads, key="same-key", tenant="globex")
        await publish(self.database, *range(20), type="x.y", key="same-key")

    @staticmethod
    def schedule(name: str) -> dict[str, Any]:
        tenant = {} if name.startswith("acme") else {"tenant": "globex"}
        return {"name": name, "cron": "@daily", "type": "a.b", **tenant}

    async def reported(self) -> dict[str, tuple[int, Any]]:
        """The responses of all routes to acme's token."""
        responses: dict[str, tuple[int, Any]] = {}
        for route in sorted(
            ROUTES, key=lambda each: ORDER.index(each.method.replace("PUT", "GET"))
        ):
            if route.tenants is TenantAccess.SYSTEM:
                continue
            asked = list(self.requests(route.method, route.path))
            assert asked, f"{route.method} {route.path} is not in the walk"
            for path, body, query in asked:
                response = await self.api.request(route.method, path, body, **query)
                key = f"{len(responses)}: {route.method} {route.path} {body} {query}"
                # What was asked for may be repeated.
                known = response.raw.replace(b"acme.globex-shop", b"").replace(
                    b"acme.globex-nightly", b""
                )
                assert b"globex" not in known, known
                assert b"lonely" not in known, known
                responses[key] = response.status, plain(response.json)
        return responses

    def requests(self, method: str, path: str) -> Iterator[tuple[str, Any, dict[str, Any]]]:
        ids = self.ids
        wanted = {"cron": "@daily", "type": "a.b"}
        match method, path:
            case "GET", "/v1/journal":
                yield path, None, {"limit": 100}
                yield path, None, {"endpoint": "acme-shop"}
            case "GET", "/v1/events":
                yield path, None, {}
                yield path, None, {"key": "same-key"}
                yield path, None, {"type": "a.*", "since": "1h"}
            case "GET", "/v1/trace/{id}":
                for text in (ids["event"], ids["waits"], "same-key", "same-once", "nobody's"):
                    yield f"/v1/trace/{text}", None, {"payload": True}
            case "GET", "/v1/deliveries":
                yield path, None, {}
                yield path, None, {"key": "same-key"}
                yield path, None, {"failed": True}
                yield path, None, {"type": "a.*", "outcome": "delivered"}
            case "GET", "/v1/deliveries/{id}":
                for text in (ids["delivery"], ids["event"], "same-key", "nobody's"):
                    yield f"/v1/deliveries/{text}", None, {}
            case "GET", "/v1/replays":
                yield path, None, {"state": "all"}
            case "GET", _ if "{" not in path:
                yield path, None, {}
            case "POST", "/v1/endpoints":
                for name in ("acme.new", "globex-shop", "acme-shop", "nobody", "acme.new"):
                    yield path, {"name": name, "url": URL}, {}
            case "PATCH", _:
                for name in ("globex-shop", "nobody", "acme.newer"):
                    yield "/v1/endpoints/acme.new", {"name": name}, {}
            case "POST", "/v1/schedules":
                for name in ("acme.weekly", "globex-nightly", "nobody", "acme.weekly"):
                    yield path, {**wanted, "name": name}, {}
                for name in ("acme.weekly", "globex-nightly", "nobody"):
                    yield path, {**wanted, "name": name, "replace": True}, {}
            case "POST", "/v1/events":
                yield path, {"type": "a.b", "once": "same-once"}, {}
                yield path, {"type": "a.b", "once": "mine"}, {}
            case "POST", "/v1/replays":
                for endpoint in ("globex-shop", "nobody"):
                    yield path, {"endpoint": endpoint, "since": "1h"}, {}
            case "POST", "/v1/dead-letters/replay":
                for endpoint in ("globex-shop", "nobody", "acme-shop"):
                    yield path, {"endpoint": endpoint}, {}
                yield path, {"all": True, "dry_run": True}, {}
            case "POST", "/v1/dead-letters/discard":
                yield path, {"all": True}, {}
            case "POST", "/v1/erase":
                yield path, {"tenant": "acme", "dry_run": True}, {}
            case "POST", "/v1/endpoints/{name}/enable":
                yield "/v1/endpoints/acme-shop/enable", {}, {}
                yield "/v1/endpoints/globex-shop/enable", {}, {}
            case "DELETE", "/v1/endpoints/{name}":
                for query in ({}, {"drain": True}, {"dead_letter": True}):
                    yield "/v1/endpoints/acme-shop", None, query
            case _, _ if path.startswith("/v1/dead-letters"):
                yield path.replace("{id}", str(ids["letter"])), None, {}
            case _, _ if path.startswith("/v1/replays"):
                yield path.replace("{id}", str(ids["job"])), None, {}
            case _, _ if path.startswith("/v1/endpoints"):
                yield path.replace("{name}", "acme-shop"), _nothing(path), {}
            case _, _ if path.startswith("/v1/schedules"):
                yield path.replace("{name}", "acme.nightly"), None, {}
            case _, "/v1/quotas/{tenant}":
                for tenant in ("acme", "globex", "nobody"):
                    yield f"/v1/quotas/{tenant}", None, {}
            case _, _ if path.startswith("/v1/once"):
                yield path.replace("{key}", "same-once"), None, {}


def _nothing(path: str) -> Any:
    return None if path.endswith(("{name}", "test")) else {}


@pytest.mark.slow
async def test_responses_to_a_tenant_do_not_depend_on_other_tenants(server: Server) -> None:
    reported: list[dict[str, tuple[int, Any]]] = []
    for alone in (True, False):
        async with server.database() as database, serving(database) as api:
            world = World(database, api, alone=alone)
            await world.live_through()
            reported.append(await world.reported())
    alone_, among_others = reported
    assert list(alone_) == list(among_others)
    for asked, responded in alone_.items():
        assert list(differences(responded, among_others[asked])) == [], asked
    assert sum(status == 200 for status, _ in alone_.values()) >= 20


@pytest.mark.full
async def test_a_tenant_sees_actors_as_operator_or_relay(server: Server) -> None:
    async with server.database() as database, serving(database) as api:
        world = World(database, api, alone=True)
        await world.live_through()
        acme = world.api
        shown = (await acme.get("/v1/endpoints/acme-shop")).json["endpoint"]
        assert (shown["state"], shown["state_by"]) == ("paused", "operator")
        (listed,) = await acme.items("/v1/endpoints")
        assert listed["state_by"] == "operator"
        kinds = ("endpoint_resumed", "endpoint_retried")
        resumed = [r for r in await acme.items("/v1/journal") if r["kind"] in kinds]
        assert [row["actor"] for row in resumed] == ["token acme-helper", "operator"]
        assert {row["session_role"] for row in resumed} == {None}
        (schedule,) = await acme.items("/v1/schedules")
        assert schedule["state_by"] in (None, "token acme-helper")
        (job,) = await acme.items("/v1/replays", state="all")
        assert (job["requested_by"], job["done"], job["all"]) == ("operator", 100, 100)
        (trace,) = (await acme.get("/v1/trace/k")).json["events"]
        assert "by operator" not in " ".join(trace["diagnosis"])
        assert trace["sequencing"]["high"] is None


TENANTS = (
    "acme",
    "acme.com",
    "Acme Inc.",
    "7c1cb3a4-6f0b",
    "x" * 99,
)


async def test_names_of_a_tenant_start_with_its_prefix(
    database: Database, client: Api, subtests: pytest.Subtests
) -> None:
    for n, tenant in enumerate(TENANTS):
        with subtests.test(tenant=tenant):
            secret = await make_token(database, f"own-{n}", ("operate",), tenant=tenant)
            api = client.with_token(secret)
            refused = await api.post("/v1/endpoints", {"name": "shop", "url": URL})
            assert (refused.status, name_prefix(tenant) in refused.detail) == (422, True)
            name = re.findall(r'"([^"]+)"$', refused.detail)[0]
            assert (await api.post("/v1/endpoints", {"name": name, "url": URL})).status == 201
            requests = {"name": name, "cron": "@daily", "type": "a.b"}
            assert (await api.post("/v1/schedules", requests)).status == 201


def test_no_two_tenants_share_a_name_prefix() -> None:
    tenants = ["acme", "acme.", "acme.com", "acme.com.", "ACME", "acme-com", "", " ", "x" * 61]
    prefixes = {name_prefix(each) for each in tenants}
    assert len(prefixes) == len(tenants)
    assert all(each.count(".") == 1 for each in prefixes)
