"""Dead letters are kept with their event, replayed in order, or discarded by an operator."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from outbox.errors import NotFound, UsageError
from outbox.operations.criteria import Criteria, DeadLetterSelection
from outbox.operations.dead_letters import discard
from outbox.operations.dead_letters import queries as dead_letters
from outbox.operations.dead_letters import replay as replays
from outbox.operations.endpoints import removal as endpoint_removal
from tests.support import ranges
from tests.support.relay import (
    OK,
    REFUSED,
    Network,
    add_endpoint,
    all_ended,
    exceptions,
    publish,
    running,
)
from tests.support.tiers import sampled
from tests.support.waiting import until

if TYPE_CHECKING:
    from uuid import UUID

    from asyncpg import Connection

    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major

ALL = DeadLetterSelection(everything=True)

# What a plan must not change.
EVERYTHING = """
SELECT 'letter' AS what, d::text FROM dead_letter d
 UNION ALL SELECT 'journal', j::text FROM journal j
 UNION ALL SELECT 'job', j::text FROM replay_job j
 UNION ALL SELECT 'cursor', c::text FROM cursor c
 ORDER BY 1, 2
"""


@pytest.fixture
async def db(database: Database) -> Connection[Any]:
    return await database.connect(server_settings={"search_path": "relay"})


async def add_dead_letter(
    db: Connection[Any], endpoint_id: UUID, *numbers: int, to: int | None = None
) -> None:
    """Insert dead letters, without a relay."""
    for number in numbers:
        await db.execute(
            """
            INSERT INTO dead_letter (endpoint_id, lane_id, batch, seq, to_seq, outbox_id, event_id,
                   type, payload, reason, attempts, last_response)
            SELECT $1, min(id), 0, $2::bigint, $3::bigint, CASE WHEN $2 = $3 THEN $2 END,
                   CASE WHEN $2 = $3 THEN gen_random_uuid() END,
                   CASE WHEN $2 = $3 THEN 'a.b' END, CASE WHEN $2 = $3 THEN '{}'::jsonb END,
                   'refused', 1, '{"status": 410}'
              FROM lane WHERE endpoint_id = $1
            """,
            endpoint_id,
            number,
            to or number,
        )


async def ids(db: Connection[Any], **options: Any) -> list[int]:
    return [row.id for row in await dead_letters.list_dead_letters(db, "relay", **options)]


async def test_a_refused_delivery_is_shown_and_replayed(
    database: Database, db: Connection[Any]
) -> None:
    made = await add_endpoint(database)
    network = Network(lambda sent: REFUSED if sent.body["data"] == {"n": 2} else OK)
    async with running(database, network):
        await publish(
            database, {"n": 1}, {"n": 2}, {"n": 3}, key="k", tenant=None, headers='{"X-A": "b"}'
        )
        await all_ended(database)
        (row,) = await dead_letters.list_dead_letters(db, "relay")
        assert (row.endpoint, row.sequence, row.to_sequence) == ("shop", 2, 2)
        assert row.lane == f"{made.id.hex[:12]}-1-0"
        assert (row.type, row.reason, row.status, row.attempts) == ("a.b", "refused", 400, 1)
        assert row.state == "dead"
        letter = await dead_letters.get_dead_letter(db, "relay", row.id)
        assert (letter.key, letter.tenant, letter.payload.text) == ("k", None, '{"n": 2}')
        assert letter.headers == {"X-A": "b"}
        assert letter.last_response is not None
        assert letter.last_response["body"] == "no"
        assert letter.replays == ()

        network.script = lambda _: OK
        outcome = await replays.start_replay(
            db, "relay", DeadLetterSelection(ids=(row.id,)), actor="ann@desk"
        )
        assert (outcome.replaying, outcome.skipped) == (1, {})
        await until(lambda: network.data() == [{"n": 1}, {"n": 3}, {"n": 2}])
        await all_ended(database)
    again, first = network.sent[-1], network.sent[1]
    assert again.delivery == first.delivery
    assert (again.seq, again.body["replay_of"]) == (4, {"lane": row.lane, "sequence": 2})
    (shown,) = (await dead_letters.get_dead_letter(db, "relay", row.id)).replays
    assert (shown.lane, shown.sequence, shown.state, shown.again) == (row.lane, 4, "replayed", None)
    assert await ids(db) == []
    assert await ids(db, states=("replaying",)) == []
    assert await ids(db, states=("replayed",)) == [row.id]
    for refused in (replays.start_replay, discard.discard_dead_letters):
        with pytest.raises(
            UsageError,
            match=f"{row.id} was replayed as sequence 4; see: outbox dead show {row.id}",
        ):
            await refused(db, "relay", DeadLetterSelection(ids=(row.id,)), actor="test")
    kinds = [r["kind"] for r in await db.fetch("SELECT kind FROM journal WHERE actor = 'ann@desk'")]
    assert kinds == ["dead_replayed"]
    assert await exceptions(database) == {}


@pytest.mark.parametrize("to", sampled([5, 9]))
async def test_the_result_of_a_replay_is_shown(
    database: Database, db: Connection[Any], to: int
) -> None:
    one = await add_endpoint(database, "one")
    await add_dead_letter(db, one.id, 1)
    (first,) = await ids(db)

    async def state() -> tuple[str, int | None]:
        (row,) = await dead_letters.list_dead_letters(
            db, "relay", states=dead_letters.STATES, limit=1
        )
        letter = await dead_letters.get_dead_letter(db, "relay", first)
        (again,) = letter.replays
        assert (row.state, row.again) == (again.state, again.again)
        assert asdict(letter) == asdict(letter) | asdict(row)
        return row.state, row.again

    await replays.start_replay(db, "relay", DeadLetterSelection(ids=(first,)), actor="test")
    assert await state() == ("replaying", None)
    await db.execute(
        "INSERT INTO delivery_run (lane_id, batch, seq, outbox_id, replay_id, replay_seq) "
        "SELECT min(lane.id), 1, 5, 1, min(replay.id), 1 FROM lane, replay;"
        "UPDATE replay SET next_seq = 2"
    )
    assert await state() == ("replaying", None)
    # An acknowledgement that no checkpoint has taken up yet.
    await db.execute(
        "INSERT INTO attempt_run (lane_id, batch, seq, attempt, replica_id, outcome, status, "
        "started_at, elapsed_ms) SELECT lane_id, batch, seq, 1, 1, 'd', 204, now(), 1 "
        "FROM delivery"
    )
    assert await state() == ("replayed", None)
    await db.execute("DELETE FROM attempt_run")
    await db.execute("UPDATE lane_progress SET acked_seq = 5")
    assert await state() == ("replayed", None)
    # Given up once more: for itself, or within a range.
    await add_dead_letter(db, one.id, 5 if to == 5 else 4, to=to)
    (second,) = await ids(db)
    assert await state() == ("dead_again", second)
    with pytest.raises(
        UsageError, match=f"dead-lettered again as {second}; see: outbox dead show {second}"
    ):
        await replays.start_replay(db, "relay", DeadLetterSelection(ids=(first,)), actor="test")


@pytest.mark.parametrize(
    "several",
    [
        {"ids": (1,), "everything": True},
        {"ids": (1,), "criteria": Criteria(endpoint="a")},
        {"criteria": Criteria(tenant="t"), "everything": True},
    ],
)
async def test_a_selection_is_exactly_one_of_ids_filter_and_all(several: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="select dead letters: by ids"):
        DeadLetterSelection()
    with pytest.raises(UsageError, match="combine neither ids nor all with criteria"):
        DeadLetterSelection(**several)
    with pytest.raises(UsageError, match="at most 1000 ids"):
        DeadLetterSelection(ids=tuple(range(1, 1002)))


async def test_dead_letters_are_paged_and_filtered(database: Database, db: Connection[Any]) -> None:
    one, two = await add_endpoint(database, "one"), await add_endpoint(database, "two")
    await add_dead_letter(db, one.id, 1, 2, 3)
    await add_dead_letter(db, two.id, 1)
    everything = await ids(db)
    assert len(everything) == 4
    assert await ids(db, limit=2) == everything[:2]
    assert await ids(db, limit=2, after=everything[1]) == everything[2:]
    assert await ids(db, only=Criteria(endpoint="two")) == everything[3:]
    with pytest.raises(NotFound, match='there is no endpoint "tow"; did you mean "two"'):
        await ids(db, only=Criteria(endpoint="tow"))
    await discard.discard_dead_letters(
        db, "relay", DeadLetterSelection(ids=(everything[0],)), actor="test"
    )
    assert await ids(db) == everything[1:]
    assert await ids(db, states=dead_letters.STATES) == everything


async def test_a_replay_by_filter_skips_what_cannot_be_replayed(
    database: Database, db: Connection[Any]
) -> None:
    one, gone = await add_endpoint(database, "one"), await add_endpoint(database, "gone")
    await add_dead_letter(db, one.id, 1, 2, 3)
    await add_dead_letter(db, one.id, 10, to=19)
    await add_dead_letter(db, gone.id, 1)
    await db.execute("UPDATE dead_letter SET payload = NULL, event_id = NULL WHERE seq = 3")
    off = await add_endpoint(database, "off")
    await add_dead_letter(db, off.id, 1, 2)
    await db.execute("UPDATE endpoint SET state = 'disabled' WHERE id = $1", off.id)
    await endpoint_removal.remove_endpoint(db, "relay", name="gone", actor="test")
    before = await db.fetch(EVERYTHING)
    planned = await replays.start_replay(db, "relay", ALL, actor="test", dry_run=True)
    assert (planned.by_endpoint, planned.job) == ({"one": 3}, None)
    assert await db.fetch(EVERYTHING) == before
    outcome = await replays.start_replay(db, "relay", ALL, actor="ann@desk")
    assert (outcome.replaying, outcome.skipped) == (3, {"erased": 1, "disabled": 2, "removed": 1})
    assert (planned.replaying, planned.skipped) == (outcome.replaying, outcome.skipped)
    # To ask is to write down what is wanted; the leader takes it.
    assert await db.fetchval("SELECT count(*) FROM replay") == 0
    parts = "SELECT (endpoint_id, next_id <= last_id)::text FROM replay_job_endpoint"
    assert await db.fetchval(parts) == f"({one.id},t)"
    await ranges.sequence_all(database)
    sql = """SELECT array_agg((d.seq, d.to_seq)::text ORDER BY r.id)
               FROM replay r JOIN dead_letter d ON d.id = r.dead_id"""
    assert await db.fetchval(sql) == ["(1,1)", "(2,2)", "(10,19)"]
    # What is replaying already is not looked at again.
    assert (await replays.start_replay(db, "relay", ALL, actor="test")).replaying == 0
    data = await db.fetchval("SELECT data FROM journal WHERE actor = 'ann@desk'")
    assert orjson.loads(data) == {"job": outcome.job, "selection": {}, "dead_letters": 3}


async def test_a_selection_by_filter(database: Database, db: Connection[Any]) -> None:
    one, two = await add_endpoint(database, "one"), await add_endpoint(database, "two")
    await add_dead_letter(db, one.id, 1, 2, 3, 4)
    await add_dead_letter(db, two.id, 1)
    await add_dead_letter(db, two.id, 5, to=9)
    await db.execute(
        """
        UPDATE dead_letter SET type = 'a.c' WHERE seq = 2;
        UPDATE dead_letter SET tenant = 't', type = 'outbox.x' WHERE seq = 3;
        UPDATE dead_letter SET reason = 'expired' WHERE seq = 4;
        UPDATE dead_letter SET at = '2026-01-01Z' WHERE seq = 1
        """
    )
    at = datetime(2026, 1, 1, tzinfo=UTC)
    for only, expected in (
        (Criteria(endpoint="one"), [1, 2, 3, 4]),
        (Criteria(types=("a.*",)), [1, 2, 4, 5]),
        (Criteria(types=("**",)), [1, 2, 4, 5]),
        (Criteria(types=("a.c", "outbox.*")), [2, 3]),
        (Criteria(tenant="t"), [3]),
        (Criteria(reason="expired"), [4]),
        (Criteria(since=at, until=at + timedelta(seconds=1)), [1, 5]),
        (Criteria(until=at), []),
        (Criteria(since=at + timedelta(seconds=1)), [2, 3, 4, 6]),
        (Criteria(endpoint="two", types=("a.b",)), [5]),
    ):
        assert await ids(db, only=only) == expected, only
        which = DeadLetterSelection(criteria=only)
        replayed = await replays.start_replay(db, "relay", which, actor="test", dry_run=True)
        discarded = await discard.discard_dead_letters(
            db, "relay", which, actor="test", dry_run=True
        )
        assert replayed.replaying == discarded.discarded == len(expected)
    only = Criteria(types=("a.c", "outbox.*"), reason="refused")
    outcome = await replays.start_replay(
        db, "relay", DeadLetterSelection(criteria=only), actor="ann@desk"
    )
    await ranges.sequence_all(database)
    assert outcome.replaying == 2
    assert await ids(db) == [1, 4, 5, 6]
    reported = orjson.loads(await db.fetchval("SELECT data FROM journal WHERE actor = 'ann@desk'"))
    assert reported["selection"] == {"types": ["a.c", "outbox.*"], "reason": "refused"}
    with pytest.raises(UsageError, match='"tired" is not a reason; choose one of: refused, '):
        Criteria(reason="tired")
    with pytest.raises(UsageError, match="until must be later than since"):
        Criteria(since=at, until=at)


@pytest.mark.parametrize(
    ("decide", "number"),
    [(replays.start_replay, "replaying"), (discard.discard_dead_letters, "discarded")],
)
@pytest.mark.parametrize(
    "which", sampled([ALL, DeadLetterSelection(criteria=Criteria(endpoint="one"))])
)
async def test_nothing_is_changed_that_a_dry_run_has_not_counted(
    database: Database, db: Connection[Any], decide: Any, number: str, which: DeadLetterSelection
) -> None:
    one = await add_endpoint(database, "one")
    await add_dead_letter(db, one.id, 1, 2)
    plan = await decide(db, "relay", which, actor="test", dry_run=True)
    await add_dead_letter(db, one.id, 3)
    counted = DeadLetterSelection(criteria=Criteria(until=plan.until))
    again = await decide(db, "relay", counted, actor="test", dry_run=True)
    assert (getattr(again, number), again.until) == (2, plan.until)
    # One that was written before the dry run, and committed afterwards.
    earlier = "UPDATE dead_letter SET at = $1::timestamptz - interval '1 ms' WHERE seq = 3"
    await db.execute(earlier, plan.until)
    before = await db.fetch(EVERYTHING)
    with pytest.raises(UsageError, match="3 dead letters match by now, but 2 were counted"):
        await decide(db, "relay", counted, actor="test", counted=2)
    assert await db.fetch(EVERYTHING) == before
    await db.execute("UPDATE dead_letter SET at = clock_timestamp() WHERE seq = 3")
    done = await decide(db, "relay", counted, actor="test", counted=2)
    assert (getattr(done, number), done.until) == (2, None)
    await ranges.sequence_all(database)
    assert await ids(db) == [3]


async def test_a_dry_run_keeps_the_times_of_its_selection(
    database: Database, db: Connection[Any]
) -> None:
    one = await add_endpoint(database, "one")
    await add_dead_letter(db, one.id, 1)
    past, future = datetime(2026, 1, 1, tzinfo=UTC), datetime(2999, 1, 1, tzinfo=UTC)
    for which, expected in (
        (DeadLetterSelection(criteria=Criteria(until=past)), (0, past)),
        (DeadLetterSelection(criteria=Criteria(since=future)), (0, None)),
        (DeadLetterSelection(ids=(1,)), (1, None)),
    ):
        plan = await replays.start_replay(db, "relay", which, actor="test", dry_run=True)
        assert (plan.replaying, plan.until) == expected
    later = DeadLetterSelection(criteria=Criteria(until=future))
    plan = await replays.start_replay(db, "relay", later, actor="test", dry_run=True)
    assert plan.replaying == 1
    assert plan.until is not None
    assert plan.until < future


async def test_dead_letters_are_counted_by_state(database: Database, db: Connection[Any]) -> None:
    one, two = await add_endpoint(database, "one"), await add_endpoint(database, "two")
    await add_dead_letter(db, one.id, 1, 2, 3, 4)
    await add_dead_letter(db, two.id, 1)
    await add_dead_letter(db, two.id, 5, to=9)
    await db.execute("UPDATE dead_letter SET reason = 'expired' WHERE id = 1")
    await discard.discard_dead_letters(db, "relay", DeadLetterSelection(ids=(1,)), actor="test")
    await replays.start_replay(db, "relay", DeadLetterSelection(ids=(2, 3, 4)), actor="test")

    async def counted(**only: Any) -> list[tuple[Any, ...]]:
        found = await dead_letters.count_by_state(db, "relay", only=Criteria(**only))
        return [(c.endpoint, c.reason, c.state, c.dead_letters, c.numbers) for c in found.counts]

    other = [("two", "refused", "dead", 2, 6)]
    first = [("one", "expired", "discarded", 1, 1)]
    assert await counted() == [*first, ("one", "refused", "replaying", 3, 3), *other]
    # The first was sent and given up again, the second delivered, the third is pending.
    await db.execute("UPDATE lane_counter SET last_seq = 10, by_xid = txid_current()")
    await ranges.sequence_all(database)
    await db.execute("UPDATE lane_progress SET acked_seq = 11 WHERE endpoint_id = $1", one.id)
    await db.execute(
        "INSERT INTO attempt_run (lane_id, batch, seq, attempt, replica_id, outcome, status, "
        "started_at, elapsed_ms) SELECT lane_id, batch, seq, 1, 1, 'd', 204, now(), 1 "
        "FROM delivery WHERE seq = 12"
    )
    await add_dead_letter(db, one.id, 11)
    assert await counted() == [
        *first,
        ("one", "refused", "dead", 1, 1),
        ("one", "refused", "dead_again", 1, 1),
        ("one", "refused", "replayed", 1, 1),
        ("one", "refused", "replaying", 1, 1),
        *other,
    ]
    assert await counted(endpoint="two") == other


async def test_what_cannot_be_replayed_is_skipped_and_blocks_no_other(
    database: Database, db: Connection[Any]
) -> None:
    one, off, gone = [await add_endpoint(database, name) for name in ("one", "it is off", "gone")]
    await add_dead_letter(db, one.id, 1, 2, 3)
    await add_dead_letter(db, off.id, 10, to=19)
    await add_dead_letter(db, gone.id, 1)
    await db.execute("UPDATE endpoint SET state = 'disabled' WHERE id = $1", off.id)
    await endpoint_removal.remove_endpoint(db, "relay", name="gone", actor="test")
    first, second, third, disabled, removed = await ids(db)
    await db.execute("UPDATE dead_letter SET payload = NULL WHERE id = $1", third)
    await discard.discard_dead_letters(
        db, "relay", DeadLetterSelection(ids=(second,)), actor="test"
    )
    for dead_id, says in (
        (second, "was discarded"),
        (third, "has no payload"),
        (
            disabled,
            'belongs to the endpoint "it is off", which is disabled; '
            "enable it first: outbox endpoint enable 'it is off'",
        ),
        (removed, 'belongs to the endpoint "gone", which was removed'),
    ):
        with pytest.raises(UsageError, match=f"dead letter {dead_id} {says}"):
            await replays.start_replay(
                db, "relay", DeadLetterSelection(ids=(dead_id,)), actor="test"
            )
    # Another state is a mistake in the selection: nothing is replayed.
    for wrong, error in ((second, UsageError), (99, NotFound)):
        with pytest.raises(error, match=f"dead letter {wrong}"):
            await replays.start_replay(
                db, "relay", DeadLetterSelection(ids=(first, wrong)), actor="test"
            )
    assert await db.fetchval("SELECT count(*) FROM replay") == 0
    chosen = DeadLetterSelection(ids=(first, third, disabled, removed))
    planned = await replays.start_replay(db, "relay", chosen, actor="test", dry_run=True)
    report = await replays.start_replay(db, "relay", chosen, actor="test")
    for found in (planned, report):
        assert found.by_endpoint == {"one": 1}
        assert found.skipped == {"erased": 1, "disabled": 1, "removed": 1}
    replayed = await db.fetch("SELECT id, state FROM dead_letter ORDER BY id")
    assert {row["id"] for row in replayed if row["state"] == "replaying"} == {first}
    assert await db.fetchval("SELECT array_agg(dead_id) FROM replay") == [first]
    parts = await db.fetch("SELECT endpoint_id, expected FROM replay_job_endpoint")
    assert [tuple(row) for row in parts] == [(one.id, 1)]
    with pytest.raises(UsageError, match=f"dead letter {first} is being replayed already"):
        await replays.start_replay(db, "relay", DeadLetterSelection(ids=(first,)), actor="test")
    with pytest.raises(UsageError, match=f"dead letter {first} is being replayed already"):
        await discard.discard_dead_letters(
            db, "relay", DeadLetterSelection(ids=(first,)), actor="test"
        )


async def test_discarding_is_journalled(database: Database, db: Connection[Any]) -> None:
    one = await add_endpoint(database, "one")
    await add_dead_letter(db, one.id, 1)
    await add_dead_letter(db, one.id, 10, to=19)
    both = await ids(db)
    outcome = await discard.discard_dead_letters(
        db, "relay", ALL, actor="ann@desk", comment="the customer left"
    )
    assert outcome.discarded == 2
    row = await db.fetchrow("SELECT actor, endpoint_id, data FROM journal ORDER BY id DESC LIMIT 1")
    assert row["actor"] == "ann@desk"
    assert orjson.loads(row["data"]) == {
        "comment": "the customer left",
        "selection": {},
        "dead_letters": 2,
        "from": both[0],
        "to": both[1],
    }
    assert await ids(db) == []


async def test_many_dead_letters_are_discarded_in_batches(
    database: Database, db: Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discard, "BATCH_SIZE", 2)
    one = await add_endpoint(database, "one", lanes=2)
    await add_dead_letter(db, one.id, 1, 2, 3, 4, 5)
    await db.execute("INSERT INTO lane_block (lane_id, seq) SELECT min(id), 3 FROM lane")
    version = await db.fetchval("SELECT version FROM cursor")
    assert (await discard.discard_dead_letters(db, "relay", ALL, actor="ann@desk")).discarded == 5
    reported = await db.fetch("SELECT data FROM journal WHERE actor = 'ann@desk' ORDER BY id")
    assert [orjson.loads(r["data"])["dead_letters"] for r in reported] == [2, 2, 1]
    # Owners are notified only if a lane is blocked by it.
    assert await db.fetchval("SELECT version FROM cursor") == version + 1
    assert await db.fetchval("SELECT count(*) FROM lane_block") == 0


@pytest.mark.parametrize("decide", [replays.start_replay, discard.discard_dead_letters])
async def test_replaying_or_discarding_unblocks_the_lane(
    database: Database, db: Connection[Any], decide: Any
) -> None:
    one = await add_endpoint(database, "one", lanes=2)
    await add_dead_letter(db, one.id, 1, 2)
    await db.execute("INSERT INTO lane_block (lane_id, seq) SELECT id, 2 FROM lane")
    first, second = await ids(db)
    version = await db.fetchval("SELECT version FROM cursor")
    await decide(db, "relay", DeadLetterSelection(ids=(first,)), actor="test")
    assert await db.fetchval("SELECT count(*) FROM lane_block") == 2
    await decide(db, "relay", DeadLetterSelection(ids=(second,)), actor="test")
    # The other lane waits for another letter of the same number.
    assert await db.fetchval("SELECT array_agg(lane_id) = ARRAY[max(l.id)] FROM lane_block, "
                             "(SELECT max(id) AS id FROM lane) l")  # fmt: skip
    # A higher version makes its owner reload.
    assert await db.fetchval("SELECT version FROM cursor") == version + 2


async def test_an_unknown_dead_letter_is_not_found(db: Connection[Any]) -> None:
    with pytest.raises(NotFound, match="there is no dead letter 7"):
        await dead_letters.get_dead_letter(db, "relay", 7)
