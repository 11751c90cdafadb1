"""SQL about one adopted table, made from its mapping: what is pending, its events, its triggers.

All names and values are quoted.  Statements run with the search path of the outbox, so the
adopted table is always named with its schema.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from outbox.core.model.sql_names import quote_ident, quote_literal, search_path
from outbox_adopt.source_table import TIME_TYPES

if TYPE_CHECKING:
    from outbox_adopt.mapping import SourceMapping
    from outbox_adopt.source_table import SourceTable

TRIGGERS = ("outbox_adoption", "outbox_adoption_returned", "outbox_adoption_sent")


@dataclass(frozen=True, slots=True)
class SourceSql:
    """SQL about one adopted table."""

    adoption: int
    schema: str
    source: SourceTable
    mapping: SourceMapping

    # ------------------------------------------------------------ expressions

    def column(self, row: str, name: str) -> str:
        """A column of a row."""
        return f"{row}.{quote_ident(name)}"

    def id(self, row: str) -> str:
        """The id of a row, as the ledger has it."""
        return f"{self.column(row, self.mapping.id)}::text"

    def order(self, row: str) -> str:
        """The order of a row as text, whatever the session's DateStyle is."""
        return f"to_jsonb({self.column(row, self.mapping.ordering)}) #>> '{{}}'"

    def pending(self, row: str) -> str:
        """Whether a row is pending; for a table that does not show it, every row is."""
        sent_column = self.mapping.sent_column
        if sent_column is None:
            return "true"
        column = self.column(row, sent_column)
        if self.mapping.pending_value is not None:
            return f"{column} = {quote_literal(self.mapping.pending_value)}"
        if self._is_boolean():
            return f"{column} IS NOT TRUE"
        return f"{column} IS NULL"

    def sent(self, row: str) -> str:
        """Whether a row was sent, if the table has a column that shows it."""
        assert self.mapping.sent_column is not None
        column = self.column(row, self.mapping.sent_column)
        if self.mapping.sent_value is not None:
            return f"{column} = {quote_literal(self.mapping.sent_value)}"
        return f"{column} IS TRUE" if self._is_boolean() else f"{column} IS NOT NULL"

    def event(self, row: str) -> str:
        """The event of a row, a converted_event.  It raises no error, whatever the row has."""
        mapping = self.mapping
        payload, body, fault = self._payload(row)
        headers = "NULL"
        if mapping.headers:
            pairs = ", ".join(
                f"{quote_literal(name)}, {self.column(row, column)}::text"
                for name, column in mapping.headers.items()
            )
            headers = f"jsonb_strip_nulls(jsonb_build_object({pairs}))"
        content_type = "NULL"
        if mapping.content_type is not None:
            content_type = quote_literal(mapping.content_type)
        values = (
            self.event_type(row),
            self._joined(row, mapping.key, ":"),
            self._text(row, mapping.tenant),
            self._text(row, mapping.once),
            payload,
            body,
            content_type,
            headers,
            fault,
        )
        return f"ROW({', '.join(values)})::converted_event"

    def source_type(self, row: str) -> str:
        """The name of a row's type in the adopted table."""
        return self._joined(row, self.mapping.type, ".")

    def event_type(self, row: str) -> str:
        """The event type that this name becomes."""
        name = self.source_type(row)
        if not self.mapping.type_names:
            return f"clean_event_type({name})"
        cases = " ".join(
            f"WHEN {quote_literal(old)} THEN {quote_literal(new)}"
            for old, new in self.mapping.type_names.items()
        )
        return f"CASE {name} {cases} ELSE clean_event_type({name}) END"

    def _payload(self, row: str) -> tuple[str, str, str]:
        """Payload, body and fault of a row's event."""
        column = self.column(row, self.mapping.payload)
        kind = self._type(self.mapping.payload)
        if kind == "bytea":
            fault = f"CASE WHEN {column} IS NULL THEN 'the payload is NULL' END"
            return "NULL", column, fault
        parsed = column if kind == "jsonb" else f"json_or_null({column}::text)"
        return f"CASE WHEN {column} IS NULL THEN 'null'::jsonb ELSE {parsed} END", "NULL", "NULL"

    def _joined(self, row: str, columns: tuple[str, ...], separator: str) -> str:
        if not columns:
            return "NULL"
        texts = ", ".join(f"{self.column(row, name)}::text" for name in columns)
        return f"nullif(concat_ws({quote_literal(separator)}, {texts}), '')"

    def _text(self, row: str, column: str | None) -> str:
        return "NULL" if column is None else f"nullif({self.column(row, column)}::text, '')"

    def _is_boolean(self) -> bool:
        return self._type(self.mapping.sent_column or "") == "boolean"

    # ------------------------------------------------------------- statements

    def hide(self, condition: str, using: str = "") -> str:
        """Hide rows `l` from the old poller: mark them as sent, or delete them.

        Args:
            using: further tables of the condition.
        """
        if self.mapping.sent_deleted:
            return self._statement(f"DELETE FROM {self.source.name} l", "USING", using, condition)
        assert self.mapping.sent_column is not None
        value = "clock_timestamp()"
        if self.mapping.sent_value is not None:
            value = quote_literal(self.mapping.sent_value)
        elif self._is_boolean():
            value = "true"
        change = (
            f"UPDATE {self.source.name} l SET {quote_ident(self.mapping.sent_column)} = {value}"
        )
        return self._statement(change, "FROM", using, condition)

    def show(self) -> str:
        """Show the held rows, and hidden duplicates, to the old poller again."""
        hidden = f"a.adoption = {self.adoption} AND a.state IN ('held', 'duplicate')"
        if self.mapping.sent_deleted:
            names = self.source.own_columns()
            values = ", ".join(
                f"(r).{quote_ident(c.name)}"
                for c in self.source.columns.values()
                if not c.generated
            )
            return (
                f"INSERT INTO {self.source.name} ({names}) OVERRIDING SYSTEM VALUE "
                f"SELECT {values} FROM (SELECT {self._saved_row('a')} AS r FROM adopted_row a "
                f"WHERE {hidden} AND a.source_row IS NOT NULL) s"
            )
        assert self.mapping.sent_column is not None
        value = "NULL"
        if self.mapping.pending_value is not None:
            value = quote_literal(self.mapping.pending_value)
        elif self._is_boolean():
            value = "false"
        return (
            f"UPDATE {self.source.name} l SET {quote_ident(self.mapping.sent_column)} = {value} "
            f"FROM adopted_row a WHERE {hidden} AND {self._same_row('a', 'l')}"
        )

    def hold_pending(self) -> str:
        """Put pending rows that no session has locked into the ledger, and hide them.

        From the last row on, so that the old poller, which sends from the first one on, sends no
        row after a held one.  Rejected rows stay pending.

        $1, $2: order and id of the row before which to begin, NULL: the last one; $3: how many.
        Returns order and id of the first row, and the number of rows; no row: none are left.
        """
        mapping = self.mapping
        ordering, id_ = (self.column("l", name) for name in (mapping.ordering, mapping.id))
        first, first_id = (self.column("p", name) for name in (mapping.ordering, mapping.id))
        saved = "to_jsonb(p.*)" if mapping.sent_deleted else "NULL::jsonb"
        hide = self.hide(
            f"{id_} = {first_id} AND h.source_id = {self.id('p')} AND h.state <> 'rejected'", "p, h"
        )
        before = f"($1::text::{self._type(mapping.ordering)}, $2::text::{self._type(mapping.id)})"
        return f"""
WITH adoption AS MATERIALIZED ({self.lock_adoption("held", "cut_over")}),
p AS MATERIALIZED (
    SELECT l.* FROM {self.source.name} l
     WHERE {self.pending("l")} AND EXISTS (SELECT FROM adoption)
       AND ($1::text IS NULL OR ({ordering}, {id_}) < {before})
     ORDER BY {ordering} DESC, {id_} DESC LIMIT $3 FOR UPDATE SKIP LOCKED),
c AS MATERIALIZED (
    SELECT f.*, CASE WHEN fault IS NULL THEN 'held' ELSE 'rejected' END AS state
      FROM (SELECT each.*, event_fault(e) AS fault
              FROM (SELECT {self.id("p")} AS source_id, {self.order("p")} AS source_order,
                           {self.event("p")} AS e, {saved} AS saved FROM p OFFSET 0) each) f),
h AS (
    INSERT INTO adopted_row AS a
           (adoption, source_id, state, fault, backlog, source_order, event, body, source_row)
    SELECT {self.adoption}, source_id, state, fault, state = 'held', source_order,
           CASE state WHEN 'held' THEN to_jsonb(e) - 'body' END,
           CASE state WHEN 'held' THEN (e).body END, CASE state WHEN 'held' THEN saved END
      FROM c
    ON CONFLICT (adoption, source_id) DO UPDATE
       SET state = excluded.state, fault = excluded.fault, backlog = excluded.backlog,
           source_order = excluded.source_order, event = excluded.event, body = excluded.body,
           source_row = excluded.source_row, event_id = NULL, recorded_at = excluded.recorded_at
    RETURNING a.source_id, a.state),
hidden AS ({hide})
SELECT {first}::text AS first, {first_id}::text AS first_id, (SELECT count(*) FROM p) AS rows
  FROM p ORDER BY {first}, {first_id} LIMIT 1"""

    def skip_duplicates(self) -> str:
        """Skip held rows that share an idempotency key with a row that was sent before."""
        mapping = self.mapping
        assert mapping.once is not None
        return f"""
WITH adoption AS MATERIALIZED ({self.lock_adoption("held", "cut_over")})
UPDATE adopted_row a SET state = 'duplicate', was_held = true, event = NULL, body = NULL
 WHERE a.adoption = {self.adoption} AND a.state = 'held' AND EXISTS (SELECT FROM adoption)
   AND a.event ->> 'once' IN (
       SELECT {self.column("d", mapping.once)}::text FROM {self.source.name} d
        WHERE {self.sent("d")} AND NOT EXISTS (
              SELECT FROM adopted_row o
               WHERE o.adoption = {self.adoption} AND o.source_id = {self.id("d")}
                 AND o.state IN ('held', 'published', 'duplicate')))"""

    def publish_held(self) -> str:
        """Publish the held rows with the ids $1, in this order."""
        return (
            f"WITH adoption AS MATERIALIZED ({self.lock_adoption('held', 'cut_over')}) "
            f"SELECT publish_held({self.adoption}, $1::text[]) FROM adoption"
        )

    def lock_adoption(self, *phases: str) -> str:
        """A query that locks the adoption's row, if it is in one of these phases.

        Commands that change rows of the adopted table run one after the other.
        """
        listed = ", ".join(map(quote_literal, phases))
        return (
            f"SELECT id FROM adoption WHERE id = {self.adoption} AND phase IN ({listed}) "
            "FOR NO KEY UPDATE"
        )

    def unhandled(self) -> str:
        """The ids of the pending rows that are not rejected."""
        return (
            f"SELECT {self.id('l')} AS source_id FROM {self.source.name} l "
            f"WHERE {self.pending('l')} AND NOT EXISTS (SELECT FROM adopted_row a "
            f"WHERE a.adoption = {self.adoption} AND a.source_id = {self.id('l')} "
            "AND a.state = 'rejected')"
        )

    def held_ids(self, condition: str = "true") -> str:
        """The ids of the held rows `a`, in the order of the adopted table."""
        kind = self._type(self.mapping.ordering)
        return (
            f"SELECT a.source_id FROM adopted_row a WHERE a.adoption = {self.adoption} "
            f"AND a.state = 'held' AND {condition} ORDER BY a.source_order::{kind}, a.source_id"
        )

    def publish_all_held(self, condition: str = "true") -> str:
        """Publish all held rows `a`, in the order of the adopted table."""
        return f"SELECT publish_held({self.adoption}, ARRAY({self.held_ids(condition)}))"

    def publish_deleted(self) -> str:
        """Publish the held rows that the adopted table does not have any more."""
        same = self._same_row("a", "l")
        return self.publish_all_held(f"NOT EXISTS (SELECT FROM {self.source.name} l WHERE {same})")

    def function_statements(self) -> list[str]:
        """Create the functions of the triggers."""
        path = search_path(self.schema)
        hide = (
            self.hide(
                f"{self.column('l', self.mapping.id)} = {self.column('NEW', self.mapping.id)}"
            )
            if self.mapping.has_pending
            else "NULL"
        )
        saved = ""
        if self.mapping.sent_deleted:
            saved = (
                f"UPDATE adopted_row SET source_row = to_jsonb(NEW) WHERE "
                f"adoption = {self.adoption} AND source_id = {self.id('NEW')} AND state = 'held';"
            )
        adopted = (
            f"adopt_row({self.adoption}, TG_ARGV[0], {self.id('NEW')}, {self.order('NEW')}, "
            f"{self.event('NEW')})"
        )
        bodies = {
            self._function(): f"""
    {self._require_own()}
    IF {adopted} <> 'rejected' AND TG_ARGV[0] <> 'dual_run' THEN
        {saved}
        {hide};
    END IF;
    RETURN NULL;""",
            self._function("_sent"): f"""
    {self._require_own()}
    PERFORM record_sent({self.adoption}, {self.id("NEW")});
    RETURN NULL;""",
        }
        return [
            f"CREATE OR REPLACE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql "
            f"SECURITY DEFINER SET search_path = {path} AS " + quote_literal(f"\nBEGIN{body}\nEND ")
            for name, body in bodies.items()
        ] + [f"REVOKE ALL ON FUNCTION {name}() FROM PUBLIC" for name in bodies]

    def trigger_statements(self, phase: str, *, marks_later: bool = False) -> list[str]:
        """Create the triggers of a phase, or replace those of another one.

        The lock waits for the transactions that have written to the table; CREATE OR REPLACE
        TRIGGER takes it, too, but not before the first one is replaced.

        Args:
            marks_later: record the rows that the old poller marks as sent after they were hidden.
        """
        inserted, returned, sent = TRIGGERS
        table, column = self.source.name, self.mapping.sent_column
        statements = [
            f"LOCK TABLE {table} IN SHARE ROW EXCLUSIVE MODE",
            self._trigger(inserted, "INSERT", self.pending("NEW"), self._function(), phase),
        ]
        if column is None or phase == "dual_run":
            return statements
        marked = f"UPDATE OF {quote_ident(column)}"
        again = f"NOT ({self.pending('OLD')}) AND {self.pending('NEW')}"
        statements.append(self._trigger(returned, marked, again, self._function(), phase))
        if marks_later:
            twice = f"NOT ({self.pending('OLD')}) AND {self.sent('NEW')}"
            if self._type(column) in TIME_TYPES:
                # If the time is unchanged, the application may have written another column.
                twice += f" AND {self.column('OLD', column)} <> {self.column('NEW', column)}"
            statements.append(self._trigger(sent, marked, twice, self._function("_sent"), phase))
        return statements

    def drop_statements(self) -> list[str]:
        """Remove the triggers and their functions."""
        return [
            *(f"DROP TRIGGER IF EXISTS {name} ON {self.source.name}" for name in TRIGGERS),
            *(f"DROP FUNCTION IF EXISTS {self._function(each)}()" for each in ("", "_sent")),
        ]

    def _require_own(self) -> str:
        """Abort before code of another role runs with the rights of the function's owner.

        The table was its own when the adoption began, see `read_source`.  The transaction has
        written to it, so that neither its owner nor its triggers change after this check.  With an
        older snapshot (REPEATABLE READ) it sees no change since, which only the owner permits.
        """
        tables = f"(TG_RELID, {self.source.oid})"
        return f"""IF EXISTS (SELECT FROM pg_class c WHERE c.oid IN {tables}
                  AND pg_get_userbyid(c.relowner) <> current_user)
       OR EXISTS (SELECT FROM pg_trigger t JOIN pg_proc p ON p.oid = t.tgfoid
                    JOIN pg_roles r ON r.oid = p.proowner
                   WHERE t.tgrelid IN {tables} AND r.rolname <> current_user AND NOT r.rolsuper)
    THEN
        RAISE insufficient_privilege USING
            MESSAGE = {quote_literal(self.source.name)} || ' is adopted by the outbox, and it or a '
                'trigger of it belongs to another role now; see: outbox adopt verify';
    END IF;"""

    def _trigger(self, name: str, event: str, when: str, function: str, phase: str) -> str:
        return (
            f"CREATE OR REPLACE TRIGGER {name} AFTER {event} ON {self.source.name} "
            f"FOR EACH ROW WHEN ({when}) EXECUTE FUNCTION {function}({quote_literal(phase)})"
        )

    def _function(self, suffix: str = "") -> str:
        return f"{quote_ident(self.schema)}.adoption_{self.adoption}{suffix}"

    def _same_row(self, ledger: str, row: str) -> str:
        kind = self._type(self.mapping.id)
        return f"{self.column(row, self.mapping.id)} = {ledger}.source_id::{kind}"

    def _type(self, column: str) -> str:
        return self.source.type(column)

    def _saved_row(self, ledger: str) -> str:
        return f"jsonb_populate_record(NULL::{self.source.name}, {ledger}.source_row)"

    @staticmethod
    def _statement(change: str, keyword: str, using: str, condition: str) -> str:
        return (
            f"{change} {keyword} {using} WHERE {condition}"
            if using
            else f"{change} WHERE {condition}"
        )
