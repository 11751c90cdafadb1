"""Doctor probe: publishes an event and measures commit, notification and sequencing.

The event has a reserved type that no wildcard matches, so only an endpoint that names the full
type receives it (`outbox.core.model.pattern`); retention drops it with its partition.  Where no
relay runs, or this role may not publish, the probe measures only a commit with a notification
to itself, and leaves nothing behind.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import asyncpg

from outbox.core.model.pattern import PROBE as TYPE
from outbox.operations.doctor.finding import STATEMENT_TIMEOUT_S, ok, problem, warning

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from outbox.operations.doctor.finding import CheckResult, DoctorContext

POLL_MIN_S, POLL_MAX_S = 0.002, 0.1
"""Poll interval for the cursor."""

ABOUT = """
SELECT EXISTS (SELECT FROM replica WHERE expires_at > clock_timestamp()) AS relay,
       'outbox-probe-' || pg_backend_pid() AS channel
"""

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


@dataclass(slots=True)
class Timing:
    """Durations of a probe in milliseconds; None: not measured, or not completed."""

    outbox_id: int | None = None
    insert_ms: float | None = None
    commit_ms: float | None = None
    notify_ms: float | None = None
    sequenced_ms: float | None = None

    def __str__(self) -> str:
        parts = (
            ("insert", self.insert_ms),
            ("commit", self.commit_ms),
            ("notification", self.notify_ms),
            ("sequenced", self.sequenced_ms),
        )
        return ", ".join(f"{name} {ms:.1f} ms" for name, ms in parts if ms is not None)


async def check_probe(context: DoctorContext) -> AsyncIterator[CheckResult]:
    """An event is committed, notified and sequenced quickly."""
    about = await context.db.fetchrow(ABOUT)
    error = None
    try:
        timing = await _run_probe(context, about["channel"], event=about["relay"])
    except TimeoutError:
        yield problem(
            f"a commit was not confirmed within {context.limits.probe_s:.0f} s",
            "see what sessions wait for: wait_event in pg_stat_activity",
        )
        return
    except (asyncpg.InsufficientPrivilegeError, asyncpg.ReadOnlySQLTransactionError) as caught:
        error = caught
        try:
            timing = await _run_probe(context, about["channel"], event=False)
        except asyncpg.ReadOnlySQLTransactionError:
            timing = None
    if error is not None:
        timed = f"; without an event: {timing}" if timing else ""
        yield _rejection_result(context, error, timed)
        return
    assert timing is not None
    limits = context.limits
    if about["relay"] and timing.sequenced_ms is None:
        yield warning(
            f"event {timing.outbox_id} of type {TYPE} was not sequenced within "
            f"{limits.probe_s:.0f} s ({timing})",
            f"see sequencing and publishing above, and outbox trace {timing.outbox_id}",
        )
    elif context.listening and timing.notify_ms is None:
        yield warning(
            f"a notification did not arrive within {limits.probe_s:.0f} s ({timing}): relays do "
            "not receive notifications of producers, and poll every OUTBOX_POLL_S",
            "behind a pooling proxy, set OUTBOX_POOLED=true; otherwise see notify queue",
        )
    elif max(_parts(timing)) > limits.probe_slow_ms:
        yield warning(
            f"the database is slow to process an event: {timing}",
            "see what sessions wait for: wait_event in pg_stat_activity",
        )
    elif about["relay"]:
        yield ok(f"event {timing.outbox_id} of type {TYPE}: {timing}")
    else:
        yield ok(f"no relay runs, so nothing was published: {timing}")


def _rejection_result(context: DoctorContext, error: Exception, timed: str) -> CheckResult:
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


def _parts(timing: Timing) -> list[float]:
    parts = (timing.insert_ms, timing.commit_ms, timing.notify_ms, timing.sequenced_ms)
    return [ms for ms in parts if ms is not None]


async def _run_probe(context: DoctorContext, channel: str, *, event: bool) -> Timing:
    """Commit an event or a WAL message, and wait for its notification and sequencing."""
    clock = asyncio.get_running_loop().time
    notified: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    def on_notify(*_: Any) -> None:
        if not notified.done():
            notified.set_result(clock())

    timing = Timing()
    if context.listening:
        await context.db.add_listener(channel, on_notify)
    try:
        transaction = context.db.transaction(isolation="read_committed")
        await transaction.start()
        try:
            await context.db.execute(
                f"SET LOCAL statement_timeout = {int(STATEMENT_TIMEOUT_S * 1000)}"
            )
            begun_at = clock()
            if event:
                timing.outbox_id = await context.db.fetchval(PUBLISH)
                timing.insert_ms = (clock() - begun_at) * 1000
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
        timing.commit_ms = (committed_at - committing_at) * 1000
        if event and await _sequenced(context, timing.outbox_id, committed_at):
            timing.sequenced_ms = (clock() - committed_at) * 1000
        if context.listening and await _wait_for(
            notified, committed_at + context.limits.probe_s - clock()
        ):
            timing.notify_ms = max(notified.result() - committing_at, 0.0) * 1000
    finally:
        if context.listening:
            await context.db.remove_listener(channel, on_notify)
    return timing


async def _sequenced(context: DoctorContext, outbox_id: int | None, committed_at: float) -> bool:
    """Whether a relay sequences the event within the time limit."""
    clock = asyncio.get_running_loop().time
    wait_s = POLL_MIN_S
    while not await context.db.fetchval(SEQUENCED, outbox_id):
        if clock() - committed_at > context.limits.probe_s:
            return False
        await asyncio.sleep(wait_s)
        wait_s = min(wait_s * 1.5, POLL_MAX_S)
    return True


async def _wait_for(notified: asyncio.Future[float], within_s: float) -> bool:
    done, _ = await asyncio.wait([notified], timeout=max(within_s, 0.1))
    return bool(done)
