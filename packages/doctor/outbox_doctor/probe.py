"""Doctor probe: publishes an event and measures commit, notification and sequencing.

The event has a reserved type that no wildcard matches, so only an endpoint that names the full
type receives it (`outbox.core.model.pattern`); retention drops it with its partition.  Where no
relay runs, or this role may not publish, the probe measures only a commit with a notification
to itself, and leaves nothing behind.
"""

from __future__ import annotations

import asyncio
from typing import Any

import asyncpg

from outbox.core.model.pattern import PROBE as TYPE
from outbox.store.sql.expressions import lease_runs
from outbox_doctor.check import (
    CheckResult,
    DoctorContext,
    Results,
    check,
    ok,
    problem,
    warning,
)

STEPS = ("insert", "commit", "notification", "sequenced")

PROBE_POLL_MIN_S, PROBE_POLL_MAX_S = 0.002, 0.1
"""Poll interval for the cursor."""

ABOUT = f"""
SELECT EXISTS (SELECT FROM replica WHERE {lease_runs("replica")}) AS relay,
       'outbox-probe-' || pg_backend_pid() AS channel
"""  # noqa: S608 (constants only)

# With an event_id of version 8, as a reserved type has.
PUBLISH = f"""
INSERT INTO outbox (event_id, type, payload)
VALUES (overlay(gen_random_uuid()::text PLACING '8' FROM 15)::uuid, '{TYPE}', '{{}}') RETURNING id
"""  # noqa: S608 (constants only)

# A commit without a write does not wait for the disk, so this writes a WAL message without a
# reader.
WRITE = f"SELECT pg_logical_emit_message(true, '{TYPE}', '')"

NOTIFY = "SELECT pg_notify($1, '')"

SEQUENCED = """
SELECT b.high >= $1 AND NOT b.young @> $1::bigint
       AND NOT EXISTS (SELECT FROM gap WHERE $1 BETWEEN lo AND hi)
  FROM (SELECT high, young FROM batch ORDER BY batch DESC LIMIT 1) b
"""


@check("probe", begins_transactions=True)
async def sequenced_event(context: DoctorContext) -> Results:
    """An event is committed, notified and sequenced quickly."""
    limits = context.limits
    about = await context.db.fetchrow(ABOUT)
    try:
        outbox_id, durations_ms = await _run_probe(context, about["channel"], event=about["relay"])
    except TimeoutError:
        yield problem(
            f"a commit was not confirmed within {limits.probe_s:.0f} s",
            "see what sessions wait for: wait_event in pg_stat_activity",
        )
        return
    except (asyncpg.InsufficientPrivilegeError, asyncpg.ReadOnlySQLTransactionError) as error:
        yield await _measure_without_event(context, about["channel"], error)
        return
    timing = _format_steps(durations_ms)
    if about["relay"] and "sequenced" not in durations_ms:
        yield warning(
            f"event {outbox_id} of type {TYPE} was not sequenced within "
            f"{limits.probe_s:.0f} s ({timing})",
            f"see sequencing and publishing above, and outbox trace {outbox_id}",
        )
    elif context.listening and "notification" not in durations_ms:
        yield warning(
            f"a notification did not arrive within {limits.probe_s:.0f} s ({timing}): relays do "
            "not receive notifications of producers, and poll every OUTBOX_POLL_S",
            "behind a pooling proxy, set OUTBOX_POOLED=true; otherwise see notify queue",
        )
    elif max(durations_ms.values()) > limits.probe_slow_ms:
        yield warning(
            f"the database is slow to process an event: {timing}",
            "see what sessions wait for: wait_event in pg_stat_activity",
        )
    elif about["relay"]:
        yield ok(f"event {outbox_id} of type {TYPE}: {timing}")
    else:
        yield ok(f"no relay runs, so nothing was published: {timing}")


async def _measure_without_event(
    context: DoctorContext, channel: str, error: Exception
) -> CheckResult:
    """This role may not publish; measure a commit only."""
    try:
        _, durations_ms = await _run_probe(context, channel, event=False)
        timed = f"; without an event: {_format_steps(durations_ms)}"
    except asyncpg.ReadOnlySQLTransactionError:
        timed = ""
    if isinstance(error, asyncpg.ReadOnlySQLTransactionError):
        return warning(
            f"could not publish a probe: transactions of this role are read-only{timed}",
            "run it with another role, or with --no-probe",
        )
    table = context.qualify("outbox")
    return warning(
        f"could not publish a probe: it needs INSERT and SELECT on {table}{timed}",
        "run it with --no-probe, or as an operator",
    )


def _format_steps(durations_ms: dict[str, float]) -> str:
    return ", ".join(
        f"{step} {durations_ms[step]:.1f} ms" for step in STEPS if step in durations_ms
    )


async def _run_probe(
    context: DoctorContext, channel: str, *, event: bool
) -> tuple[int | None, dict[str, float]]:
    """Commit an event or a WAL message, and wait for its notification and sequencing.

    Returns the event's id, and the durations of the completed steps in milliseconds.
    """
    clock = asyncio.get_running_loop().time
    notified: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    def on_notify(*_: Any) -> None:
        if not notified.done():
            notified.set_result(clock())

    outbox_id: int | None = None
    durations_ms: dict[str, float] = {}
    if context.listening:
        await context.db.add_listener(channel, on_notify)
    try:
        transaction = context.db.transaction(isolation="read_committed")
        await transaction.start()
        try:
            await context.limit_statements()
            begun_at = clock()
            if event:
                outbox_id = await context.db.fetchval(PUBLISH)
                durations_ms["insert"] = (clock() - begun_at) * 1000
            else:
                await context.db.execute(WRITE)
            if context.listening:
                await context.db.execute(NOTIFY, channel)
        except BaseException:
            await transaction.rollback()
            raise
        committing_at = clock()
        # A statement time-out does not apply to a commit, which may wait for a standby.
        async with asyncio.timeout(context.limits.probe_s):
            await transaction.commit()
        committed_at = clock()
        ends_at = committed_at + context.limits.probe_s
        durations_ms["commit"] = (committed_at - committing_at) * 1000
        if event and await _wait_until_sequenced(context, outbox_id, ends_at):
            durations_ms["sequenced"] = (clock() - committed_at) * 1000
        if context.listening:
            done, _ = await asyncio.wait([notified], timeout=max(ends_at - clock(), 0.1))
            if done:
                durations_ms["notification"] = max(notified.result() - committing_at, 0.0) * 1000
    finally:
        if context.listening:
            await context.db.remove_listener(channel, on_notify)
    return outbox_id, durations_ms


async def _wait_until_sequenced(
    context: DoctorContext, outbox_id: int | None, ends_at: float
) -> bool:
    """Whether a relay sequences the event within the time limit."""
    clock = asyncio.get_running_loop().time
    wait_s = PROBE_POLL_MIN_S
    while not await context.db.fetchval(SEQUENCED, outbox_id):
        if clock() > ends_at:
            return False
        await asyncio.sleep(wait_s)
        wait_s = min(wait_s * 1.5, PROBE_POLL_MAX_S)
    return True
