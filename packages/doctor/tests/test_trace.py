"""The trace of an event, found by any of its identifiers."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

import outbox
from outbox.core.model.response import AttemptResult
from outbox.errors import NotFound
from outbox.operations import criteria
from outbox.operations.criteria import DeadLetterSelection
from outbox.operations.dead_letters import replay as replays
from outbox.operations.endpoints import changes as endpoint_changes
from outbox.operations.endpoints import removal as endpoint_removal
from outbox.operations.endpoints import states as endpoint_states
from outbox.operations.events import queries as events
from outbox.operations.pages import WHOLE_RESPONSES_MAX
from outbox.store.retention import erasure
from outbox_doctor.trace import queries as trace
from tests.support.plans import explain
from tests.support.relay import (
    BUSY,
    OK,
    REFUSED,
    SLOW_RETRY,
    Network,
    add_endpoint,
    all_ended,
    fetchval,
    publish,
    running,
)
from tests.support.waiting import until

if TYPE_CHECKING:
    from asyncpg import Connection

    from outbox_doctor.trace.model import EventTrace, TracedDelivery
    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major


@pytest.fixture
async def db(database: Database) -> Connection[Any]:
    return await database.connect(server_settings={"search_path": "relay"})


async def trace_of(db: Connection[Any], text: str, **options: Any) -> EventTrace:
    """The trace of the only event with this identifier."""
    found = await events.find_events(db, "relay", text)
    (outbox_id,) = found.outbox_ids
    return await trace.read_trace(db, "relay", outbox_id, **options)


async def by(db: Connection[Any], text: str) -> tuple[str, tuple[int, ...]]:
    found = await events.find_events(db, "relay", text)
    return found.by, found.outbox_ids


def the(event_trace: EventTrace, endpoint: str = "shop") -> TracedDelivery:
    (delivery,) = (d for d in event_trace.deliveries if d.endpoint == endpoint)
    return delivery


# ----------------------------------------------------------------- finding it


async def test_an_event_is_found_by_any_of_its_identifiers(
    database: Database, db: Connection[Any]
) -> None:
    await add_endpoint(database)
    await add_endpoint(database, "audit")
    network = Network()
    async with running(database, network):
        await publish(database, 0)
        event_id = await outbox.publish(
            db, "a.b", {"order": 17}, key="order-17", once="pay:17", autocommit=True
        )
        await all_ended(database)
    outbox_id = await db.fetchval("SELECT max(id) FROM outbox")
    assert await by(db, str(event_id)) == ("event id", (outbox_id,))
    assert await by(db, str(event_id).upper()) == ("event id", (outbox_id,))
    assert await by(db, "pay:17") == ("once key", (outbox_id,))
    assert await by(db, "order-17") == ("key", (outbox_id,))
    assert await by(db, str(outbox_id)) == ("outbox id", (outbox_id,))
    reported = {sent.delivery for sent in network.sent if sent.body["id"] == str(event_id)}
    assert len(reported) == 2
    for delivery in reported:
        assert await by(db, delivery) == ("X-Delivery", (outbox_id,))
    event_trace = await trace.read_trace(db, "relay", outbox_id)
    assert {str(d.delivery_id) for d in event_trace.deliveries} == reported


async def test_a_tenants_own_once_key_is_found_after_an_ordering_key_of_the_same_text(
    db: Connection[Any],
) -> None:
    async with db.transaction():
        for once in ("acme:same", "acme:alone"):
            await outbox.publish(
                db, "a.b", {}, key="same", tenant="acme", once=once, autocommit=True
            )
    for text, found in (("same", ("key", (2, 1))), ("alone", ("once key", (2,)))):
        match = await events.find_events(db, "relay", text, tenant="acme", once_key=f"acme:{text}")
        assert (match.by, match.outbox_ids) == found


@pytest.mark.full
async def test_a_trace_has_the_newest_attempts_of_each_delivery_and_a_limited_size(
    database: Database, db: Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    await add_endpoint(database)
    await add_endpoint(database, "audit")
    async with running(database, Network()):
        await publish(database, 0)
        await all_ended(database)
    await db.execute("""
        INSERT INTO attempt_run (lane_id, batch, seq, attempt, replica_id, outcome, started_at,
                                 elapsed_ms, response)
        SELECT lane_id, batch, seq, n, replica_id, 'r', started_at, 1.0,
               '{"status": 500, "headers": [], "body": "busy"}'
          FROM attempt, generate_series(2, 200) n""")
    whole = WHOLE_RESPONSES_MAX // 2
    monkeypatch.setattr(trace, "TRACED_ATTEMPTS_MAX", 2 * (whole + 2))
    deliveries = (await trace.read_trace(db, "relay", 1)).deliveries
    assert len(deliveries) == 2
    for delivery in deliveries:
        assert [each.attempt for each in delivery.attempts] == list(range(199 - whole, 201))
        responses = [each.response for each in delivery.attempts]
        assert responses[:2] == [{"status": 500}] * 2
        assert responses[2:] == [{"status": 500, "headers": [], "body": "busy"}] * whole


UNKNOWN = (
    "nothing",
    "",
    "8f1b7fb1-73a4-4ac1-8065-7cd8914e7d33",
    "99",
    "9" * 30,
    "-1",
    "\x00",
)


async def test_an_unknown_event_is_not_found(
    db: Connection[Any], subtests: pytest.Subtests
) -> None:
    for text in UNKNOWN:
        with subtests.test(text=text):
            with pytest.raises(NotFound, match="no event found for"):
                await events.find_events(db, "relay", text)
            with pytest.raises(NotFound, match="there is no event"):
                await trace.read_trace(db, "relay", 99)


async def test_events_of_a_key_are_paged_newest_first(
    database: Database, db: Connection[Any]
) -> None:
    await publish(database, *range(5), key="order-1")
    await publish(database, 9, key="order-2")
    first = await events.find_events(db, "relay", "order-1", limit=2)
    assert (first.outbox_ids, first.more) == ((5, 4), True)
    rest = await events.find_events(db, "relay", "order-1", limit=10, below=4)
    assert (rest.outbox_ids, rest.more) == ((3, 2, 1), False)


@pytest.mark.full
async def test_a_key_is_found_among_many_without_reading_them(db: Connection[Any]) -> None:
    await db.execute("""
        INSERT INTO outbox (type, key, payload)
        SELECT 'a.b', 'order-' || i, to_jsonb(repeat('x', 500)) FROM generate_series(1, 20000) i
    """)
    await db.execute("SELECT brin_summarize_new_values('outbox_0_event_id_key_idx')")
    assert await by(db, "order-12345") == ("key", (12345,))
    event_id = await db.fetchval("SELECT event_id FROM outbox WHERE id = 12345")
    # Without settings, and although the table was never analysed.
    plan = await explain(db, events.LIST_NEWEST, 1 << 40, 51, generic=False)
    assert plan.rows < 200, plan
    async with db.transaction():
        await db.execute(erasure.PLAN_BY_INDEX)
        for sql, arguments in (
            (events.FIND_BY_KEY, (1 << 40, 5, *[None] * 5, "order-12345")),
            (events.FIND_BY_EVENT_ID, (event_id, None)),
        ):
            plan = await explain(db, sql, *arguments, generic=False)
            assert plan.rows < 2000, plan


# ---------------------------------------------------------------- its life


async def test_every_attempt_has_its_response(database: Database, db: Connection[Any]) -> None:
    responses = [
        BUSY,
        AttemptResult.completed(
            429, 0.002, headers=(("X-Request-Id", "r-2"), ("Set-Cookie", "c")), body=b"slow"
        ),
        AttemptResult.completed(200, 0.003, headers=(("X-Request-Id", "r-3"),), body=b"thanks"),
    ]
    await add_endpoint(database)
    network = Network(lambda sent: responses[min(sent.attempt, 3) - 1])
    async with running(database, network):
        await publish(database, 1, key="k", headers='{"X-A": "b"}')
        await all_ended(database)
    event_trace = await trace_of(db, "k", payload=True)
    event = event_trace.event
    assert (event.type, event.headers, event.payload.text) == (
        "a.b",
        {"X-A": "b"},
        "1",
    )
    assert event_trace.sequenced is not None
    assert (event_trace.sequenced.batch, event_trace.sequenced.late) == (1, False)
    delivery = the(event_trace)
    assert (delivery.state, delivery.sequence, delivery.dead_letter) == ("delivered", 1, None)
    reported = [(a.attempt, a.outcome, a.status) for a in delivery.attempts]
    assert reported == [(1, "retry", 503), (2, "retry", 429), (3, "delivered", 200)]
    first, second, third = (a.response for a in delivery.attempts)
    assert first is not None
    assert first["body"] == "busy"
    assert second is not None
    assert (second["version"], second["headers"]) == (1, {"x-request-id": "r-2"})
    assert third == {"version": 1, "headers": {"x-request-id": "r-3"}, "body": "thanks"}
    assert event_trace.event.published_at <= delivery.sequenced_at
    # The relay estimates the server's clock, which it is off from by a round trip at most.
    started_at = delivery.attempts[0].started_at
    assert delivery.sequenced_at - started_at < timedelta(seconds=1)
    assert event_trace.diagnosis == ()
    assert (await trace_of(db, "k")).event.payload is None


@pytest.mark.full
async def test_a_late_event_is_found_in_its_batch(database: Database, db: Connection[Any]) -> None:
    await add_endpoint(database)
    async with running(database, Network()):
        async with db.transaction():
            await db.execute("INSERT INTO outbox (type, key, payload) VALUES ('a.b', 'late', '1')")
            await publish(database, 2, key="early")
            await until(lambda: fetchval(database, "SELECT count(*) = 1 FROM delivery"))
        await all_ended(database)
    late, early = await trace_of(db, "late"), await trace_of(db, "early")
    assert late.sequenced is not None
    assert early.sequenced is not None
    assert (late.sequenced.late, early.sequenced.late) == (True, False)
    assert late.event.outbox_id < early.event.outbox_id
    assert the(late).sequence > the(early).sequence
    assert the(late).state == "delivered"


async def test_a_dead_letter_and_its_replay_are_shown(
    database: Database, db: Connection[Any]
) -> None:
    await add_endpoint(database)
    responses = [REFUSED]
    network = Network(lambda sent: responses[0])
    async with running(database, network):
        await publish(database, 1, key="k")
        await all_ended(database)
        event_trace = await trace_of(db, "k")
        assert the(event_trace).state == "dead"
        letter = the(event_trace).dead_letter
        assert letter is not None
        assert event_trace.diagnosis == (
            f"shop: sequence 1 of lane {the(event_trace).lane} was dead-lettered because its "
            f"receiver refused it; it is dead letter {letter.id}: outbox dead replay {letter.id}",
        )
        # Again, to be refused again; and then it is taken.
        await replays.start_replay(db, "relay", DeadLetterSelection(ids=(letter.id,)), actor="test")
        await until(lambda: fetchval(database, "SELECT count(*) = 2 FROM dead_letter"))
        first, second = (await trace_of(db, "k")).deliveries
        assert (first.state, second.state) == ("dead_again", "dead")
        assert second.replay_of == (first.lane, 1)
        responses[0] = OK
        assert second.dead_letter is not None
        await replays.start_replay(
            db, "relay", DeadLetterSelection(ids=(second.dead_letter.id,)), actor="test"
        )
        await until(lambda: network.accepted)
        await all_ended(database)
    event_trace = await trace_of(db, "k")
    assert [d.state for d in event_trace.deliveries] == ["dead_again", "replayed", "delivered"]
    assert event_trace.deliveries[2].replay_of == (first.lane, 2)
    assert event_trace.diagnosis == ()
    assert len({d.delivery_id for d in event_trace.deliveries}) == 1
    # A dead letter's copy is shown when the event itself was dropped.
    await db.execute("SET LOCAL relay.remove = 'on'; TRUNCATE outbox")
    assert (await trace_of(db, str(event_trace.event.event_id))).event.payload_bytes == 1
    assert await by(db, str(first.delivery_id)) == ("X-Delivery", (event_trace.event.outbox_id,))


@pytest.mark.full
async def test_a_sequence_in_a_range_has_its_dead_letter(
    database: Database, db: Connection[Any]
) -> None:
    await add_endpoint(database, retry=SLOW_RETRY)
    async with running(database, Network(lambda _: BUSY)):
        for n in range(4):
            await publish(database, n, key=f"k{n}")
        await until(lambda: fetchval(database, "SELECT sum(last_seq) = 4 FROM lane_counter"))
        await endpoint_removal.remove_endpoint(db, "relay", "shop", actor="test", dead_letter=True)
        await until(lambda: fetchval(database, "SELECT count(*) = 1 FROM dead_letter"))
    event_trace = await trace_of(db, "k2")
    letter = the(event_trace).dead_letter
    assert letter is not None
    assert (letter.sequence, letter.to_sequence, letter.reason) == (1, 4, "removed")
    (reason,) = event_trace.diagnosis
    assert reason.endswith("because its endpoint was removed; it is dead letter 1")


# ------------------------------------------------------- why it is not delivered


async def test_a_stopped_relay_is_a_cause(database: Database, db: Connection[Any]) -> None:
    await add_endpoint(database)
    await publish(database, 1, key="k")
    event_trace = await trace_of(db, "k")
    assert event_trace.sequenced is None
    assert event_trace.diagnosis == (
        "it is not sequenced because no relay is running; start one: outbox relay",
    )


@pytest.mark.full
async def test_an_earlier_failing_delivery_is_a_cause(
    database: Database, db: Connection[Any]
) -> None:
    await add_endpoint(database, retry=SLOW_RETRY)
    network = Network(lambda _: BUSY)
    async with running(database, network):
        for n in range(3):
            await publish(database, n, key=f"k{n}")
        await until(lambda: fetchval(database, "SELECT sum(last_seq) = 3 FROM lane_counter"))
        await until(lambda: fetchval(database, "SELECT max(attempts) = 1 FROM lane_progress"))
        first, third = await trace_of(db, "k0"), await trace_of(db, "k2")
        lane = the(first).lane
        assert the(first).state == "pending"
        (reason,) = first.diagnosis
        assert reason.startswith(
            f"shop: sequence 1 of lane {lane} failed after 1 attempt, the last: it responded "
            "with 503; "
        )
        assert "the next is in" in reason
        (reason,) = third.diagnosis
        assert reason.startswith(
            f"shop: sequence 3 of lane {lane} waits behind 2 deliveries of its lane; the "
            f"first is sequence 1 (event {first.event.event_id}), which failed after 1 attempt"
        )
    # Without a running relay.
    assert any("no live relay" in reason for reason in (await trace_of(db, "k0")).diagnosis)


async def test_a_paused_endpoint_is_a_cause_with_actor_and_command(
    database: Database, db: Connection[Any]
) -> None:
    await add_endpoint(database)
    await endpoint_states.pause_endpoints(db, "relay", ["shop"], actor="kim", comment="they move")
    async with running(database, Network()):
        await publish(database, 1, key="k")
        await until(lambda: fetchval(database, "SELECT sum(last_seq) = 1 FROM lane_counter"))
        (reason,) = (await trace_of(db, "k")).diagnosis
    assert "waits: its endpoint has been paused" in reason
    assert reason.endswith(" (they move); outbox endpoint resume shop")


async def test_a_blocked_lane_is_reported(database: Database, db: Connection[Any]) -> None:
    await add_endpoint(database, on_dead_letter="block")
    async with running(database, Network(lambda _: REFUSED)):
        await publish(database, 1, key="k1")
        await publish(database, 2, key="k2")
        await until(lambda: fetchval(database, "SELECT count(*) = 1 FROM lane_block"))
        await until(lambda: fetchval(database, "SELECT sum(last_seq) = 2 FROM lane_counter"))
        (reason,) = (await trace_of(db, "k2")).diagnosis
    assert "its lane has been blocked by dead letter" in reason
    assert "outbox dead replay 1, outbox dead discard 1 or outbox endpoint resume shop" in reason


async def test_a_retry_after_of_the_receiver_is_a_cause(
    database: Database, db: Connection[Any]
) -> None:
    await add_endpoint(database)
    wait = AttemptResult.completed(429, 0.001, headers=(("Retry-After", "600"),))
    async with running(database, Network(lambda _: wait)):
        await publish(database, 1, key="k")
        held = "SELECT count(held_until) = 1 FROM endpoint_health"
        await until(lambda: fetchval(database, held))
        reported = (await trace_of(db, "k")).diagnosis
    assert any("more: its receiver sent Retry-After" in reason for reason in reported)


@pytest.mark.full
async def test_pending_lanes_of_an_older_generation_are_a_cause(
    database: Database, db: Connection[Any]
) -> None:
    await add_endpoint(database, retry=SLOW_RETRY)
    async with running(database, Network(lambda _: BUSY)):
        await publish(database, 1, key="k1")
        await until(lambda: fetchval(database, "SELECT sum(last_seq) = 1 FROM lane_counter"))
        await endpoint_changes.update_endpoint(
            db, "relay", "shop", lambda settings: replace(settings, lanes=2), actor="test"
        )
        await publish(database, 2, key="k2")
        await until(lambda: fetchval(database, "SELECT sum(last_seq) = 2 FROM lane_counter"))
        reported = (await trace_of(db, "k2")).diagnosis
    assert any(
        "waits for 1 pending delivery in lanes of an older generation" in reason
        for reason in reported
    )


async def test_endpoints_without_a_delivery_are_listed_with_the_rule(
    database: Database, db: Connection[Any]
) -> None:
    await add_endpoint(database, "gets-it")
    await add_endpoint(database, "b-type", types=["c.*"])
    await add_endpoint(database, "a-type", types=["d.**"])
    await add_endpoint(database, "tenant", tenant="acme")
    await add_endpoint(database, "filter", filter="@.n > 1")
    await add_endpoint(database, "gone")
    await endpoint_removal.remove_endpoint(db, "relay", "gone", actor="test")
    async with running(database, Network()):
        await publish(database, {"n": 1}, key="k")
        await all_ended(database)
        await add_endpoint(database, "younger")
    event_trace = await trace_of(db, "k")
    assert [d.endpoint for d in event_trace.deliveries] == ["gets-it"]
    assert {m.reason: (m.endpoints, m.examples) for m in event_trace.missed} == {
        "type": (2, ("a-type", "b-type")),
        "tenant": (1, ("tenant",)),
        "filter": (1, ("filter",)),
        "before": (1, ("younger",)),
    }
    assert event_trace.diagnosis == ()
    # Asked about one of them.
    ids = await criteria.find_endpoint_ids(db, "filter")
    event_trace = await trace_of(db, "k", endpoint_ids=ids)
    assert event_trace.diagnosis == (
        "no endpoint received it: 1 with a filter that excludes its payload (filter)",
    )


@pytest.mark.full
async def test_the_number_of_deliveries_is_limited(database: Database, db: Connection[Any]) -> None:
    for name in "abc":
        await add_endpoint(database, name)
    async with running(database, Network()):
        await publish(database, 1, key="k")
        await all_ended(database)
    event_trace = await trace_of(db, "k", limit=2)
    assert ([d.endpoint for d in event_trace.deliveries], event_trace.deliveries_total) == (
        ["a", "b"],
        3,
    )
    assert event_trace.missed == ()
