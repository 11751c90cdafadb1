"""Our own objects: as the migrations made them, and far enough ahead."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox.core.model.schema_name import migrate_command
from outbox.core.sequencing.partition_window import WIDTH
from outbox.operations.doctor.finding import age, ok, problem, warning
from outbox.store.connection import migrate
from outbox.store.partitions import PARENTS, PartitionStore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from outbox.operations.doctor.finding import Look, Said

# What the cursor's argument needs of the sequence behind outbox.id.
SEQUENCE = """
SELECT s.seqcache AS cache, s.seqincrement AS increment, s.seqcycle AS cycle,
       c.relpersistence = 'p' AS logged, seq.name,
       has_sequence_privilege(c.oid, 'SELECT') OR has_sequence_privilege(c.oid, 'USAGE') AS seen
  FROM pg_get_serial_sequence('outbox', 'id') AS seq(name)
  JOIN pg_sequence s ON s.seqrelid = seq.name::regclass
  JOIN pg_class c ON c.oid = s.seqrelid
"""

# Statements of their own, in this order: ids only rise, so that neither of the
# first two can be above the third where nobody went around the sequence.
LAST_EVENT = "SELECT max(id) FROM outbox"
LAST_READ = "SELECT high FROM batch ORDER BY batch DESC LIMIT 1"
LAST_GIVEN = """
SELECT coalesce(pg_sequence_last_value(pg_get_serial_sequence('outbox', 'id')::regclass), 0)
"""

# The newest period of each kind is the one that is written.
WRITTEN_PERIODS = "SELECT kind, max(number) FROM period GROUP BY kind"

TRIGGER = """
SELECT tgenabled::text FROM pg_trigger
 WHERE tgrelid = 'outbox'::regclass AND tgname = 'ring_the_relay'
"""

FLAG = """
SELECT pg_sequence_last_value('wakeup'::regclass) AS value,
       extract(epoch FROM clock_timestamp())::float8 AS now,
       has_sequence_privilege('wakeup', 'SELECT') OR has_sequence_privilege('wakeup', 'USAGE')
           AS seen,
       has_sequence_privilege('public', 'wakeup', 'SELECT') AS granted
"""

_WHY_DISABLED = {
    "D": "is disabled: nobody wakes a sleeping relay",
    "R": "is enabled for replicas only: nobody wakes a sleeping relay",
    "O": "does not fire where session_replication_role is replica",
}


async def version(look: Look) -> AsyncIterator[Said]:
    """The migrations of this program are applied."""
    found = await migrate.status(look.db, look.schema)
    run = f"run: {migrate_command(look.schema)}"
    if not found.applied:
        yield problem(f'schema "{look.schema}" is not there', run)
    elif found.pending:
        yield problem(
            f'schema "{look.schema}" is at version {found.version}, this program needs '
            f"{found.pending[-1].version}",
            run,
        )
    elif found.version > found.applied[-1].version:
        yield ok(
            f'"{look.schema}" is at version {found.version}; this program knows '
            f"{found.applied[-1].version} and goes on working with it"
        )
    else:
        yield ok(f'"{look.schema}" is at version {found.version}')


async def sequence(look: Look) -> AsyncIterator[Said]:
    """Ids are given out one by one, rising, and nobody goes around that."""
    row = await look.db.fetchrow(SEQUENCE)
    if row is None:
        yield problem(
            "outbox.id has no sequence, so nothing can be published",
            "restore it as outbox migrate --sql has it",
        )
        return
    name = row["name"]
    wrong = [
        (f"CACHE is {row['cache']}", "CACHE 1", row["cache"] != 1),
        (f"INCREMENT is {row['increment']}", "INCREMENT BY 1", row["increment"] != 1),
        ("it may CYCLE", "NO CYCLE", row["cycle"]),
        ("it is not LOGGED", "SET LOGGED", not row["logged"]),
    ]
    bad = [(says, do) for says, do, is_wrong in wrong if is_wrong]
    if bad:
        yield problem(
            f"of {name} {', '.join(says for says, _ in bad)}: events would be lost, "
            "so sequencing stops",
            "; ".join(f"ALTER SEQUENCE {name} {do}" for _, do in bad),
        )
    if not row["seen"]:
        yield warning(
            f"this role may not see how far {name} is", f"GRANT SELECT ON SEQUENCE {name}"
        )
        return
    last_event = await look.db.fetchval(LAST_EVENT) or 0
    last_read = await look.db.fetchval(LAST_READ)
    given = await look.db.fetchval(LAST_GIVEN)
    if given < last_read:
        yield problem(
            f"{name} went back to {given}, below {last_read}, which was read already: "
            "sequencing stops",
            f"SELECT setval('{name}', {max(last_read, last_event)}); events published "
            "meanwhile with lower ids have to be published again",
        )
    elif last_event > given:
        yield problem(
            f"there is an event with id {last_event}, above {name}, which is at {given}: it was "
            "written with an id of its own (COPY?), and sequencing stops",
            f"remove it, or SELECT setval('{name}', {last_event})",
        )
    elif not bad:
        yield ok(f"ids are given out one by one, and stand at {given}")


async def trigger(look: Look) -> AsyncIterator[Said]:
    """Producers wake a sleeping relay."""
    enabled = await look.db.fetchval(TRIGGER)
    table = look.name("outbox")
    if enabled is None:
        yield problem(
            f"the trigger ring_the_relay of {table} is gone: nobody wakes a sleeping relay",
            "create it as outbox migrate --sql has it, and ENABLE ALWAYS",
        )
    elif enabled == "A":
        yield ok("ring_the_relay is there and always fires")
    else:
        say = warning if enabled == "O" else problem
        yield say(
            f"the trigger ring_the_relay of {table} {_WHY_DISABLED[enabled]}",
            f"ALTER TABLE {table} ENABLE ALWAYS TRIGGER ring_the_relay",
        )


async def flag(look: Look) -> AsyncIterator[Said]:
    """Producers can read the wake-up flag, and it says something possible."""
    row = await look.db.fetchrow(FLAG)
    name = look.name("wakeup")
    if not row["granted"]:
        yield problem(
            f"producers may not read {name}: their INSERT fails, or wakes nobody",
            f"GRANT SELECT ON SEQUENCE {name} TO PUBLIC",
        )
    if not row["seen"]:
        yield warning(f"this role may not read {name}", f"GRANT SELECT ON SEQUENCE {name}")
    elif (ahead_s := (row["value"] or 0) - row["now"]) > look.limits.asleep_s:
        yield warning(
            f"the flag is stuck: it says that a relay sleeps for {age(ahead_s)}, and no relay "
            "says that for more than a minute; every commit of a producer pays for a NOTIFY",
            f"SELECT setval('{name}', 1)",
        )
    elif row["granted"]:
        yield ok("a relay may be asleep" if ahead_s > 0 else "no relay sleeps")


async def partitions(look: Look) -> AsyncIterator[Said]:
    """No producer, and no relay, meets a missing partition."""
    written = dict(await look.db.fetch(WRITTEN_PERIODS))
    store = PartitionStore(look.db)
    wrong = False
    for kind, parents in PARENTS.items():
        for parent in parents:
            # A detaching one takes no rows any more.
            there = {p.lo // WIDTH for p in await store.partitions(parent) if not p.detaching}
            for number in (written[kind], written[kind] + 1):
                if number not in there:
                    wrong = True
                    yield _missing(look, parent, number, now=number == written[kind])
                    break
    if not wrong:
        yield ok("there are empty ones ahead")


def _missing(look: Look, parent: str, number: int, *, now: bool) -> Said:
    name = look.name(parent)
    add = f"SELECT {look.name('add_partition')}('{name}', {number})"
    if now:
        return problem(
            f"{name} has no partition for the period that is written: writing fails",
            f"run now: {add}",
        )
    return warning(
        f"{name} has no partition for the next period, so this one goes on",
        f"run outbox relay, which makes it; or now: {add}",
    )
