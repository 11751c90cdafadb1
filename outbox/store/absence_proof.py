"""The proof that rows which a read did not return do not exist.

Two decisions depend on absent events: an id is dead, and nothing of an ended period is left.  A
third one, that the event of a pending delivery is gone, is made when no record explains it.  Row
level security, a detached partition or another table of the same name also make rows absent.  So
the message that writes such a decision proves, each statement with its own snapshot:

1. It locks the table (ACCESS SHARE): no policy, plain DETACH, rename or drop until it ends.
2. The conditions hold, under which a read returns every committed row.
3. The ranges are read again, by one index probe each.  A row aborts the message.
4. The conditions still hold: ATTACH and DETACH CONCURRENTLY do not wait for the lock.

The conditions vouch for the read in step 3, never for an earlier one: what hid a row from that may
be gone by now.  Statements instead of a function: the relay prepares them, which halves their cost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import structlog
from asyncpg import PostgresError

from outbox.core.model.sql_names import quote_ident
from outbox.core.sequencing.partition_window import WIDTH
from outbox.errors import CursorBroken, SchemaMissing
from outbox.store.connection.row_security import read_row_security_reason, stop_empty
from outbox.store.sql.message import WriteStatement, is_aborted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from outbox.core.sequencing.gaps import Range
    from outbox.store.connection.store_connection import StoreConnection
    from outbox.store.sql.message import WriteCall

log = structlog.get_logger("outbox.sequencer")

CONTRADICTED = "committed events were not returned by an earlier read; nothing was concluded"
"""Logged when the second read found a row that an earlier one did not return."""

FOUND_IDS_MAX = 10
"""Maximum number of ids that the log names."""

# The table and the sequence, to which the OIDs of the session's start are compared later.
READ_OIDS = """
SELECT c.oid, c.relkind, pg_get_serial_sequence('outbox', 'id')::regclass::oid AS sequence
  FROM pg_class c WHERE c.oid = to_regclass('outbox')
"""

# The ids of the periods that may have events which are not sequenced yet.
READ_UNSETTLED = f"""
SELECT coalesce(range_agg(int8range(number * {WIDTH}, (number + 1) * {WIDTH})), '{{}}')::text
  FROM period WHERE kind = 'events' AND last_batch IS NULL AND dropped_at IS NULL
"""  # noqa: S608 (constants only)

# The ids of attached partitions, by their bounds; DEFAULT, MINVALUE and MAXVALUE are none.
_ATTACHED = r"""
SELECT range_agg(int8range(bound[1]::bigint, bound[2]::bigint))
  FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
 CROSS JOIN LATERAL regexp_match(pg_get_expr(c.relpartbound, c.oid),
                                 'FROM \(''?(-?\d+)''?\) TO \(''?(\d+)''?\)') AS bound
 WHERE i.inhparent = $1::oid AND NOT i.inhdetachpending AND c.relkind = 'r' AND bound IS NOT NULL
"""

# Periods whose ids are among the ranges $3, which were not dropped, and of which a part is in no
# attached partition.  A number with neither a period nor a table never had an event.  CASE: the
# bounds of all partitions, which are costly to read, are read only if that of the period differs.
_HIDDEN_PERIODS = rf"""
SELECT n.number
  FROM (SELECT $3::text::int8multirange AS ids OFFSET 0) AS missing
 CROSS JOIN (SELECT number FROM period WHERE kind = 'events' AND dropped_at IS NULL
              UNION
             SELECT substr(relname, 8)::bigint FROM pg_class
              WHERE relnamespace = quote_ident(current_schema())::regnamespace
                AND relname ~ '^outbox_\d{{1,8}}$' AND relkind IN ('r', 'p', 'f', 'v', 'm')) AS n
 CROSS JOIN LATERAL (
       SELECT int8range(n.number * {WIDTH}, (n.number + 1) * {WIDTH}) AS ids) AS period
 WHERE missing.ids && period.ids
   AND CASE WHEN EXISTS (
                 SELECT FROM period p
                  WHERE p.kind = 'events' AND p.number = n.number AND p.dropped_at IS NOT NULL)
              OR EXISTS (
                 SELECT FROM pg_class c JOIN pg_inherits i ON i.inhrelid = c.oid
                  WHERE c.relname = 'outbox_' || n.number AND c.relkind = 'r'
                    AND c.relnamespace = quote_ident(current_schema())::regnamespace
                    AND i.inhparent = $1::oid AND NOT i.inhdetachpending
                    AND pg_get_expr(c.relpartbound, c.oid) = format(
                            'FOR VALUES FROM (%L) TO (%L)', lower(period.ids), upper(period.ids)))
            THEN false
            ELSE NOT int8multirange(period.ids) * missing.ids
                     <@ coalesce(({_ATTACHED}), '{{}}'::int8multirange) END
"""  # noqa: S608 (constants only)

CONDITIONS = {
    "table": """EXISTS (
        SELECT FROM pg_class WHERE oid = $1::oid AND oid = to_regclass('outbox') AND relkind = 'p')
""",
    "row security": "NOT row_security_active(to_regclass('outbox')::oid)",
    "sequence": """NOT pg_is_in_recovery() AND EXISTS (
        SELECT FROM pg_sequence s JOIN pg_class c ON c.oid = s.seqrelid
         WHERE s.seqrelid = $2::oid
           AND s.seqrelid = pg_get_serial_sequence('outbox', 'id')::regclass
           AND s.seqcache = 1 AND s.seqincrement = 1 AND NOT s.seqcycle
           AND c.relpersistence = 'p')
""",
    "partitions": f"NOT EXISTS ({_HIDDEN_PERIODS})",
    "subscription": """NOT EXISTS (
        SELECT FROM pg_subscription_rel s
         WHERE s.srrelid = $1::oid OR EXISTS (
               SELECT FROM pg_inherits WHERE inhrelid = s.srrelid AND inhparent = $1::oid))
""",
}
"""The conditions under which a read returns every committed row of the ranges $3.  $1 and $2 are
the OIDs of table and sequence."""

LOCK_TABLE = WriteStatement("lock_outbox", "SELECT FROM outbox WHERE false")


def require(name: str, conditions: Iterable[str]) -> WriteStatement:
    """The statement that aborts its message unless some conditions hold."""
    # A parameter that is in none of them would have no type.
    typed = "$1::oid IS NOT NULL AND $2::oid IS NOT NULL AND $3::text IS NOT NULL"
    return WriteStatement(name, f"SELECT abort_unless({' AND '.join([typed, *conditions])})")


ID_CONDITIONS = {"sequence"}
"""Conditions that matter for ids that may be assigned, not for an event that was read before."""
REQUIRE_VISIBLE = require("require_visible", CONDITIONS.values())
REQUIRE_EVENTS_VISIBLE = require(
    "require_events_visible",
    (condition for name, condition in CONDITIONS.items() if name not in ID_CONDITIONS),
)
REQUIRE_ABSENT = WriteStatement(
    "require_absent",
    """
SELECT abort_unless(NOT EXISTS (
    SELECT FROM unnest($1::text::int8multirange) AS missing
     CROSS JOIN LATERAL (
           SELECT FROM outbox WHERE id >= lower(missing) AND id < upper(missing) LIMIT 1) event))
""",
)

# Which conditions do not hold.
_FAILED = " UNION ALL ".join(
    f"SELECT '{name}' AS condition WHERE ({condition}) IS NOT TRUE"
    for name, condition in CONDITIONS.items()
)
READ_FAILED = f"""
SELECT condition FROM ({_FAILED}) failed
 WHERE $1::oid IS NOT NULL AND $2::oid IS NOT NULL AND $3::text IS NOT NULL
"""  # noqa: S608 (constants only)
READ_PRESENT = f"""
SELECT event.id FROM unnest($1::text::int8multirange) AS missing
 CROSS JOIN LATERAL (
       SELECT id FROM outbox WHERE id >= lower(missing) AND id < upper(missing)
        ORDER BY id LIMIT {FOUND_IDS_MAX}) event
 LIMIT {FOUND_IDS_MAX}
"""  # noqa: S608 (constants only)

# The first hidden period, and what its table is.
READ_HIDDEN = f"""
SELECT hidden.number, c.relkind, i.inhdetachpending AS detaching
  FROM ({_HIDDEN_PERIODS.replace("$3", "$2")}) AS hidden
  LEFT JOIN pg_class c ON c.relname = 'outbox_' || hidden.number
                      AND c.relnamespace = quote_ident(current_schema())::regnamespace
  LEFT JOIN pg_inherits i ON i.inhrelid = c.oid AND i.inhparent = $1::oid
 ORDER BY hidden.number LIMIT 1
"""  # noqa: S608 (constants only)
READ_SUBSCRIBED = """
SELECT srrelid::regclass::text AS name FROM pg_subscription_rel
 WHERE srrelid = $1::oid OR srrelid IN (SELECT inhrelid FROM pg_inherits WHERE inhparent = $1::oid)
 LIMIT 1
"""
READ_ROLE = """
SELECT current_schema() AS schema, current_user AS role, pg_is_in_recovery() AS standby
"""


class AbsenceProof:
    """The proof on one connection.

    Args:
        connection: the connection on which the decisions are written.
        of_events: what is proven to be absent are events that were sequenced.
    """

    conditions_before = conditions_after = REQUIRE_VISIBLE
    second_read = REQUIRE_ABSENT

    def __init__(self, connection: StoreConnection, *, of_events: bool = False) -> None:
        self._db = connection
        self._conditions = list(CONDITIONS)
        if of_events:
            self._conditions = [name for name in CONDITIONS if name not in ID_CONDITIONS]
            self.conditions_before = self.conditions_after = REQUIRE_EVENTS_VISIBLE
        self._table: int | None = None
        self.sequence: int | None = None
        """The OID of the sequence; None: `check` was not called."""
        self.on_contradiction: Callable[[], object] = lambda: None
        """Called when the second read found a row that an earlier one did not return."""
        self.contradictions = 0
        """How often the second read found a row that an earlier one did not return."""

    async def check(self) -> None:
        """Check all conditions; the first call remembers the OIDs of the table and its sequence.

        The ids in question are those of all periods that may have events to sequence.

        Raises:
            CursorBroken: a condition does not hold.
            SchemaMissing: there is no such table.
        """
        if self._table is None:
            row = await self._db.fetchrow(READ_OIDS)
            if row is not None and row["relkind"] != b"p":
                raise CursorBroken(await self._reason("table", "{}"))
            if row is None or row["sequence"] is None:
                raise SchemaMissing('outbox.id has no sequence; was "outbox migrate" run?')
            self._table, self.sequence = row["oid"], row["sequence"]
        unsettled = await self._db.fetchval(READ_UNSETTLED)
        if unsettled == "{}":
            await stop_empty(self._db, "period")
        await self._check_conditions(unsettled)

    async def write(
        self, missing: Sequence[Range], *calls: WriteCall, was_read: bool = True
    ) -> int:
        """Write in one message, see `write_together`, of which `prove` is a part.

        Args:
            missing: the ranges that the message proves to be absent.
            was_read: an earlier read returned no row of them.

        Returns:
            The result; 0 if the message was aborted although the conditions hold.

        Raises:
            CursorBroken: a condition does not hold; nothing was written.
        """
        try:
            return await self._db.write_together((LOCK_TABLE,), *calls)
        except PostgresError as error:
            if not is_aborted(error):
                raise
        # The cause is read afterwards: an error's text is localized.
        ranges = multirange(missing)
        await self._check_conditions(ranges)
        if was_read and (found := await self._db.fetch(READ_PRESENT, ranges)):
            self.contradictions += 1
            self.on_contradiction()
            log.error(CONTRADICTED, first_ids=[row["id"] for row in found])
        return 0

    async def prove(self, missing: Sequence[Range], *reads: WriteCall) -> list[WriteCall]:
        """The proof that no id of some ranges exists, for a message of `write`.

        Args:
            reads: the statements that read the ranges again; by default the second read.
        """
        if self._table is None:
            await self.check()
        ranges = multirange(missing)
        arguments = self._table, self.sequence, ranges
        return [
            (self.conditions_before, *arguments),
            *(reads or [(self.second_read, ranges)]),
            (self.conditions_after, *arguments),
        ]

    async def require_visible(self, event_ids: Iterable[int]) -> None:
        """Require that a read between two calls returns these events, as far as they exist.

        Raises:
            CursorBroken: a condition does not hold.
        """
        await self.check()
        await self._check_conditions(multirange((each, each) for each in event_ids))

    async def hidden_events(self, through_id: int) -> str | None:
        """Why reads may not return every event up to an id, and what to do; None: they do."""
        try:
            await self.check()
            await self._check_conditions(multirange([(0, through_id)]))
        except SchemaMissing:
            return None
        except CursorBroken as broken:
            return str(broken)
        return None

    async def _check_conditions(self, ranges: str) -> None:
        rows = await self._db.fetch(READ_FAILED, self._table, self.sequence, ranges)
        if rows:
            failed = {row["condition"] for row in rows}
            for condition in self._conditions:
                if condition in failed:
                    raise CursorBroken(await self._reason(condition, ranges))

    async def _reason(self, condition: str, ranges: str) -> str:
        """Why a condition does not hold, and the command that repairs it."""
        here = await self._db.fetchrow(READ_ROLE)
        schema = quote_ident(here["schema"])
        outbox = f"{schema}.outbox"
        match condition:
            case "table":
                return (
                    f"{outbox} is not the table that it was; rename that one back "
                    "(ALTER TABLE … RENAME TO outbox), or restart the relays if it was replaced on "
                    "purpose"
                )
            case "row security":
                return await read_row_security_reason(self._db)
            case "sequence" if here["standby"]:
                return "this server is a standby; connect to the primary"
            case "sequence":
                return (
                    "the sequence of outbox.id must be LOGGED with CACHE 1, INCREMENT 1, NO CYCLE; "
                    "restore that with ALTER SEQUENCE"
                )
            case "partitions":
                row = await self._db.fetchrow(READ_HIDDEN, self._table, ranges)
                return _hidden_reason(outbox, row)
        table = await self._db.fetchval(READ_SUBSCRIBED, self._table)
        return (
            f"a subscription writes into {table}, with ids that this sequence did not assign; "
            "DROP SUBSCRIPTION first (a disabled one counts)"
        )


def multirange(ranges: Iterable[Range]) -> str:
    """Ranges as an argument of the type `int8multirange`."""
    return f"{{{','.join(f'[{lo},{hi}]' for lo, hi in ranges)}}}"


def ranges_of(multirange: Iterable[Any]) -> tuple[Range, ...]:
    """An `int8multirange` as it was read, as ranges."""
    return tuple((r.lower, r.upper - 1) for r in multirange)


def _hidden_reason(outbox: str, row: Any) -> str:
    """What to do about a period whose partition is not attached."""
    if row is None:
        return "a partition was attached meanwhile"
    number, partition = row["number"], f"{outbox}_{row['number']}"
    bounds = f"FOR VALUES FROM ({number * WIDTH}) TO ({(number + 1) * WIDTH})"
    attach = f"ALTER TABLE {outbox} ATTACH PARTITION {partition} {bounds}"
    if row["relkind"] is None:
        return (
            f"the partition {partition} does not exist, and its period was not dropped; restore it "
            f"and run: {attach}; or accept that its events are lost: "
            f"SELECT {outbox.removesuffix('.outbox')}.add_partition('{outbox}', {number})"
        )
    if row["detaching"]:
        detach = f"ALTER TABLE {outbox} DETACH PARTITION {partition} FINALIZE"
        return f"{partition} is being detached; run: {detach}; then: {attach}"
    if row["relkind"] != b"r":
        return (
            f"{partition} is not an ordinary table, so what a read returns depends on other tables "
            f"or another server; replace it by a table with its rows, and run: {attach}"
        )
    return f"{partition} is not attached to {outbox}; run: {attach}"
