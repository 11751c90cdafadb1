"""The self-probe: an event of our own, sent through the database and timed.

It has a reserved type that no wildcard covers, so it reaches no endpoint that does not name
all of it (`outbox.core.model.pattern`).  It is an event like any other, and goes with its
partition.  Where no relay runs, or this role may not publish, nothing is left behind: a
commit with a notification to ourselves is all that is timed.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import asyncpg

from outbox.core.model.pattern import PROBE as TYPE
from outbox.operations.doctor.finding import STATEMENT_TIMEOUT_S, ok, warning

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from outbox.operations.doctor.finding import Look, Said

LOOK_MIN_S, LOOK_MAX_S = 0.002, 0.1
"""Between two looks at how far the cursor is."""

ABOUT = """
SELECT EXISTS (SELECT FROM replica WHERE expires_at > clock_timestamp()) AS relay,
       'outbox-probe-' || pg_backend_pid() AS channel
"""

# With an event_id of version 8, as a reserved type has.
PUBLISH = f"""
INSERT INTO outbox (event_id, type, payload)
VALUES (overlay(gen_random_uuid()::text PLACING '8' FROM 15)::uuid, '{TYPE}', '{{}}') RETURNING id
"""  # noqa: S608 (constants only)

# A commit that wrote nothing would not wait for the disk.  Nobody reads this message.
WRITE = f"SELECT pg_logical_emit_message(true, '{TYPE}', '')"

NOTIFY = "SELECT pg_notify($1, '')"

SEQUENCED = """
SELECT b.high >= $1 AND NOT b.young @> $1::bigint
       AND NOT EXISTS (SELECT FROM gap WHERE $1 BETWEEN lo AND hi)
  FROM (SELECT high, young FROM batch ORDER BY batch DESC LIMIT 1) b
"""


@dataclass(slots=True)
class Timing:
    """What a probe took, in milliseconds; None: it was not part of it, or did not end."""

    outbox_id: int | None = None
    insert_ms: float | None = None
    commit_ms: float | None = None
    notify_ms: float | None = None
    sequenced_ms: float | None = None

    def __str__(self) -> str:
        """`insert 0.4 ms, commit 0.2 ms`."""
        parts = (
            ("insert", self.insert_ms),
            ("commit", self.commit_ms),
            ("notification", self.notify_ms),
            ("sequenced", self.sequenced_ms),
        )
        return ", ".join(f"{name} {ms:.1f} ms" for name, ms in parts if ms is not None)


async def probe(look: Look) -> AsyncIterator[Said]:
    """How long it takes an event to get through the database."""
    about = await look.db.fetchrow(ABOUT)
    refused = None
    try:
        timing = await _send(look, about["channel"], event=about["relay"])
    except (asyncpg.InsufficientPrivilegeError, asyncpg.ReadOnlySQLTransactionError) as error:
        refused = error
        try:
            timing = await _send(look, about["channel"], event=False)
        except asyncpg.ReadOnlySQLTransactionError:
            timing = None
    if refused is not None:
        timed = f"; without one: {timing}" if timing else ""
        yield _refused(look, refused, timed)
        return
    assert timing is not None
    limits = look.limits
    if about["relay"] and timing.sequenced_ms is None:
        yield warning(
            f"event {timing.outbox_id} of type {TYPE} was not sequenced within "
            f"{limits.probe_s:.0f} s ({timing})",
            f"see sequencing and publishing above, and outbox trace {timing.outbox_id}",
        )
    elif look.listening and timing.notify_ms is None:
        yield warning(
            f"a notification did not come back within {limits.probe_s:.0f} s ({timing}): relays "
            "do not hear producers, and look only each OUTBOX_POLL_S",
            "if a proxy stands between, set OUTBOX_POOLED=true; otherwise see notify queue",
        )
    elif max(_parts(timing)) > limits.probe_slow_ms:
        yield warning(
            f"an event takes long to get through the database: {timing}",
            "see what the server waits for: wait_event in pg_stat_activity",
        )
    elif about["relay"]:
        yield ok(f"event {timing.outbox_id} of type {TYPE}: {timing}")
    else:
        yield ok(f"no relay runs, so nothing was published: {timing}")


def _refused(look: Look, error: Exception, timed: str) -> Said:
    if isinstance(error, asyncpg.ReadOnlySQLTransactionError):
        return warning(
            f"could not send a probe: this role's transactions are read-only{timed}",
            "run it with another role, or with --no-probe",
        )
    table = look.name("outbox")
    return warning(
        f"could not send a probe: needs INSERT and SELECT on {table}{timed}",
        "run it with --no-probe, or as an operator",
    )


def _parts(timing: Timing) -> list[float]:
    parts = (timing.insert_ms, timing.commit_ms, timing.notify_ms, timing.sequenced_ms)
    return [ms for ms in parts if ms is not None]


async def _send(look: Look, channel: str, *, event: bool) -> Timing:
    """Commit an event, or next to nothing, and wait for what follows from it."""
    clock = asyncio.get_running_loop().time
    heard: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    def hear(*_: Any) -> None:
        if not heard.done():
            heard.set_result(clock())

    timing = Timing()
    if look.listening:
        await look.db.add_listener(channel, hear)
    try:
        transaction = look.db.transaction(isolation="read_committed")
        await transaction.start()
        try:
            await look.db.execute(
                f"SET LOCAL statement_timeout = {int(STATEMENT_TIMEOUT_S * 1000)}"
            )
            begun_at = clock()
            if event:
                timing.outbox_id = await look.db.fetchval(PUBLISH)
                timing.insert_ms = (clock() - begun_at) * 1000
            else:
                await look.db.execute(WRITE)
            if look.listening:
                await look.db.execute(NOTIFY, channel)
        except BaseException:
            await transaction.rollback()
            raise
        committing_at = clock()
        await transaction.commit()
        committed_at = clock()
        timing.commit_ms = (committed_at - committing_at) * 1000
        if event and await _sequenced(look, timing.outbox_id, committed_at):
            timing.sequenced_ms = (clock() - committed_at) * 1000
        if look.listening and await _happens(heard, committed_at + look.limits.probe_s - clock()):
            timing.notify_ms = max(heard.result() - committing_at, 0.0) * 1000
    finally:
        if look.listening:
            await look.db.remove_listener(channel, hear)
    return timing


async def _sequenced(look: Look, outbox_id: int | None, committed_at: float) -> bool:
    """Whether a relay gets as far as this event in time."""
    clock = asyncio.get_running_loop().time
    wait_s = LOOK_MIN_S
    while not await look.db.fetchval(SEQUENCED, outbox_id):
        if clock() - committed_at > look.limits.probe_s:
            return False
        await asyncio.sleep(wait_s)
        wait_s = min(wait_s * 1.5, LOOK_MAX_S)
    return True


async def _happens(heard: asyncio.Future[float], within_s: float) -> bool:
    done, _ = await asyncio.wait([heard], timeout=max(within_s, 0.1))
    return bool(done)
