"""Dead letters and replays through the API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from outbox.operations.endpoints.queries import NOT_SHOWN
from outbox.relay.relay import default_name
from tests.support.api import make_token
from tests.support.ranges import next_pending
from tests.support.relay import (
    BUSY,
    OK,
    REFUSED,
    Network,
    add_endpoint,
    all_ended,
    exceptions,
    fetchval,
    publish,
    running,
)
from tests.support.waiting import until

if TYPE_CHECKING:
    from tests.support.api import Api
    from tests.support.postgres import Database
    from tests.support.relay import Sent

pytestmark = pytest.mark.one_major


async def dead_lettered(database: Database, count: int, **columns: Any) -> None:
    """Create `n` dead letters at each of two endpoints, with ids from 1, alternating."""
    await add_endpoint(database, "shop")
    await add_endpoint(database, "audit", types=["a.*"])
    async with running(database, Network(lambda _: REFUSED)):
        await publish(database, *range(count), **columns)
        await all_ended(database)


@pytest.mark.full
async def test_a_listing_is_filtered_and_paged(database: Database, api: Api) -> None:
    await dead_lettered(database, 6, type="a.b", key="k")
    assert len(await api.items("/v1/dead-letters", limit=5)) == 12
    ids = [row["id"] for row in await api.items("/v1/dead-letters", limit=5)]
    assert ids == sorted(set(ids))
    for query, expected in (
        ({"endpoint": "shop"}, 6),
        ({"endpoint": "shop", "type": "a.*"}, 6),
        ({"type": "x.*"}, 0),
        ({"reason": "refused", "since": "1h"}, 12),
        ({"reason": "exhausted"}, 0),
        ({"until": "1h"}, 0),
        ({"tenant": "acme"}, 0),
        ({"state": "discarded"}, 0),
        ({"state": "all"}, 12),
    ):
        assert len(await api.items("/v1/dead-letters", **query)) == expected, query
    assert (await api.get("/v1/dead-letters", endpoint="nobody")).status == 404
    assert (await api.get("/v1/dead-letters", reason="bored")).status == 422


@pytest.mark.full
async def test_counts_and_a_single_dead_letter(database: Database, api: Api) -> None:
    await dead_lettered(database, 2)
    counts = (await api.get("/v1/dead-letters/counts")).json
    assert counts["total"]["dead"] == 4
    assert {(c["endpoint"], c["dead_letters"]) for c in counts["counts"]} == {
        ("shop", 2),
        ("audit", 2),
    }
    assert (await api.get("/v1/dead-letters/counts", endpoint="shop")).json["total"]["dead"] == 2
    (first, *_) = await api.items("/v1/dead-letters", endpoint="shop")
    letter = (await api.get(f"/v1/dead-letters/{first['id']}")).json
    assert letter == {**letter, **first}
    assert (letter["payload"], letter["last_response"]["body"]) == (0, "no")
    for text in ("999", "0", "x", "-1", "9" * 30):
        assert (await api.get(f"/v1/dead-letters/{text}")).status == 404, text


@pytest.mark.full
async def test_a_listing_has_the_key_and_the_last_response(database: Database, api: Api) -> None:
    await dead_lettered(database, 1, key="k")
    rows = await api.items("/v1/dead-letters")
    assert [(row["key"], row["status"], row["failure"], row["excerpt"]) for row in rows] == [
        ("k", 400, None, "no")
    ] * 2
    # Only operators read what a receiver responded.
    reader = api.with_token(await make_token(database, "reader", ("read",)))
    assert {row["excerpt"] for row in await reader.items("/v1/dead-letters")} == {None}
    assert (await reader.get("/v1/dead-letters/1")).json["excerpt"] is None


async def test_dead_letters_are_replayed_by_id(database: Database, api: Api) -> None:
    await dead_lettered(database, 2)
    ids = [row["id"] for row in await api.items("/v1/dead-letters", endpoint="shop")]
    dry = await api.post("/v1/dead-letters/replay", {"ids": ids, "dry_run": True})
    assert dry.json == {
        "dry_run": True,
        "replaying": 2,
        "skipped": {},
        "by_endpoint": {"shop": 2},
        "job": None,
        "until": None,
    }
    assert await fetchval(database, "SELECT count(*) FROM replay_job") == 0
    done = await api.post("/v1/dead-letters/replay", {"ids": ids})
    job = await fetchval(database, "SELECT id FROM replay_job")
    assert (done.json["replaying"], done.json["job"]) == (2, job)
    assert await fetchval(database, "SELECT requested_by FROM replay_job") == "token all"
    again = await api.post("/v1/dead-letters/replay", {"ids": ids})
    assert (again.status, "being replayed already" in again.detail) == (409, True)
    network = Network(lambda _: OK)
    async with running(database, network):
        await all_ended(database)
    assert network.data() == [0, 1]
    (letter, *_) = await api.items("/v1/dead-letters", state="replayed")
    reported = (await api.get(f"/v1/dead-letters/{letter['id']}")).json
    assert reported["replays"][0]["state"] == "replayed"
    assert await exceptions(database) == {}


async def test_a_replay_by_filter_is_a_job_that_can_be_read_and_aborted(
    database: Database, api: Api
) -> None:
    await dead_lettered(database, 3)
    sweep = {"endpoint": "shop", "type": ["a.*"], "since": "1h", "rate": 50}
    job = (await api.post("/v1/dead-letters/replay", sweep)).json["job"]
    reported = (await api.get(f"/v1/replays/{job}")).json
    assert (reported["kind"], reported["state"], reported["endpoint"], reported["rate_per_s"]) == (
        "dead",
        "running",
        "shop",
        50.0,
    )
    assert [each["id"] for each in await api.items("/v1/replays")] == [job]
    aborted = await api.post(f"/v1/replays/{job}/abort")
    assert aborted.json["state"] == "aborted"
    assert (await api.post(f"/v1/replays/{job}/abort")).status == 409
    assert await api.items("/v1/replays", state="running") == []
    assert len(await api.items("/v1/replays")) == 1
    assert (await api.get("/v1/replays/77")).status == 404
    sql = "SELECT array_agg(actor) FROM journal WHERE kind IN ('dead_replayed', 'replay_aborted')"
    assert await fetchval(database, sql) == ["token all", "token all"]


async def test_a_dry_run_limits_what_is_discarded(database: Database, api: Api) -> None:
    await dead_lettered(database, 2)
    path = "/v1/dead-letters/discard"
    plan = (await api.post(path, {"all": True, "dry_run": True})).json
    assert plan["discarded"] == 4
    async with running(database, Network(lambda _: REFUSED)):
        await publish(database, 7)
        await all_ended(database)
    # All of them by now, one more than a client has counted, and those that it has counted.
    assert (await api.post(path, {"all": True, "dry_run": True})).json["discarded"] > 4
    counted = {"until": plan["until"], "counted": 3}
    assert (await api.post(path, counted)).status == 409
    done = await api.post(path, {**counted, "counted": 4})
    assert (done.json["discarded"], done.json["until"]) == (4, None)
    assert len(await api.items("/v1/dead-letters")) > 0


async def test_replaying_everything_requires_all(database: Database, api: Api) -> None:
    await dead_lettered(database, 1)
    for path in ("/v1/dead-letters/replay", "/v1/dead-letters/discard"):
        for body in ({}, {"dry_run": True}, {"all": True, "endpoint": "shop"}, {"ids": []}):
            response = await api.post(path, body)
            assert response.status == 422, (path, body)
        assert (await api.post(path, {"ids": [0]})).status == 422
        assert (await api.post(path, {"ids": [999]})).status == 404
        assert (await api.post(path)).status == 415
    assert len(await api.items("/v1/dead-letters")) == 2


@pytest.mark.full
async def test_dead_letters_are_discarded(database: Database, api: Api) -> None:
    await dead_lettered(database, 3)
    (first, *_) = await api.items("/v1/dead-letters", endpoint="shop")
    discard = {"ids": [first["id"]], "comment": "the customer left"}
    assert (await api.post("/v1/dead-letters/discard", discard)).json["discarded"] == 1
    assert (await api.post("/v1/dead-letters/discard", discard)).status == 409
    reason = "SELECT data ->> 'comment' FROM journal WHERE kind = 'dead_discarded'"
    assert await fetchval(database, reason) == "the customer left"
    dry = await api.post("/v1/dead-letters/discard", {"endpoint": "audit", "dry_run": True})
    assert (dry.json["discarded"], dry.json["dry_run"]) == (3, True)
    assert (await api.post("/v1/dead-letters/discard", {"all": True})).json["discarded"] == 5
    assert await api.items("/v1/dead-letters") == []
    assert len(await api.items("/v1/dead-letters", state="discarded")) == 6


@pytest.mark.full
async def test_a_backfill_replays_past_events(database: Database, api: Api) -> None:
    sent: list[Any] = []

    def receive(request: Sent) -> Any:
        sent.append(request.body)
        return OK

    await add_endpoint(database, "shop")
    async with running(database, Network(receive)):
        await publish(database, 1, 2, type="a.b")
        await publish(database, 3, type="c.d")
        await all_ended(database)
        asked = {"endpoint": "shop", "since": "1h", "type": ["a.*"]}
        dry = await api.post("/v1/replays", {**asked, "dry_run": True})
        assert (dry.status, dry.json["deliveries"]) == (200, 2)
        done = await api.post("/v1/replays", asked)
        assert (done.status, done.json["kind"]) == (201, "history")
        await all_ended(database)
    assert [body["data"] for body in sent] == [1, 2, 3, 1, 2]
    assert (await api.get(f"/v1/replays/{done.json['id']}")).json["taken"] == 2


async def test_chosen_events_are_sent_again(database: Database, api: Api) -> None:
    network = Network()
    await add_endpoint(database, "shop")
    async with running(database, network):
        await publish(database, 1, 2, 3, key="k")
        await publish(database, 4)
        await all_ended(database)
        rows = (await api.get("/v1/endpoints/shop/deliveries")).json["items"]
        asked = {"endpoint": "shop", "events": [rows[0]["delivery"], rows[2]["event"]]}
        dry = await api.post("/v1/replays", {**asked, "dry_run": True})
        assert (dry.json["deliveries"], dry.json["events"]) == (2, 2)
        done = await api.post("/v1/replays", asked)
        assert (done.status, done.json["events"]) == (201, 2)
        await all_ended(database)
        await api.post("/v1/replays", {"endpoint": "shop", "key": "k"})
        await all_ended(database)
    assert network.data() == [1, 2, 3, 4, 2, 4, 1, 2, 3]


INVALID_BACKFILLS = (
    ({"endpoint": "shop"}, 422),
    ({"endpoint": "shop", "events": []}, 422),
    ({"endpoint": "shop", "events": ["1"] * 1001}, 422),
    ({"endpoint": "shop", "events": ["1"], "key": "k"}, 422),
    ({"endpoint": "shop", "events": ["nothing"]}, 404),
    ({"endpoint": "shop", "key": "nothing"}, 404),
    ({"since": "1h"}, 422),
    ({"endpoint": "nobody", "since": "1h"}, 404),
    ({"endpoint": "shop", "since": "1h", "until": "2h"}, 422),
    ({"endpoint": "shop", "since": "1h", "rate": 0}, 422),
    ({"endpoint": "shop", "since": "1h", "type": ["a..b"]}, 422),
)


async def test_an_invalid_backfill_is_rejected(
    database: Database, api: Api, subtests: pytest.Subtests
) -> None:
    await add_endpoint(database, "shop")
    for body, status in INVALID_BACKFILLS:
        with subtests.test(body=body, status=status):
            assert (await api.post("/v1/replays", body)).status == status


async def test_a_listing_is_complete_while_dead_letters_are_added(
    database: Database, api: Api
) -> None:
    await dead_lettered(database, 5)
    page = (await api.get("/v1/dead-letters", limit=3)).json
    found = [row["id"] for row in page["items"]]
    async with running(database, Network(lambda _: REFUSED)):
        await publish(database, 9, 9)
        await all_ended(database)
    while page["next"] is not None:
        page = (await api.get("/v1/dead-letters", limit=3, after=page["next"])).json
        found += [row["id"] for row in page["items"]]
    assert found == sorted(set(found))
    assert len(found) == 14


@pytest.mark.full
async def test_a_tenant_that_skips_does_not_see_which_relay_owns_its_endpoint(
    database: Database, api: Api
) -> None:
    retry = {"base_s": 0.05, "factor": 1.0, "cap_s": 0.05, "attempts_max": 10_000}
    await add_endpoint(database, "acme.shop", tenant="acme", lanes=1, retry=retry)
    async with running(database, Network(lambda _: BUSY)):
        await publish(database, 1, 2, tenant="acme")
        await until(lambda: fetchval(database, "SELECT attempts > 0 FROM lane_progress"))
        for tenant, relay in (("acme", NOT_SHOWN), (None, default_name())):
            caller = api.with_token(await make_token(database, f"t{tenant}", tenant=tenant))
            lane, sequence = await next_pending(database, "acme.shop")
            stuck = {"lane": lane, "sequence": sequence}
            response = await caller.post("/v1/endpoints/acme.shop/skip", stuck)
            assert (response.status, response.json["relay"]) == (200, relay)
            assert response.json["dead_letter"] is not None
            if tenant is not None:
                await until(lambda: fetchval(database, "SELECT attempts > 0 FROM lane_progress"))
