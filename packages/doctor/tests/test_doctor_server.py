"""The doctor about servers that differ from one of PostgreSQL: Amazon Aurora, Citus."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from outbox_doctor import server
from outbox_doctor.check import Severity
from tests.support.doctor import PATH, findings_of, reported_findings, the_one

if TYPE_CHECKING:
    from asyncpg import Connection

    from tests.support.postgres import Database

pytestmark = [pytest.mark.system, pytest.mark.one_major]

# As Aurora responds: github.com/jobinau/pg_gather/issues/9.
AURORA = """
CREATE FUNCTION aurora() RETURNS text LANGUAGE plpgsql AS $$ BEGIN
    RAISE 'wal_level must be set to ''logical''' USING
          HINT = 'WAL control functions cannot be executed when wal_level < logical.';
END $$;
CREATE OR REPLACE FUNCTION server_timeline() RETURNS bigint LANGUAGE sql
    AS 'SELECT NULL::bigint'
"""

# The catalogue of Citus, with a table that is distributed, its partition, a reference table, and a
# local one.
CITUS = """
SET allow_system_table_mods = on;
CREATE TABLE pg_catalog.pg_dist_partition (
    logicalrelid regclass, partmethod "char", partkey text, colocationid integer, repmodel "char");
INSERT INTO pg_dist_partition VALUES ('outbox', 'h', '1', 1, 's'), ('outbox_0', 'h', '1', 1, 's'),
    ('endpoint', 'n', NULL, 2, 't'), ('lane', 'n', NULL, 0, 's');
"""


@pytest.fixture
async def db(database: Database) -> Connection[Any]:
    return await database.connect(**PATH)


async def test_the_error_of_a_timeline_that_is_not_reported_is_shown(
    db: Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    await db.execute(AURORA)
    monkeypatch.setattr(server, "READ_WAL_FILE", "SELECT aurora()")
    found = await the_one(db, "timeline")
    assert found.severity is Severity.WARNING
    assert found.message.endswith("(wal_level must be set to 'logical')")
    assert "GRANT" not in str(found.action)
    # The statement that begins new lanes.
    action = str(found.action)
    await db.execute(action[action.index("UPDATE") :])
    assert await db.fetchval("SELECT history_changed()")
    await db.execute("DROP FUNCTION aurora")
    await db.execute(AURORA.replace("USING", "USING ERRCODE = 'insufficient_privilege',"))
    assert str((await the_one(db, "timeline")).action).startswith("GRANT EXECUTE")


async def test_tables_that_citus_distributes_are_a_problem(database: Database) -> None:
    db = await database.connect(**PATH)
    (local,) = await findings_of(db, "local tables")
    assert local.severity is Severity.OK
    await db.execute(CITUS)
    found = await reported_findings(db, "local tables")
    assert [each.severity for each in found] == [Severity.PROBLEM] * 2
    assert [each.action for each in found] == [
        f"SELECT undistribute_table('relay.{table}')" for table in ("endpoint", "outbox")
    ]
