"""The statements that apply migration files, for any driver.

Applied migrations are recorded in the schema's table `migration`.  Each is applied by one message,
which locks that table and checks the version, so a concurrent migrator finds the work done, and a
migrator that falls silent holds nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox.core.model.sql_names import quote_ident, quote_literal, search_path
from outbox.errors import CannotRun
from outbox.store.errors import ABORTED
from outbox.store.sql.expressions import lease_runs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outbox.store.schema.migration_files import Migration

ROW_SECURITY_OFF = "SET LOCAL row_security = off"
"""The statement that begins a message behind a proxy that takes no startup parameters."""

# One migrator at a time per schema: this conflicts with itself, and not with reading the history.
# It requires a privilege on the table, unlike an advisory lock, which any role may take.
LOCK = "LOCK TABLE migration IN SHARE ROW EXCLUSIVE MODE"

READ_CURRENT_ROLE = "SELECT current_user AS role, current_database() AS database"

CREATE_HISTORY = """CREATE TABLE IF NOT EXISTS migration (
    version    integer     PRIMARY KEY,
    name       text        NOT NULL,
    checksum   text        NOT NULL,
    works_from integer     NOT NULL,  -- the oldest compatible program version
    applied_at timestamptz NOT NULL DEFAULT clock_timestamp()
)"""

WRITE_HISTORY = (
    "INSERT INTO migration (version, name, checksum, works_from) VALUES ({}, {}, {}, {})"
)

RELAYS_RUN = "OB002"
"""The error code of a migration that was refused because relays run."""

# Refuses a migration while a relay runs: one whose lease has not expired, by the server's clock.
#   LOCK TABLE: until the transaction ends, no relay registers and no lease is renewed.  It
#     conflicts neither with readers nor with FOR KEY SHARE, the fence of deliveries.  A relay that
#     registers checks the schema's version before and after: without this lock it could do both
#     while the migration, which does not see its row, is uncommitted.
#   FOR UPDATE: waits for statements that passed the fence before their lease expired.
#   epoch: no lease begins to run again if the server's clock is set back.  A relay that was
#     frozen has to register again, and checks the schema's version then.
REQUIRE_STOPPED_RELAYS = f"""DO $$ DECLARE
    running bigint;
    names   text;
    left_s  numeric;
BEGIN
    IF to_regclass('replica') IS NULL THEN
        RETURN;
    END IF;
    LOCK TABLE replica IN SHARE ROW EXCLUSIVE MODE;
    SELECT count(*), ceil(extract(epoch FROM max(expires_at) - clock_timestamp())),
           string_agg(format('%s (version %s)', name, version), ', ' ORDER BY n)
             FILTER (WHERE n <= 5)
      INTO running, left_s, names
      FROM (SELECT name, version, expires_at, row_number() OVER (ORDER BY id) AS n
              FROM replica WHERE {lease_runs("replica")}) r;
    IF running > 0 THEN
        RAISE EXCEPTION USING ERRCODE = '{RELAYS_RUN}', MESSAGE = format(
            '{{migration}} was not applied: relays must stop first, and %s running: %s; stop them, '
            'then run this again (one that was killed counts as running until its lease ends, in '
            'at most %s s)',
            running || CASE running WHEN 1 THEN ' is' ELSE ' are' END,
            names || CASE WHEN running > 5 THEN ' and others' ELSE '' END,
            greatest(left_s, 1));
    END IF;
    PERFORM FROM replica FOR UPDATE;
    UPDATE replica SET expires_at = 'epoch';
END $$"""  # noqa: S608 (constants only)

# A message or script that was applied already, or that is for another version, stops before it
# changes anything.
CHECK_VERSION = f"""DO $$ BEGIN
    IF (SELECT coalesce(max(version), 0) FROM migration) <> {{after}} THEN
        RAISE EXCEPTION 'this script requires schema version {{after}}, but the schema is at %',
            (SELECT coalesce(max(version), 0) FROM migration) USING ERRCODE = '{ABORTED}';
    END IF;
END $$"""  # noqa: S608 (a constant only)

# Grants the privileges that a migration adds to the roles that require them.  Before the file
# of roles exists, there are none.
SYNC_GRANTS = """DO $$ BEGIN
    IF to_regproc('sync_grants') IS NOT NULL THEN
        PERFORM sync_grants();
    END IF;
END $$"""


def apply_statements(
    schema: str, pending: Sequence[Migration], *, creates_schema: bool
) -> list[str]:
    """The first of some migrations as one message, which is applied to the version before it only.

    If relays must stop before any of them, the first one already requires it: a refusal is not to
    leave the schema between two versions.
    """
    migration = pending[0]
    statements = [f"CREATE SCHEMA {quote_ident(schema)}"] if creates_schema else []
    statements.append(f"SET LOCAL search_path = {search_path(schema)}")
    if migration.version == 1:
        statements.append(CREATE_HISTORY)
    statements += [LOCK, CHECK_VERSION.format(after=migration.version - 1)]
    if not migration.relays_stop_first:
        later = next((each for each in pending if each.relays_stop_first), None)
        statements += [] if later is None else [_require_stopped_relays(later)]
    return [*statements, *statements_of(migration)]


def statements_of(migration: Migration) -> list[str]:
    """The statements of a migration, all for one transaction."""
    # A file ends with a semicolon, and may end with a comment.
    return [
        *statements_before(migration),
        f"{migration.sql.strip()}\n",
        *statements_after(migration),
    ]


def statements_before(migration: Migration) -> list[str]:
    """Statements that precede a migration, in its transaction."""
    return [_require_stopped_relays(migration)] if migration.relays_stop_first else []


def _require_stopped_relays(migration: Migration) -> str:
    return REQUIRE_STOPPED_RELAYS.format(migration=migration)


def statements_after(migration: Migration) -> list[str]:
    """Statements that follow a migration, in its transaction."""
    row = WRITE_HISTORY.format(
        migration.version,
        quote_literal(migration.name),
        quote_literal(migration.checksum),
        migration.works_from,
    )
    return [row, SYNC_GRANTS]


def may_not_create_schema(role: str, database: str) -> CannotRun:
    """The error for a role without the privilege to create the schema."""
    return CannotRun(
        "this role may not create a schema; run: GRANT CREATE ON DATABASE "
        f"{quote_ident(database)} TO {quote_ident(role)}"
    )
