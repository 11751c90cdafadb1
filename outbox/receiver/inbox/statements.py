"""Tables and SQL statements of an inbox, for PostgreSQL and SQLite.

Parameters are those of `outbox.drivers.statement`.  JSON is passed as text, because how a driver
decodes JSON columns is the application's choice.

    inbox      processed deliveries by X-Delivery, until they expire
    lane       the order-check state of each lane
    latest     the newest event of each key, for `is_newest`
    request    optional: every signed request and its response
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from outbox.errors import UsageError

Dialect = Literal["postgresql", "sqlite", "memory"]

CREATE_LOCK_TIMEOUT_S = 10
"""Wait for another session that creates the tables."""
CREATE_ATTEMPTS_MAX = 3

_TOKEN = re.compile(r"\{([a-z_]+)\}")
_PREFIX = re.compile(r"(?:[a-z_][a-z0-9_]{0,40}\.)?[a-z_][a-z0-9_]{0,40}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Statements:
    """SQL for one dialect and one table prefix."""

    is_there: str
    """Whether all tables exist; needs no privilege to create them."""
    create: tuple[str, ...]
    """Creates the missing tables, unless others do at the same time."""
    create_together: str | None
    """Creates them in one statement, also while others do.  None: one transaction writes at a
    time."""
    advance: str | None
    """Fast path in one statement: the next number of a lane without missing numbers, and
    a new X-Delivery.  Returns whether each of the two held."""
    advance_run: str | None
    """Advances a lane by several numbers: whether they are the next, and the new values of
    X-Delivery."""
    confirm: str
    """Returns a row if this X-Delivery is recorded.  Fails in a failed transaction, which some
    drivers would commit without an error."""
    add_lane: str
    """Adds a lane if it is not there; on SQLite, this also takes the lock for writing."""
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
    lane: str


_TOKENS = {
    "postgresql": {
        "integer": "bigint",
        "boolean": "boolean",
        "json": "jsonb",
        "identity": "bigint GENERATED ALWAYS AS IDENTITY",
        "time": "timestamptz",
        "now": "clock_timestamp()",
        "retention": "make_interval(secs => :keep_s)",
        "by_bytes": 'text COLLATE "C"',
        "options": "",
        # Each delivery updates one of few rows: free space on the page allows HOT updates.
        "lane_options": "WITH (fillfactor = 50)",
    },
    "sqlite": {
        "integer": "INTEGER",
        "boolean": "INTEGER",
        "json": "TEXT",
        "identity": "INTEGER",
        "time": "REAL",
        # Epoch seconds; `unixepoch('subsec')` needs SQLite 3.42.
        "now": "((julianday('now') - 2440587.5) * 86400.0)",
        "retention": ":keep_s",
        "by_bytes": "text",
        "options": "WITHOUT ROWID",
        "lane_options": "WITHOUT ROWID",
    },
    "memory": {},
}
"""What a dialect writes for `{name}` in a statement, besides `{p}`, the prefix, and `{bare}`, the
prefix without its schema."""


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
    tokens = _TOKENS[dialect] | {"p": prefix, "bare": prefix.rpartition(".")[2]}

    def named(text: Any) -> Any:
        if isinstance(text, tuple):
            return tuple(map(named, text))
        return text and _TOKEN.sub(lambda token: tokens[token[1]], text)

    texts = {"postgresql": _POSTGRESQL, "sqlite": _SQLITE, "memory": _MEMORY}[dialect]
    return Statements(*(named(getattr(texts, field.name)) for field in fields(Statements)))


_LANE_ROWS = """
    SELECT lane, high, ended, CAST(missing AS text), CAST(holes AS text),
           CAST(unknown AS text), forgotten
      FROM {p}_lane
    """

_COMMON = {
    "confirm": "SELECT 1 FROM {p}_inbox WHERE delivery_id = :delivery_id",
    "lanes": f"{_LANE_ROWS} ORDER BY lane",
    "lane": f"{_LANE_ROWS} WHERE lane = :lane",
    "claim": """
        INSERT INTO {p}_inbox (delivery_id, lane, sequence)
        VALUES (:delivery_id, :lane, :sequence)
        ON CONFLICT (delivery_id) DO NOTHING RETURNING 1
        """,
    "unclaim": "DELETE FROM {p}_inbox WHERE delivery_id = :delivery_id",
    "add_lane": """
        INSERT INTO {p}_lane (lane) VALUES (:lane) ON CONFLICT (lane) DO NOTHING
        """,
    "keep_lane": """
        UPDATE {p}_lane
           SET high = :high, ended = :ended, missing = CAST(CAST(:missing AS text) AS {json}),
               holes = CAST(CAST(:holes AS text) AS {json}),
               unknown = CAST(CAST(:unknown AS text) AS {json}), heard_at = {now}
         WHERE lane = :lane
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

_TABLES = (
    """
    CREATE TABLE IF NOT EXISTS {p}_inbox (
        delivery_id text PRIMARY KEY,
        lane        text,
        sequence    {integer},
        received_at {time} NOT NULL DEFAULT {now}) {options}
    """,
    """
    CREATE TABLE IF NOT EXISTS {p}_lane (
        lane      text PRIMARY KEY,
        high      {integer} NOT NULL DEFAULT 0,
        ended     {boolean} NOT NULL DEFAULT false,
        missing   {json} NOT NULL DEFAULT '[]',
        holes     {json} NOT NULL DEFAULT '[]',
        unknown   {json} NOT NULL DEFAULT '[]',
        forgotten {integer} NOT NULL DEFAULT 0,
        heard_at  {time} NOT NULL DEFAULT {now}) {lane_options}
    """,
    """
    CREATE TABLE IF NOT EXISTS {p}_latest (
        key          text PRIMARY KEY,
        delivery_id  text NOT NULL,
        lane         text NOT NULL,
        sequence     {integer} NOT NULL,
        published_at {by_bytes} NOT NULL,
        again_at     {by_bytes} NOT NULL DEFAULT '') {options}
    """,
    """
    CREATE TABLE IF NOT EXISTS {p}_request (
        id          {identity} PRIMARY KEY,
        at          {time} NOT NULL DEFAULT {now},
        delivery_id text,
        lane        text,
        sequence    {integer},
        type        text,
        attempt     int,
        outcome     text NOT NULL,
        status      int NOT NULL,
        reason      text)
    """,
)

_CREATE = (
    *_TABLES,
    # Rows are inserted in the order of these columns, so BRIN indexes suffice.
    """
    CREATE INDEX IF NOT EXISTS {bare}_inbox_received ON {p}_inbox
     USING brin (received_at) WITH (pages_per_range = 16, autosummarize = on)
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
    PERFORM set_config('lock_timeout', '{CREATE_LOCK_TIMEOUT_S}s', true);
    FOR attempt IN 1..{CREATE_ATTEMPTS_MAX} LOOP
        BEGIN
            {"; ".join(_CREATE)};
            EXIT;
        EXCEPTION WHEN duplicate_table OR unique_violation THEN
            IF attempt = {CREATE_ATTEMPTS_MAX} THEN RAISE; END IF;
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
    advance_run="""
        WITH moved AS (
            UPDATE {p}_lane SET high = CAST(:last AS bigint), heard_at = clock_timestamp()
             WHERE lane = :lane AND high = CAST(:first AS bigint) - 1
               AND missing = '[]' AND NOT ended
            RETURNING 1),
        claimed AS (
            INSERT INTO {p}_inbox (delivery_id, lane, sequence)
            SELECT given.id, :lane, CAST(:first AS bigint) - 1 + given.place
              FROM moved, jsonb_array_elements_text(CAST(CAST(:ids AS text) AS jsonb))
                          WITH ORDINALITY AS given (id, place)
             ORDER BY given.place
            ON CONFLICT (delivery_id) DO NOTHING RETURNING delivery_id)
        SELECT EXISTS (SELECT FROM moved),
               (SELECT CAST(coalesce(jsonb_agg(delivery_id), '[]') AS text) FROM claimed)
        """,
    lock_lanes=f"""
        {_LANE_ROWS} WHERE lane IN (:lane, :replayed) ORDER BY lane COLLATE "C" FOR UPDATE
        """,
    lock_old="""
        SELECT delivery_id, lane, sequence FROM {p}_inbox
         WHERE received_at < {now} - {retention}
         LIMIT :rows FOR UPDATE SKIP LOCKED
        """,
    expire="""
        DELETE FROM {p}_inbox WHERE delivery_id = ANY(ARRAY(
            SELECT jsonb_array_elements_text(CAST(CAST(:ids AS text) AS jsonb))))
        """,
    expire_requests="""
        DELETE FROM {p}_request WHERE id = ANY(ARRAY(
            SELECT id FROM {p}_request
             WHERE at < {now} - {retention}
             LIMIT :rows FOR UPDATE SKIP LOCKED))
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
        *_TABLES,
        "CREATE INDEX IF NOT EXISTS {p}_inbox_received ON {bare}_inbox (received_at)",
    ),
    # SQLite cannot write to two tables in one statement, and saves no round trip by it.
    advance=None,
    advance_run=None,
    # One transaction writes at a time, so there is nothing to lock.
    lock_lanes=f"{_LANE_ROWS} WHERE lane IN (:lane, :replayed)",
    lock_old="""
        SELECT delivery_id, lane, sequence FROM {p}_inbox
         WHERE received_at < {now} - {retention} ORDER BY received_at LIMIT :rows
        """,
    expire="DELETE FROM {p}_inbox WHERE delivery_id IN (SELECT value FROM json_each(:ids))",
    expire_requests="""
        DELETE FROM {p}_request WHERE id IN (
            SELECT id FROM {p}_request WHERE at < {now} - {retention} ORDER BY id LIMIT :rows)
        """,
    **_COMMON,
)

# The memory inbox dispatches on the name of a statement instead of its SQL.
_MEMORY = replace(
    Statements(*(field.name for field in fields(Statements))),  # type: ignore[arg-type]
    create=(),
    create_together=None,
    advance=None,
    advance_run=None,
)
