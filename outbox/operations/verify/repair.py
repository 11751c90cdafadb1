"""Repair of violations found by `outbox verify`, where other tables determine the right value.

All repairs run in one routing transaction: it locks the cursor row, so no batch is written
concurrently, and reads the damage again under the lock.  Relays must not use cached state that
was repaired.  Their registrations are therefore ended like those of an expired replica, which
fences off results of requests in flight; they register again within a second and reload.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import asyncpg
import orjson

from outbox.core.model.sql_names import quote_ident
from outbox.errors import CannotRun
from outbox.operations.verify.repair_rules import DETACHED_PARTITIONS, REPAIRS
from outbox.store.connection.connect import map_errors
from outbox.store.leadership import CLEAR_LEADER
from outbox.store.replicas import LOCK_REPLICA, RELEASE_ALL, REMOVE_REPLICA
from outbox.store.routing_change import routing_transaction, write_journal

if TYPE_CHECKING:
    from collections.abc import Mapping
    from uuid import UUID

    from asyncpg import Connection

    from outbox.operations.verify.repair_rules import Repair

LOCK_TIMEOUT_S = 5.0

READ_REPLICAS = "SELECT id FROM replica ORDER BY id"

IS_EMPTY = "SELECT NOT EXISTS (SELECT FROM {})"

DROP_DETACHED = "drop an empty detached partition"

ADVICE: Mapping[str, str] = {
    "lost": "publish these events again from the application; see outbox trace ID",
    "complete": "see outbox trace ID; publish an event without a delivery again, or restore the "
    "table delivery from a backup",
    "real": "restore the tables outbox and delivery from the same backup; see outbox trace ID",
    "once": "the receiver discards the duplicate by its X-Delivery; see outbox trace ID",
    "replayed": "see outbox dead show ID; replay missing deliveries: outbox dead replay ID",
    "resent": "see outbox replay list --state all; the receiver can request missing sequences "
    "again",
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
    """Apply all possible repairs in one transaction, with a journal entry for each.

    Raises:
        CannotRun: a row was locked for too long; nothing was changed.
    """
    done: list[AppliedRepair] = []
    replicas_expired = False
    try:
        async with routing_transaction(connection, schema):
            await connection.execute(f"SET LOCAL lock_timeout = {int(LOCK_TIMEOUT_S * 1000)}")
            for repair in REPAIRS:
                rows = await connection.fetch(repair.find_sql)
                if not rows:
                    continue
                planned = _to_repairs(repair, rows)
                if repair.expires_replicas:
                    if not replicas_expired:
                        await _expire_replicas(connection, actor)
                        replicas_expired = True
                    # Read again: relays may have written until they were expired.
                    rows = await connection.fetch(repair.find_sql)
                columns = [[row[name] for row in rows] for name in repair.columns]
                await connection.execute(repair.repair_sql, *columns)
                for endpoint_id, applied in planned:
                    await _journal_repair(connection, actor, endpoint_id, applied)
                    done.append(applied)
            for name in await _find_detached_partitions(connection):
                await connection.execute(f"DROP TABLE {quote_ident(name)}")
                await _journal_repair(connection, actor, None, _partition_repair(name))
                done.append(_partition_repair(name))
            if not done:
                raise _NothingToRepair
    except _NothingToRepair:
        pass
    except asyncpg.LockNotAvailableError:
        raise CannotRun(
            f"another session holds a lock for over {LOCK_TIMEOUT_S:.0f} s; nothing was changed: "
            "stop the relays, and run it again"
        ) from None
    return done


async def _expire_replicas(connection: Connection[Any], actor: str) -> None:
    """Expire all registered replicas, which fences them, and end the leader's term."""
    for row in await connection.fetch(READ_REPLICAS):
        expirable = (row["id"], None, None)
        await connection.write_together(
            (LOCK_REPLICA, *expirable),
            (RELEASE_ALL, *expirable, actor, "repaired"),
            (REMOVE_REPLICA, *expirable),
        )
    await connection.execute(CLEAR_LEADER)


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


async def _journal_repair(
    connection: Connection[Any], actor: str, endpoint_id: UUID | None, applied: AppliedRepair
) -> None:
    entry = {
        "repair": applied.repair,
        "what": applied.what,
        "before": applied.before,
        "after": applied.after,
    }
    await write_journal(connection, "repaired", actor, endpoint_id, entry)


class _NothingToRepair(Exception):
    """Rolls back a transaction that had nothing to repair."""
