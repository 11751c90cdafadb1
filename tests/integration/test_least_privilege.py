"""A relay with a least-privilege role does everything that a relay does.

packages/api/tests/test_api_role.py has the role of the API.
"""

from __future__ import annotations

import importlib
import pkgutil
import socket
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

from outbox import operations, store
from outbox.core.sequencing.partition_window import WIDTH, Retention
from outbox.errors import CannotRun
from outbox.relay.delivery import recorder
from outbox.store.retention.partitions import PARENTS, PartitionStore
from outbox.store.retention.periods import RetentionStore
from outbox.store.sql.message import WriteStatement
from tests.support.process import outbox
from tests.support.relay import (
    BUSY,
    OK,
    REFUSED,
    Network,
    Sent,
    add_endpoint,
    all_ended,
    exceptions,
    fetchval,
    killed_at_the_end,
    publish,
    relay,
    running,
)
from tests.support.roles import dsn_of, role
from tests.support.tiers import sampled
from tests.support.waiting import until

if TYPE_CHECKING:
    from types import ModuleType

    from asyncpg import Connection

    from outbox.core.model.response import AttemptResult
    from tests.support.postgres import Database

pytestmark = pytest.mark.system

PATH = {"server_settings": {"search_path": "relay"}}
UNCHECKPOINTED = """
SELECT NOT EXISTS (SELECT FROM lane_progress p JOIN lane_counter c USING (lane_id)
                    WHERE c.last_seq > p.acked_seq)
"""
AN_HOUR_AGO = """
UPDATE period SET dropped_at = dropped_at - interval '2 hours' WHERE dropped_at IS NOT NULL
"""
SIZE = """
SELECT sum(pg_relation_size(inhrelid)) FROM pg_inherits
 WHERE inhparent = $1::text::regclass AND inhrelid::regclass::text ~ ('_' || $2::text || '$')
"""

OF_OTHERS = {"lock_quota", "write_entries", "record_detaching"}
"""Statements of the store that operators and the owner execute."""
AUTHENTICATION = {"note_token_use", "note_fetch_token_use"}
"""Statements that the API executes."""


class Maintainer:
    """Runs maintenance as a relay does, with periods of no length and no retention."""

    def __init__(self, connection: Connection[Any]) -> None:
        self.db = connection
        self.partitions = PartitionStore(connection)
        self._retention = RetentionStore(connection, Retention(0, 0, 0), period_s=0)

    async def maintain(self) -> None:
        for _ in range(6):
            await self.partitions.extend()
            await self.partitions.summarize()
            await self._retention.advance_periods()
        await self._retention.delete_expired()
        await self.partitions.analyze()

    async def first(self, kind: str) -> int:
        number = await self.db.fetchval(
            "SELECT min(number) FROM period WHERE kind = $1 AND dropped_at IS NULL", kind
        )
        return int(number)


async def test_a_least_privilege_relay_leads_delivers_and_drops_old_periods(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "CHECKPOINT_EVERY_S", 0.05)

    def script(sent: Sent) -> AttemptResult:
        if sent.body["data"] == "no":
            return REFUSED
        return BUSY if sent.attempt == 1 and sent.seq % 5 == 0 else OK

    network = Network(script)
    await add_endpoint(database, lanes=2)
    # Operational events for subscribed endpoints are written by the relay.
    await add_endpoint(database, "operations", types=["outbox.dead_letter.*"])
    async with role(database, "relay") as name:
        dsn = dsn_of(database, name)
        keeper = Maintainer(await database.connect(user=name, **PATH))
        async with running(database, network, dsn=dsn):
            for n in range(3):
                await publish(database, *range(n * 20, n * 20 + 20), "no", key=f"k{n}")
                await all_ended(database)
                await until(lambda: fetchval(database, UNCHECKPOINTED), what="the checkpoints")
                await keeper.maintain()
                assert await keeper.partitions.drop() == (0, 0, [])  # Simulates an hour.
                await fetchval(database, AN_HOUR_AGO)
                gone, emptied, _ = await keeper.partitions.drop()
                assert gone == 0
                assert emptied >= 1
                assert await keeper.partitions.drop() == (0, 0, [])
        assert await exceptions(database) == {}
        shop = [s.body["data"] for s in network.accepted if s.url.endswith("shop")]
        assert sorted(shop) == list(range(60))
        event_types = [s.body["type"] for s in network.accepted if s.url.endswith("operations")]
        assert event_types == ["outbox.dead_letter.created"] * 3
        for kind, parents in PARENTS.items():
            first = await keeper.first(kind)
            assert first > 0
            for parent in parents:
                there = [p.lo // WIDTH for p in await keeper.partitions.partitions(parent)]
                assert there[0] == 0  # The empty partitions are there,
                assert await fetchval(database, SIZE, parent, "0") == 0  # and empty,
                assert there[-1] >= first + 2  # and new events have their own.
    # Their owner drops them.
    owned = PartitionStore(await database.connect(**PATH))
    assert await owned.drop_owned() > 0
    for kind, parents in PARENTS.items():
        for parent in parents:
            there = [p.lo // WIDTH for p in await owned.partitions(parent)]
            assert there[0] == await keeper_first(database, kind)
    assert await exceptions(database) == {}


async def keeper_first(database: Database, kind: str) -> int:
    sql = "SELECT min(number) FROM period WHERE kind = $1 AND dropped_at IS NULL"
    return int(await fetchval(database, sql, kind))


@pytest.mark.full
@pytest.mark.one_major
async def test_a_least_privilege_relay_takes_over_from_a_killed_one(database: Database) -> None:
    await add_endpoint(database)
    network = Network()
    async with role(database, "relay") as name:
        dsn = dsn_of(database, name)
        async with killed_at_the_end(database, network, dsn=dsn, lease_s=1.0):
            await publish(database, 1, 2)
            await all_ended(database)
        async with running(database, network, dsn=dsn):
            await publish(database, 3)
            await all_ended(database)
    assert network.data() == [1, 2, 3]


@pytest.mark.one_major
@pytest.mark.parametrize(
    ("purpose", "package", "others"),
    [("relay", store, OF_OTHERS), ("operator", operations, AUTHENTICATION)],
    ids=["relay", "operator"],
)
async def test_a_role_may_execute_every_statement_of_its_purpose(
    database: Database, purpose: str, package: ModuleType, others: set[str]
) -> None:
    """Also those that are executed once a year."""
    refused = set()
    async with role(database, purpose) as name, database.connection(user=name, **PATH) as db:
        for statement in write_statements(package):
            try:
                await db.execute(f"EXPLAIN (GENERIC_PLAN) {statement.sql}")
            except asyncpg.InsufficientPrivilegeError:
                refused.add(statement.name)
    assert refused == others


def write_statements(package: ModuleType) -> list[WriteStatement]:
    """The statements of all modules of a package."""
    names = [m.name for m in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
    found = {
        value.name: value
        for name in names
        for value in vars(importlib.import_module(name)).values()
        if isinstance(value, WriteStatement)
    }
    return list(found.values())


@pytest.mark.one_major
@pytest.mark.parametrize(
    "lacking",
    sampled(["UPDATE ON cursor", "EXECUTE ON FUNCTION end_period", "UPDATE ON SEQUENCE wakeup"]),
)
async def test_a_relay_that_lacks_one_privilege_ends_and_names_it(
    database: Database, lacking: str
) -> None:
    """Also one that it would need only as the leader, or a month later."""
    async with role(database, "relay") as name:
        await fetchval(database, f'REVOKE {lacking} FROM "{name}"')
        privilege, _, what = lacking.partition(" ON ")
        expected = rf"\({privilege} on {what.split()[-1]}\); .* outbox migrate --relay {name}$"
        with pytest.raises(CannotRun, match=expected):
            await relay(database, Network(), dsn=dsn_of(database, name)).run()


@pytest.mark.one_major
@pytest.mark.parametrize("purposes", sampled([[], ["producer"], ["reader"], ["operator"]]))
async def test_a_relay_of_another_purpose_ends_and_names_the_grant(
    database: Database, purposes: list[str]
) -> None:
    async with role(database, *purposes) as name:
        expected = r"^permission denied for .*\(outbox migrate --relay ROLE\)"
        with pytest.raises(CannotRun, match=expected):
            await relay(database, Network(), dsn=dsn_of(database, name)).run()


@pytest.mark.full
@pytest.mark.one_major
async def test_a_relay_runs_with_an_overloaded_function(database: Database) -> None:
    """A later, compatible version of the schema may have one."""
    await add_endpoint(database)
    network = Network()
    overload = "CREATE FUNCTION end_period(a text) RETURNS void LANGUAGE sql AS ''SELECT''"
    async with role(database, "relay") as name:
        await fetchval(database, f"DO $$ BEGIN EXECUTE '{overload}'; END $$")
        await fetchval(database, f'REVOKE EXECUTE ON FUNCTION end_period(text) FROM "{name}"')
        async with running(database, network, dsn=dsn_of(database, name)):
            await publish(database, 1)
            await all_ended(database, 20)
    assert network.data() == [1]


@pytest.mark.one_major
async def test_the_command_exits_with_3_in_one_line(database: Database) -> None:
    async with role(database, "relay") as name:
        await fetchval(database, f'REVOKE INSERT ON batch FROM "{name}"')
        ended = await outbox("relay", env={"OUTBOX_DSN": dsn_of(database, name)})
    assert (ended.code, ended.stdout) == (3, "")
    assert ended.stderr.partition("outbox: see https://")[0] == (
        f'outbox: the role "{name}" lacks privileges of the purpose "relay" (INSERT on '
        f"batch); as the role that ran outbox migrate: outbox migrate --relay {name}\n"
    )


@pytest.mark.one_major
async def test_a_relay_with_an_api_reports_its_own_error_in_one_line(
    database: Database, empty_database: Database
) -> None:
    """The child that it has started changes neither the message nor the exit code."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        cases = (
            (empty_database, (), 'schema "relay" is not there; run: outbox migrate'),
            (
                database,
                ("--health", address),
                f"cannot listen on {address}: Address already in use; choose another",
            ),
        )
        for given, words, message in cases:
            ended = await outbox(
                "relay", "--admin", "127.0.0.1:0", *words, env={"OUTBOX_DSN": given.dsn}
            )
            assert ended.code == 3
            *_, reported = (
                each for each in ended.stderr.splitlines() if not each.startswith("outbox: see ")
            )
            assert reported == f"outbox: {message}"
