"""What a lane delivered is sent again when its receiver asks for that, and taken if it was lost."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest

from outbox.operations import (
    backfill,
    endpoint_removal,
    endpoint_states,
    fetch_tokens,
    receiver_replays,
    replay_jobs,
    replays,
)
from outbox.operations.backfill import Backfill
from outbox.operations.dead_letter_filter import Selection
from outbox.operations.fetch_tokens import Fetcher
from outbox.receiver.fetch import AlreadyAsked, CannotFetch, Fetch
from tests.integration.test_catch_up import Ledger, Wire, fetchable
from tests.support import ranges
from tests.support.relay import (
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
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from asyncpg import Connection

    from outbox.operations.endpoint_changes import NewEndpoint
    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major


@pytest.fixture
async def db(database: Database) -> AsyncIterator[Connection[Any]]:
    async with database.connection(server_settings={"search_path": "relay"}) as connection:
        yield connection


@pytest.fixture
def unpaced() -> Iterator[None]:
    with ranges.unpaced(3):
        yield


def lane_of(made: NewEndpoint, generation: int = 1, slot: int = 0) -> str:
    return f"{made.id.hex[:12]}-{generation}-{slot}"


async def ask(db: Connection[Any], made: NewEndpoint, after: int) -> receiver_replays.Resending:
    return await receiver_replays.ask(db, "relay", Fetcher(made.id, "shop"), lane_of(made), after)


async def test_after_a_restored_backup_it_is_processed_once_and_in_order(
    database: Database, tmp_path: Path
) -> None:
    made = await add_endpoint(database)
    async with fetchable(database) as fetch:
        ledger = Ledger(tmp_path / "shop.sqlite", made.secret)
        wire = Wire(ledger.receiver)
        async with running(database, wire):
            await publish(database, *range(5), key="k")
            await all_ended(database)
            with contextlib.closing(ledger.connected()) as file:
                file.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            shutil.copy(ledger.file, tmp_path / "backup.sqlite")
            await publish(database, *range(5, 10), key="k")
            await all_ended(database)
            restored = Ledger(tmp_path / "backup.sqlite", made.secret)
            wire.receiver = restored.receiver
            asked = await asyncio.to_thread(fetch.replay, lane_of(made), 3)
            assert (asked.lane, asked.from_sequence, asked.to_sequence) == (lane_of(made), 4, 10)
            await all_ended(database)
            # The two that it had are told apart from the five that it had not.
            assert restored.moved() == list(range(10))
            assert restored.receiver.totals.ended["duplicate"] == 2
            again = wire.sent[-7:]
            assert [sent.body["replay_of"]["sequence"] for sent in again] == list(range(4, 11))
            assert {sent.body["backfill"] for sent in again} == {asked.job}
            assert len({sent.delivery for sent in wire.sent}) == 17
            # Nothing is there a second time, for who asks a second time.
            asked = await fetch.replay_async(lane_of(made), 0)
            await all_ended(database)
            assert len(wire.sent) == 17 + 10
            assert restored.moved() == list(range(10))
    async with database.connection(server_settings={"search_path": "relay"}) as connection:
        assert asked.job is not None
        job = await replay_jobs.get(connection, "relay", asked.job)
    assert (job.kind, job.state, job.lane) == ("lane", "done", lane_of(made))
    assert (job.from_sequence, job.to_sequence, job.taken, job.done, job.all) == (1, 17, 10, 17, 17)
    assert job.asked_by == "receiver shop"
    assert await exceptions(database) == {}


async def test_what_was_given_up_stays_an_operators_to_send_again(
    database: Database, db: Connection[Any]
) -> None:
    made = await add_endpoint(database)
    network = Network(lambda sent: REFUSED if sent.seq in (2, 5) else OK)
    async with running(database, network):
        await publish(database, *range(1, 6), key="k")
        await all_ended(database)
        await replays.replay(db, "relay", Selection(ids=(1,)), actor="test")
        await all_ended(database)
        assert (await ask(db, made, 0)).to_sequence == 6
        await all_ended(database)
    # Number 6 is 2 in its second life, which was delivered.
    assert [sent.body.get("replay_of", {}).get("sequence") for sent in network.sent[6:]] == [
        *(1, 3, 4, 6)
    ]
    assert [sent.body["data"] for sent in network.sent[6:]] == [1, 3, 4, 2]
    assert await exceptions(database) == {}


async def test_what_is_given_up_of_it_can_be_sent_again_in_turn(
    database: Database, db: Connection[Any]
) -> None:
    made = await add_endpoint(database)
    network = Network()
    async with running(database, network):
        await publish(database, 1, 2)
        await all_ended(database)
        network.script = lambda sent: REFUSED if sent.seq == 4 else OK
        await ask(db, made, 0)
        await all_ended(database)
        await replays.replay(db, "relay", Selection(everything=True), actor="test")
        await all_ended(database)
    refused, last = network.sent[-2:]
    assert (refused.seq, last.seq, last.body["data"]) == (4, 5, 2)
    assert last.delivery == refused.delivery
    assert last.body["copy_of"] == refused.body["copy_of"] == network.sent[1].delivery
    assert last.body["replay_of"]["sequence"] == 4
    assert await exceptions(database) == {}


async def test_a_copy_comes_again_if_what_it_is_a_copy_of_does_not(
    database: Database, db: Connection[Any]
) -> None:
    made = await add_endpoint(database)
    network = Network()
    async with running(database, network):
        await publish(database, *range(1, 4), key="k")
        await all_ended(database)
        for after in (0, 3, 2, 0):
            await ask(db, made, after)
            await all_ended(database)
    asked = [sent.body["replay_of"]["sequence"] for sent in network.sent[3:]]
    # 4 to 6 are copies of 1 to 3, 7 to 9 of those; then 3 itself, and what it is not of.
    assert asked == [1, 2, 3, *(4, 5, 6), *(3, 4, 5), *(1, 2, 3)]
    first = {sent.body["data"]: sent.delivery for sent in network.sent[:3]}
    for sent in network.sent[3:]:
        assert sent.body["copy_of"] == first[sent.body["data"]] != sent.delivery
    assert await exceptions(database) == {}


async def test_what_is_sent_again_of_a_backfill_is_a_copy_of_that(
    database: Database, db: Connection[Any]
) -> None:
    made = await add_endpoint(database)
    network = Network()
    async with running(database, network):
        await publish(database, 1)
        await all_ended(database)
        since = datetime(2020, 1, 1, tzinfo=UTC)
        await backfill.ask(db, "relay", Backfill("shop", since), actor="test")
        await all_ended(database)
        await ask(db, made, 0)
        await all_ended(database)
    one, once_more, first, second = network.sent
    assert len({sent.delivery for sent in network.sent}) == 4
    assert "copy_of" not in one.body | once_more.body
    assert (first.body["copy_of"], second.body["copy_of"]) == (one.delivery, once_more.delivery)
    assert await exceptions(database) == {}


async def test_lanes_were_changed_since(
    database: Database, db: Connection[Any], tmp_path: Path
) -> None:
    """What an old lane delivered goes where its keys are now, and is still known by its number."""
    made = await add_endpoint(database, lanes=1)
    async with fetchable(database) as fetch:
        ledger = Ledger(tmp_path / "shop.sqlite", made.secret, fetch=fetch)
        wire = Wire(ledger.receiver)
        async with running(database, wire):
            await publish(database, 0, key="k0")
            await all_ended(database)
            wire.receiver = None
            for n in range(1, 12):
                await publish(database, n, key=f"k{n % 3}")
            await all_ended(database)
            await ranges.change_lanes(db, made.id, 3)
            wire.receiver = ledger.receiver
            await publish(database, 12, key="k0")
            await all_ended(database)
            await asyncio.to_thread(fetch.replay, lane_of(made), 4)
            await all_ended(database)
            assert sorted(ledger.moved()) == [0, *range(4, 13)]
            # The rest is fetched, and what came already is not processed again.
            await asyncio.to_thread(ledger.receiver.catch_up)
            assert sorted(ledger.moved()) == list(range(13))
            await asyncio.to_thread(ledger.receiver.catch_up, lane_of(made))
            assert sorted(ledger.moved()) == list(range(13))
    assert len({sent.body["lane"] for sent in wire.sent}) > 2
    assert await exceptions(database) == {}


async def test_it_goes_on_where_another_leader_left_it(
    database: Database, db: Connection[Any], unpaced: None
) -> None:
    made = await add_endpoint(database)
    network = Network()
    async with running(database, network):
        await publish(database, *range(10), key="k")
        await all_ended(database)
    asked = await ask(db, made, 2)
    await publish(database, "live", key="k")
    for _ in range(2):
        worker = await ranges.sequencer(database)
        for _ in range(2):
            await ranges.turn(worker)
    taken = "SELECT array_agg(replay_seq::int ORDER BY seq) FROM delivery WHERE backfill_id = $1"
    numbers = await db.fetchval(taken, asked.job)
    assert numbers == [3, 4, 5, 6, 7, 8]
    # Deliveries of it are in the lanes: what follows comes when those are done.
    async with running(database, network):
        await all_ended(database)
    assert await db.fetchval(taken, asked.job) == list(range(3, 11))
    assert sorted(map(str, network.data()[10:])) == sorted(map(str, [*range(2, 10), "live"]))
    assert await exceptions(database) == {}


async def test_an_operator_sees_it_and_can_end_it(
    database: Database, db: Connection[Any], unpaced: None
) -> None:
    made = await add_endpoint(database)
    network = Network()
    async with running(database, network):
        await publish(database, *range(10), key="k")
        await all_ended(database)
    asked = await ask(db, made, 0)
    assert asked.job is not None
    worker = await ranges.sequencer(database)
    for _ in range(2):
        await ranges.turn(worker)
    aborted = await replay_jobs.abort(db, "relay", asked.job, actor="test")
    async with running(database, network):
        await all_ended(database)
        await until(lambda: db.fetchval("SELECT ended_at FROM replay_part"))
    assert aborted.taken == len(network.sent) - 10 == 3
    assert await exceptions(database) == {}


async def test_it_is_asked_for_once_at_a_time_and_by_whose_it_is(
    database: Database, db: Connection[Any]
) -> None:
    made = await add_endpoint(database)
    other = await add_endpoint(database, "other", types=("none",))
    async with fetchable(database) as fetch, fetchable_other(database) as others:
        lane = lane_of(made)
        with pytest.raises(CannotFetch, match="404, there is no lane"):
            await others.replay_async(lane, 0)
        nothing = await others.replay_async(lane_of(other), 0)
        assert (nothing.job, nothing.from_sequence, nothing.to_sequence) == (None, None, None)
        async with running(database, Network()):
            await publish(database, 1, 2, 3)
            await all_ended(database)
            version = "SELECT version FROM cursor"
            before = await db.fetchval(version)
            nothing = await fetch.replay_async(lane, 3)
            assert (nothing.job, nothing.from_sequence, nothing.to_sequence) == (None, None, None)
            # Whoever sequences was not bothered.
            assert await db.fetchval(version) == before
            await endpoint_states.pause(db, "relay", ["shop"], actor="test")
            asked = await fetch.replay_async(lane, 0, 2)
            assert (asked.from_sequence, asked.to_sequence, asked.acknowledged) == (1, 2, 3)
            with pytest.raises(AlreadyAsked, match=f"409, lane {lane} .* already, by job 1"):
                await fetch.replay_async(lane, 1)
            await endpoint_states.resume(db, "relay", ["shop"], actor="test")
            await all_ended(database)
        await db.execute("UPDATE endpoint SET state = 'disabled' WHERE name = 'shop'")
        with pytest.raises(CannotFetch, match="409, the endpoint is disabled"):
            await fetch.replay_async(lane, 0)
    assert asked.job == 1
    told = "SELECT actor, data FROM journal WHERE kind = 'lane_asked'"
    (row,) = await db.fetch(told)
    assert row["actor"] == "receiver shop"


@contextlib.asynccontextmanager
async def fetchable_other(database: Database) -> AsyncIterator[Fetch]:
    async with fetchable(database, "other") as fetch:
        yield fetch


async def test_it_is_owed_by_an_endpoint_that_is_to_be_removed(
    database: Database, db: Connection[Any]
) -> None:
    made = await add_endpoint(database)
    async with running(database, Network()):
        await publish(database, 1, 2, 3)
        await all_ended(database)
    await ask(db, made, 0)
    assert (await endpoint_removal.waiting(db, "relay", made.id)).owed == 3
    await fetch_tokens.add(db, "relay", "shop", actor="test")
    await endpoint_removal.remove(db, "relay", "shop", actor="test", give_up=True)
    async with running(database, Network()):
        await until(lambda: db.fetchval("SELECT ended_at FROM replay_job"))
    assert await fetchval(database, "SELECT count(*) FROM delivery WHERE replay_id > 0") == 0
    assert await exceptions(database) == {}


async def test_what_was_erased_meanwhile_is_passed_over(
    database: Database, db: Connection[Any]
) -> None:
    made = await add_endpoint(database)
    network = Network()
    async with running(database, network):
        await publish(database, 1, 2, 3)
        await all_ended(database)
        await db.execute("UPDATE outbox SET payload = NULL, erased_at = now() WHERE id = 2")
        await ask(db, made, 0)
        await all_ended(database)
    assert network.data() == [1, 2, 3, 1, 3]
    assert await exceptions(database) == {}
