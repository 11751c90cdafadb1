"""Publishing and finding events through the API."""

from __future__ import annotations

import asyncio
import uuid
from base64 import b64encode
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from outbox.operations.events import queries as events
from outbox.operations.rows import ID_MAX
from outbox.producers.event import Event
from outbox.store.connection.connect import connect
from outbox.store.connection.dsn import parse
from outbox_api.events import _digest
from tests.support.api import make_token
from tests.support.plans import explain
from tests.support.relay import (
    OK,
    REFUSED,
    Network,
    add_endpoint,
    all_ended,
    fetchval,
    publish,
    running,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from outbox.core.model.response import AttemptResult as Response
    from tests.support.api import Api, AttemptResult
    from tests.support.postgres import Database
    from tests.support.relay import Sent

pytestmark = pytest.mark.one_major

COUNT = "SELECT count(*) FROM outbox"


async def test_an_event_is_published_with_all_its_fields(database: Database, api: Api) -> None:
    body = {
        "type": "order.paid",
        "payload": {"order": 7, "a": [1.5, None, "ü"]},
        "key": "order-7",
        "tenant": "acme",
        "headers": {"X-A": "b"},
        "expires_in": "10m",
    }
    response = await api.post("/v1/events", body)
    assert response.status == 201
    assert response.json["already"] is False
    async with database.connection(server_settings={"search_path": "relay"}) as db:
        row = await db.fetchrow("SELECT *, payload = $1::jsonb AS same FROM outbox", _json(body))
    assert str(row["event_id"]) == response.json["id"]
    assert (row["type"], row["key"], row["tenant"]) == ("order.paid", "order-7", "acme")
    assert row["same"]
    assert row["expires_at"] - row["created_at"] == pytest.approx(
        timedelta(minutes=10), abs=timedelta(seconds=5)
    )


def _json(body: dict[str, Any]) -> str:
    import orjson

    return orjson.dumps(body["payload"]).decode()


async def test_a_used_idempotency_key_returns_the_earlier_event(
    database: Database, api: Api
) -> None:
    event = {"type": "a.b", "payload": 1}
    first = await api.post("/v1/events", event, headers={"Idempotency-Key": "k/1"})
    again = await api.post("/v1/events", event, headers={"Idempotency-Key": "k/1"})
    body = await api.post("/v1/events", {**event, "once": "k/1"})
    assert (first.status, again.status, body.status) == (201, 200, 200)
    assert first.json["id"] == again.json["id"] == body.json["id"]
    assert (first.json["already"], again.json["already"]) == (False, True)
    assert await fetchval(database, COUNT) == 1


async def test_an_idempotency_key_does_not_compare_contents(database: Database, api: Api) -> None:
    first = await api.post("/v1/events", {"type": "a.b", "payload": 1, "once": "k"})
    other = await api.post("/v1/events", {"type": "c.d"}, headers={"Idempotency-Key": "k"})
    assert (other.status, other.json) == (200, {"id": first.json["id"], "already": True})
    assert await fetchval(database, COUNT) == 1


async def test_an_idempotency_key_with_another_body_is_refused(
    database: Database, api: Api
) -> None:
    headers = {"Idempotency-Key": "k"}
    event = {"type": "order.paid", "payload": {"a": 1, "b": [2.0]}, "key": "o", "once_for": "1h"}
    first = await api.post("/v1/events", event, headers=headers)
    assert first.status == 201
    changes: tuple[dict[str, Any], ...] = (
        {"payload": {"a": 2, "b": [2.0]}},
        {"payload": {"a": "1", "b": [2.0]}},
        {"type": "order.sent"},
        {"key": None},
        {"tenant": "acme"},
        {"headers": {"A": "b"}},
        {"expires_in": "2h"},
        {"deliver_at": datetime.now(UTC) + timedelta(days=1)},
    )
    for change in changes:
        response = await api.post("/v1/events", {**event, **change}, headers=headers)
        assert (response.status, response.json["type"]) == (
            422,
            "urn:outbox:problem:idempotency-key-reused",
        )
        assert response.detail == (
            "Idempotency-Key: was used with another body, and nothing is published; "
            "use a new key for another event, or send the same body"
        )
    # The same body in another form, and the first event is still what the key stands for.
    same = b'{"key": "o", "payload":{"b":[2.0],"a":1},  "once_for":3600, "type":"order.paid"}'
    again = await api.post("/v1/events", data=same, headers=headers)
    assert (again.status, again.json) == (200, {"id": first.json["id"], "already": True})
    assert await fetchval(database, COUNT) == 1
    # After a reset, the key stands for the next body.
    await api.post("/v1/once/k/reset")
    other = {**event, "payload": 3}
    assert (await api.post("/v1/events", other, headers=headers)).status == 201
    assert (await api.post("/v1/events", event, headers=headers)).status == 422
    assert await fetchval(database, COUNT) == 2


def test_the_digest_of_a_body_is_the_same_in_later_versions() -> None:
    """It is stored for as long as the key; another one would refuse a retry after an upgrade."""
    event = Event(
        "order.paid", {"a": [1, 2.5, None]}, key="o", tenant="acme", once="k", expires_in=600.0,
        deliver_at=datetime(2026, 1, 31, 12, tzinfo=UTC), headers={"A": "b"}, once_for=60.0,
    )  # fmt: skip
    assert _digest(event).hex()[:8] == "ededdbac"
    assert _digest(Event("a.b", None, once="k")).hex()[:8] == "9a2f3ad3"

    @dataclass(frozen=True)
    class LaterEvent(Event):
        new: str | None = None

    assert _digest(LaterEvent("a.b", None, once="k")) == _digest(Event("a.b", None, once="k"))


async def test_a_time_in_another_zone_is_the_same_body(database: Database, api: Api) -> None:
    def publish(deliver_at: str) -> Awaitable[AttemptResult]:
        event = {"type": "a.b", "deliver_at": deliver_at}
        return api.post("/v1/events", event, headers={"Idempotency-Key": "k"})

    first = await publish("2999-01-31T12:00:00.25Z")
    for same in ("2999-01-31T14:00:00.25+02:00", "2999-01-30T22:30:00.250-13:30"):
        again = await publish(same)
        assert (again.status, again.json["id"]) == (200, first.json["id"])
    assert (await publish("2999-01-31T12:00:00.25+02:00")).status == 422


async def test_of_bodies_that_claim_one_idempotency_key_at_once_one_is_published(
    database: Database, api: Api
) -> None:
    responses = await asyncio.gather(
        *(
            api.post("/v1/events", {"type": "a.b", "payload": n}, headers={"Idempotency-Key": "k"})
            for n in range(20)
        )
    )
    assert sorted(response.status for response in responses) == [201] + [422] * 19
    assert await fetchval(database, COUNT) == 1


async def test_a_large_and_deep_body_has_an_idempotency_key(database: Database, api: Api) -> None:
    deep: Any = "x" * 20_000
    for _ in range(250):
        deep = [deep]
    event, headers = {"type": "a.b", "payload": deep}, {"Idempotency-Key": "k"}
    statuses = [(await api.post("/v1/events", event, headers=headers)).status for _ in range(2)]
    assert statuses == [201, 200]


async def test_an_idempotency_key_claimed_without_an_event_has_none(
    database: Database, api: Api
) -> None:
    await fetchval(database, "SELECT claim_once('k')")
    response = await api.post("/v1/events", {"type": "a.b", "once": "k"})
    assert (response.status, response.json) == (200, {"id": None, "already": True})


async def test_fifty_concurrent_requests_with_one_key_publish_one_event(
    database: Database, api: Api
) -> None:
    responses = await asyncio.gather(
        *(
            api.post("/v1/events", {"type": "a.b"}, headers={"Idempotency-Key": "k"})
            for _ in range(50)
        )
    )
    assert sorted(response.status for response in responses) == [200] * 49 + [201]
    assert len({response.json["id"] for response in responses}) == 1
    assert await fetchval(database, COUNT) == 1


async def test_a_batch_keeps_its_order_and_has_a_result_for_each_event(
    database: Database, api: Api
) -> None:
    earlier = (await api.post("/v1/events", {"type": "a.b", "once": "k"})).json["id"]
    body = [{"type": "a.b", "payload": n} for n in range(999)] + [{"type": "a.b", "once": "k"}]
    response = await api.post("/v1/events", {"events": body})
    assert response.status == 201
    reported = response.json["events"]
    assert [each["already"] for each in reported] == [False] * 999 + [True]
    assert reported[-1]["id"] == earlier
    async with database.connection(server_settings={"search_path": "relay"}) as db:
        rows = await db.fetch("SELECT event_id FROM outbox WHERE id > 1 ORDER BY id")
    assert [str(row["event_id"]) for row in rows] == [each["id"] for each in reported[:-1]]
    again = await api.post("/v1/events", {"events": [body[-1]]})
    assert again.status == 200


async def test_a_batch_is_atomic(database: Database, api: Api) -> None:
    good = {"type": "a.b"}
    response = await api.post("/v1/events", {"events": [good, {"type": "no type"}, good]})
    assert response.status == 422
    assert "(event 2)" in response.detail
    assert await fetchval(database, COUNT) == 0


async def test_bytes_are_published_in_base64(database: Database, api: Api) -> None:
    every_byte = bytes(range(256))
    event = {
        "type": "image.added",
        "payload_base64": b64encode(every_byte).decode(),
        "content_type": "image/png",
    }
    await add_endpoint(database)
    json = {"type": "a.b", "payload": 1, "payload_base64": None, "content_type": None}
    for body in (event, {"events": [event, json, event]}):
        assert (await api.post("/v1/events", body)).status == 201
    bodies = "SELECT count(*) FROM outbox WHERE body = $1 AND content_type = 'image/png'"
    assert await fetchval(database, bodies, every_byte) == 3
    key = {"Idempotency-Key": "k"}
    first = await api.post("/v1/events", event, headers=key)
    again = await api.post("/v1/events", event, headers=key)
    assert (first.status, again.status, again.json["id"]) == (201, 200, first.json["id"])
    other = event | {"payload_base64": "AA=="}
    assert (await api.post("/v1/events", other, headers=key)).status == 422
    traced = await api.get(f"/v1/trace/{first.json['id']}?payload=true")
    shown = traced.json["events"][0]["event"]
    assert (shown["payload"], shown["payload_bytes"]) == (None, 256)
    assert shown["content_type"] == "image/png"


INVALID_EVENTS = (
    ({"type": "a.b", "payload_base64": "AA=="}, "payload_base64 together with content_type"),
    ({"type": "a.b", "content_type": "a/b"}, "payload_base64 together with content_type"),
    (
        {"type": "a.b", "payload_base64": "AA==", "content_type": None},
        "payload_base64 together with content_type",
    ),
    (
        {"type": "a.b", "payload": {}, "payload_base64": "AA==", "content_type": "a/b"},
        "either payload or payload_base64",
    ),
    (
        {"type": "a.b", "payload_base64": "A*==", "content_type": "a/b"},
        "payload_base64: must be a string in Base64",
    ),
    (
        {"type": "a.b", "payload_base64": 5, "content_type": "a/b"},
        "payload_base64: must be a string in Base64",
    ),
    (
        {"type": "a.b", "payload_base64": "AA==", "content_type": "png"},
        "content_type: 'png' is not a media type",
    ),
    ({"type": "outbox.x"}, 'type: "outbox." is reserved'),
    ({"type": "a.b", "key": ""}, "key: 0 bytes, must be 1 to 512"),
    ({"type": "a.b", "payload": "\0"}, "payload: PostgreSQL cannot store a NUL"),
    ({"type": "a.b", "payload": "x" * 300_000}, "payload: 300002 bytes as JSON, the limit"),
    ({"type": "a.b", "headers": {"webhook-id": "x"}}, "headers: "),
    ({"type": "a.b", "expires_in": -1}, "expires_in: "),
    ({"type": "a.b", "expires_in": "soon"}, 'expires_in: "soon" is not a time'),
    ({"type": "a.b", "once_for": 60}, "once_for: requires once"),
    ({"type": "a.b", "deliver_at": "2027-01-01T00:00:00"}, "deliver_at: "),
    ({"type": "a.b", "events": [{"type": "a.b"}]}, "one event, or events, not both"),
    ({"events": []}, "events: "),
    ({"events": [{"type": "a.b"}] * 1001}, "events: "),
)


async def test_an_invalid_event_is_rejected(
    database: Database, api: Api, subtests: pytest.Subtests
) -> None:
    for body, says in INVALID_EVENTS:
        with subtests.test(body=body, says=says):
            response = await api.post("/v1/events", body)
            assert response.status == 422
            assert says in response.detail
            assert "(event 1)" not in response.detail
            assert await fetchval(database, COUNT) == 0


async def test_an_idempotency_key_for_a_batch_or_given_twice_is_rejected(api: Api) -> None:
    headers = {"Idempotency-Key": "k"}
    many = await api.post("/v1/events", {"events": [{"type": "a.b"}]}, headers=headers)
    twice = await api.post("/v1/events", {"type": "a.b", "once": "k"}, headers=headers)
    empty = await api.post("/v1/events", {"type": "a.b"}, headers={"Idempotency-Key": ""})
    assert (many.status, twice.status, empty.status) == (422, 422, 422)
    assert empty.detail == "once: 0 bytes, must be 1 to 512"


async def test_the_size_of_a_tenants_idempotency_key_is_that_of_what_it_sends(
    database: Database, api: Api
) -> None:
    """It is stored with a prefix."""
    tenant = api.with_token(await make_token(database, "acme", tenant="acme"))
    assert (await tenant.post("/v1/events", {"type": "a.b", "once": "k" * 478})).status == 201
    for key, size in (("", 0), ("k" * 479, 479)):
        says = f"once: {size} bytes, must be 1 to 478"
        one = await tenant.post("/v1/events", {"type": "a.b", "once": key})
        header = await tenant.post("/v1/events", {"type": "a.b"}, headers={"Idempotency-Key": key})
        events = [{"type": "a.b"}, {"type": "a.b", "once": key}]
        many = await tenant.post("/v1/events", {"events": events})
        assert [each.status for each in (one, header, many)] == [422] * 3
        assert (one.detail, header.detail) == (says, says)
        assert many.detail == f"{says} (event 2)"


async def test_a_scheduled_event_waits(database: Database, api: Api) -> None:
    at = datetime.now(UTC) + timedelta(days=1)
    response = await api.post("/v1/events", {"type": "a.b", "deliver_at": at})
    assert response.status == 201
    assert await fetchval(database, "SELECT deliver_at FROM future_event") == at
    trace = (await api.get(f"/v1/trace/{response.json['id']}")).json
    future = trace["future"]
    assert (trace["events"], future["id"], future["held"]) == ([], response.json["id"], False)
    assert future["deliver_at"] == future["expected_at"]
    (listed,) = await api.items("/v1/future-events")
    assert listed == future
    assert await api.items("/v1/future-events", held=True) == []


# ---------------------------------------------------------------- looking


async def test_events_are_filtered(database: Database, api: Api) -> None:
    await publish(database, 1, type="order.paid", key="a", tenant="acme")
    await publish(database, 2, type="order.paid", key="b")
    await publish(database, 3, type="cart.left", key="a")

    async def ids(**query: Any) -> list[int]:
        return [row["outbox_id"] for row in (await api.get("/v1/events", **query)).json["items"]]

    assert await ids() == [3, 2, 1]
    assert await ids(key="a") == [3, 1]
    assert await ids(key="a", type="order.*") == [1]
    assert await ids(type=["cart.**", "order.paid"]) == [3, 2, 1]
    assert await ids(tenant="acme") == [1]
    assert await ids(since="1h") == [3, 2, 1]
    assert await ids(until="1h") == []
    assert await ids(since="2020-01-01T00:00:00Z", until="2020-01-02T00:00:00+01:00") == []


INVALID_QUERIES = (
    ({"type": "a..b"}, "type pattern"),
    ({"since": "yesterday"}, 'since: "yesterday" is neither a time with its zone'),
    ({"since": "2026-01-31T12:00:00"}, "with its zone"),
    ({"since": "1h", "until": "2h"}, "must be later"),
)


async def test_an_invalid_event_query_is_rejected(api: Api, subtests: pytest.Subtests) -> None:
    for query, says in INVALID_QUERIES:
        with subtests.test(query=query, says=says):
            response = await api.get("/v1/events", **query)
            assert response.status == 422
            assert says in response.detail


async def test_pages_are_complete_while_events_are_added(database: Database, api: Api) -> None:
    await publish(database, *range(25), key="k")
    for query in ({}, {"key": "k"}):
        page = (await api.get("/v1/events", limit=10, **query)).json
        found = [row["outbox_id"] for row in page["items"]]
        newest = found[0]
        while page["next"] is not None:
            await publish(database, 1, 2, 3, key="k")
            page = (await api.get("/v1/events", limit=10, after=page["next"], **query)).json
            found += [row["outbox_id"] for row in page["items"]]
        assert found == list(range(newest, 0, -1))


async def test_a_search_is_bounded_and_returns_its_position(
    database: Database, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events.search_events, "__kwdefaults__", {
        **(events.search_events.__kwdefaults__ or {}), "scanned_max": 10,
    })  # fmt: skip
    await publish(database, 1, type="rare.one")
    await publish(database, *range(24))
    pages = []
    after: dict[str, str] = {}
    while True:
        page = (await api.get("/v1/events", type="rare.*", **after)).json
        pages.append(page)
        if page["next"] is None:
            break
        after = {"after": page["next"]}
    assert [page["scanned"] for page in pages] == [10, 10, 5]
    assert [len(page["items"]) for page in pages] == [0, 0, 1]
    times = [page["scanned_back_to"] for page in pages]
    assert times == sorted(times, reverse=True)


@pytest.mark.parametrize("generic", [False, True])
async def test_a_search_reads_no_more_rows_than_its_bound(
    database: Database, generic: bool
) -> None:
    address = parse(database.dsn, source="test", env={})
    db = await connect(address, schema="relay")
    try:
        await db.execute("""
            INSERT INTO outbox (type, key, payload)
            SELECT 'a.b', 'k' || i, to_jsonb(repeat('x', 300)) FROM generate_series(1, 20000) i
        """)
        async with db.transaction():
            await db.execute(events.PLAN_BY_ID)
            plan = await explain(
                db, events.FIND, ID_MAX, 101, ["a.*"], *[None] * 4, 1000,
                generic=generic,
            )  # fmt: skip
        assert plan.rows <= 1000 + 2 * 101 + 50, plan
        assert not [scan for scan in plan.scans if scan.node == "Seq Scan" and scan.rows > 10], plan
    finally:
        await db.close()


# ------------------------------------------------------------------ tracing


async def test_a_trace_equals_the_output_of_the_command(database: Database, api: Api) -> None:
    await add_endpoint(database, "shop")
    await add_endpoint(database, "other", types=["x.y"])
    network = Network(lambda _: OK)
    async with running(database, network):
        made = await api.post(
            "/v1/events", {"type": "a.b", "payload": {"n": 1}, "key": "k", "once": "o"}
        )
        await all_ended(database)
    event_id = made.json["id"]
    for text in (event_id, "k", "o", "1", network.sent[0].delivery):
        reported = (await api.get(f"/v1/trace/{text}")).json
        (trace,) = reported["events"]
        assert trace["event"]["event_id"] == event_id, text
        assert [d["state"] for d in trace["deliveries"]] == ["delivered"]
        assert trace["event"]["payload"] is None
    reported = (await api.get("/v1/trace/k", payload=True, endpoint="other")).json
    assert reported["events"][0]["event"]["payload"] == {"n": 1}
    assert reported["events"][0]["deliveries"] == []
    assert reported["events"][0]["diagnosis"]


async def test_an_unknown_event_has_no_trace(api: Api) -> None:
    assert (await api.get(f"/v1/trace/{uuid.uuid4()}")).status == 404
    assert (await api.get("/v1/trace/k", endpoint="nobody")).status == 404


async def test_an_event_is_found_by_a_key_with_a_slash(database: Database, api: Api) -> None:
    await publish(database, 1, key="a/b?c")
    response = await api.get("/v1/trace/a%2Fb%3Fc")
    assert response.json["events"][0]["event"]["key"] == "a/b?c"


async def test_events_are_listed_with_their_deliveries_and_a_preview(
    database: Database, api: Api
) -> None:
    await add_endpoint(database, "shop")
    await add_endpoint(database, "strict", types=["order.*"])
    await add_endpoint(database, "acme", tenant="acme", all_tenants=False)

    def script(sent: Sent) -> Response:
        return REFUSED if sent.url.endswith("strict") else OK

    async with running(database, Network(script)):
        await publish(database, {"n": 1}, type="order.paid")
        await publish(database, {"n": 2}, type="a.b", tenant="acme")
        await publish(database, "x" * 20_000, type="other.large")
        await all_ended(database)
    (large, of_acme, order) = (await api.get("/v1/events", deliveries=True, limit=50)).json["items"]
    assert order["preview"] == '{"n": 1}'
    assert order["deliveries"] == {
        "delivered": 1, "pending": 0, "dead": 1, "replayed": 0, "discarded": 0, "attempts": 2,
    }  # fmt: skip
    assert large["deliveries"]["delivered"] == 1
    assert len(large["preview"]) == 120
    assert of_acme["deliveries"]["delivered"] == 1
    # A tenant's token: deliveries to its own endpoints only.
    await add_endpoint(database, "everything", all_tenants=True)
    acme = api.with_token(await make_token(database, "acme", ("read",), tenant="acme"))
    (own,) = (await acme.get("/v1/events", deliveries=True, limit=50)).json["items"]
    assert own["deliveries"] == of_acme["deliveries"]
    # After the dead letter was replayed.
    (letter,) = await api.items("/v1/dead-letters")
    await api.post("/v1/dead-letters/replay", {"ids": [letter["id"]]})
    async with running(database, Network()):
        await publish(database, 4, type="order.paid")
        await all_ended(database)
    counts = (await api.get("/v1/events", deliveries=True, limit=50)).json["items"][-1][
        "deliveries"
    ]
    assert (counts["delivered"], counts["dead"], counts["replayed"]) == (2, 0, 1)
    # An event that is not sequenced has no deliveries yet.
    await publish(database, 5)
    newest = (await api.get("/v1/events", deliveries=True, limit=1)).json["items"][0]
    assert newest["deliveries"] is None
    assert (await api.get("/v1/events", limit=1)).json["items"][0]["deliveries"] is None
    assert (await api.get("/v1/events", deliveries=True, limit=101)).status == 422
