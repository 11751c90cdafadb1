"""One row that a trigger or a constraint refuses stops no other one.

The relay and PostgreSQL are real; the network responds from a script.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from outbox.core.delivery import owned_lane
from outbox.core.delivery.commands import Progress, Record
from outbox.operations import status
from outbox.operations.criteria import DeadLetterSelection
from outbox.operations.dead_letters import replay as replays
from outbox.operations.endpoints import removal as endpoint_removal
from outbox.operations.endpoints import states as endpoint_states
from outbox.relay.cluster import ownership
from outbox.relay.delivery import endpoint_supervisor
from outbox.relay.sequencing import replay_feeder, sequencer
from outbox.relay.sequencing.cursor import BATCH_REFUSED
from outbox.store.refused_rows import PROGRESS, RefusedRow
from outbox.store.schedules.future_events import FutureEventStore
from outbox.store.schedules.schedule_runs import ScheduleRunStore
from outbox_doctor.check import Severity
from tests.support.doctor import findings_of
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
from tests.support.roles import role
from tests.support.schedules import add_schedule, let_be_due, published
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, MutableMapping

    from asyncpg import Connection

    from tests.support.postgres import Database
    from tests.support.relay import Sent

pytestmark = [pytest.mark.system, pytest.mark.one_major]

PATH = {"server_settings": {"search_path": "relay"}}
ROW_REFUSED = "outbox.row.refused"
REFUSE = """
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS
    $$BEGIN RAISE EXCEPTION 'not this one: %', TG_TABLE_NAME USING ERRCODE = 'AP001'; END$$;
"""
TRIGGER = "CREATE {} TRIGGER refuse {} ON {} {} FOR EACH ROW WHEN ({}) EXECUTE FUNCTION refuse();"


SUPPRESS = "CREATE FUNCTION {} RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';"


def trigger(table: str, condition: str, event: str = "BEFORE INSERT") -> str:
    return REFUSE + TRIGGER.format("", event, table, "", condition)


def suppressing(table: str, condition: str) -> str:
    """Leaves neither a row nor an error."""
    return (
        f"{SUPPRESS.format('suppress()')} CREATE TRIGGER suppress BEFORE INSERT ON {table} "
        f"FOR EACH ROW WHEN ({condition}) EXECUTE FUNCTION suppress()"
    )


def _has(divisor: int, rest: int) -> str:
    """Whether a run has a sequence with this rest; a trigger's condition has no subquery."""
    added = divisor - rest
    return f"(NEW.seq + NEW.count - 1 + {added}) / {divisor} > (NEW.seq - 1 + {added}) / {divisor}"


BAD_EVENT = {
    "a trigger": trigger("outbox", "NEW.type = 'bad'"),
    "a constraint": "ALTER TABLE outbox ADD CONSTRAINT mine CHECK (type <> 'bad') NOT VALID",
    "a trigger at the commit": REFUSE
    + TRIGGER.format(
        "CONSTRAINT", "AFTER INSERT", "outbox", "DEFERRABLE INITIALLY DEFERRED", "NEW.type = 'bad'"
    ),
    "a missing function": """
        CREATE FUNCTION call() RETURNS trigger LANGUAGE plpgsql AS
            'BEGIN IF NEW.type = ''bad'' THEN PERFORM absent(); END IF; RETURN NEW; END';
        CREATE TRIGGER call BEFORE INSERT ON outbox FOR EACH ROW EXECUTE FUNCTION call()""",
    "a missing privilege": """
        CREATE TABLE mine (n int);
        CREATE FUNCTION call() RETURNS trigger LANGUAGE plpgsql AS
            'BEGIN IF NEW.type = ''bad'' THEN INSERT INTO mine VALUES (1); END IF; RETURN NEW; END';
        CREATE TRIGGER call BEFORE INSERT ON outbox FOR EACH ROW EXECUTE FUNCTION call()""",
    "a trigger that suppresses": """
        CREATE FUNCTION nothing() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
        CREATE TRIGGER nothing BEFORE INSERT ON outbox FOR EACH ROW
            WHEN (NEW.type = 'bad') EXECUTE FUNCTION nothing()""",
}
"""What refuses events of the type `bad`, by name."""


async def delay(db: Connection[Any], *types: str) -> None:
    """Delayed events that are due, in this order."""
    for n, type_ in enumerate(types):
        await db.fetchval(
            "SELECT publish($1, to_jsonb($2::int), deliver_at => now() + interval '1 day')",
            type_,
            n,
        )
    await db.execute("UPDATE future_event SET deliver_at = now() - interval '1 min'")


async def test_a_refused_delayed_event_stops_no_other_and_is_tried_again(
    database: Database, subtests: pytest.Subtests
) -> None:
    """By the role of a relay, which has no further privileges."""
    db = await database.connect(**PATH)
    async with role(database, "relay") as name:
        for how, damage in BAD_EVENT.items():
            with subtests.test(how=how):
                await delay(db, "good", "good", "bad", *["good"] * 7)
                await db.execute(damage)
                async with database.connection(user=name, **PATH) as own:
                    store = FutureEventStore(own, 1)
                    assert await store.move_due() == 10
                    rows = await db.fetch("SELECT payload FROM outbox ORDER BY id")
                    assert [int(row["payload"]) for row in rows] == [0, 1, 3, 4, 5, 6, 7, 8, 9]
                    (left,) = await db.fetch(
                        "SELECT type, problem, retry_at - now() AS wait FROM future_event"
                    )
                    assert left["type"] == "bad"
                    assert left["problem"]
                    # As long as it has been due.
                    assert 30 < left["wait"].total_seconds() < 120
                    assert await store.move_due() == 0
                    await db.execute("UPDATE future_event SET retry_at = now() - interval '1 s'")
                    await _repair(db)
                    assert await store.move_due() == 1
            await _reset(db)


async def _repair(db: Connection[Any]) -> None:
    await db.execute("""
        DROP FUNCTION IF EXISTS refuse, call, nothing CASCADE; DROP TABLE IF EXISTS mine;
        ALTER TABLE outbox DROP CONSTRAINT IF EXISTS mine""")


async def _reset(db: Connection[Any]) -> None:
    await _repair(db)
    await db.execute("SET relay.remove = 'on'; TRUNCATE outbox, future_event; RESET relay.remove")


async def test_a_refused_schedule_runs_beside_a_good_one(
    database: Database, subtests: pytest.Subtests
) -> None:
    db = await database.connect(**PATH)
    async with role(database, "relay") as name:
        for how, damage in BAD_EVENT.items():
            with subtests.test(how=how):
                names = [f"{each}-{how.replace(' ', '-')}" for each in ("one", "two", "three")]
                for each, type_ in zip(names, ("good", "bad", "good"), strict=True):
                    await add_schedule(db, each, type=type_)
                    due = await let_be_due(db, 2, each)
                await db.execute(damage)
                async with database.connection(user=name, **PATH) as own:
                    store = ScheduleRunStore(own, 1)
                    result = await store.run_due_schedules()
                    assert (result.schedules, [each for each, _ in result.broken]) == (
                        3,
                        [names[1]],
                    )
                    assert await published(db, names[0]) == await published(db, names[2]) == due
                    assert await published(db, names[1]) == []
                    (finding,) = await findings_of(db, "schedules")
                    assert finding.severity is Severity.PROBLEM
                    assert f'schedule "{names[1]}"' in finding.message
                    assert "cannot run: " in finding.message
                    assert "see the log" not in finding.message
                    # It does not keep the runner busy.
                    assert (await store.run_due_schedules()).schedules == 0
                    await _repair(db)
                    await db.execute("UPDATE schedule SET due_at = now() WHERE name = $1", names[1])
                    assert (await store.run_due_schedules()).schedules == 1
                assert await published(db, names[1]) == due
            await _repair(db)


async def test_a_schedule_that_cannot_even_be_postponed_stops_no_other(database: Database) -> None:
    db = await database.connect(**PATH)
    for name in ("bad", "good"):
        await add_schedule(db, name, type="good")
        await let_be_due(db, 1, name)
    await db.execute(trigger("schedule", "NEW.name = 'bad'", "BEFORE UPDATE"))
    store = ScheduleRunStore(db, 1)
    result = await store.run_due_schedules()
    assert (result.schedules, [name for name, _ in result.broken]) == (1, ["bad"])
    assert (await store.run_due_schedules()).schedules == 0


# ------------------------------------------------------------------------ deliveries

PENDING = """
SELECT count(*) FROM lane_progress p JOIN endpoint e ON e.id = p.endpoint_id
  JOIN lane_counter c USING (lane_id) WHERE c.last_seq > p.acked_seq AND e.name <> 'oncall'
"""


def payload(sent: Sent) -> Any:
    return sent.body[0]["data"] if isinstance(sent.body, list) else sent.body["data"]


def received(network: Network, name: str) -> list[Any]:
    """The payloads that the endpoint of this name has accepted."""
    return [payload(sent) for sent in network.accepted if sent.url.endswith(name)]


def reports(network: Network) -> list[dict[str, Any]]:
    """The operational events that arrived."""
    return [sent.body["data"] for sent in network.accepted if sent.url.endswith("/oncall")]


def session_losses(logs: list[MutableMapping[str, Any]]) -> list[Any]:
    return [
        each for each in logs if each["event"] in ("the session was lost", "not registered yet")
    ]


async def test_a_refused_attempt_is_left_out_and_its_progress_is_kept(
    database: Database, logs: list[MutableMapping[str, Any]]
) -> None:
    """Successes and failures; alone, in runs and in batches; with an error, and suppressed."""
    failed = set()

    def script(sent: Sent) -> Any:
        again = (sent.url, sent.seq) in failed
        failed.add((sent.url, sent.seq))
        return OK if again or sent.seq % 5 else BUSY

    await add_endpoint(database, "shop")
    await add_endpoint(database, "ordered", lanes=1)
    await add_endpoint(database, "batches", lanes=1, batch_max=10)
    await add_endpoint(database, "oncall", types=[ROW_REFUSED])
    await publish(database, *range(40))
    await execute(database, trigger("attempt_run", _has(6, 1)))
    await execute(database, suppressing("attempt_run", _has(6, 4)))
    network = Network(script)
    async with running(database, network, poll_s=0.05):
        await until(lambda: reports(network), what="the operational event")
        await until(lambda: _none_pending(database), what="all deliveries")
        assert session_losses(logs) == []
    received = [(sent.url, payload(sent)) for sent in network.accepted]
    for name in ("shop", "ordered"):
        got = [data for url, data in received if url.endswith(name)]
        assert sorted(got) == list(range(40))
    assert {report["row"] for report in reports(network)} == {"attempt"}
    assert {report["sqlstate"] for report in reports(network)} <= {"AP001", "OB003"}
    assert await fetchval(database, "SELECT count(*) FROM attempt WHERE seq % 3 = 1") == 0
    assert await exceptions(database) == {}
    # A successor does not send again what was recorded.
    accepted = len(network.accepted)
    await publish(database, 40)
    async with running(database, network, poll_s=0.05):
        await until(lambda: len(network.accepted) >= accepted + 3, what="the next event")
    assert [payload(each) for each in network.accepted[accepted:]] == [40] * 3


async def test_a_trigger_that_is_made_while_a_relay_runs_suppresses_no_attempt_silently(
    database: Database, logs: list[MutableMapping[str, Any]]
) -> None:
    """Groups of attempts are counted only where a trigger exists when the session begins."""
    await add_endpoint(database, "shop", lanes=1)
    await add_endpoint(database, "oncall", types=[ROW_REFUSED])
    network = Network()
    async with running(database, network, poll_s=0.05):
        await publish(database, 0)
        await until(lambda: _none_pending(database), what="the first delivery")
        await execute(database, suppressing("attempt_run", _has(2, 0)))
        await publish(database, *range(1, 21))
        await until(lambda: reports(network), what="the operational event")
        await until(lambda: _none_pending(database), what="all deliveries")
    first_seen = dict.fromkeys(payload(s) for s in network.accepted if s.url.endswith("shop"))
    assert list(first_seen) == list(range(21))
    assert await fetchval(database, "SELECT count(*) FROM attempt WHERE seq % 2 = 0") == 0
    assert await exceptions(database) == {}


@pytest.mark.parametrize("refuse", [trigger, suppressing])
async def test_a_refused_dead_letter_holds_its_lane_alone(
    database: Database,
    logs: list[MutableMapping[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    refuse: Callable[[str, str], str],
) -> None:
    """Until the database accepts it; nothing is lost or sent again, and the order holds."""
    monkeypatch.setattr(owned_lane, "REFUSED_RETRY_S_MIN", 0.2)
    monkeypatch.setattr(owned_lane, "REFUSED_RETRY_S_MAX", 0.2)
    await add_endpoint(database, "good", lanes=1)
    await add_endpoint(database, "bad", lanes=1)
    await add_endpoint(database, "oncall", types=[ROW_REFUSED])
    await publish(database, *range(5))
    await execute(database, refuse("dead_letter", "true"))

    def script(sent: Sent) -> Any:
        return REFUSED if sent.url.endswith("/bad") and payload(sent) == 1 else OK

    network = Network(script)
    async with running(database, network, poll_s=0.05):
        await until(lambda: len(received(network, "/good")) == 5, what="the other endpoint")
        await until(lambda: reports(network), what="the operational event")
        tried = "SELECT count(*) > 3 FROM journal WHERE kind = 'row_refused'"
        await until(lambda: fetchval(database, tried), what="retries")
        assert received(network, "/bad") == [0]
        assert session_losses(logs) == []
        progress = """SELECT retry_seq FROM lane_progress p JOIN endpoint e ON e.id = endpoint_id
                       WHERE e.name = 'bad'"""
        await until(lambda: _is(database, progress, 2), what="the retry state")
        await execute(database, "DROP FUNCTION IF EXISTS refuse, suppress CASCADE")
        await until(lambda: len(received(network, "/bad")) == 4, what="the rest")
        await all_ended(database)
    assert received(network, "/bad") == [0, 2, 3, 4]
    assert sum(sent.url.endswith("/bad") and payload(sent) == 1 for sent in network.sent) == 1
    assert [report["row"] for report in reports(network)] == ["dead letter"]
    (letter,) = await _letters(database)
    assert (letter["seq"], letter["reason"]) == (2, "refused")
    assert await exceptions(database) == {}


async def test_a_refused_batch_ends_no_session_and_is_reported(
    database: Database,
    logs: list[MutableMapping[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is sequenced until it is accepted; what was sequenced before is delivered."""
    monkeypatch.setattr(sequencer, "BROKEN_RETRY_S", 0.2)
    monkeypatch.setattr(endpoint_supervisor, "ENDPOINTS_CHECK_EVERY_S", 0.1)
    await add_endpoint(database, lanes=1)
    goes_on = asyncio.Event()

    async def script(sent: Sent) -> Any:
        await goes_on.wait()
        return OK

    async def stopped() -> str | None:
        async with database.connection(**PATH) as db:
            return (await status.read_overview(db, "relay")).stopped

    network = Network(script)
    async with running(database, network, poll_s=0.05) as worker:
        await publish(database, 1, 2, 3)
        await until(lambda: fetchval(database, "SELECT count(*) = 3 FROM delivery"))
        await execute(database, trigger("delivery_run", "true"))
        await publish(database, 4, 5)
        await until(lambda: not worker.readiness().ready, what="the readiness")
        assert "refuses the rows of a batch" in worker.readiness().reason
        # A trigger may quote a payload.
        assert worker.readiness().public_reason == f"sequencing stopped: {BATCH_REFUSED}"
        await until(stopped, what="the status")
        assert "not this one: delivery" in str(await stopped())
        goes_on.set()
        await until(lambda: network.data() == [1, 2, 3], what="the earlier deliveries")
        await execute(database, "DROP FUNCTION refuse CASCADE")
        await until(lambda: network.data() == [1, 2, 3, 4, 5], what="the rest")
        await until(lambda: worker.readiness().ready, what="the readiness")
        await until(lambda: _is_none(stopped), what="the status")
        await all_ended(database)
    assert session_losses(logs) == []
    assert await exceptions(database) == {}


async def _is_none(read: Callable[[], Awaitable[object]]) -> bool:
    return await read() is None


@pytest.mark.parametrize("how", ["trigger", "suppressing"])
async def test_refused_progress_of_a_lane_after_failures_ends_no_session(
    database: Database, logs: list[MutableMapping[str, Any]], how: str
) -> None:
    """Its retries and its dead letter go on, and so does the other endpoint."""
    for name in ("good", "bad"):
        await add_endpoint(database, name, lanes=1)
    lane = await fetchval(database, LANE_OF, "bad")
    mine = f"NEW.lane_id = {lane}"

    def script(sent: Sent) -> Any:
        return BUSY if sent.url.endswith("/bad") and payload(sent) == 2 else OK

    network = Network(script)
    async with running(database, network, poll_s=0.05):
        await publish(database, 1)
        await until(lambda: network.data() == [1, 1], what="the first deliveries")
        if how == "trigger":
            await execute(database, trigger("lane_progress", mine, "BEFORE UPDATE"))
        else:
            suppress = suppressing("lane_progress", mine)
            await execute(database, suppress.replace("BEFORE INSERT", "BEFORE UPDATE"))
        await publish(database, 2, 3)
        await until(lambda: received(network, "/good") == [1, 2, 3], what="the other endpoint")
        tried = "SELECT count(*) > 1 FROM attempt WHERE outcome = 'retry'"
        await until(lambda: fetchval(database, tried), what="the retries")
        refused = "SELECT count(*) > 2 FROM journal WHERE kind = 'row_refused'"
        await until(lambda: fetchval(database, refused), what="what was refused")
        assert session_losses(logs) == []
        await execute(database, "DROP FUNCTION IF EXISTS refuse, suppress CASCADE")
        network.script = lambda _: OK
        await until(lambda: 3 in received(network, "/bad"), what="the rest")
        await all_ended(database)
    assert received(network, "/bad") in ([1, 2, 3], [1, 3])
    assert session_losses(logs) == []
    assert await exceptions(database) == {}


def test_the_refused_progress_of_a_lane_that_cannot_be_opened_has_a_place() -> None:
    record = Record(7, 5, None, Progress(4, 4, 3))
    refused = RefusedRow.of_lane(PROGRESS, record, "no", "AP001", publish=False)
    assert orjson.loads(refused.identity) == {
        "lane": 7, "batch": 3, "sequence": 5, "to_sequence": 5,
    }  # fmt: skip


async def test_refused_progress_of_a_lane_stops_no_other_endpoint(
    database: Database, logs: list[MutableMapping[str, Any]]
) -> None:
    """Neither a checkpoint, nor the claim of the next owner."""
    for name in ("good", "bad"):
        await add_endpoint(database, name, lanes=1)
    lane = await fetchval(database, LANE_OF, "bad")
    acked = f"SELECT acked_seq FROM lane_progress WHERE lane_id <> {lane}"
    network = Network()
    async with running(database, network, poll_s=0.05):
        await publish(database, 1)
        await until(lambda: network.data() == [1, 1], what="the first deliveries")
        await execute(database, trigger("lane_progress", f"NEW.lane_id = {lane}", "BEFORE UPDATE"))
        await publish(database, 2)
        await until(lambda: network.data() == [1, 1, 2, 2], what="the next deliveries")
        await until(lambda: _is(database, acked, 2), what="the checkpoint of the other lane")
    async with running(database, network, poll_s=0.05):
        await publish(database, 3)
        await until(lambda: _is(database, acked, 3), what="the other endpoint")
        assert network.data() == [1, 1, 2, 2, 3]
        await execute(database, "DROP FUNCTION refuse CASCADE")
        await until(lambda: network.data() == [1, 1, 2, 2, 3, 3], what="the rest")
        await all_ended(database)
    assert session_losses(logs) == []
    assert await exceptions(database) == {}


@pytest.mark.parametrize("refuse", [trigger, suppressing])
async def test_refused_dead_letters_of_a_removed_endpoint_end_no_session(
    database: Database,
    logs: list[MutableMapping[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    refuse: Callable[[str, str], str],
) -> None:
    monkeypatch.setattr(ownership, "FINISH_RETRY_S", 0.2)
    await add_endpoint(database, "good")
    await add_endpoint(database, "bad", lanes=1)
    async with database.at_hand() as db:
        await endpoint_states.pause_endpoints(db, "relay", ["bad"], actor="test")
    await publish(database, 1)
    await execute(database, refuse("dead_letter", "true"))
    network = Network()
    async with running(database, network, poll_s=0.05):
        await until(lambda: network.data() == [1], what="the delivery")
        async with database.at_hand() as db:
            await endpoint_removal.remove_endpoint(
                db, "relay", "bad", actor="test", dead_letter=True
            )
        refused = "the database refuses the dead letters of an endpoint that ends"
        await until(lambda: len([e for e in logs if e["event"] == refused]) > 1, what="retries")
        await publish(database, 2)
        await until(lambda: network.data() == [1, 2], what="the next delivery")
        await execute(database, "DROP FUNCTION IF EXISTS refuse, suppress CASCADE")
        removed = "SELECT state FROM endpoint WHERE name LIKE 'bad%' OR state = 'removed'"
        await until(lambda: _is(database, removed, "removed"), what="the end of the endpoint")
    assert session_losses(logs) == []
    assert await exceptions(database) == {}


@pytest.mark.parametrize("table", ["dead_letter", "delivery_run"])
async def test_refused_replays_stop_neither_live_events_nor_other_replays(
    database: Database,
    logs: list[MutableMapping[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    table: str,
) -> None:
    """Neither a dead letter that cannot be claimed, nor a delivery that cannot be written."""
    monkeypatch.setattr(replay_feeder, "REPLAY_RETRY_S", 0.3)
    refuse = True
    network = Network(lambda sent: REFUSED if refuse else OK)
    for name in ("good", "bad"):
        await add_endpoint(database, name, lanes=1)
    await publish(database, 1)
    async with running(database, network, poll_s=0.05):
        await until(lambda: _is(database, "SELECT count(*) FROM dead_letter", 2), what="letters")
        refuse = False
        condition = {
            "dead_letter": f"NEW.endpoint_id = '{await _endpoint(database, 'bad')}'",
            "delivery_run": "NEW.replay_id IS NOT NULL AND NEW.lane_id = "
            + str(await fetchval(database, LANE_OF, "bad")),
        }[table]
        event = "BEFORE UPDATE" if table == "dead_letter" else "BEFORE INSERT"
        await execute(database, trigger(table, condition, event))
        async with database.at_hand() as db:
            everything = DeadLetterSelection(everything=True)
            await replays.start_replay(db, "relay", everything, actor="test")
        await until(lambda: _sent_to(network, "/good") == [1], what="the other replay")
        await publish(database, 2)
        await until(lambda: network.data().count(2) == 2, what="the live event")
        assert _sent_to(network, "/bad") == [2]
        await execute(database, "DROP FUNCTION refuse CASCADE")
        await until(lambda: _sent_to(network, "/bad") == [2, 1], what="the replay")
        await all_ended(database)
    assert session_losses(logs) == []
    assert await exceptions(database) == {}


LANE_OF = "SELECT l.id FROM lane l JOIN endpoint e ON e.id = l.endpoint_id WHERE e.name = $1"


def _sent_to(network: Network, name: str) -> list[Any]:
    return [payload(sent) for sent in network.accepted if sent.url.endswith(name)]


async def _endpoint(database: Database, name: str) -> Any:
    return await fetchval(database, "SELECT id FROM endpoint WHERE name = $1", name)


async def _letters(database: Database) -> list[Any]:
    async with database.at_hand() as db:
        return list(await db.fetch("SELECT seq, reason FROM dead_letter"))


async def _is(database: Database, sql: str, expected: object) -> bool:
    return bool(await fetchval(database, sql) == expected)


async def _none_pending(database: Database) -> bool:
    return bool(await fetchval(database, PENDING) == 0)


async def execute(database: Database, statements: str) -> None:
    async with database.at_hand() as db:
        await db.execute(statements)


async def test_a_delivery_without_any_record_is_still_a_violation(database: Database) -> None:
    """The journal's entry of a failed attempt excuses no success that is missing."""
    failed = set()

    def script(sent: Sent) -> Any:
        again = sent.seq in failed
        failed.add(sent.seq)
        return OK if again else BUSY

    await add_endpoint(database, lanes=1)
    await execute(database, trigger("attempt_run", "NEW.outcome <> 'd'"))
    await publish(database, 1)
    network = Network(script)
    async with running(database, network, poll_s=0.05):
        await until(lambda: network.data() == [1], what="the delivery")
        await all_ended(database)
    refused = "SELECT data ->> 'outcome' FROM journal WHERE kind = 'row_refused'"
    assert await fetchval(database, refused) == "retry"
    assert await exceptions(database) == {}
    await execute(database, "DELETE FROM attempt_run")
    assert set(await exceptions(database)) == {"accounted"}
