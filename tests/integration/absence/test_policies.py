"""A policy that hides all rows of one of our tables: nothing is lost, and the table is named."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from outbox.core.sequencing.replay_throttle import JobPart
from outbox.errors import CursorBroken
from outbox.store.connection.connect import connect
from outbox.store.connection.dsn import parse
from outbox.store.delivery.lanes import LaneStore
from outbox.store.replays.replay_feed import ReplayFeedStore
from outbox.store.schema.migration_files import table_names
from outbox.store.sequencing.filters import FilterStore
from tests.integration.absence.test_damages import relay_settings
from tests.support.doctor import reported_findings
from tests.support.relay import (
    Network,
    Sent,
    add_endpoint,
    all_ended,
    exceptions,
    fetchval,
    publish,
    remove_events,
    running,
)
from tests.support.roles import role
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, MutableMapping, Sequence
    from uuid import UUID

    from tests.support.postgres import Database

pytestmark = [pytest.mark.costly, pytest.mark.system]

_PGBOUNCER = [pytest.mark.full, pytest.mark.pgbouncer]
OWNER = {"server_settings": {"search_path": "relay"}}
# What deliveries are read from; the whole list is `full`.
READ = ("delivery_run", "lane_progress", "subscription", "endpoint_secret")


@pytest.mark.parametrize(
    ("tables", "pooled"),
    [
        pytest.param(READ, False, id="read, direct"),
        pytest.param(table_names(), False, id="all, direct", marks=pytest.mark.full),
        pytest.param(
            table_names(),
            True,
            id="all, PgBouncer",
            marks=[pytest.mark.full, pytest.mark.pgbouncer],
        ),
    ],
)
async def test_nothing_is_lost_while_all_rows_of_a_table_are_hidden(
    tables: Sequence[str],
    pooled: bool,
    database: Database,
    logs: list[MutableMapping[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("outbox.relay.delivery.endpoint_supervisor.ENDPOINTS_CHECK_EVERY_S", 0.1)
    monkeypatch.setattr("outbox.relay.maintenance.EVERY_S", 0.1)
    await add_endpoint(database, lanes=1)
    network, published = Network(), 0
    async with (
        role(database, "relay") as name,
        relay_settings(database, name, pooled=pooled) as settings,
        database.connection(**OWNER) as owner,
        running(database, network, **settings) as worker,
    ):
        # Before it has registered once, a relay ends with the reason.
        await worker.started.wait()
        for table in tables:
            await publish(database, published, published + 1, key="k")
            await owner.execute(
                f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY"
            )
            before = len(logs)
            await publish(database, published + 2, key="k")
            await until(
                lambda: _is_named(logs, before, table) or _has_ended(database),  # noqa: B023
                what=f"the relay to name {table}, or not to need it",
            )
            assert await fetchval(database, "SELECT count(*) FROM dead_letter") == 0, table
            (finding,) = await reported_findings(owner, "row security")
            assert f'"relay"."{table}"' in finding.message, table
            await owner.execute(
                f"ALTER TABLE {table} DISABLE ROW LEVEL SECURITY, NO FORCE ROW LEVEL SECURITY"
            )
            published += 3
            await all_ended(database)
            # A session that ends may leave acknowledgements unwritten: copies may follow.
            assert list(dict.fromkeys(network.data())) == list(range(published)), table
            assert all(map(_is_signed, network.sent)), table
    assert await fetchval(database, "SELECT count(*) FROM dead_letter") == 0
    assert await exceptions(database) == {}


def _is_signed(sent: Sent) -> bool:
    return sent.headers["webhook-signature"].startswith("v1,")


def _is_named(logs: list[MutableMapping[str, Any]], since: int, table: str) -> bool:
    text = str(logs[since:]).replace("\\", "")
    return f'"relay"."{table}"' in text or f"relay.{table}" in text


async def _has_ended(database: Database) -> bool:
    return bool(
        await fetchval(
            database,
            """
            SELECT (SELECT max(id) FROM outbox) = (SELECT max(outbox_id) FROM delivery)
               AND NOT EXISTS (
                   SELECT FROM delivery d WHERE NOT EXISTS (
                       SELECT FROM attempt a WHERE a.lane_id = d.lane_id AND a.seq = d.seq
                          AND a.outcome = 'delivered'))
            """,
        )
    )


PATH_OF_POOLED = {"search_path": "relay", "row_security": "on"}
# Reads of the relay from whose absent rows something follows, and a table whose rows they need.
READS: dict[str, tuple[str, Callable[[Any, UUID], Awaitable[object]]]] = {
    "lanes of an older generation": ("lane", lambda db, id_: LaneStore(db).lanes([id_])),
    "what was delivered": ("attempt_run", lambda db, id_: LaneStore(db).lanes([id_])),
    "signing keys": ("endpoint_secret", lambda db, id_: LaneStore(db).endpoints([id_])),
    "jobs without a subscription": ("subscription", lambda db, _: ReplayFeedStore(db).read_parts()),
    "a chunk that is delivered": (
        "delivery_run",
        lambda db, id_: ReplayFeedStore(db).read_chunk_progress([id_]),
    ),
    "the rest of a backfill": (
        "outbox",
        lambda db, id_: ReplayFeedStore(db).read_history(JobPart(1, id_, "history", None, 1)),
    ),
}


async def test_a_read_behind_a_proxy_concludes_nothing_from_hidden_rows(database: Database) -> None:
    """A session of a pooler has the role's own setting, so a policy hides rows from it."""
    await add_endpoint(database, lanes=1)
    endpoint_id = await fetchval(database, "SELECT id FROM endpoint")
    await fetchval(
        database,
        "WITH job AS ("
        "    INSERT INTO replay_job (kind, requested_by) VALUES ('history', 'test') RETURNING id)"
        " INSERT INTO replay_job_endpoint (job_id, endpoint_id, first_id, next_id, last_id)"
        " SELECT id, $1, 1, 1, 10 FROM job",
        endpoint_id,
    )
    async with (
        role(database, "relay") as name,
        database.connection(**OWNER) as owner,
        database.connection(user=name, server_settings=PATH_OF_POOLED) as pooled,
    ):
        for what, (table, read) in READS.items():
            await read(pooled, endpoint_id)
            await owner.execute(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY")
            with pytest.raises(CursorBroken) as stopped:
                await read(pooled, endpoint_id)
            assert f'"relay"."{table}"' in str(stopped.value), what
            await owner.execute(f"ALTER TABLE {table} DISABLE ROW LEVEL SECURITY")


@pytest.mark.pgbouncer
async def test_a_session_behind_a_proxy_does_not_begin_while_a_policy_applies(
    database: Database,
) -> None:
    """Commands and requests read many tables: none of them concludes anything then."""
    async with (
        role(database, "operator") as name,
        database.connection(**OWNER) as owner,
        relay_settings(database, name, pooled=True) as settings,
    ):
        dsn = parse(settings["dsn"], source="test", env={})
        (await connect(dsn, schema="relay", pooled=True)).terminate()
        await owner.execute("ALTER TABLE lane_progress ENABLE ROW LEVEL SECURITY")
        with pytest.raises(CursorBroken, match="DISABLE ROW LEVEL SECURITY"):
            await connect(dsn, schema="relay", pooled=True)


async def test_an_event_that_a_filter_does_not_read_counts_as_a_match(database: Database) -> None:
    """It was sequenced, so it is gone or hidden: that is decided when it is to be sent."""
    await publish(database, {"a": 1}, {"a": 2})
    await remove_events(database, "id = 1")
    async with database.connection(**OWNER) as owner:
        store = FilterStore(owner)
        async with store.transaction():
            assert await store.evaluate([("@.a == 3", [1, 2])], 60.0) == [{1}]
