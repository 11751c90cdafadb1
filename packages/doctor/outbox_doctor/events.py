"""Checks of what removes events or keeps them from being stored, and of sequences behind."""

from __future__ import annotations

from outbox.core.model.sql_names import quote_ident, setting_name
from outbox.core.sequencing.partition_window import WIDTH
from outbox_doctor.check import DoctorContext, Results, check, ok, problem, warning

MISSING_GUARDS = (
    "SELECT relation, name, statement FROM missing_guards() WHERE name <> 'notify_relay'"
)


@check("removal", passed="events cannot be deleted, truncated or renumbered")
async def guards(context: DoctorContext) -> Results:
    """Triggers refuse the removal of events, on every partition."""
    for row in await context.db.fetch(MISSING_GUARDS):
        yield problem(
            f"the trigger {row['name']} of {context.qualify(row['relation'])} is missing or not "
            "enabled always: events can be removed, and count as rolled back",
            f"a running relay repairs it within minutes, or run: {row['statement']}",
        )


# Databases and roles whose sessions may remove events.
ALLOWED_BY_DEFAULT = """
SELECT d.datname AS database, r.rolname AS role
  FROM pg_db_role_setting s
  LEFT JOIN pg_database d ON d.oid = s.setdatabase
  LEFT JOIN pg_roles r ON r.oid = s.setrole
 WHERE (s.setdatabase = 0 OR d.datname = current_database())
   AND EXISTS (SELECT FROM unnest(s.setconfig) AS c(text) WHERE lower(c.text) = lower($1) || '=on')
 ORDER BY 1, 2
"""
ALLOWED_HERE = "SELECT coalesce(current_setting($1, true), '') = 'on'"


@check("may remove", passed="no database or role may remove events by default")
async def removal_setting(context: DoctorContext) -> Results:
    """No database and no role carries the setting that permits the removal of events."""
    setting = setting_name(context.schema, "remove")
    rows = await context.db.fetch(ALLOWED_BY_DEFAULT, setting)
    for row in rows:
        role = None if row["role"] is None else f"ROLE {quote_ident(row['role'])}"
        database = None if row["database"] is None else f"DATABASE {quote_ident(row['database'])}"
        subject = f"{role} IN {database}" if role and database else role or database or "ROLE ALL"
        yield warning(
            f"sessions may delete events, which then count as rolled back: {setting} is on for "
            f"{subject}",
            f"unless it is a database of tests: ALTER {subject} RESET {setting}",
        )
    if not rows and await context.db.fetchval(ALLOWED_HERE, setting):
        yield warning(
            f"this session may delete events: {setting} is on",
            "remove it from options in the DSN, PGOPTIONS or postgresql.conf, unless it is a "
            "database of tests",
        )


FILTERS = """
SELECT f.name, f.discards
  FROM unnest('{outbox,future_event,idempotency_key}'::regclass[]) AS t(relation),
       insert_filters(t.relation) AS f
 ORDER BY f.discards DESC, f.name
"""


@check("suppression", passed="no trigger or rule may suppress an event")
async def filters(context: DoctorContext) -> Results:
    """No trigger or rule keeps an event from being stored without an error."""
    for row in await context.db.fetch(FILTERS):
        if row["discards"]:
            yield warning(
                f"{row['name']} may suppress an INSERT: publish then fails, and a plain INSERT "
                "stores no event and reports no error",
                "let it raise an error instead of returning NULL, or publish by publish()",
            )
        else:
            yield ok(f"{row['name']} runs before each event is stored")


SEQUENCES_BEHIND = "SELECT relation, sequence, last_value, highest FROM sequences_behind()"


@check("sequences", passed="no sequence is behind the ids of its table")
async def sequences(context: DoctorContext) -> Results:
    """Every sequence assigns ids above those that its table has."""
    for row in await context.db.fetch(SEQUENCES_BEHIND):
        yield problem(
            f"{row['sequence']} is at {row['last_value']}, below {row['highest']}, the highest id "
            f"of {context.qualify(row['relation'])}: inserts fail, as after logical replication or "
            "a restore of data alone",
            "start a relay or run outbox migrate, which advance it, or run: "
            f"SELECT setval('{row['sequence']}', {row['highest']})",
        )


BATCHES_READ = 1000
"""Batches among which the last one with events is searched."""

# The last sequenced event, unless its period was dropped; and whether events up to it are there.
LAST_SEQUENCED = """
SELECT last.high, EXISTS (SELECT FROM outbox WHERE id BETWEEN p.first_id AND last.high) AS there
  FROM (SELECT b.high FROM (SELECT high, events FROM batch ORDER BY batch DESC LIMIT $1) b
         WHERE b.events > 0 ORDER BY b.high DESC LIMIT 1) last
 CROSS JOIN LATERAL (
       SELECT number * $2::bigint AS first_id FROM period
        WHERE kind = 'events' AND number = last.high / $2::bigint AND dropped_at IS NULL) p
"""


@check("emptied", passed="sequenced events are there")
async def emptied(context: DoctorContext) -> Results:
    """The events of the current period were not removed."""
    row = await context.db.fetchrow(LAST_SEQUENCED, BATCHES_READ, WIDTH)
    if row is not None and not row["there"]:
        yield problem(
            f"{context.qualify('outbox')} was emptied: no event up to id {row['high']}, the last "
            "sequenced one, is left in its period",
            "restore the events from a backup; in a database of tests: outbox.testing.reset()",
        )
