"""Mending what `outbox verify` found, as far as the other tables tell how it has to be.

All of it is one change of who gets what: under the cursor row, so that no batch is
written meanwhile, and looked at again there before anything is done.  What relays hold
in memory of what is mended they must not use again: their registrations are ended, as
those of a dead one are, so that nothing that they still have on the wire is written;
they register anew within a second, and read everything afresh.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import asyncpg
import orjson

from outbox.core.model.sql_names import quote_ident
from outbox.errors import CannotRun
from outbox.operations.verify.repair_rules import LOOSE_PARTITIONS, REPAIRS
from outbox.store.connection.connect import map_errors
from outbox.store.cursor import SIGN_CURSOR
from outbox.store.replicas import FREE_ALL, LOCK_REPLICA, REMOVE_REPLICA
from outbox.store.routing_change import change, write_journal

if TYPE_CHECKING:
    from collections.abc import Mapping
    from uuid import UUID

    from asyncpg import Connection

    from outbox.operations.verify.repair_rules import Repair

LOCK_TIMEOUT_S = 5.0

READ_REPLICAS = "SELECT id FROM replica ORDER BY id"

IS_EMPTY = "SELECT NOT EXISTS (SELECT FROM {})"

DROP_LOOSE = "drop an empty table that was cut off its parent and is part of nothing"

ADVICE: Mapping[str, str] = {
    "lost": "publish these events again in your application; outbox trace ID shows each",
    "complete": "see outbox trace ID; publish an event again that has no delivery, or restore "
    "delivery from a backup",
    "real": "restore outbox and delivery from the same backup; see outbox trace ID",
    "once": "its receiver dropped the second by its X-Delivery; see outbox trace ID",
    "replayed": "see outbox dead show ID; what is missing can be sent again: outbox dead replay ID",
    "resent": "see outbox replay list --state all; the receiver asks for what is missing again",
    "backfilled": "see outbox replay show JOB; ask for what is missing again: outbox replay",
    "numbered": "where --repair leaves one, numbers are missing: restore delivery from a backup, "
    "or begin new lanes: outbox endpoint update NAME --lanes N",
    "accounted": "restore attempt and dead_letter from a backup; ask the receiver whether it has "
    "the number",
    "in order": "where --repair leaves one, an acknowledgement is missing: restore attempt",
    "gaps": "where --repair leaves one, it stands in the newest batch, and the leader settles it",
    "owned": "where --repair leaves one, say what the endpoint is to be: outbox endpoint pause, "
    "resume, enable, disable or remove",
    "whole": "where --repair leaves one, restore the lane's rows from a backup, or remove its "
    "endpoint and add it again",
}
"""By check, what to do about what stays."""


@dataclass(frozen=True, slots=True)
class Mended:
    """A damage, and what was done about it, or would be."""

    repair: str
    what: str
    does: str
    before: Any
    after: Any


async def plan(connection: Connection[Any], schema: str) -> list[Mended]:
    """What `mend` would do now; changes nothing."""
    found: list[Mended] = []
    with map_errors(schema):
        async with connection.transaction(isolation="repeatable_read", readonly=True):
            for repair in REPAIRS:
                rows = await connection.fetch(repair.find)
                found += [m for _, m in _mended(repair, rows)]
            found += [_dropped(name) for name in await _loose(connection)]
    return found


async def mend(connection: Connection[Any], schema: str, *, actor: str) -> list[Mended]:
    """Mend everything that can be, in one transaction; each repair is journalled.

    Raises:
        CannotRun: a relay could not be made to begin anew; nothing was changed.
    """
    done: list[Mended] = []
    begun_anew = False
    try:
        async with change(connection, schema):
            await connection.execute(f"SET LOCAL lock_timeout = {int(LOCK_TIMEOUT_S * 1000)}")
            for repair in REPAIRS:
                rows = await connection.fetch(repair.find)
                if not rows:
                    continue
                told = _mended(repair, rows)
                if repair.forgets:
                    if not begun_anew:
                        await _begin_anew(connection, actor)
                        begun_anew = True
                    # What a relay has written since then counts, and its end is written, too.
                    rows = await connection.fetch(repair.find)
                columns = [[row[name] for row in rows] for name in repair.takes]
                await connection.execute(repair.mend, *columns)
                for endpoint_id, mended in told:
                    await _tell(connection, actor, endpoint_id, mended)
                    done.append(mended)
            for name in await _loose(connection):
                await connection.execute(f"DROP TABLE {quote_ident(name)}")
                await _tell(connection, actor, None, _dropped(name))
                done.append(_dropped(name))
            if not done:
                raise _Nothing
    except _Nothing:
        pass
    except asyncpg.LockNotAvailableError:
        raise CannotRun(
            f"something holds our rows for over {LOCK_TIMEOUT_S:.0f} s; nothing was changed: "
            "stop the relays, and run it again"
        ) from None
    return done


async def _begin_anew(connection: Connection[Any], actor: str) -> None:
    """Nobody who is registered now writes anything more, or leads."""
    for row in await connection.fetch(READ_REPLICAS):
        await connection.fetchval(LOCK_REPLICA, row["id"], None, None)
        await connection.execute(FREE_ALL, row["id"], actor, "repaired")
        await connection.execute(REMOVE_REPLICA, row["id"])
    await connection.execute(SIGN_CURSOR, None)


async def _loose(connection: Connection[Any]) -> list[str]:
    """Tables that are named like partitions, are none, and are empty."""
    names = [row["name"] for row in await connection.fetch(LOOSE_PARTITIONS)]
    return [n for n in names if await connection.fetchval(IS_EMPTY.format(quote_ident(n)))]


def _mended(repair: Repair, rows: list[Any]) -> list[tuple[UUID | None, Mended]]:
    """Each damage once, and whose it is."""
    found = {
        row["what"]: (
            row["endpoint_id"],
            Mended(
                repair.name,
                row["what"],
                repair.does,
                row["before"] and orjson.loads(row["before"]),
                row["after"] and orjson.loads(row["after"]),
            ),
        )
        for row in rows
    }
    return list(found.values())


def _dropped(name: str) -> Mended:
    what = f"table {name} is empty, and no partition of anything"
    return Mended("partitions", what, DROP_LOOSE, name, None)


async def _tell(
    connection: Connection[Any], actor: str, endpoint_id: UUID | None, mended: Mended
) -> None:
    told = {
        "repair": mended.repair,
        "what": mended.what,
        "before": mended.before,
        "after": mended.after,
    }
    await write_journal(connection, "repaired", actor, endpoint_id, told)


class _Nothing(Exception):
    """Takes back a change in which nothing was changed."""
