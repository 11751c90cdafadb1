"""Other resources of the API: schedules, idempotency keys, erasure, journal, tokens, status."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from outbox.operations import journal
from outbox_api import status
from outbox_doctor.verify import audit
from tests.support.api import make_token, serving
from tests.support.postgres import API_ROLE
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
    from tests.support.api import Api
    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major

ERASED_BY = "SELECT DISTINCT actor FROM journal WHERE kind = 'erased'"
NIGHTLY = {"name": "nightly", "cron": "@daily", "type": "report.due", "timezone": "Europe/Berlin"}


# ---------------------------------------------------------------- schedules


async def test_a_schedule_is_added_changed_and_removed(database: Database, api: Api) -> None:
    made = await api.post("/v1/schedules", {**NIGHTLY, "payload": {"n": 1}, "grace": "2m"})
    assert made.status == 201
    assert (made.json["grace_s"], len(made.json["next_runs"])) == (120.0, 3)
    again = await api.post("/v1/schedules", NIGHTLY)
    assert again.status == 409
    changed = await api.post("/v1/schedules", {**NIGHTLY, "cron": "@hourly", "replace": True})
    assert (changed.status, changed.json["cron"]) == (201, "@hourly")
    paused = await api.post("/v1/schedules/nightly/pause", {"comment": "a move"})
    assert (paused.json["state"], paused.json["state_by"]) == ("paused", "token all")
    (listed,) = await api.items("/v1/schedules")
    assert (listed["name"], listed["next_runs"], "payload" in listed) == ("nightly", [], False)
    assert (await api.post("/v1/schedules/nightly/resume")).json["state"] == "active"
    run = await api.post("/v1/schedules/nightly/run-now")
    assert run.status == 201
    assert str(await fetchval(database, "SELECT event_id FROM outbox")) == run.json["id"]
    assert (await api.get("/v1/schedules/nightly")).json["last_event"] == run.json["id"]
    assert (await api.request("DELETE", "/v1/schedules/nightly")).json == {"removed": "nightly"}
    assert (await api.get("/v1/schedules/nightly")).status == 404
    actors = "SELECT array_agg(DISTINCT actor) FROM journal WHERE kind LIKE 'schedule%'"
    assert await fetchval(database, actors) == ["token all"]


INVALID_SCHEDULES = (
    ({"cron": "often"}, "cron"),
    ({"timezone": "Mars/Olympus"}, "Mars/Olympus"),
    ({"name": "two words"}, "name: "),
    ({"type": "outbox.x"}, "type: "),
    ({"misfire": "maybe"}, "misfire: "),
    ({"grace": -1}, "grace: "),
    ({"payload": "x" * 300_000}, "payload"),
)


async def test_an_invalid_schedule_is_rejected(api: Api, subtests: pytest.Subtests) -> None:
    for change, says in INVALID_SCHEDULES:
        with subtests.test(change=change, says=says):
            response = await api.post("/v1/schedules", {**NIGHTLY, **change})
            assert response.status == 422
            assert says in response.detail
            assert await api.items("/v1/schedules") == []


async def test_schedules_are_paged_with_the_count_of_future_events(
    database: Database, api: Api
) -> None:
    for n in range(5):
        await api.post("/v1/schedules", {**NIGHTLY, "name": f"s{n}"})
    await api.post("/v1/events", {"type": "a.b", "deliver_at": "2999-01-01T00:00:00Z"})
    assert [s["name"] for s in await api.items("/v1/schedules", limit=2)] == [
        f"s{n}" for n in range(5)
    ]
    page = (await api.get("/v1/schedules")).json
    assert page["future_events"]["events"] == 1


# ---------------------------------------------------------------- once keys


async def test_idempotency_keys_are_listed_shown_and_reset(database: Database, api: Api) -> None:
    for key in ("plan:1", "plan:2", "x/y"):
        await api.post("/v1/events", {"type": "a.b", "once": key})
    await fetchval(database, "SELECT claim_once('claimed')")
    keys = [row["key"] for row in await api.items("/v1/once", limit=1)]
    assert keys == ["claimed", "plan:1", "plan:2", "x/y"]
    assert len(await api.items("/v1/once", prefix="plan:")) == 2
    assert len(await api.items("/v1/once", state="claimed-without-event")) == 1
    assert await api.items("/v1/once", until="1h") == []
    shown = (await api.get("/v1/once/x%2Fy")).json
    assert (shown["state"], shown["type"]) == ("held", "a.b")
    assert (await api.post("/v1/once/x%2Fy/reset")).json == {"key": "x/y", "reset": True}
    assert (await api.post("/v1/once/x%2Fy/reset")).json == {"key": "x/y", "reset": False}
    assert (await api.get("/v1/once/nobody")).status == 404
    assert (await api.post("/v1/once/nobody/reset")).status == 404
    actor = "SELECT actor FROM journal WHERE kind = 'once_reset'"
    assert await fetchval(database, actor) == "token all"


# ------------------------------------------------------------------ erasing


async def test_payloads_are_erased(database: Database, api: Api) -> None:
    await publish(database, 1, tenant="acme", key="k")
    await publish(database, 2, key="k")
    counted = (await api.post("/v1/erase", {"tenant": "acme", "dry_run": True})).json
    assert (counted["events"], counted["responses"]) == (1, None)
    sql = "SELECT array_agg(payload IS NULL ORDER BY id) FROM outbox"
    assert await fetchval(database, sql) == [False, False]
    assert (await api.post("/v1/erase", {"tenant": "acme"})).json["events"] == 1
    assert await fetchval(database, sql) == [True, False]
    assert (await api.post("/v1/erase", {"key": "k"})).json["events"] == 1
    assert await fetchval(database, sql) == [True, True]
    assert await fetchval(database, ERASED_BY) == "token all"
    for body in ({}, {"tenant": "a", "key": "b"}, {"dry_run": True}):
        assert (await api.post("/v1/erase", body)).status == 422


# ------------------------------------------------------------- the journal


async def test_the_journal_lists_the_newest_entry_first(database: Database, api: Api) -> None:
    await add_endpoint(database, "shop")
    await add_endpoint(database, "other")
    for _ in range(3):
        await api.post("/v1/endpoints/shop/resume")
    rows = await api.items("/v1/journal", limit=2)
    ids = [row["id"] for row in rows]
    assert ids == sorted(ids, reverse=True)
    assert [row["kind"] for row in rows[:3]] == ["endpoint_retried"] * 3
    assert rows[0] == {
        **rows[0],
        "actor": "token all",
        "session_role": API_ROLE,
        "endpoint": "shop",
        "data": {"name": "shop", "comment": None},
    }
    only = await api.items("/v1/journal", endpoint="other", limit=1)
    assert [row["kind"] for row in only] == ["endpoint_added"]
    assert (await api.get("/v1/journal", endpoint="nobody")).status == 404


async def test_the_journal_is_filtered_by_kind_actor_and_time(database: Database, api: Api) -> None:
    await add_endpoint(database, "shop")
    for _ in range(3):
        await api.post("/v1/endpoints/shop/resume")

    async def kinds(**only: str) -> set[str]:
        return {row["kind"] for row in await api.items("/v1/journal", limit=2, **only)}

    assert await kinds() > {"endpoint_retried", "endpoint_added"}
    assert await kinds(kind="endpoint_added") == {"endpoint_added"}
    assert await kinds(kind="endpoint_added", endpoint="shop") == {"endpoint_added"}
    assert await kinds(actor="token all", since="1h") == {"endpoint_retried"}
    assert await kinds(until="1h") == set()
    assert await kinds(until="1h", endpoint="shop") == set()
    assert len(await api.items("/v1/journal", limit=2, kind="endpoint_retried")) == 3
    for wrong in ({"kind": ""}, {"since": "yesterday"}, {"by": "ann"}):
        assert (await api.get("/v1/journal", **wrong)).status == 422


async def test_the_journal_is_filtered_by_who_made_an_entry(
    database: Database, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    await add_endpoint(database, "shop")
    await fetchval(
        database,
        """INSERT INTO journal (kind, actor)
           SELECT 'sequencing_stopped', 'replica 7' FROM generate_series(1, 6) RETURNING id""",
    )
    monkeypatch.setattr(journal, "SCANNED_MAX", 4)
    added, token = await api.items("/v1/journal", limit=2, by="people")
    assert (added["kind"], token["kind"]) == ("endpoint_added", "token_added")
    assert len(await api.items("/v1/journal", limit=2, by="relays")) == 6
    assert len(await api.items("/v1/journal", limit=2, by="all")) == 8
    page = (await api.get("/v1/journal", by="people")).json
    assert (page["items"], page["next"]) == ([], str(added["id"] + 3))


# ------------------------------------------------------------------- tokens


async def test_tokens_are_added_listed_and_revoked(database: Database, api: Api) -> None:
    body = {"name": "ci", "scopes": ["publish", "read"], "tenant": "acme", "expires": "1d"}
    made = await api.post("/v1/tokens", body)
    assert (made.status, made.json["scopes"]) == (201, ["read", "publish"])
    ci = api.with_token(made.json["secret"])
    assert (await ci.get("/v1/me")).json["tenant"] == "acme"
    assert (await api.post("/v1/tokens", body)).status == 409
    rows = await api.items("/v1/tokens", limit=1)
    assert [(r["name"], r["state"], r["created_by"]) for r in rows] == [
        ("all", "live", "test"),
        ("ci", "live", "token all"),
    ]
    assert made.json["secret"] not in str(rows)
    for query, expected in (
        ({"search": "CI"}, ["ci"]),
        ({"tenant": "acme"}, ["ci"]),
        ({"scope": "operate"}, ["all"]),
        ({"scope": "read"}, ["all", "ci"]),
        ({"search": "l", "tenant": "acme"}, []),
    ):
        assert [r["name"] for r in await api.items("/v1/tokens", **query)] == expected, query
    assert (await api.request("DELETE", "/v1/tokens/ci")).json == {"revoked": "ci"}
    assert (await api.request("DELETE", "/v1/tokens/ci")).status == 404
    assert [r["name"] for r in await api.items("/v1/tokens")] == ["all"]
    ended = await api.items("/v1/tokens", revoked=True)
    assert [(r["state"], r["revoked_by"]) for r in ended] == [
        ("live", None),
        ("revoked", "token all"),
    ]


async def test_a_token_cannot_grant_scopes_that_it_lacks(database: Database, client: Api) -> None:
    secret = await make_token(database, "ops", ("operate",))
    ops = client.with_token(secret)
    assert (await ops.post("/v1/tokens", {"name": "a", "scopes": ["read"]})).status == 403
    assert (await ops.post("/v1/tokens", {"name": "a", "scopes": ["operate"]})).status == 201


INVALID_TOKENS = (
    {"name": "two words"},
    {"scopes": []},
    {"scopes": ["all"]},
    {"expires": 0},
)


async def test_an_invalid_token_is_rejected(api: Api, subtests: pytest.Subtests) -> None:
    for change in INVALID_TOKENS:
        with subtests.test(change=change):
            response = await api.post("/v1/tokens", {"name": "a", "scopes": ["read"], **change})
            assert response.status == 422


# ----------------------------------------------------------------- overview


async def test_the_status_equals_the_output_of_the_command(database: Database, api: Api) -> None:
    await add_endpoint(database, "shop")
    async with running(database, Network(lambda s: REFUSED if s.body["data"] else OK)):
        await publish(database, 0, 1)
        await all_ended(database)
        reported = (await api.get("/v1/status")).json
        assert (reported["schema"], reported["pending"], reported["dead_letters"]) == (
            "relay",
            0,
            {"dead": 1},
        )
        assert [each["leads"] for each in (await api.get("/v1/replicas")).json["items"]] == [True]


async def test_the_doctor_writes_nothing(database: Database, api: Api) -> None:
    reported = (await api.get("/v1/doctor")).json
    assert reported["problems"] == sum(f["severity"] == "problem" for f in reported["findings"])
    assert {f["check"] for f in reported["findings"]} >= {"server", "relays"}
    assert await fetchval(database, "SELECT count(*) FROM outbox") == 0


async def test_the_doctor_reports_networks_open_to_every_endpoint(
    database: Database, client: Api
) -> None:
    async with serving(database, allow_networks=("169.254.0.0/16",)) as other:
        reported = [
            (await each.with_token(await make_token(database, name)).get("/v1/doctor")).raw
            for name, each in (("a", other), ("b", client))
        ]
    explanation = b"OUTBOX_ALLOW_NETWORKS opens this for every endpoint"
    assert [explanation in each for each in reported] == [True, False]


async def test_an_audit_reports_violations(database: Database, api: Api) -> None:
    assert (await api.post("/v1/verify")).json["violations"] == 0
    await publish(database, 1)
    await fetchval(
        database, "INSERT INTO batch (batch, high) VALUES (1, 0), (2, 1) RETURNING batch"
    )
    await add_endpoint(database, "shop")
    await fetchval(database, "UPDATE subscription SET from_batch = 1 RETURNING 1")
    reported = (await api.post("/v1/verify")).json
    assert reported["violations"] > 0
    assert [c["action"] for c in reported["checks"] if c["violations"]]


async def test_skipped_events_are_sequenced_on_request(database: Database, api: Api) -> None:
    await fetchval(
        database,
        """WITH skipped AS (INSERT INTO batch (batch, high, dead) VALUES (1, 5, '{[3,4)}'))
           INSERT INTO outbox (id, type, payload) OVERRIDING SYSTEM VALUE
           VALUES (3, 'a.b', '1') RETURNING id""",
    )
    expected = {"events": 1, "batches": 1, "first_ids": [3]}
    gaps = "SELECT count(*) FROM gap"
    planned = await api.request("POST", "/v1/resequence", dry_run="true")
    assert planned.json == {"dry_run": True, **expected}
    assert await fetchval(database, gaps) == 0
    assert (await api.post("/v1/resequence")).json == {"dry_run": False, **expected}
    assert await fetchval(database, gaps) == 1


async def test_an_audit_that_takes_too_long_is_cancelled(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "VERIFY_TIMEOUT_S", 0.05)
    monkeypatch.setattr(audit, "COUNT_ROWS", "SELECT pg_sleep(60)")
    response = await api.post("/v1/verify")
    assert response.status == 503
    assert "run: outbox verify" in response.detail
