"""Receiver replays: a lane repeats delivered events on request; the receiver accepts those that it
lost.
"""

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
from outbox.operations.dead_letter_filter import DeadLetterSelection
from outbox.operations.fetch_tokens import Fetcher
from outbox.receiver.fetch import CannotFetch, FetchClient, ReplayConflict
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


async def request_replay(
    db: Connection[Any], made: NewEndpoint, after: int
) -> receiver_replays.ReceiverReplay:
    return await receiver_replays.request_replay(
        db, "relay", Fetcher(made.id, "shop"), lane_of(made), after
    )


async def test_replayed_events_are_processed_once_and_in_order_after_a_restored_backup(
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
            replay = await asyncio.to_thread(fetch.replay, lane_of(made), 3)
            assert (replay.lane, replay.from_sequence, replay.to_sequence) == (lane_of(made), 4, 10)
            await all_ended(database)
            # The two known deliveries are distinguished from the five lost ones.
            assert restored.moved() == list(range(10))
            assert restored.receiver.totals.requests["duplicate"] == 2
            again = wire.sent[-7:]
            assert [sent.body["replay_of"]["sequence"] for sent in again] == list(range(4, 11))
            assert {sent.body["backfill"] for sent in again} == {replay.job}
            assert len({sent.delivery for sent in wire.sent}) == 17
            # A second request creates nothing twice.
            replay = await fetch.replay_async(lane_of(made), 0)
            await all_ended(database)
            assert len(wire.sent) == 17 + 10
            assert restored.moved() == list(range(10))
    async with database.connection(server_settings={"search_path": "relay"}) as connection:
        assert replay.job is not None
        job = await replay_jobs.get_job(connection, "relay", replay.job)
    assert (job.kind, job.state, job.lane) == ("lane", "done", lane_of(made))
    assert (job.from_sequence, job.to_sequence, job.taken, job.done, job.all) == (1, 17, 10, 17, 17)
    assert job.requested_by == "receiver shop"
    assert await exceptions(database) == {}


async def test_a_receiver_cannot_replay_dead_letters(
    database: Database, db: Connection[Any]
) -> None:
    made = await add_endpoint(database)
    network = Network(lambda sent: REFUSED if sent.seq in (2, 5) else OK)
    async with running(database, network):
        await publish(database, *range(1, 6), key="k")
        await all_ended(database)
        await replays.start_replay(db, "relay", DeadLetterSelection(ids=(1,)), actor="test")
        await all_ended(database)
        assert (await request_replay(db, made, 0)).to_sequence == 6
        await all_ended(database)
    # Sequence number 6 is the replay of 2, which was delivered.
    assert [sent.body.get("replay_of", {}).get("sequence") for sent in network.sent[6:]] == [
        *(1, 3, 4, 6)
    ]
    assert [sent.body["data"] for sent in network.sent[6:]] == [1, 3, 4, 2]
    assert await exceptions(database) == {}


async def test_dead_letters_of_a_receiver_replay_can_be_replayed(
    database: Database, db: Connection[Any]
) -> None:
    made = await add_endpoint(database)
    network = Network()
    async with running(database, network):
        await publish(database, 1, 2)
        await all_ended(database)
        network.script = lambda sent: REFUSED if sent.seq == 4 else OK
        await request_replay(db, made, 0)
        await all_ended(database)
        await replays.start_replay(db, "relay", DeadLetterSelection(everything=True), actor="test")
        await all_ended(database)
    refused, last = network.sent[-2:]
    assert (refused.seq, last.seq, last.body["data"]) == (4, 5, 2)
    assert last.delivery == refused.delivery
    assert last.body["copy_of"] == refused.body["copy_of"] == network.sent[1].delivery
    assert last.body["replay_of"]["sequence"] == 4
    assert await exceptions(database) == {}


async def test_a_replayed_delivery_is_replayed_only_if_its_original_is_not(
    database: Database, db: Connection[Any]
) -> None:
    made = await add_endpoint(database)
    network = Network()
    async with running(database, network):
        await publish(database, *range(1, 4), key="k")
        await all_ended(database)
        for after in (0, 3, 2, 0):
            await request_replay(db, made, after)
            await all_ended(database)
    replay = [sent.body["replay_of"]["sequence"] for sent in network.sent[3:]]
    # 4 to 6 are copies of 1 to 3, 7 to 9 are copies of those; then 3 itself and the deliveries that
    # are no copies.
    assert replay == [1, 2, 3, *(4, 5, 6), *(3, 4, 5), *(1, 2, 3)]
    first = {sent.body["data"]: sent.delivery for sent in network.sent[:3]}
    for sent in network.sent[3:]:
        assert sent.body["copy_of"] == first[sent.body["data"]] != sent.delivery
    assert await exceptions(database) == {}


async def test_a_replay_of_a_backfilled_delivery_names_the_backfilled_delivery(
    database: Database, db: Connection[Any]
) -> None:
    made = await add_endpoint(database)
    network = Network()
    async with running(database, network):
        await publish(database, 1)
        await all_ended(database)
        since = datetime(2020, 1, 1, tzinfo=UTC)
        await backfill.request_backfill(db, "relay", Backfill("shop", since), actor="test")
        await all_ended(database)
        await request_replay(db, made, 0)
        await all_ended(database)
    one, once_more, first, second = network.sent
    assert len({sent.delivery for sent in network.sent}) == 4
    assert "copy_of" not in one.body | once_more.body
    assert (first.body["copy_of"], second.body["copy_of"]) == (one.delivery, once_more.delivery)
    assert await exceptions(database) == {}


async def test_deliveries_of_old_lanes_are_replayed_in_the_current_lanes(
    database: Database, db: Connection[Any], tmp_path: Path
) -> None:
    """Deliveries of an old lane go to the current lanes of their keys and keep their identity."""
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
            # The rest is fetched, and deliveries already received are not processed again.
            await asyncio.to_thread(ledger.receiver.catch_up)
            assert sorted(ledger.moved()) == list(range(13))
            await asyncio.to_thread(ledger.receiver.catch_up, lane_of(made))
            assert sorted(ledger.moved()) == list(range(13))
    assert len({sent.body["lane"] for sent in wire.sent}) > 2
    assert await exceptions(database) == {}


async def test_a_new_leader_continues_a_receiver_replay(
    database: Database, db: Connection[Any], unpaced: None
) -> None:
    made = await add_endpoint(database)
    network = Network()
    async with running(database, network):
        await publish(database, *range(10), key="k")
        await all_ended(database)
    replay = await request_replay(db, made, 2)
    await publish(database, "live", key="k")
    for _ in range(2):
        worker = await ranges.sequencer(database)
        for _ in range(2):
            await ranges.turn(worker)
    taken = "SELECT array_agg(replay_seq::int ORDER BY seq) FROM delivery WHERE backfill_id = $1"
    numbers = await db.fetchval(taken, replay.job)
    assert numbers == [3, 4, 5, 6, 7, 8]
    # Deliveries of the replay are in the lanes: the next chunk waits for them.
    async with running(database, network):
        await all_ended(database)
    assert await db.fetchval(taken, replay.job) == list(range(3, 11))
    assert sorted(map(str, network.data()[10:])) == sorted(map(str, [*range(2, 10), "live"]))
    assert await exceptions(database) == {}


async def test_an_operator_lists_and_aborts_a_receiver_replay(
    database: Database, db: Connection[Any], unpaced: None
) -> None:
    made = await add_endpoint(database)
    network = Network()
    async with running(database, network):
        await publish(database, *range(10), key="k")
        await all_ended(database)
    replay = await request_replay(db, made, 0)
    assert replay.job is not None
    worker = await ranges.sequencer(database)
    for _ in range(2):
        await ranges.turn(worker)
    aborted = await replay_jobs.abort_job(db, "relay", replay.job, actor="test")
    async with running(database, network):
        await all_ended(database)
        await until(lambda: db.fetchval("SELECT ended_at FROM replay_job_endpoint"))
    assert aborted.taken == len(network.sent) - 10 == 3
    assert await exceptions(database) == {}


async def test_an_endpoint_has_one_receiver_replay_at_a_time_and_only_of_its_own_lanes(
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
            # The sequencer was not involved.
            assert await db.fetchval(version) == before
            await endpoint_states.pause_endpoints(db, "relay", ["shop"], actor="test")
            replay = await fetch.replay_async(lane, 0, 2)
            assert (replay.from_sequence, replay.to_sequence, replay.acknowledged) == (1, 2, 3)
            with pytest.raises(ReplayConflict, match=f"409, lane {lane} .* already, by job 1"):
                await fetch.replay_async(lane, 1)
            await endpoint_states.resume_endpoints(db, "relay", ["shop"], actor="test")
            await all_ended(database)
        await db.execute("UPDATE endpoint SET state = 'disabled' WHERE name = 'shop'")
        with pytest.raises(CannotFetch, match="409, the endpoint is disabled"):
            await fetch.replay_async(lane, 0)
    assert replay.job == 1
    entry_sql = "SELECT actor, data FROM journal WHERE kind = 'lane_replay_requested'"
    (row,) = await db.fetch(entry_sql)
    assert row["actor"] == "receiver shop"


@contextlib.asynccontextmanager
async def fetchable_other(database: Database) -> AsyncIterator[FetchClient]:
    async with fetchable(database, "other") as fetch:
        yield fetch


async def test_a_removal_ends_a_receiver_replay(database: Database, db: Connection[Any]) -> None:
    made = await add_endpoint(database)
    async with running(database, Network()):
        await publish(database, 1, 2, 3)
        await all_ended(database)
    await request_replay(db, made, 0)
    assert (await endpoint_removal.read_drain_status(db, "relay", made.id)).pending == 3
    await fetch_tokens.add_fetch_token(db, "relay", "shop", actor="test")
    await endpoint_removal.remove_endpoint(db, "relay", "shop", actor="test", dead_letter=True)
    async with running(database, Network()):
        await until(lambda: db.fetchval("SELECT ended_at FROM replay_job"))
    assert await fetchval(database, "SELECT count(*) FROM delivery WHERE replay_id > 0") == 0
    assert await exceptions(database) == {}


async def test_a_receiver_replay_skips_erased_events(
    database: Database, db: Connection[Any]
) -> None:
    made = await add_endpoint(database)
    network = Network()
    async with running(database, network):
        await publish(database, 1, 2, 3)
        await all_ended(database)
        await db.execute("UPDATE outbox SET payload = NULL, erased_at = now() WHERE id = 2")
        await request_replay(db, made, 0)
        await all_ended(database)
    assert network.data() == [1, 2, 3, 1, 3]
    assert await exceptions(database) == {}
