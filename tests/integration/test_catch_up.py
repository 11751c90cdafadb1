"""Catch-up: a receiver that lost deliveries fetches them from the relay and ends in the correct
state.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sqlite3
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

from outbox.core.model.response import AttemptResult
from outbox.errors import UsageError
from outbox.operations.tokens import fetch as fetch_tokens
from outbox.receiver import (
    AsyncReceiver,
    Gaps,
    MemoryDatabase,
    Message,
    Receiver,
    Refuse,
    Request,
    verify,
)
from outbox.receiver.fetch import CannotFetch, FetchClient, PageItem
from outbox.web.address import Address
from outbox_api import receivers
from tests.support.relay import (
    QUICK_RETRY,
    Network,
    Sent,
    add_endpoint,
    all_ended,
    current,
    publish,
    remove_events,
    running,
    settings_for,
)
from tests.support.split_runs import split_runs
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from outbox.core.model.message_format import FormatName
    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major


@asynccontextmanager
async def fetchable(database: Database, name: str = "shop") -> AsyncIterator[FetchClient]:
    """The fetch settings of a receiver."""
    connection = await database.connect(server_settings={"search_path": "relay"})
    made = await fetch_tokens.add_fetch_token(connection, "relay", name, actor="test")
    settings = settings_for(database, dsn_source="test")
    async with receivers.running(current(settings), Address("127.0.0.1", 0)) as at:
        yield FetchClient(at.url, made.token)


def as_request(sent: Sent) -> Request:
    return Request("POST", sent.request.headers, sent.request.body)


class Wire(Network):
    """Delivers to a receiver, which can be replaced or absent."""

    def __init__(self, receiver: Any = None) -> None:
        super().__init__(self._respond)
        self.receiver = receiver
        self.lost: set[int] = set()
        """Sequence numbers that are acknowledged on behalf of the receiver."""

    async def _respond(self, sent: Sent) -> AttemptResult:
        if self.receiver is None or sent.seq in self.lost:
            return AttemptResult.completed(200, 0.001)
        request = as_request(sent)
        if isinstance(self.receiver, AsyncReceiver):
            response = await self.receiver.handle(request)
        else:
            response = await asyncio.to_thread(self.receiver.handle, request)
        return AttemptResult.completed(response.status, 0.001, body=response.body)


class Ledger:
    """A SQLite file with an account, and a receiver that updates it."""

    def __init__(self, file: Path, secret: str, **options: Any) -> None:
        self.file = file
        with contextlib.closing(self.connected()) as db:
            db.execute("CREATE TABLE IF NOT EXISTS moved (n)")
            db.commit()
        self.receiver = Receiver(secret, file, **options)
        self.receiver.on("a.b")(self.move)

    def move(self, message: Any, connection: sqlite3.Connection) -> None:
        connection.execute("INSERT INTO moved VALUES (?)", (message.data,))

    def connected(self) -> sqlite3.Connection:
        return sqlite3.connect(self.file)

    def moved(self) -> list[int]:
        with contextlib.closing(self.connected()) as db:
            return [n for (n,) in db.execute("SELECT n FROM moved ORDER BY rowid")]


async def test_a_restored_backup_catches_up_without_loss_or_duplicates(
    database: Database, tmp_path: Path
) -> None:
    made = await add_endpoint(database)
    async with fetchable(database) as fetch:
        ledger = Ledger(tmp_path / "shop.sqlite", made.secret, fetch=fetch)
        wire = Wire(ledger.receiver)
        async with running(database, wire):
            await publish(database, *range(5), key="k")
            await all_ended(database)
            with contextlib.closing(ledger.connected()) as db:
                db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            shutil.copy(ledger.file, tmp_path / "backup.sqlite")
            await publish(database, *range(5, 10), key="k")
            await all_ended(database)
            assert ledger.moved() == list(range(10))
            restored = Ledger(tmp_path / "backup.sqlite", made.secret, fetch=fetch)
            assert restored.moved() == list(range(5))
            wire.receiver = restored.receiver
            (caught_up,) = await asyncio.to_thread(restored.receiver.catch_up)
            assert (caught_up.fetched, caught_up.failed, caught_up.unavailable) == (5, None, ())
            assert restored.moved() == list(range(10))
            # A second run has nothing to do.
            assert await asyncio.to_thread(restored.receiver.catch_up) == []
            await publish(database, *range(10, 15), key="k")
            await all_ended(database)
            assert restored.moved() == list(range(15))
    assert restored.receiver.totals.gaps == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prefix", "format_name"),
    [("X-", "envelope"), pytest.param("Acme-", "raw", marks=pytest.mark.full)],
)
async def test_lost_deliveries_are_fetched_before_the_next_delivery(
    database: Database, prefix: str, format_name: FormatName
) -> None:
    """Sequence numbers were acknowledged that this receiver never processed."""
    made = await add_endpoint(database, header_prefix=prefix, format=format_name)
    async with (
        fetchable(database) as fetch,
        asyncpg.create_pool(database.dsn, min_size=1, max_size=4) as pool,
    ):
        receiver = AsyncReceiver(
            made.secret,
            pool,
            fetch=fetch,
            gaps=Gaps.CATCH_UP,
            header_prefix=prefix,
            formats=[format_name],
        )
        received: list[int] = []

        @receiver.on("a.b")
        def receive(message: Any, _: Any) -> None:
            received.append(message.data)

        wire = Wire(receiver)
        wire.lost = {3, 4, 7}
        async with running(database, wire):
            await publish(database, *range(1, 11), key="k")
            await all_ended(database)
        assert received == list(range(1, 11))
        assert receiver.totals.gaps == 0
        # A catch-up finds the lost tail.
        wire.lost = {11, 12}
        async with running(database, wire):
            await publish(database, 11, 12, key="k")
            await all_ended(database)
        assert received == list(range(1, 11))
        await receiver.catch_up()
        assert received == list(range(1, 13))


@pytest.mark.full
async def test_the_payload_of_a_thin_message_is_fetched_while_it_is_processed(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = await add_endpoint(database, format="thin")
    received: list[Any] = []
    async with fetchable(database) as fetch:
        receiver = AsyncReceiver(
            made.secret, MemoryDatabase(), fetch=fetch, gaps=Gaps.CATCH_UP, formats=["thin"]
        )
        threaded = Receiver(made.secret, tmp_path / "inbox.sqlite", fetch=fetch)

        @receiver.on("a.b")
        async def receive(message: Message, _: Any) -> None:
            if message.format == "envelope":
                received.append(message.data)
                return
            assert message.data is None
            received.append(await receiver.fetch_payload(message))
            payload = await asyncio.to_thread(threaded.fetch_payload, message)
            assert payload == received[-1]
            with pytest.raises(CannotFetch, match="another delivery than"):
                await receiver.fetch_payload(replace(message, delivery_id="x"))
            monkeypatch.setattr(fetch, "delivery_async", captured(message))
            with pytest.raises(CannotFetch, match="what was fetched has no payload"):
                await receiver.fetch_payload(message)
            monkeypatch.undo()
            with pytest.raises(CannotFetch, match="no delivery 99 in the lane"):
                await receiver.fetch_payload(replace(message, sequence=99))

        wire = Wire(receiver)

        def captured(message: Message) -> Any:
            async def respond(*_: Any) -> PageItem:
                return PageItem(message.sequence, False, as_request(wire.sent[-1]))

            return respond

        async with running(database, wire):
            await publish(database, {"n": 1}, {"n": 2}, key="k")
            await all_ended(database)
            # What is fetched to catch up has its payload.
            wire.lost = {3}
            await publish(database, {"n": 3}, {"n": 4}, key="k")
            await all_ended(database)
    assert [each["n"] for each in received] == [1, 2, 3, 4]
    with pytest.raises(UsageError, match="fetch=FetchClient"):
        await AsyncReceiver(made.secret, MemoryDatabase()).fetch_payload(
            verify(wire.sent[0].request.headers, wire.sent[0].request.body, made.secret).messages[0]
        )


@pytest.mark.full
async def test_a_lane_started_after_the_backup_is_fetched_from_its_start(
    database: Database, tmp_path: Path
) -> None:
    made = await add_endpoint(database, lanes=3)
    async with fetchable(database) as fetch:
        ledger = Ledger(tmp_path / "shop.sqlite", made.secret, fetch=fetch)
        wire = Wire(ledger.receiver)
        async with running(database, wire):
            await publish(database, 0, key="k0")
            await all_ended(database)
            wire.receiver = None
            for n in range(1, 30):
                await publish(database, n, key=f"k{n}")
            await all_ended(database)
        await asyncio.to_thread(ledger.receiver.catch_up)
    assert sorted(ledger.moved()) == list(range(30))


@pytest.mark.full
async def test_a_lane_of_another_endpoint_is_not_fetched(
    database: Database, tmp_path: Path
) -> None:
    made = await add_endpoint(database, lanes=3)
    async with fetchable(database) as fetch:
        wire = Wire()
        async with running(database, wire):
            for n in range(30):
                await publish(database, n, key=f"k{n}")
            await all_ended(database)
            ledger = Ledger(tmp_path / "shop.sqlite", made.secret, fetch=fetch)
            wire.receiver = ledger.receiver
            await publish(database, 30, key="k0")
            await all_ended(database)
        await asyncio.to_thread(ledger.receiver.catch_up)
    assert ledger.moved() == [30]


@pytest.mark.full
async def test_a_new_receiver_does_not_fetch_the_whole_history(
    database: Database, tmp_path: Path
) -> None:
    made = await add_endpoint(database)
    async with fetchable(database) as fetch:
        async with running(database, Network()):
            await publish(database, 1, 2, 3, key="k")
            await all_ended(database)
        ledger = Ledger(tmp_path / "shop.sqlite", made.secret, fetch=fetch)
        await asyncio.to_thread(ledger.receiver.start)
        assert await asyncio.to_thread(ledger.receiver.catch_up) == []
        (all_of_it,) = await asyncio.to_thread(
            ledger.receiver.catch_up, next(iter(await asyncio.to_thread(list, fetch.lanes()))).lane
        )
        assert all_of_it.fetched == 3
    assert ledger.moved() == [1, 2, 3]


@pytest.mark.full
async def test_expired_deliveries_are_skipped(database: Database, tmp_path: Path) -> None:
    made = await add_endpoint(database)
    async with fetchable(database) as fetch:
        ledger = Ledger(tmp_path / "shop.sqlite", made.secret, fetch=fetch)
        wire = Wire(ledger.receiver)
        wire.lost = {2, 3, 5}
        async with running(database, wire):
            await publish(database, *range(1, 7), key="k")
            await all_ended(database)
        async with database.connection(server_settings={"search_path": "relay"}) as db:
            await remove_events(database, "id = 2")
            await split_runs(db)
            await db.execute("DELETE FROM delivery_run WHERE seq = 1")
        (caught_up,) = await asyncio.to_thread(ledger.receiver.catch_up)
        assert (caught_up.fetched, caught_up.unavailable) == (2, ((2, 2),))
        assert sorted(ledger.moved()) == [1, 3, 4, 5, 6]
        assert await asyncio.to_thread(ledger.receiver.catch_up) == []


@pytest.mark.full
async def test_an_early_delivery_is_deferred_while_the_relay_is_unreachable(
    database: Database,
) -> None:
    made = await add_endpoint(database, retry=QUICK_RETRY | {"attempts_max": 1000})
    nowhere = FetchClient("http://127.0.0.1:9", "obf_" + "A" * 43)
    receiver = AsyncReceiver(made.secret, MemoryDatabase(), fetch=nowhere, gaps=Gaps.CATCH_UP)
    receiver.on("**")(lambda *_: None)
    wire = Wire(receiver)
    wire.lost = {2}
    async with running(database, wire):
        await publish(database, 1, 2, key="k")
        await all_ended(database)
        with pytest.raises(CannotFetch, match="cannot be reached"):
            await receiver.catch_up()
        async with fetchable(database) as fetch:
            await publish(database, 3, key="k")
            await until(lambda: receiver.totals.requests["put_off"])
            assert receiver.totals.requests["processed"] == 1
            receiver._fetch = fetch
            await all_ended(database)
    assert (receiver.totals.requests["processed"], receiver.totals.fetched) == (2, 1)


@pytest.mark.full
async def test_a_rejected_delivery_is_skipped(database: Database, tmp_path: Path) -> None:
    made = await add_endpoint(database)
    async with fetchable(database) as fetch:
        ledger = Ledger(tmp_path / "shop.sqlite", made.secret, fetch=fetch, gaps=Gaps.CATCH_UP)

        @ledger.receiver.on("a.b")
        def refuse(message: Any, _: Any) -> None:
            if message.data == 3:
                raise Refuse("never")

        wire = Wire(ledger.receiver)
        wire.lost = {2, 3}
        async with running(database, wire):
            await publish(database, 1, 2, 3, 4, 5, key="k")
            await all_ended(database)
        assert ledger.moved() == [1, 2, 4, 5]
        assert await asyncio.to_thread(ledger.receiver.catch_up) == []


async def test_what_is_lost_at_the_end_of_a_lane_is_found_and_recorded(
    database: Database, tmp_path: Path
) -> None:
    made = await add_endpoint(database)
    async with fetchable(database) as fetch:
        ledger = Ledger(tmp_path / "shop.sqlite", made.secret, fetch=fetch)

        @ledger.receiver.on("a.b")
        def refuse(message: Any, _: Any) -> None:
            if message.data in (4, 5):
                raise Refuse("never")

        wire = Wire(ledger.receiver)
        wire.lost = {2, 3, 5}
        async with running(database, wire):
            await publish(database, *range(1, 6), key="k")
            await all_ended(database)
        assert ledger.moved() == [1]
        (caught_up,) = await asyncio.to_thread(ledger.receiver.catch_up)
        assert (caught_up.acknowledged, caught_up.fetched, caught_up.failed) == (5, 2, None)
        assert (caught_up.dead_lettered, caught_up.unavailable) == (1, ((5, 5),))
        assert ledger.moved() == [1, 2, 3]
        assert await asyncio.to_thread(ledger.receiver.catch_up) == []


@pytest.mark.full
async def test_a_processing_error_blocks_only_its_lane(database: Database, tmp_path: Path) -> None:
    made = await add_endpoint(database)
    async with fetchable(database) as fetch:
        ledger = Ledger(tmp_path / "shop.sqlite", made.secret, fetch=fetch)

        @ledger.receiver.on("a.b")
        def fail(message: Any, _: Any) -> None:
            if message.data == 3:
                raise LookupError

        wire = Wire(ledger.receiver)
        async with running(database, wire):
            await publish(database, 1, key="k")
            await all_ended(database)
            wire.receiver = None
            await publish(database, 2, 3, 4, key="k")
            await all_ended(database)
        (caught_up,) = await asyncio.to_thread(ledger.receiver.catch_up)
    assert (caught_up.fetched, caught_up.failed) == (1, 3)
    assert ledger.moved() == [1, 2]


@pytest.mark.full
async def test_a_wrong_token_or_secret_is_reported(database: Database) -> None:
    made = await add_endpoint(database)
    other = await add_endpoint(database, "other")
    async with fetchable(database) as fetch:
        lost = AsyncReceiver(other.secret, MemoryDatabase(), fetch=fetch)
        async with running(database, Network()):
            await publish(database, 1)
            await all_ended(database)
        (standing,) = [each async for each in fetch.lanes_async()]
        with pytest.raises(CannotFetch, match="is refused: no signature matches"):
            await lost.catch_up(standing.lane)
        fetch._headers["Authorization"] = "Bearer obf_" + "A" * 43
        with pytest.raises(CannotFetch, match="401, the fetch token is unknown"):
            await AsyncReceiver(made.secret, MemoryDatabase(), fetch=fetch).catch_up("x")
    with pytest.raises(UsageError, match="needs fetch="):
        await AsyncReceiver(made.secret, MemoryDatabase()).catch_up()
    with pytest.raises(UsageError, match="http"):
        FetchClient("ftp://x", "y")
    with pytest.raises(UsageError, match="needs fetch=FetchClient"):
        AsyncReceiver(made.secret, MemoryDatabase(), gaps=Gaps.CATCH_UP)
