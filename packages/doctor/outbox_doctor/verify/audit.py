"""`outbox verify`: all checks in one snapshot, so that relays can keep running."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outbox.store.connection.connect import map_errors
from outbox.store.sql.expressions import RUN_LENGTH
from outbox_doctor.verify.guarantees import CHECKS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from asyncpg import Connection

EXAMPLES_MAX = 5

COUNT_ROWS = f"""
SELECT (SELECT count(*) FROM outbox) AS events,
       (SELECT coalesce(sum({RUN_LENGTH}), 0)::bigint FROM delivery_run) AS deliveries,
       (SELECT coalesce(sum(count), 0)::bigint FROM attempt_run) AS attempts,
       (SELECT count(*) FROM dead_letter) AS dead_letters,
       (SELECT count(*) FROM lane) AS lanes
"""  # noqa: S608 (constants only)


@dataclass(frozen=True, slots=True)
class VerifiedCheck:
    """An invariant and its violations."""

    name: str
    guarantee: str
    violations: int
    examples: tuple[str, ...]
    action: str | None
    """The action to take; null: there are no violations."""


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Result of an audit."""

    violations: int
    checks: list[VerifiedCheck]
    counts: dict[str, int]
    """Rows that were read, by table."""
    seconds: float


async def run_audit(connection: Connection[Any], schema: str) -> VerifyReport:
    """Run all checks, and measure the time."""
    started = time.monotonic()
    with map_errors(schema):
        counts = dict(await connection.fetchrow(COUNT_ROWS))
        checks = [each async for each in run_checks(connection)]
    violations = sum(check.violations for check in checks)
    return VerifyReport(violations, checks, counts, round(time.monotonic() - started, 3))


async def run_checks(connection: Connection[Any]) -> AsyncIterator[VerifiedCheck]:
    """Run all checks in one snapshot; yields the result of each, in order."""
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        for check in CHECKS:
            if check.settings:
                await connection.execute(f"SAVEPOINT settings; {check.settings}")
            row = await connection.fetchrow(
                f"SELECT count(*) AS n, (array_agg(what))[1:{EXAMPLES_MAX}] AS examples "  # noqa: S608
                f"FROM ({check.query}) AS exceptions(what)"
            )
            if check.settings:
                await connection.execute("ROLLBACK TO settings")
            yield VerifiedCheck(
                check.name,
                check.guarantee,
                row["n"],
                tuple(row["examples"] or ()),
                check.action if row["n"] else None,
            )
