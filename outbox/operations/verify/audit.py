"""The result of `outbox verify`: all checks, and what they read."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outbox.operations.verify.guarantees import count_rows, run_checks
from outbox.operations.verify.repair import ADVICE
from outbox.store.connection.connect import map_errors

if TYPE_CHECKING:
    from asyncpg import Connection


@dataclass(frozen=True, slots=True)
class VerifiedCheck:
    """An invariant and its violations."""

    name: str
    guarantee: str
    violations: int
    examples: tuple[str, ...]
    action: str | None
    """The action to take; None: there are no violations."""


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
        counts = await count_rows(connection)
        checks = [
            VerifiedCheck(
                found.check.name,
                found.check.guarantee,
                found.violations,
                found.examples,
                ADVICE[found.check.name] if found.violations else None,
            )
            async for found in run_checks(connection)
        ]
    violations = sum(check.violations for check in checks)
    return VerifyReport(violations, checks, counts, round(time.monotonic() - started, 3))
