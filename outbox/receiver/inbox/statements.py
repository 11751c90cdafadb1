"""Tables and SQL statements of an inbox, for PostgreSQL and SQLite.

Parameters are written `:name`; `drivers` converts them to each driver's style.  JSON is
passed as text, because how a driver decodes JSON columns is the application's choice.

    inbox      processed deliveries by X-Delivery, until they expire
    lane       the order-check state of each lane
    latest     the newest event of each key, for `is_newest`
    request    optional: every signed request and its response
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any, Literal

from outbox.errors import UsageError

Dialect = Literal["postgresql", "sqlite", "memory"]

_NOW = "(julianday('now') - 2440587.5) * 86400.0"
"""Epoch seconds; `unixepoch('subsec')` needs SQLite 3.42."""

LOCK_TIMEOUT_S = 10
"""Wait for another session that creates the tables."""
ATTEMPTS_MAX = 3

_PREFIX = re.compile(r"(?:[a-z_][a-z0-9_]{0,40}\.)?[a-z_][a-z0-9_]{0,40}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Statements:
    """SQL for one dialect and one table prefix."""

    is_there: str
    """Whether all tables exist; needs no privilege to create them."""
    create: tuple[str, ...]
    """Creates the missing tables, unless others do at the same time."""
    create_together: str | None
    """The same in one statement, also while others do.  None: one transaction writes at a time."""
    advance: str | None
    """Fast path in one statement: the next number of a lane without missing numbers, and
    a new X-Delivery.  Returns whether each of the two held."""
    confirm: str
    """Fails in a failed transaction, which some drivers would commit without an error."""
    add_lane: str
    touch_lane: str
    """Locks a lane by an UPDATE without effect, also on SQLite, which has no FOR UPDATE."""
    lock_lanes: str
    """Locks lanes in the order of their names, the global lock order."""
    claim: str
    """Returns a row if this X-Delivery is new; waits for a concurrent insert of it."""
    unclaim: str
    keep_lane: str
    lock_old: str
    """Selects and locks some expired deliveries."""
    forget: str
    """Records up to which number of a lane deliveries may have expired."""
    expire: str
    expire_requests: str
    latest: str
    """Returns a row unless a newer event of the key is recorded."""
    log: str
    lanes: str


def statements(dialect: Dialect, prefix: str) -> Statements:
    """Return the statements for the tables `<prefix>_inbox`, `<prefix>_lane` and so on.

    Raises:
        UsageError: the prefix is invalid.
    """
    if not _PREFIX.fullmatch(prefix):
        raise UsageError(
            f"prefix: {prefix[:100]!r} is invalid; use a-z, 0-9 and _, optionally after a "
            "schema and a dot"
        )
    if dialect == "memory":
        # The memory inbox dispatches on the name of a statement instead of its SQL.
        names = {field.name: field.name for field in fields(Statements)}
        special = {"create": (), "create_together": None, "advance": None}
        return Statements(**{**names, **special})  # type: ignore[arg-type]
    texts = _POSTGRESQL if dialect == "postgresql" else _SQLITE
    bare = prefix.rpartition(".")[2]

    def named(text: str) -> str:
        return text.replace("{p}", prefix).replace("{bare}", bare).replace("{now}", _NOW)

    of_dialect: dict[str, Any] = {
        "create": tuple(map(named, texts.create)),
        "create_together": texts.create_together and named(texts.create_together),
        "advance": texts.advance and named(texts.advance),
    }
    for field in fields(Statements):
        if field.name not in of_dialect:
            of_dialect[field.name] = named(getattr(texts, field.name))
    return Statements(**of_dialect)


_COMMON = {
    "confirm": "SELECT 1",
    "touch_lane": "UPDATE {p}_lane SET lane = lane WHERE lane = :lane",
    "claim": """
        INSERT INTO {p}_inbox (delivery_id, lane, sequence)
        VALUES (:delivery_id, :lane, :sequence)
        ON CONFLICT (delivery_id) DO NOTHING RETURNING 1
        """,
    "unclaim": "DELETE FROM {p}_inbox WHERE delivery_id = :delivery_id",
    "add_lane": """
        INSERT INTO {p}_lane (lane) VALUES (:lane) ON CONFLICT (lane) DO NOTHING
        """,
    "forget": """
        UPDATE {p}_lane SET forgotten = :sequence WHERE lane = :lane AND forgotten < :sequence
        """,
    "log": """
        INSERT INTO {p}_request
               (delivery_id, lane, sequence, type, attempt, outcome, status, reason)
        VALUES (:delivery_id, :lane, :sequence, :type, :attempt, :outcome, :status, :reason)
        """,
    # Replays and backfills come without a lane: their number does not reflect the age of the
    # event, so they are compared by time of publication.  Equal times belong to one
    # transaction, whose later event is also sent later.
    "latest": """
        INSERT INTO {p}_latest AS known (key, delivery_id, lane, sequence, published_at)
        VALUES (:key, :delivery_id, :lane, :sequence, :published_at)
        ON CONFLICT (key) DO UPDATE
           SET delivery_id = excluded.delivery_id,
               lane = CASE excluded.lane WHEN '' THEN known.lane ELSE excluded.lane END,
               sequence = CASE excluded.lane WHEN '' THEN known.sequence
                                             ELSE excluded.sequence END,
               published_at = CASE excluded.lane WHEN '' THEN known.published_at
                                                 ELSE excluded.published_at END,
               again_at = CASE excluded.lane WHEN '' THEN excluded.published_at ELSE '' END
         WHERE known.delivery_id = excluded.delivery_id OR CASE excluded.lane
               WHEN '' THEN known.published_at < excluded.published_at
                            AND known.again_at < excluded.published_at
               WHEN known.lane THEN known.sequence < excluded.sequence
                                    AND known.again_at <= excluded.published_at
               ELSE known.published_at <= excluded.published_at
                    AND known.again_at <= excluded.published_at END
        RETURNING 1
        """,
}

_CREATE = (
    """
    CREATE TABLE IF NOT EXISTS {p}_inbox (
        delivery_id text PRIMARY KEY,
        lane        text,
        sequence    bigint,
        received_at timestamptz NOT NULL DEFAULT clock_timestamp())
    """,
    # Rows are inserted in the order of this column, so a BRIN index suffices.
    """
    CREATE INDEX IF NOT EXISTS {bare}_inbox_received ON {p}_inbox
     USING brin (received_at) WITH (pages_per_range = 16, autosummarize = on)
    """,
    # Each delivery updates one of few rows: free space on the page allows HOT updates.
    """
    CREATE TABLE IF NOT EXISTS {p}_lane (
        lane      text PRIMARY KEY,
        high      bigint NOT NULL DEFAULT 0,
        ended     boolean NOT NULL DEFAULT false,
        missing   jsonb NOT NULL DEFAULT '[]',
        holes     jsonb NOT NULL DEFAULT '[]',
        unknown   jsonb NOT NULL DEFAULT '[]',
        forgotten bigint NOT NULL DEFAULT 0,
        heard_at  timestamptz NOT NULL DEFAULT clock_timestamp()) WITH (fillfactor = 50)
    """,
    """
    CREATE TABLE IF NOT EXISTS {p}_latest (
        key          text PRIMARY KEY,
        delivery_id  text NOT NULL,
        lane         text NOT NULL,
        sequence     bigint NOT NULL,
        published_at text COLLATE "C" NOT NULL,
        again_at     text COLLATE "C" NOT NULL DEFAULT '')
    """,
    """
    CREATE TABLE IF NOT EXISTS {p}_request (
        id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        at          timestamptz NOT NULL DEFAULT clock_timestamp(),
        delivery_id text,
        lane        text,
        sequence    bigint,
        type        text,
        attempt     int,
        outcome     text NOT NULL,
        status      int NOT NULL,
        reason      text)
    """,
    """
    CREATE INDEX IF NOT EXISTS {bare}_request_at ON {p}_request
     USING brin (at) WITH (pages_per_range = 16, autosummarize = on)
    """,
)

# Of several sessions that create the tables, the later ones wait for the first one to commit: its
# uncommitted row in pg_class conflicts with theirs.  They continue with its tables.  That requires
# CREATE on the schema, unlike an advisory lock, which any role may take.
_CREATE_TOGETHER = f"""
DO $outbox$
DECLARE
    lock_timeout_before text DEFAULT current_setting('lock_timeout');
BEGIN
    PERFORM set_config('lock_timeout', '{LOCK_TIMEOUT_S}s', true);
    FOR attempt IN 1..{ATTEMPTS_MAX} LOOP
        BEGIN
            {"; ".join(_CREATE)};
            EXIT;
        EXCEPTION WHEN duplicate_table OR unique_violation THEN
            IF attempt = {ATTEMPTS_MAX} THEN RAISE; END IF;
        END;
    END LOOP;
    PERFORM set_config('lock_timeout', lock_timeout_before, true);
END $outbox$
"""

_POSTGRESQL = Statements(
    is_there="""
        SELECT count(to_regclass('{p}_' || name)) = 4
          FROM unnest(ARRAY['inbox', 'lane', 'latest', 'request']) AS name
        """,
    create=_CREATE,
    create_together=_CREATE_TOGETHER,
    advance="""
        WITH moved AS (
            UPDATE {p}_lane SET high = CAST(:sequence AS bigint), heard_at = clock_timestamp()
             WHERE lane = :lane AND high = CAST(:sequence AS bigint) - 1
               AND missing = '[]' AND NOT ended
            RETURNING 1),
        claimed AS (
            INSERT INTO {p}_inbox (delivery_id, lane, sequence)
            SELECT :delivery_id, :lane, CAST(:sequence AS bigint) FROM moved
            ON CONFLICT (delivery_id) DO NOTHING RETURNING 1)
        SELECT EXISTS (SELECT FROM moved), EXISTS (SELECT FROM claimed)
        """,
    lock_lanes="""
        SELECT lane, high, ended, CAST(missing AS text), CAST(holes AS text),
               CAST(unknown AS text), forgotten
          FROM {p}_lane WHERE lane IN (:lane, :replayed) ORDER BY lane COLLATE "C" FOR UPDATE
        """,
    keep_lane="""
        UPDATE {p}_lane
           SET high = :high, ended = :ended, missing = CAST(CAST(:missing AS text) AS jsonb),
               holes = CAST(CAST(:holes AS text) AS jsonb),
               unknown = CAST(CAST(:unknown AS text) AS jsonb), heard_at = clock_timestamp()
         WHERE lane = :lane
        """,
    lock_old="""
        SELECT delivery_id, lane, sequence FROM {p}_inbox
         WHERE received_at < clock_timestamp() - make_interval(secs => :keep_s)
         LIMIT :rows FOR UPDATE SKIP LOCKED
        """,
    expire="""
        DELETE FROM {p}_inbox WHERE delivery_id = ANY(ARRAY(
            SELECT jsonb_array_elements_text(CAST(CAST(:ids AS text) AS jsonb))))
        """,
    expire_requests="""
        DELETE FROM {p}_request WHERE id = ANY(ARRAY(
            SELECT id FROM {p}_request
             WHERE at < clock_timestamp() - make_interval(secs => :keep_s)
             LIMIT :rows FOR UPDATE SKIP LOCKED))
        """,
    lanes="""
        SELECT lane, high, ended, CAST(missing AS text), CAST(holes AS text),
               CAST(unknown AS text), forgotten
          FROM {p}_lane ORDER BY lane
        """,
    **_COMMON,
)

_SQLITE = Statements(
    create_together=None,
    is_there="""
        SELECT count(*) = 4 FROM sqlite_master
         WHERE type = 'table'
           AND name IN ('{p}_inbox', '{p}_lane', '{p}_latest', '{p}_request')
        """,
    create=(
        """
        CREATE TABLE IF NOT EXISTS {p}_inbox (
            delivery_id TEXT PRIMARY KEY,
            lane        TEXT,
            sequence    INTEGER,
            received_at REAL NOT NULL DEFAULT ({now})) WITHOUT ROWID
        """,
        """
        CREATE INDEX IF NOT EXISTS {p}_inbox_received ON {bare}_inbox (received_at)
        """,
        """
        CREATE TABLE IF NOT EXISTS {p}_lane (
            lane      TEXT PRIMARY KEY,
            high      INTEGER NOT NULL DEFAULT 0,
            ended     INTEGER NOT NULL DEFAULT 0,
            missing   TEXT NOT NULL DEFAULT '[]',
            holes     TEXT NOT NULL DEFAULT '[]',
            unknown   TEXT NOT NULL DEFAULT '[]',
            forgotten INTEGER NOT NULL DEFAULT 0,
            heard_at  REAL NOT NULL DEFAULT ({now})) WITHOUT ROWID
        """,
        """
        CREATE TABLE IF NOT EXISTS {p}_latest (
            key          TEXT PRIMARY KEY,
            delivery_id  TEXT NOT NULL,
            lane         TEXT NOT NULL,
            sequence     INTEGER NOT NULL,
            published_at TEXT NOT NULL,
            again_at     TEXT NOT NULL DEFAULT '') WITHOUT ROWID
        """,
        """
        CREATE TABLE IF NOT EXISTS {p}_request (
            id          INTEGER PRIMARY KEY,
            at          REAL NOT NULL DEFAULT ({now}),
            delivery_id TEXT,
            lane        TEXT,
            sequence    INTEGER,
            type        TEXT,
            attempt     INTEGER,
            outcome     TEXT NOT NULL,
            status      INTEGER NOT NULL,
            reason      TEXT)
        """,
    ),
    # SQLite cannot write to two tables in one statement, and saves no round trip by it.
    advance=None,
    # One transaction writes at a time, so there is nothing to lock.
    lock_lanes="""
        SELECT lane, high, ended, missing, holes, unknown, forgotten
          FROM {p}_lane WHERE lane IN (:lane, :replayed)
        """,
    keep_lane="""
        UPDATE {p}_lane
           SET high = :high, ended = :ended, missing = :missing, holes = :holes,
               unknown = :unknown, heard_at = {now}
         WHERE lane = :lane
        """,
    lock_old="""
        SELECT delivery_id, lane, sequence FROM {p}_inbox
         WHERE received_at < {now} - :keep_s ORDER BY received_at LIMIT :rows
        """,
    expire="DELETE FROM {p}_inbox WHERE delivery_id IN (SELECT value FROM json_each(:ids))",
    expire_requests="""
        DELETE FROM {p}_request WHERE id IN (
            SELECT id FROM {p}_request WHERE at < {now} - :keep_s ORDER BY id LIMIT :rows)
        """,
    lanes="""
        SELECT lane, high, ended, missing, holes, unknown, forgotten FROM {p}_lane ORDER BY lane
        """,
    **_COMMON,
)
