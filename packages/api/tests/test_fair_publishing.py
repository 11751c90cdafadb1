"""Publishing with tenants' tokens: within the tenant's share at once, or held."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from outbox.operations.events import future as operations
from outbox.operations.rows import ID_MAX
from outbox.operations.schedules import queries as schedules
from outbox_api import app, future_events
from outbox_api.fair_publishing import READ_SUBSCRIPTIONS, FairPublisher
from outbox_api.problem import Refusal
from outbox_api.shared import Shared
from outbox_api.shares import Shares
from outbox_api.token_bucket import Allowance
from tests.support.api import make_token, serving
from tests.support.plans import explain
from tests.support.relay import add_endpoint, fetchval

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.api import Api
    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major

BURST = 10
HELD_DELIVERIES_MAX = 30


class Tenants:
    """An API with small shares, which nothing refills, and its clients."""

    def __init__(self, everything: Api, acme: Api, globex: Api, shared: Shared) -> None:
        self.everything, self.acme, self.globex, self.shared = everything, acme, globex, shared


@pytest.fixture
async def tenants(database: Database, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Tenants]:
    """Of acme two endpoints receive each event, of globex one."""
    share = Allowance(per_s=1e-6, burst=BURST)
    shares = Shares(share, Allowance(per_s=1e-6, burst=1000))
    monkeypatch.setattr(
        app, "FairPublisher", partial(FairPublisher, shares=shares, held_max=HELD_DELIVERIES_MAX)
    )
    await add_endpoint(database, "acme-1", tenant="acme", types=["a.*"])
    await add_endpoint(database, "everything", all_tenants=True, types=["a.**"])
    shared = Shared()
    async with serving(database, shared=shared) as anonymous:
        clients = [
            anonymous.with_token(await make_token(database, name, tenant=tenant))
            for name, tenant in (("all", None), ("acme", "acme"), ("globex", "globex"))
        ]
        yield Tenants(*clients, shared)


def events(*keys: str, **rest: Any) -> dict[str, Any]:
    return {"events": [{"type": "a.b", "key": key} | rest for key in keys]}


async def publish(client: Api, *keys: str, **rest: Any) -> list[str]:
    response = await client.post("/v1/events", events(*keys, **rest))
    assert response.status == 201, response.detail
    return [each["id"] for each in response.json["events"]]


async def stored(database: Database) -> tuple[str, str]:
    """The keys of published events, and of held ones, in their order."""
    row = await fetchval(
        database,
        """SELECT ARRAY[(SELECT string_agg(key, '' ORDER BY id) FROM outbox),
                        (SELECT string_agg(key, '' ORDER BY id) FROM future_event
                          WHERE held_before IS NOT NULL)]""",
    )
    return row[0] or "", row[1] or ""


async def test_events_within_the_share_are_published_and_those_above_are_held(
    database: Database, tenants: Tenants
) -> None:
    await publish(tenants.acme, *"abcde")
    assert await stored(database) == ("abcde", "")
    # The share is used up, by two deliveries of each event.  A held request is complete.
    await publish(tenants.acme, *"fg")
    assert await stored(database) == ("abcde", "fg")
    assert await fetchval(database, "SELECT array_agg(cost) FROM future_event") == [2, 2]
    # Neither other tenants nor tokens without one wait for it.
    await publish(tenants.globex, "h")
    await publish(tenants.everything, "i", tenant="acme")
    assert await stored(database) == ("abcdehi", "fg")
    assert tenants.shared.meters.to_json()["series"]["outbox.api.held"] == [[[], 1]]


async def test_an_event_without_receivers_counts_as_one_delivery_and_keeps_its_place(
    database: Database, tenants: Tenants
) -> None:
    await publish(tenants.acme, *"abcdefghij", type="nobody.receives.it")
    assert await stored(database) == ("abcdefghij", "")
    await publish(tenants.acme, "k", type="nobody.receives.it")
    assert await stored(database) == ("abcdefghij", "k")


async def test_delayed_events_neither_use_the_share_nor_hold_others(
    database: Database, tenants: Tenants
) -> None:
    # Also those whose time has come: a client must not name its way round the share.
    for at in ("2999-01-01T00:00:00Z", "2000-01-01T00:00:00Z"):
        await publish(tenants.acme, *"abcdef", deliver_at=at)
    assert await fetchval(database, "SELECT sum(cost) FROM future_event") == 24
    await publish(tenants.acme, *"vwxyz")
    assert await stored(database) == ("vwxyz", "")


async def test_the_cost_follows_a_change_of_routing(database: Database, tenants: Tenants) -> None:
    costs = "SELECT array_agg(cost ORDER BY id) FROM future_event"
    later = {"deliver_at": "2999-01-01T00:00:00Z"}
    await publish(tenants.acme, "a", **later)
    for name in ("acme-2", "acme-3"):
        url = {"name": f"acme.{name}", "url": "https://example.com/", "types": ["a.b"]}
        assert (await tenants.acme.post("/v1/endpoints", url)).status == 201
    await publish(tenants.acme, "b", **later)
    assert await fetchval(database, costs) == [2, 4]
    # Nor does a request cost more than after the change: 9 of 10, which were 12.
    await fetchval(database, "UPDATE subscription SET to_batch = 9 WHERE all_tenants RETURNING 1")
    await fetchval(database, "UPDATE cursor SET version = version + 1 RETURNING 1")
    await publish(tenants.acme, *"cde")
    assert await stored(database) == ("cde", "")


async def test_an_endpoint_that_gets_earlier_events_first_counts_in_the_cost(
    database: Database, tenants: Tenants
) -> None:
    later = {"deliver_at": "2999-01-01T00:00:00Z"}
    await publish(tenants.acme, "a", **later)
    fed = {"name": "acme.2", "url": "https://example.com/", "types": ["a.b"], "from": "beginning"}
    assert (await tenants.acme.post("/v1/endpoints", fed)).status == 201
    await publish(tenants.acme, "b", **later)
    costs = "SELECT array_agg(cost ORDER BY id) FROM future_event"
    assert await fetchval(database, costs) == [2, 3]


OTHERS = """
INSERT INTO endpoint (id, name, url, tenant, retry, lanes)
SELECT gen_random_uuid(), 'e' || n, 'http://127.0.0.1:9/', 't' || n / 10, '{}', 1
  FROM generate_series(1, 2000) n;
INSERT INTO subscription (endpoint_id, from_batch, types, tenant, all_tenants)
SELECT id, 1, types, tenant, all_tenants FROM endpoint;
ANALYZE endpoint, subscription;
"""


async def test_the_routes_of_a_tenant_are_read_without_those_of_others(database: Database) -> None:
    """Each change of anybody's routes makes all tenants' ones be read again."""
    async with database.connection(server_settings={"search_path": "relay"}) as db:
        await db.execute(OTHERS)
        plan = await explain(db, READ_SUBSCRIPTIONS, "t7", False, generic=False)
        assert plan.rows <= 40, plan
        assert len(await db.fetch(READ_SUBSCRIPTIONS, "t7", False)) == 10


async def test_a_request_is_published_once_while_the_routes_keep_changing(
    database: Database, tenants: Tenants, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_costs = FairPublisher._costs

    async def change_after(*given: Any) -> list[int]:
        costs = await find_costs(*given)
        await fetchval(database, "UPDATE cursor SET version = version + 1 RETURNING 1")
        return costs

    with monkeypatch.context() as patched:
        patched.setattr(FairPublisher, "_costs", change_after)
        await publish(tenants.acme, "a")
    # It was charged once.
    await publish(tenants.acme, *"bcde")
    assert await stored(database) == ("abcde", "")


async def test_a_refused_request_leaves_the_share_as_it_was(
    database: Database, tenants: Tenants
) -> None:
    large = {"type": "a.b", "payload": "x" * 300_000}
    wrong = {"type": "a.b", "key": "no"}
    refuse = "ALTER TABLE outbox ADD CONSTRAINT refused CHECK (key <> 'no')"
    async with database.connection(server_settings={"search_path": "relay"}) as db:
        await db.execute(refuse)
    for event in (large, wrong):
        body = {"events": [*events(*"abcd")["events"], event]}
        assert (await tenants.acme.post("/v1/events", body)).status == 422
    await publish(tenants.acme, *"abcde")
    assert await stored(database) == ("abcde", "")


async def test_above_what_may_be_held_a_request_is_refused(
    database: Database, tenants: Tenants
) -> None:
    await publish(tenants.acme, *"abcdefghijkl")
    response = await tenants.acme.post("/v1/events", events(*"mnopq"))
    assert (response.status, response.json["type"]) == (429, "urn:outbox:problem:too-many-requests")
    assert response.headers["Retry-After"] == "1"
    assert response.detail == (
        'more than 30 deliveries of the tenant "acme" would be held for its share of '
        "5,000 deliveries a second; retry in 1 s"
    )
    assert await stored(database) == ("", "abcdefghijkl")
    refusals = tenants.shared.meters.to_json()["series"]["outbox.api.refusals"]
    assert [("api", Refusal.SHARE), 1] in refusals
    # What has a deliver_at is not held, and what fits is.
    await publish(tenants.acme, *"mnopq", deliver_at="2999-01-01T00:00:00Z")
    await publish(tenants.acme, *"rst")
    assert await stored(database) == ("", "abcdefghijklrst")


async def test_a_key_of_a_held_event_is_used_at_once(database: Database, tenants: Tenants) -> None:
    await publish(tenants.acme, *"abcdef")
    event, headers = {"type": "a.b", "key": "g"}, {"Idempotency-Key": "k"}
    first, again = [await tenants.acme.post("/v1/events", event, headers=headers) for _ in range(2)]
    assert (first.status, again.status, again.json["id"]) == (201, 200, first.json["id"])
    other = await tenants.acme.post("/v1/events", event | {"payload": 1}, headers=headers)
    assert other.json["type"] == "urn:outbox:problem:idempotency-key-reused"
    assert await stored(database) == ("", "abcdefg")
    trace = (await tenants.acme.get("/v1/trace/k")).json
    assert (trace["found_by"], trace["future"]["id"]) == ("once key", first.json["id"])
    by_key = await tenants.everything.get("/v1/trace/g")
    assert (by_key.status, "held or delayed ones are not found by key" in by_key.detail) == (
        404,
        True,
    )


# ------------------------------------------------------------ shown as held


async def test_a_held_event_is_shown_to_its_tenant_with_what_is_before_it(
    tenants: Tenants,
) -> None:
    ids = await publish(tenants.acme, *"abcdef")
    later = await publish(tenants.acme, "g", deliver_at="2999-01-01T00:00:00Z")
    for client in (tenants.acme, tenants.everything):
        for n, event_id in enumerate(ids):
            future = (await client.get(f"/v1/trace/{event_id}")).json["future"]
            assert (future["id"], future["held"], future["deliver_at"]) == (event_id, True, None)
            assert future["deliveries_ahead"] == 2 * n
            assert future["expected_at"] >= future["accepted_at"]
        listed = await client.items("/v1/future-events", limit=2)
        assert [each["id"] for each in listed] == [*later, *reversed(ids)]
        held = await client.items("/v1/future-events", limit=4, held=True)
        assert [each["id"] for each in held] == [*reversed(ids)]
        (status, page) = [
            (await client.get(path)).json["held"]
            for path in ("/v1/endpoint-statuses", "/v1/future-events")
        ]
        for seen in (status, page):
            assert (seen["events"], seen["deliveries"], seen["tenants"]) == (6, 12, 1)
            assert seen["oldest_at"] <= seen["now"]
    status = (await tenants.everything.get("/v1/status")).json["held"]
    assert (status["events"], status["deliveries"], status["tenants"]) == (6, 12, 1)
    # Others see nothing of it.
    assert (await tenants.globex.get(f"/v1/trace/{ids[0]}")).status == 404
    assert await tenants.globex.items("/v1/future-events") == []
    assert await tenants.globex.items("/v1/future-events", held=True) == []
    page = (await tenants.globex.get("/v1/future-events", held=True)).json["held"]
    assert (page["events"], page["deliveries"], page["tenants"], page["oldest_at"]) == (
        0, 0, 0, None,
    )  # fmt: skip


async def test_a_list_of_a_tenant_goes_on_after_others_events(
    database: Database, tenants: Tenants
) -> None:
    (first,) = await publish(tenants.globex, "a", deliver_at="2999-01-01T00:00:00Z")
    await publish(tenants.acme, *"abcdef")
    async with database.connection(server_settings={"search_path": "relay"}) as db:
        below: int | None = ID_MAX
        seen, pages = [], 0
        while below is not None:
            page = await future_events.list_future_events(
                db, "relay", tenant="globex", held=False, limit=10, below=below, scanned_max=3
            )
            seen += [str(each.id) for each in page.events]
            below, pages = page.next, pages + 1
    assert (seen, pages) == ([first], 3)


MANY = """
INSERT INTO future_event (event_id, type, tenant, payload, deliver_at, cost, held_before)
SELECT gen_random_uuid(), 'a', tenant, '1', now(), 1, i
  FROM (VALUES ('acme', 3000), ('globex', 200)) t(tenant, n), generate_series(0, n - 1) i;
INSERT INTO future_event (event_id, type, payload, deliver_at)
SELECT gen_random_uuid(), 'a', '1', now() + interval '1 h' FROM generate_series(1, 3000);
INSERT INTO tenant_share (tenant, first_id, last_id, total)
SELECT tenant, min(id), max(id), count(*) FROM future_event
 WHERE held_before IS NOT NULL GROUP BY tenant;
"""


@pytest.mark.parametrize("analyzed", [False, True])
async def test_what_is_shown_of_held_events_does_not_read_those_of_others(
    database: Database, analyzed: bool
) -> None:
    async with database.connection(server_settings={"search_path": "relay"}) as db:
        await db.execute(MANY)
        if analyzed:
            await db.execute("ANALYZE future_event, tenant_share")
        one = "SELECT event_id FROM future_event WHERE tenant = 'globex' ORDER BY id DESC LIMIT 1"
        for sql, arguments, rows_max in (
            (operations.FIND_FUTURE, (await db.fetchval(one), None), 10),
            (operations.READ_HELD, ("globex",), 210),
            (future_events.LIST_HELD, (ID_MAX, 11, "globex"), 50),
            (future_events.LIST_HELD, (ID_MAX, 11, None), 60),
            (schedules.READ_FUTURE, (10,), 3000),
        ):
            plan = await explain(db, sql, *arguments, generic=False)
            assert plan.rows <= rows_max, (sql, plan)
