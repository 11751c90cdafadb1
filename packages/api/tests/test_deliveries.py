"""The delivery log through the API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.support.api import make_token
from tests.support.delivery_log import becomes
from tests.support.relay import (
    SLOW_RETRY,
    Network,
    add_endpoint,
    all_ended,
    publish,
    running,
)
from tests.support.waiting import until

if TYPE_CHECKING:
    from tests.support.api import Api
    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major

SHOP = "/v1/endpoints/shop/deliveries"


async def test_the_log_is_paged_and_filtered(database: Database, api: Api) -> None:
    await add_endpoint(database)
    await add_endpoint(database, "audit")
    async with running(database, Network(becomes)):
        await publish(database, "well", "busy", "bad", type="order.paid", key="order-7")
        await publish(database, "well", type="user.added")
        await all_ended(database)
    page = (await api.get(SHOP, limit=2)).json
    assert page["scanned"] == 3  # One more, to know that there is a next page.
    rest = (await api.get(SHOP, limit=2, after=page["next"])).json
    assert rest["next"] is None
    rows = page["items"] + rest["items"]
    assert [(row["type"], row["outcome"], row["attempts"]) for row in rows] == [
        ("user.added", "delivered", 1),
        ("order.paid", "dead", 1),
        ("order.paid", "delivered", 2),
        ("order.paid", "delivered", 1),
    ]
    for query, found in (
        ({"failed": True}, rows[1:3]),
        ({"outcome": "delivered", "failed": True}, rows[2:3]),
        ({"outcome": "refused"}, rows[1:2]),
        ({"status": "5xx"}, rows[2:3]),
        ({"status": "204", "type": "user.*"}, rows[:1]),
        ({"key": "order-7"}, rows[1:]),
        ({"event": rows[0]["event"]}, rows[:1]),
        ({"since": "1h"}, rows),
        ({"until": "1h"}, []),
        ({"tenant": "acme"}, []),
    ):
        assert (await api.get(SHOP, **query)).json["items"] == found, query
    everywhere = (await api.get("/v1/deliveries", key="order-7")).json["items"]
    assert sorted(row["endpoint"] for row in everywhere) == ["audit"] * 3 + ["shop"] * 3


async def test_a_delivery_is_shown_with_all_its_attempts(database: Database, api: Api) -> None:
    await add_endpoint(database)
    await add_endpoint(database, "audit")
    async with running(database, Network(becomes)):
        await publish(database, "busy")
        await all_ended(database)
    (row,) = (await api.get(SHOP)).json["items"]
    found = (await api.get(f"/v1/deliveries/{row['delivery']}")).json
    (delivery,) = found["deliveries"]
    assert (delivery["endpoint"], delivery["delivery_id"]) == ("shop", row["delivery"])
    assert [each["status"] for each in delivery["attempts"]] == [503, 204]
    assert found["event"]["event_id"] == row["event"]
    refused = await api.get(f"/v1/deliveries/{row['event']}")
    assert (refused.status, refused.detail) == (
        404,
        f'"{row["event"]}" is not an X-Delivery; it is found as event id',
    )


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ({"status": "6xx"}, "neither a status"),
        ({"outcome": "lost"}, "outcome"),
        ({"after": "x"}, "not a position"),
        ({"limit": 1001}, "limit"),
        ({"key": "a", "event": "b"}, "not both"),
        ({"type": "a..b"}, "type"),
    ],
)
async def test_a_query_that_is_wrong_is_refused(
    database: Database, api: Api, query: dict[str, Any], says: str
) -> None:
    await add_endpoint(database)
    response = await api.get(SHOP, **query)
    assert response.status in (400, 422)
    assert says in response.detail


async def test_a_log_of_everything_is_refused(api: Api) -> None:
    response = await api.get("/v1/deliveries")
    assert (response.status, response.detail) == (
        422,
        "name an endpoint, a tenant, a key or an event",
    )


async def test_a_tenant_does_not_learn_what_the_relay_can_reach(
    database: Database, api: Api, client: Api
) -> None:
    await add_endpoint(database, tenant="acme", retry=SLOW_RETRY)
    own = client.with_token(await make_token(database, "own", tenant="acme"))
    async with running(database, Network(becomes)):
        await publish(database, "gone", tenant="acme")

        async def is_tried() -> bool:
            (row,) = (await api.get(SHOP)).json["items"] or [{"attempts": 0}]
            return bool(row["attempts"])

        await until(is_tried, what="the attempt")
    (row,) = (await api.get(SHOP)).json["items"]
    assert (row["failure"], row["elapsed_ms"]) == ("dns", 250.0)
    page = (await own.get(SHOP)).json
    (row,) = page["items"]
    assert (row["failure"], row["elapsed_ms"]) == ("connect", 1000.0)
    assert page["scanned"] is None
