"""Repair of violations found by `outbox verify`, where other tables determine the right value.

Relays must not use cached state that is repaired.  Their registrations are therefore ended like
those of an expired replica, which fences off results of requests in flight; they register again
within a second and reload.  Damage is found without locks, and repaired in one message, which
does nothing if that damage has changed meanwhile, or if a relay has registered.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import asyncpg
import orjson

from outbox.core.model.sql_names import quote_ident
from outbox.operations.verify.repair_rules import REPAIRS
from outbox.store.change import LOCK_TIMEOUT_S, make_change
from outbox.store.connection.connect import map_errors
from outbox.store.connection.message import WriteStatement, is_aborted
from outbox.store.partitions import MAINTENANCE_IS_LEASED, PARENTS
from outbox.store.replicas import LOCK_REPLICA, RELEASE_ALL, REMOVE_REPLICA
from outbox.store.retention import END_LEADERSHIP
from outbox.store.routing_change import ADD_TO_JOURNAL
from outbox.store.timeline import LOCK_EPOCHS

if TYPE_CHECKING:
    from collections.abc import Mapping
    from uuid import UUID

    from asyncpg import Connection

    from outbox.operations.verify.repair_rule import Repair
    from outbox.store.change import Change
    from outbox.store.connection.store_connection import StoreConnection

READ_REPLICAS = "SELECT id FROM replica ORDER BY id"

REQUIRE_NO_REPLICAS = WriteStatement(
    "require_no_replicas", "SELECT abort_unless(NOT EXISTS (SELECT FROM replica))"
)

# A fingerprint of what a statement finds.  `floor_batch` changes with each batch; an older one is
# correct, because it is lower.
FINGERPRINT = """
SELECT coalesce(md5(string_agg(row::text, ' ' ORDER BY row::text)), '')
  FROM (SELECT to_jsonb(found) - 'floor_batch' AS row FROM ({}) AS found) rows
"""

AT_ONCE = 1_000
"""Violations that one message repairs: for each it reads the damage again, under its locks."""

IS_EMPTY = "SELECT NOT EXISTS (SELECT FROM {})"

PARTITIONED = [parent for parents in PARENTS.values() for parent in parents]

# Partitions that were detached and never attached again.  Running maintenance creates such
# tables, too, so this reads them only while no session has the maintenance lease.
DETACHED_PARTITIONS = f"""
SELECT c.relname::text AS name
  FROM pg_class c
 WHERE c.relnamespace = quote_ident(current_schema())::regnamespace AND c.relkind = 'r'
   AND c.relname ~ '^({"|".join(PARTITIONED)})_[0-9]+$' AND NOT c.relispartition
   AND NOT {MAINTENANCE_IS_LEASED}
 ORDER BY c.relname
"""  # noqa: S608

DROP_DETACHED = "drop an empty detached partition"

ADVICE: Mapping[str, str] = {
    "lost": "run outbox verify --repair; the next batches sequence these events, as late ones",
    "complete": "see outbox trace ID; publish an event without a delivery again, or restore the "
    "table delivery from a backup",
    "real": "restore the tables outbox and delivery from the same backup; see outbox trace ID",
    "once": "the receiver discards the duplicate by its X-Delivery; see outbox trace ID",
    "replayed": "see outbox dead show ID; replay missing deliveries: outbox dead replay ID",
    "backfilled": "see outbox replay show JOB; start a new backfill: outbox replay",
    "contiguous": "run outbox verify --repair; if a violation remains, deliveries are missing: "
    "restore the table delivery from a backup, or start new lanes: outbox endpoint update NAME "
    "--lanes N",
    "accounted": "restore the tables attempt and dead_letter from a backup; ask the receiver "
    "whether it has the sequence",
    "in order": "run outbox verify --repair; if a violation remains, restore the table attempt "
    "from a backup",
    "gaps": "run outbox verify --repair; if a violation remains, the leader resolves it with the "
    "next batch",
    "owned": "run outbox verify --repair; if a violation remains, set the endpoint's state: "
    "outbox endpoint pause, resume, enable, disable or remove",
    "whole": "run outbox verify --repair; if a violation remains, restore the lane's rows from a "
    "backup, or remove its endpoint and add it again",
}
"""The action to take for a violation, by check."""


@dataclass(frozen=True, slots=True)
class AppliedRepair:
    """One repair, applied or planned."""

    repair: str
    what: str
    action: str
    before: Any
    after: Any


async def plan_repairs(connection: Connection[Any], schema: str) -> list[AppliedRepair]:
    """Return the repairs that `apply_repairs` would make now, without a change."""
    found: list[AppliedRepair] = []
    with map_errors(schema):
        async with connection.transaction(isolation="repeatable_read", readonly=True):
            for repair in REPAIRS:
                rows = await connection.fetch(repair.find_sql)
                found += [m for _, m in _to_repairs(repair, rows)]
            found += [
                _partition_repair(name) for name in await _find_detached_partitions(connection)
            ]
    return found


async def apply_repairs(
    connection: Connection[Any], schema: str, *, actor: str
) -> list[AppliedRepair]:
    """Apply all possible repairs, with a journal entry for each.

    Raises:
        CannotRun: a row was locked for too long; earlier repairs are applied.
    """
    done: list[AppliedRepair] = []
    # One after the other: a repair may cause what a later one repairs.
    for repair in REPAIRS:
        with map_errors(schema, "operator"):
            portions = await _find_keys(connection, repair)
        for keys in portions:
            plan = partial(_plan, repair, keys)
            done += await make_change(connection, schema, actor, plan, long=True)
    with map_errors(schema, "operator"):
        for name in await _find_detached_partitions(connection):
            if await _drop_detached(connection, name, actor):
                done.append(_partition_repair(name))
    return done


async def _find_keys(
    connection: Connection[Any], repair: Repair
) -> list[tuple[()] | tuple[list[Any]]]:
    """The arguments that limit a repair's finder, for each message."""
    if repair.key is None:
        return [()]
    rows = await connection.fetch(repair.find_sql)
    keys = list(dict.fromkeys(row[repair.key] for row in rows))
    return [(keys[n : n + AT_ONCE],) for n in range(0, len(keys), AT_ONCE)]


async def _plan(
    repair: Repair, keys: tuple[()] | tuple[list[Any]], change: Change
) -> list[AppliedRepair]:
    """Plan a repair; if relays cache what is repaired, their registrations are ended."""
    fingerprint = FINGERPRINT.format(repair.unchanged_sql)
    # First: what changes between the two makes the message abort.
    found = await change.db.fetchval(fingerprint, *keys)
    rows = await change.db.fetch(repair.find_again_sql, *keys)
    if not rows:
        return []
    expirables: list[tuple[int, None, None]] = []
    if repair.expires_replicas:
        expirables = [(row["id"], None, None) for row in await change.db.fetch(READ_REPLICAS)]
        # Locked first: relays that write wait, and are fenced off then.
        for expirable in expirables:
            change.write(LOCK_REPLICA, *expirable)
        change.write(LOCK_EPOCHS)
    require = f"SELECT abort_unless(({fingerprint}) = ${len(keys) + 1})"
    change.write(WriteStatement(f"require_{repair.name}", require), *keys, found)
    columns = [[row[name] for row in rows] for name in repair.columns]
    change.write(WriteStatement(f"repair_{repair.name}", repair.repair_sql), *columns)
    for expirable in expirables:
        change.write(RELEASE_ALL, *expirable, change.actor, "repaired")
        change.write(REMOVE_REPLICA, *expirable)
    if repair.expires_replicas:
        change.write(REQUIRE_NO_REPLICAS)
        change.write(END_LEADERSHIP)
    planned = _to_repairs(repair, rows)
    for endpoint_id, applied in planned:
        change.journal("repaired", endpoint_id, _entry(applied))
    return [applied for _, applied in planned]


async def _drop_detached(connection: StoreConnection, name: str, actor: str) -> bool:
    """Drop a partition in one message, unless it has rows by now, or is in use."""
    table = quote_ident(name)
    entry = orjson.dumps(_entry(_partition_repair(name))).decode()
    message = (
        f"SET LOCAL lock_timeout = {int(LOCK_TIMEOUT_S * 1000)}",
        f"SELECT abort_unless(NOT EXISTS (SELECT FROM {table}))",  # noqa: S608 (quoted)
        f"DROP TABLE {table}",
        ADD_TO_JOURNAL.inline(("repaired", actor, None, entry)),
    )
    try:
        await connection.execute("; ".join(message))
    except asyncpg.PostgresError as error:
        if not is_aborted(error) and not isinstance(error, asyncpg.LockNotAvailableError):
            raise
        return False
    return True


async def _find_detached_partitions(connection: Connection[Any]) -> list[str]:
    """Empty tables with a partition's name that are not attached to a parent."""
    names = [row["name"] for row in await connection.fetch(DETACHED_PARTITIONS)]
    return [n for n in names if await connection.fetchval(IS_EMPTY.format(quote_ident(n)))]


def _to_repairs(repair: Repair, rows: list[Any]) -> list[tuple[UUID | None, AppliedRepair]]:
    """One repair per violation, with its endpoint; a violation can have several rows."""
    found = {
        row["what"]: (
            row["endpoint_id"],
            AppliedRepair(
                repair.name,
                row["what"],
                repair.action,
                row["before"] and orjson.loads(row["before"]),
                row["after"] and orjson.loads(row["after"]),
            ),
        )
        for row in rows
    }
    return list(found.values())


def _partition_repair(name: str) -> AppliedRepair:
    what = f"table {name} is an empty detached partition"
    return AppliedRepair("partitions", what, DROP_DETACHED, name, None)


def _entry(applied: AppliedRepair) -> dict[str, Any]:
    """The data of a journal entry."""
    return {
        "repair": applied.repair,
        "what": applied.what,
        "before": applied.before,
        "after": applied.after,
    }
