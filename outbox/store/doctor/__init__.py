"""Preconditions and live health, each finding with what to do about it.

Every check reads in a short transaction of its own, under a time-out, so that
one that takes too long, or that this role may not make, says so and leaves the
others alone.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import asyncpg

from outbox.errors import DatabaseUnavailable
from outbox.store.connect import map_errors
from outbox.store.doctor import endpoints, lanes, relays, schema, server, transactions
from outbox.store.doctor.finding import (
    Finding,
    Limits,
    Look,
    Said,
    Severity,
    Subject,
    problem,
    warning,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from outbox.store.doctor.finding import Check

__all__ = ["Finding", "Limits", "Look", "Severity", "Subject", "examine"]

STATEMENT_TIMEOUT_S = 5.0
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
    ("secrets", endpoints.secrets),
    ("networks", endpoints.networks),
)

_LIVE: tuple[tuple[str, Check], ...] = (
    ("relays", relays.replicas),
    ("listeners", relays.listeners),
    ("sequencing", relays.lag),
    ("owners", relays.owners),
    ("endpoints", endpoints.states),
    ("health", endpoints.health),
    ("blocked lanes", lanes.blocked),
    ("failing lanes", lanes.failing),
    ("old lanes", lanes.generations),
    ("dead letters", lanes.dead_letters),
    ("gaps", transactions.gaps),
    ("publishing", transactions.holders),
    ("horizon", transactions.horizon),
    ("notify queue", transactions.queue),
)


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
                return await _read(check, look)
    except TimeoutError:
        raise DatabaseUnavailable(
            f"the database did not answer everything within {TIMEOUT_S:.0f} s; run it again"
        ) from None


async def _read(check: Check, look: Look) -> list[Said]:
    said: list[Said] = []
    try:
        # READ COMMITTED: some compare what two statements see one after the other.
        async with look.db.transaction(isolation="read_committed", readonly=True):
            # In the transaction, because a proxy would hand it to other clients.
            limit_ms = int(STATEMENT_TIMEOUT_S * 1000)
            await look.db.execute(f"SET LOCAL statement_timeout = {limit_ms}")
            said += [each async for each in check(look)]
    except asyncpg.QueryCanceledError:
        said.append(
            warning(
                f"not looked at: it took over {STATEMENT_TIMEOUT_S:.0f} s",
                "run it again when the server has less to do",
            )
        )
    except asyncpg.InsufficientPrivilegeError as error:
        said.append(
            warning(
                f"not looked at: {str(error).partition(chr(10))[0]}",
                "connect as the role that ran outbox migrate",
            )
        )
    except (asyncpg.UndefinedTableError, asyncpg.UndefinedColumnError) as error:
        said.append(
            problem(
                f"something of ours is missing: {str(error).partition(chr(10))[0]}",
                "restore it from a backup, or as outbox migrate --sql has it",
            )
        )
    return said
