"""The examination of `outbox doctor`: all checks, each finding with an action.

Each check runs in its own short transaction with a statement time-out, so a slow check, or one
that this role has no rights for, does not affect the others.  No transaction is open while a broker
is examined: the server would end it.  Only the probe writes, and only on request.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import nullcontext
from typing import TYPE_CHECKING

import asyncpg

from outbox.errors import CannotRun, DatabaseUnavailable
from outbox.store.connection.connect import map_errors
from outbox_doctor import (
    endpoints,
    events,
    feeds,
    headers,
    lanes,
    payloads,
    probe,
    relays,
    retention,
    roles,
    schema,
    server,
    sessions,
    tables,
)
from outbox_doctor.check import (
    CHECK_STATEMENT_TIMEOUT_S,
    Check,
    CheckResult,
    DoctorContext,
    DoctorFinding,
    DoctorReport,
    Severity,
    Subject,
    ok,
    problem,
    warning,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

CHECKS_TIMEOUT_S = 60.0
"""Time-out of all checks together."""

FIRST = (server.version, schema.row_security, schema.version, sessions.locks, schema.initial_rows)
"""The first checks.  After a problem in one of these, the others are skipped: they would repeat
it."""

PRECONDITIONS = (
    server.durability,
    server.timeline,
    server.connections,
    server.clock,
    schema.missing_rows,
    schema.sequence,
    schema.hidden_events,
    events.sequences,
    events.emptied,
    schema.trigger,
    events.guards,
    events.removal_setting,
    events.filters,
    schema.constraint,
    schema.wakeup_flag,
    schema.partitions,
    schema.local_tables,
    schema.other_objects,
    roles.privileges,
    tables.autovacuum,
    endpoints.secrets,
    endpoints.altered_secrets,
    endpoints.networks,
    headers.sizes,
    endpoints.brokers,
    endpoints.certificates,
)

LIVE = (
    server.synchronous_standbys,
    relays.replicas,
    relays.listeners,
    relays.lag,
    relays.skipped_events,
    relays.unaccounted_events,
    relays.schedules,
    relays.owners,
    endpoints.states,
    endpoints.health,
    endpoints.connection_reuse,
    endpoints.filters,
    feeds.progress,
    lanes.blocked,
    lanes.failing,
    lanes.older_generations,
    lanes.dead_letters,
    payloads.recent_payloads,
    sessions.gaps,
    sessions.publishing,
    sessions.horizon,
    tables.dead_rows,
    tables.wraparound,
    tables.size,
    retention.periods,
    retention.empty_partitions,
    retention.detached_tables,
    sessions.notification_queue,
)

PROBE = (probe.sequenced_event,)


async def examine(context: DoctorContext) -> DoctorReport:
    """Run all checks.

    Raises:
        DatabaseUnavailable: the connection was lost, or the checks took longer than
            `CHECKS_TIMEOUT_S`.
        CannotRun: the schema is not an outbox schema, or cannot be read.
        SchemaTooNew: a later version of this package migrated it.
    """
    try:
        with map_errors(context.schema):
            async with asyncio.timeout(CHECKS_TIMEOUT_S):
                findings = [finding async for finding in _run_checks(context)]
    except TimeoutError:
        raise DatabaseUnavailable(
            f"the database did not respond within {CHECKS_TIMEOUT_S:.0f} s; run it again"
        ) from None
    severities = Counter(finding.severity for finding in findings)
    return DoctorReport(
        context.schema, severities[Severity.PROBLEM], severities[Severity.WARNING], findings
    )


async def _run_checks(context: DoctorContext) -> AsyncIterator[DoctorFinding]:
    for subject, checks in (
        (Subject.PRECONDITIONS, FIRST),
        (Subject.PRECONDITIONS, PRECONDITIONS),
        (Subject.LIVE, LIVE),
        (Subject.LIVE, PROBE if context.probing else ()),
    ):
        for check in checks:
            results = await _run_check(check, context)
            for result in results:
                yield DoctorFinding(subject, check.name, *result)
            if checks is FIRST and any(result.severity is Severity.PROBLEM for result in results):
                return


async def _run_check(check: Check, context: DoctorContext) -> list[CheckResult]:
    """Run one check; most errors of the database are a result of it, too."""
    try:
        async with nullcontext() if check.begins_transactions else context.read_only():
            results = [result async for result in check.results(context)]
            return results or [ok(check.passed)]
    except asyncpg.QueryCanceledError:
        skipped = warning(
            f"skipped: a query took over {CHECK_STATEMENT_TIMEOUT_S:.0f} s",
            "run it again when the server is less busy",
        )
    except asyncpg.InsufficientPrivilegeError as error:
        reason = _first_line(error)
        action = "connect as the role that ran outbox migrate"
        if any(thing in reason for thing in (" table ", " view ", " sequence ", " function ")):
            action = await _suggest_grant(context)
        skipped = warning(f"this check needs more rights: {reason}", action)
    except CannotRun as error:
        if isinstance(error.__cause__, asyncpg.InsufficientPrivilegeError):
            # This role cannot read the migrations.
            reason = _first_line(error.__cause__)
            raise CannotRun(f"{reason}; {await _suggest_grant(context)}") from error
        raise
    except (asyncpg.UndefinedTableError, asyncpg.UndefinedColumnError) as error:
        skipped = problem(
            f"a schema object is missing: {_first_line(error)}",
            "restore it from a backup, or create it as in outbox migrate --sql",
        )
    return [skipped]


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


async def _suggest_grant(context: DoctorContext) -> str:
    about = await context.db.fetchrow(roles.READ_PURPOSES)
    if about["purposes"] == ["producer"]:
        # A producer role should not get the rights of a reader.
        return "this role is a producer; run it as a reader or an operator"
    command = context.grant_command("reader", about["role"])
    return f"as the role that ran outbox migrate: {command}"
