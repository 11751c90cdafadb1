"""Preconditions and live health, each finding with what to do about it.

Every check reads in a short transaction of its own, under a time-out, so that
one that takes too long, or that this role may not make, says so and leaves the
others alone.  Only the probe writes, and only where it is asked for.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import asyncpg

from outbox.errors import CannotRun, DatabaseUnavailable
from outbox.operations.doctor import (
    endpoints,
    horizon,
    lanes,
    probe,
    relays,
    retention,
    roles,
    schedules,
    schema,
    server,
    tables,
    transactions,
)
from outbox.operations.doctor.finding import (
    STATEMENT_TIMEOUT_S,
    Finding,
    Limits,
    Look,
    Said,
    Severity,
    Subject,
    problem,
    warning,
)
from outbox.store.connection.connect import map_errors

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from outbox.operations.doctor.finding import Check

__all__ = ["Finding", "Limits", "Look", "Severity", "Subject", "examine"]

TIMEOUT_S = 60.0
"""For everything."""

_FIRST: tuple[tuple[str, Check], ...] = (
    ("server", server.version),
    ("schema", schema.version),
)
"""Where one of these has a problem, the others would only repeat it."""

_PRECONDITIONS: tuple[tuple[str, Check], ...] = (
    ("durability", server.durability),
    ("timeline", server.timeline),
    ("connections", server.connections),
    ("clock", server.clock),
    ("sequence", schema.sequence),
    ("trigger", schema.trigger),
    ("wake-up flag", schema.flag),
    ("partitions", schema.partitions),
    ("roles", roles.roles),
    ("autovacuum", tables.autovacuum),
    ("secrets", endpoints.secrets),
    ("networks", endpoints.networks),
    ("certificates", endpoints.certificates),
)

_LIVE: tuple[tuple[str, Check], ...] = (
    ("relays", relays.replicas),
    ("listeners", relays.listeners),
    ("sequencing", relays.lag),
    ("schedules", schedules.overdue),
    ("owners", relays.owners),
    ("endpoints", endpoints.states),
    ("health", endpoints.health),
    ("filters", endpoints.filters),
    ("blocked lanes", lanes.blocked),
    ("failing lanes", lanes.failing),
    ("old lanes", lanes.generations),
    ("dead letters", lanes.dead_letters),
    ("gaps", transactions.gaps),
    ("publishing", transactions.holders),
    ("horizon", horizon.horizon),
    ("dead rows", tables.dead_rows),
    ("wraparound", tables.wraparound),
    ("size", tables.size),
    ("retention", retention.retention),
    ("leftovers", roles.shells),
    ("notify queue", transactions.queue),
)

_PROBE: tuple[tuple[str, Check], ...] = (("probe", probe.probe),)
"""Writes, and so has transactions of its own."""


async def examine(look: Look) -> AsyncIterator[Finding]:
    """Look at everything.

    Raises:
        DatabaseUnavailable: the connection was lost, or nothing was answered
            within `TIMEOUT_S`.
        CannotRun: the schema is not ours or cannot be read at all.
        SchemaTooNew: a later version of this package migrated it.
    """
    give_up_at = asyncio.get_running_loop().time() + TIMEOUT_S
    for subject, checks in (
        (Subject.PRECONDITIONS, _FIRST),
        (Subject.PRECONDITIONS, _PRECONDITIONS),
        (Subject.LIVE, _LIVE),
        (Subject.LIVE, _PROBE if look.probing else ()),
    ):
        for name, check in checks:
            found = await _ask(check, look, give_up_at)
            for said in found:
                yield Finding(subject, name, said.severity, said.says, said.do)
            if checks is _FIRST and any(said.severity is Severity.PROBLEM for said in found):
                return


async def _ask(check: Check, look: Look, give_up_at: float) -> list[Said]:
    """What a check says, or why it could say nothing."""
    try:
        with map_errors(look.schema):
            async with asyncio.timeout_at(give_up_at):
                return await _answer(check, look)
    except TimeoutError:
        raise DatabaseUnavailable(
            f"the database did not answer everything within {TIMEOUT_S:.0f} s; run it again"
        ) from None


async def _answer(check: Check, look: Look) -> list[Said]:
    said: list[Said] = []
    try:
        if check is probe.probe:
            said += [each async for each in check(look)]
        else:
            await _read(check, look, said)
    except asyncpg.QueryCanceledError:
        said.append(
            warning(
                f"not looked at: it took over {STATEMENT_TIMEOUT_S:.0f} s",
                "run it again when the server has less to do",
            )
        )
    except asyncpg.InsufficientPrivilegeError as error:
        said.append(await _unseen(look, str(error).partition("\n")[0]))
    except CannotRun as error:
        if isinstance(error.__cause__, asyncpg.InsufficientPrivilegeError):
            raise await _shut_out(look, str(error.__cause__).partition("\n")[0]) from error
        raise
    except (asyncpg.UndefinedTableError, asyncpg.UndefinedColumnError) as error:
        said.append(
            problem(
                f"something of ours is missing: {str(error).partition(chr(10))[0]}",
                "restore it from a backup, or as outbox migrate --sql has it",
            )
        )
    return said


async def _read(check: Check, look: Look, said: list[Said]) -> None:
    # READ COMMITTED: some compare what two statements see one after the other.
    async with look.db.transaction(isolation="read_committed", readonly=True):
        # In the transaction, because a proxy would hand it to other clients.
        limit_ms = int(STATEMENT_TIMEOUT_S * 1000)
        await look.db.execute(f"SET LOCAL statement_timeout = {limit_ms}")
        said += [each async for each in check(look)]


async def _shut_out(look: Look, why: str) -> CannotRun:
    """The error for a role that cannot even see which migrations there are."""
    return CannotRun(f"{why}; {await _grant_reader(look)}")


async def _unseen(look: Look, why: str) -> Said:
    """What this role may not read, and who could let it."""
    if any(thing in why for thing in (" table ", " sequence ", " function ")):
        do = await _grant_reader(look)
    else:
        do = "connect as the role that ran outbox migrate"
    return warning(f"could not see this: {why}", do)


async def _grant_reader(look: Look) -> str:
    about = await look.db.fetchrow(roles.PURPOSES)
    if about["purposes"] == ["producer"]:
        # Who publishes is not to look, so it is not this role that should get more.
        return "that role is for a producer; run it as a reader or an operator"
    return f"as the role that ran outbox migrate: {roles.grant(look, 'reader', about['role'])}"
