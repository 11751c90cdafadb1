"""Checks of `outbox doctor`: preconditions and live health, each finding with an action.

Each check runs in its own short transaction with a statement time-out, so a slow check, or one
that this role has no rights for, does not affect the others.  Only the probe writes, and only
on request.
"""

from __future__ import annotations

import asyncio
from collections import Counter
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
    CheckResult,
    DoctorContext,
    DoctorFinding,
    DoctorLimits,
    DoctorReport,
    Severity,
    Subject,
    problem,
    warning,
)
from outbox.store.connection.connect import map_errors

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from outbox.operations.doctor.finding import Check

__all__ = [
    "DoctorContext",
    "DoctorFinding",
    "DoctorLimits",
    "DoctorReport",
    "Severity",
    "Subject",
    "examine",
]

TIMEOUT_S = 60.0
"""For all checks together."""

_FIRST: tuple[tuple[str, Check], ...] = (
    ("server", server.check_version),
    ("schema", schema.check_version),
    ("locks", transactions.check_locks),
    ("rows", schema.check_initial_rows),
)
"""After a problem in one of these, the other checks are skipped: they would repeat it."""

_PRECONDITIONS: tuple[tuple[str, Check], ...] = (
    ("durability", server.check_durability),
    ("timeline", server.check_timeline),
    ("connections", server.check_connections),
    ("clock", server.check_clock),
    ("sequence", schema.check_sequence),
    ("trigger", schema.check_trigger),
    ("wake-up flag", schema.check_flag),
    ("partitions", schema.check_partitions),
    ("roles", roles.check_roles),
    ("autovacuum", tables.check_autovacuum),
    ("secrets", endpoints.check_secrets),
    ("altered secrets", endpoints.check_altered_secrets),
    ("networks", endpoints.check_networks),
    ("certificates", endpoints.check_certificates),
)

_LIVE: tuple[tuple[str, Check], ...] = (
    ("standbys", server.check_synchronous_standby),
    ("relays", relays.check_replicas),
    ("listeners", relays.check_listeners),
    ("sequencing", relays.check_lag),
    ("skipped events", relays.check_skipped_events),
    ("schedules", schedules.check_overdue),
    ("owners", relays.check_owners),
    ("endpoints", endpoints.check_states),
    ("health", endpoints.check_health),
    ("keep-alive", endpoints.check_connection_reuse),
    ("filters", endpoints.check_filters),
    ("blocked lanes", lanes.check_blocked),
    ("failing lanes", lanes.check_failing),
    ("old lanes", lanes.check_generations),
    ("dead letters", lanes.check_dead_letters),
    ("gaps", transactions.check_gaps),
    ("publishing", transactions.check_in_flight),
    ("horizon", horizon.check_horizon),
    ("dead rows", tables.check_dead_rows),
    ("wraparound", tables.check_wraparound),
    ("size", tables.check_size),
    ("retention", retention.check_retention),
    ("old periods", roles.check_empty_partitions),
    ("notify queue", transactions.check_queue),
)

_PROBE: tuple[tuple[str, Check], ...] = (("probe", probe.check_probe),)
"""The probe writes, so it manages its own transactions."""


async def examine(context: DoctorContext) -> DoctorReport:
    """Run all checks.

    Raises:
        DatabaseUnavailable: the connection was lost, or the checks took longer than `TIMEOUT_S`.
        CannotRun: the schema is not an outbox schema, or cannot be read.
        SchemaTooNew: a later version of this package migrated it.
    """
    findings = [finding async for finding in _run_checks(context)]
    severities = Counter(finding.severity for finding in findings)
    return DoctorReport(
        context.schema, severities[Severity.PROBLEM], severities[Severity.WARNING], findings
    )


async def _run_checks(context: DoctorContext) -> AsyncIterator[DoctorFinding]:
    deadline = asyncio.get_running_loop().time() + TIMEOUT_S
    for subject, checks in (
        (Subject.PRECONDITIONS, _FIRST),
        (Subject.PRECONDITIONS, _PRECONDITIONS),
        (Subject.LIVE, _LIVE),
        (Subject.LIVE, _PROBE if context.probing else ()),
    ):
        for name, check in checks:
            results = await _run_check(check, context, deadline)
            for result in results:
                yield DoctorFinding(subject, name, result.severity, result.message, result.action)
            if checks is _FIRST and any(result.severity is Severity.PROBLEM for result in results):
                return


async def _run_check(check: Check, context: DoctorContext, deadline: float) -> list[CheckResult]:
    """Run one check within the total time-out."""
    try:
        with map_errors(context.schema):
            async with asyncio.timeout_at(deadline):
                return await _collect_results(check, context)
    except TimeoutError:
        raise DatabaseUnavailable(
            f"the database did not respond within {TIMEOUT_S:.0f} s; run it again"
        ) from None


async def _collect_results(check: Check, context: DoctorContext) -> list[CheckResult]:
    results: list[CheckResult] = []
    try:
        if check is probe.check_probe:
            results += [each async for each in check(context)]
        else:
            await _run_read_only(check, context, results)
    except asyncpg.QueryCanceledError:
        results.append(
            warning(
                f"skipped: a query took over {STATEMENT_TIMEOUT_S:.0f} s",
                "run it again when the server is less busy",
            )
        )
    except asyncpg.InsufficientPrivilegeError as error:
        results.append(await _privilege_result(context, str(error).partition("\n")[0]))
    except CannotRun as error:
        if isinstance(error.__cause__, asyncpg.InsufficientPrivilegeError):
            raise await _access_error(context, str(error.__cause__).partition("\n")[0]) from error
        raise
    except (asyncpg.UndefinedTableError, asyncpg.UndefinedColumnError) as error:
        results.append(
            problem(
                f"a schema object is missing: {str(error).partition(chr(10))[0]}",
                "restore it from a backup, or create it as in outbox migrate --sql",
            )
        )
    return results


async def _run_read_only(check: Check, context: DoctorContext, results: list[CheckResult]) -> None:
    # READ COMMITTED: some checks compare the snapshots of two consecutive statements.
    async with context.db.transaction(isolation="read_committed", readonly=True):
        # SET LOCAL: behind a pooling proxy, a session setting would leak to other clients.
        limit_ms = int(STATEMENT_TIMEOUT_S * 1000)
        await context.db.execute(f"SET LOCAL statement_timeout = {limit_ms}")
        results += [each async for each in check(context)]


async def _access_error(context: DoctorContext, reason: str) -> CannotRun:
    """The error for a role that cannot read the migrations."""
    return CannotRun(f"{reason}; {await _suggest_grant(context)}")


async def _privilege_result(context: DoctorContext, reason: str) -> CheckResult:
    """The result of a check that this role has no rights for."""
    if any(thing in reason for thing in (" table ", " sequence ", " function ")):
        action = await _suggest_grant(context)
    else:
        action = "connect as the role that ran outbox migrate"
    return warning(f"this check needs more rights: {reason}", action)


async def _suggest_grant(context: DoctorContext) -> str:
    about = await context.db.fetchrow(roles.PURPOSES)
    if about["purposes"] == ["producer"]:
        # A producer role should not get the rights of a reader.
        return "this role is a producer; run it as a reader or an operator"
    return (
        "as the role that ran outbox migrate: "
        f"{roles.grant_command(context, 'reader', about['role'])}"
    )
