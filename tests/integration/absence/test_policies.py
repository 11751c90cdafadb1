"""A policy that hides all rows of one of our tables: nothing is lost, and the table is named."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from outbox.store.connection.migration_files import table_names
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
    running,
)
from tests.support.roles import role
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import MutableMapping, Sequence

    from tests.support.postgres import Database

pytestmark = [pytest.mark.costly, pytest.mark.system]

_PGBOUNCER = [pytest.mark.full, pytest.mark.pgbouncer]
OWNER = {"server_settings": {"search_path": "relay"}}
# What deliveries are read from; the whole list is `full`.
READ = ("delivery", "lane_progress", "subscription", "endpoint_secret")


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
        running(database, network, **settings),
    ):
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
