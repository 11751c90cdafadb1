"""Checks of the schema: version, initial rows, id sequence, trigger, wake-up flag, partitions."""

from __future__ import annotations

from typing import Any

from outbox.core.model.duration import rounded
from outbox.core.model.schema_name import migrate_command
from outbox.core.model.sql_names import quote_ident
from outbox.core.sequencing.partition_window import WIDTH
from outbox.store.absence_proof import AbsenceProof
from outbox.store.cluster.timeline import MISSING_ROWS
from outbox.store.connection import current_schema
from outbox.store.connection.row_security import read_protected_reason
from outbox.store.retention.partitions import PARENTS, READ_REFERENCES, PartitionStore
from outbox_doctor.check import (
    CheckResult,
    DoctorContext,
    Results,
    check,
    check_rows,
    ok,
    problem,
    warning,
)


@check("row security", passed="no policy applies to these tables")
async def row_security(context: DoctorContext) -> Results:
    """No policy hides rows from the relay, or makes its statements fail."""
    if reason := await read_protected_reason(context.db):
        yield _problem(reason)


@check("schema")
async def version(context: DoctorContext) -> Results:
    """The migrations of this version are applied."""
    status = await current_schema.status(context.db, context.schema)
    run = f"run: {migrate_command(context.schema)}"
    is_at = f"is at version {status.version}"
    if not status.applied:
        yield problem(f'schema "{context.schema}" does not exist', run)
    elif status.pending:
        needed = status.pending[-1].version
        yield problem(f'schema "{context.schema}" {is_at}, this program needs {needed}', run)
    elif status.version > (known := status.applied[-1].version):
        newer = f"newer than version {known} of this program, and compatible"
        yield ok(f'"{context.schema}" {is_at}, {newer}')
    else:
        yield ok(f'"{context.schema}" {is_at}')


# The tables that have a row from their migration on, and are empty.
EMPTIED = """
SELECT array_agg(name ORDER BY name)
  FROM (VALUES ('batch', EXISTS (SELECT FROM batch)), ('cursor', EXISTS (SELECT FROM cursor)),
               ('event_account', EXISTS (SELECT FROM event_account)),
               ('lag_report', EXISTS (SELECT FROM lag_report)),
               ('lock', EXISTS (SELECT FROM lock)), ('period', EXISTS (SELECT FROM period)))
       AS initial(name, is_there)
 WHERE NOT is_there
"""


@check("rows", passed="the rows that the migrations wrote exist")
async def initial_rows(context: DoctorContext) -> Results:
    """No table has lost the row that a migration wrote."""
    emptied = await context.db.fetchval(EMPTIED)
    if emptied:
        yield problem(
            f"emptied, although each always has a row: {', '.join(map(context.qualify, emptied))}",
            "restore the schema from a backup, or begin anew, without its endpoints and events: "
            f"DROP SCHEMA {quote_ident(context.schema)} CASCADE; then run: "
            f"{migrate_command(context.schema)}",
        )
    if not await context.db.fetchval("SELECT EXISTS (SELECT FROM odometer)"):
        odometer = context.qualify("odometer")
        yield warning(
            f"{odometer} was emptied: no endpoint is disabled and nothing is dropped for its age",
            f"run: INSERT INTO {odometer} (seconds) SELECT coalesce(max(seconds), 0) "  # noqa: S608
            f"FROM {odometer}_mark",
        )


@check_rows("complete", MISSING_ROWS, "every endpoint and lane has its rows", see="outbox verify")
def missing_rows(row: Any) -> CheckResult:
    """No row without which an endpoint or lane is skipped is missing, as in half a restore."""
    return problem(
        row["what"],
        "finish the restore, with all tables of one backup; if none is in progress: outbox verify",
    )


# Properties of the sequence behind outbox.id that the sequencer relies on.
SEQUENCE = """
SELECT s.seqcache AS cache, s.seqincrement AS increment, s.seqcycle AS cycle,
       c.relpersistence = 'p' AS logged, seq.name,
       has_sequence_privilege(c.oid, 'SELECT') OR has_sequence_privilege(c.oid, 'USAGE') AS seen
  FROM pg_get_serial_sequence('outbox', 'id') AS seq(name)
  JOIN pg_sequence s ON s.seqrelid = seq.name::regclass
  JOIN pg_class c ON c.oid = s.seqrelid
"""

# Separate statements in this order: ids only increase, so neither of the first two results can
# exceed the third, unless ids were assigned without the sequence.
LAST_EVENT = "SELECT max(id) FROM outbox"
LAST_READ = "SELECT high FROM batch ORDER BY batch DESC LIMIT 1"
LAST_GIVEN = """
SELECT coalesce(pg_sequence_last_value(pg_get_serial_sequence('outbox', 'id')::regclass), 0)
"""


@check("sequence")
async def sequence(context: DoctorContext) -> Results:
    """The id sequence is consecutive, and all ids come from it."""
    row = await context.db.fetchrow(SEQUENCE)
    if row is None:
        yield problem(
            "outbox.id has no sequence, so producers cannot publish",
            "create it as in outbox migrate --sql",
        )
        return
    name = row["name"]
    wrong = {
        f"CACHE is {row['cache']}": "CACHE 1" if row["cache"] != 1 else "",
        f"INCREMENT is {row['increment']}": "INCREMENT BY 1" if row["increment"] != 1 else "",
        "it may CYCLE": "NO CYCLE" if row["cycle"] else "",
        "it is not LOGGED": "" if row["logged"] else "SET LOGGED",
    }
    bad = {message: do for message, do in wrong.items() if do}
    if bad:
        yield problem(
            f"sequence {name}: {', '.join(bad)}; events could be lost, so sequencing stops",
            "; ".join(f"ALTER SEQUENCE {name} {do}" for do in bad.values()),
        )
    if not row["seen"]:
        yield warning(f"this role may not read {name}", f"GRANT SELECT ON SEQUENCE {name}")
        return
    last_event = await context.db.fetchval(LAST_EVENT) or 0
    last_read = await context.db.fetchval(LAST_READ)
    given = await context.db.fetchval(LAST_GIVEN)
    if given < last_read:
        yield problem(
            f"{name} was reset to {given}, below {last_read}, which is sequenced already: "
            "sequencing stops",
            f"SELECT setval('{name}', {max(last_read, last_event)}); then publish "
            "events with lower ids again",
        )
    elif last_event > given:
        yield problem(
            f"event id {last_event} is above {name}, which is at {given}: the event was inserted "
            "with an explicit id (COPY?), and sequencing stops",
            f"delete it, or SELECT setval('{name}', {last_event})",
        )
    elif not bad:
        yield ok(f"ids are consecutive; the last one is {given}")


@check("hidden events", passed="reads return every committed event")
async def hidden_events(context: DoctorContext) -> Results:
    """Nothing hides events from reads; row security and the sequence have checks of their own."""
    proof = AbsenceProof(context.db, of_events=True)
    if reason := await proof.hidden_events(await context.db.fetchval(LAST_GIVEN)):
        yield _problem(reason)


def _problem(reason: str) -> CheckResult:
    """A problem whose reason ends with what to do."""
    message, _, action = reason.partition("; ")
    return problem(message, action)


TRIGGER = """
SELECT tgenabled::text FROM pg_trigger
 WHERE tgrelid = 'outbox'::regclass AND tgname = 'notify_relay'
"""

_DISABLED_EFFECT = {
    "D": "is disabled: producers cannot wake a sleeping relay",
    "R": "is enabled for replicas only: producers cannot wake a sleeping relay",
    "O": "does not fire when session_replication_role is replica",
}


@check("trigger", passed="notify_relay is enabled always")
async def trigger(context: DoctorContext) -> Results:
    """Producers wake a sleeping relay."""
    enabled = await context.db.fetchval(TRIGGER)
    table = context.qualify("outbox")
    if enabled is None:
        yield problem(
            f"the trigger notify_relay of {table} is missing: producers cannot wake a sleeping "
            "relay",
            "create it as in outbox migrate --sql, with ENABLE ALWAYS",
        )
    elif enabled != "A":
        make_result = warning if enabled == "O" else problem
        yield make_result(
            f"the trigger notify_relay of {table} {_DISABLED_EFFECT[enabled]}",
            f"ALTER TABLE {table} ENABLE ALWAYS TRIGGER notify_relay",
        )


# Of the constraint of the outbox, which checks each event.
CONSTRAINT = """
SELECT EXISTS (SELECT FROM pg_constraint WHERE conrelid = 'outbox'::regclass
                                           AND conname = 'event_must_be_valid') AS found,
       has_function_privilege('public', 'require_valid_event'::regproc, 'EXECUTE') AS granted
"""


@check("constraint", passed="invalid events are refused")
async def constraint(context: DoctorContext) -> Results:
    """The outbox has its constraint, and producers may execute the function that it calls."""
    row = await context.db.fetchrow(CONSTRAINT)
    if not row["found"]:
        yield problem(
            f"the constraint event_must_be_valid of {context.qualify('outbox')} is missing: "
            "producers can publish events that receivers refuse",
            f"SELECT {context.qualify('constrain_events')}"
            f"({context.qualify('payload_bytes_max')}())",
        )
    if not row["granted"]:
        name = context.qualify("require_valid_event")
        yield problem(
            f"producers may not execute {name}: their INSERT fails",
            f"GRANT EXECUTE ON FUNCTION {name} TO PUBLIC",
        )


FLAG = """
SELECT pg_sequence_last_value('wakeup'::regclass) AS value,
       extract(epoch FROM clock_timestamp())::float8 AS now,
       has_sequence_privilege('wakeup', 'SELECT') OR has_sequence_privilege('wakeup', 'USAGE')
           AS seen,
       has_sequence_privilege('public', 'wakeup', 'SELECT') AS granted
"""


@check("wake-up flag")
async def wakeup_flag(context: DoctorContext) -> Results:
    """Producers can read the wake-up flag, and its value is plausible."""
    row = await context.db.fetchrow(FLAG)
    name = context.qualify("wakeup")
    if not row["granted"]:
        yield problem(
            f"producers may not read {name}: their INSERT fails, or does not wake a relay",
            f"GRANT SELECT ON SEQUENCE {name} TO PUBLIC",
        )
    if not row["seen"]:
        yield warning(f"this role may not read {name}", f"GRANT SELECT ON SEQUENCE {name}")
    elif (ahead_s := (row["value"] or 0) - row["now"]) > context.limits.sleep_flag_max_s:
        yield warning(
            f"the wake-up flag is stuck {rounded(ahead_s)} in the future, and relays set it "
            "for a minute at most; every producer commit sends a NOTIFY",
            f"SELECT setval('{name}', 1)",
        )
    elif row["granted"]:
        yield ok("a relay may be sleeping" if ahead_s > 0 else "no relay is sleeping")


# The newest period of each kind is the current one.
WRITTEN_PERIODS = "SELECT kind, max(number) FROM period GROUP BY kind"

# Whether another table has the name of a partition.
TABLE_EXISTS = "SELECT to_regclass($1) IS NOT NULL"


@check("partitions", passed="the partitions of the current and the next period exist")
async def partitions(context: DoctorContext) -> Results:
    """Events, deliveries and attempts can be inserted now and in the next period."""
    written = dict(await context.db.fetch(WRITTEN_PERIODS))
    if (last_id := await PartitionStore(context.db).last_id_beyond()) is not None:
        sequence = await context.db.fetchval("SELECT pg_get_serial_sequence('outbox', 'id')")
        used = max(await context.db.fetchval(LAST_EVENT) or 0, await context.db.fetchval(LAST_READ))
        yield problem(
            f"{sequence} is at {last_id}, beyond every partition: inserts fail",
            f"set it back to the last id in use: SELECT setval('{sequence}', {max(used, 1)})",
        )
        return
    written["events"] = max(written["events"], await context.db.fetchval(LAST_GIVEN) // WIDTH)
    store = PartitionStore(context.db)
    for kind, parents in PARENTS.items():
        for parent in parents:
            # A partition that is being detached accepts no rows.
            numbers = {p.lo // WIDTH for p in await store.partitions(parent) if not p.detaching}
            current = written[kind]
            if current not in numbers:
                yield await _missing_partition(context, parent, current, now=True)
            elif current + 1 not in numbers:
                yield await _missing_partition(context, parent, current + 1, now=False)


# Columns of an application in the outbox whose values PostgreSQL computes.
GENERATED = """
SELECT array_agg(attname::text ORDER BY attnum) FROM pg_attribute
 WHERE attrelid = 'outbox'::regclass AND attgenerated <> '' AND NOT attisdropped
"""


@check("other objects", passed="no foreign key refers to these tables")
async def other_objects(context: DoctorContext) -> Results:
    """What an application has added to the tables does not wait for maintenance."""
    for parents in PARENTS.values():
        for parent in parents:
            for row in await context.db.fetch(READ_REFERENCES, parent):
                key = quote_ident(row["name"])
                yield warning(
                    f"{row['relation']} has a foreign key ({row['name']}) to "
                    f"{context.qualify(parent)}: a period is kept while rows refer to it, and "
                    "partitions are made and dropped only while none writes to that table",
                    f"ALTER TABLE {row['relation']} DROP CONSTRAINT {key}",
                )
    if generated := await context.db.fetchval(GENERATED):
        yield ok(
            f"{context.qualify('outbox')} has generated columns ({', '.join(generated)}), and so "
            "has each new partition"
        )


FIND_CITUS = "SELECT to_regclass('pg_catalog.pg_dist_partition') IS NOT NULL"
# Tables that Citus keeps on other servers, too.  A local table that it knows has no group.
DISTRIBUTED = """
SELECT array_agg(c.relname::text ORDER BY c.relname)
  FROM pg_dist_partition p JOIN pg_class c ON c.oid = p.logicalrelid
 WHERE c.relnamespace = quote_ident(current_schema())::regnamespace AND NOT c.relispartition
   AND (p.partmethod <> 'n' OR p.colocationid <> 0)
"""


@check("local tables", passed="all tables are local to this server")
async def local_tables(context: DoctorContext) -> Results:
    """No table is distributed over servers by Citus: snapshots and locks are those of one."""
    if not await context.db.fetchval(FIND_CITUS):
        return
    for table in await context.db.fetchval(DISTRIBUTED) or ():
        name = context.qualify(table)
        yield problem(
            f"{name} is distributed by Citus: events may be lost or reordered",
            f"SELECT undistribute_table('{name}')",
        )


async def _missing_partition(
    context: DoctorContext, parent: str, number: int, *, now: bool
) -> CheckResult:
    name, partition = context.qualify(parent), f"{parent}_{number}"
    action = f"SELECT {context.qualify('add_partition')}('{name}', {number})"
    taken = await context.db.fetchval(TABLE_EXISTS, partition)
    if taken:
        action = (
            f"ALTER TABLE {context.qualify(partition)} RENAME TO {partition}_other; then: {action} "
            f"(that table is no partition of {name}, but has the name of one)"
        )
    if now:
        return problem(
            f"{name} has no partition for the current period: inserts fail", f"run now: {action}"
        )
    if not taken:
        action = f"outbox relay, which creates it, or run: {action}"
    return warning(
        f"{name} has no partition for the next period; the current one stays open", f"run {action}"
    )
