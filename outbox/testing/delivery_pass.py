"""`deliver_now`: one pass of a real relay, in the process of the test.

The relay sequences what is committed, and delivers what is pending: with the lanes, formats,
signatures and retry policies of the endpoints, and with receivers of the test in place of the
network.  The pass ends when no delivery can be sent any more: each one is delivered,
dead-lettered, or waits for a retry, for an operator, or for a delivery before it.
"""

from __future__ import annotations

import asyncio
import queue
import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outbox.config import load
from outbox.core.model.ids import lane_name
from outbox.errors import Conflict, UsageError
from outbox.operations import lanes
from outbox.operations.dead_letters.queries import list_dead_letters
from outbox.relay.cluster.connections import Connections
from outbox.relay.relay import Relay
from outbox.store.cluster.replicas import read_names
from outbox.store.connection import dsn as addresses
from outbox.store.connection.connect import connect, map_errors
from outbox.store.connection.current_schema import require_current
from outbox.store.connection.current_settings import CurrentSettings
from outbox.testing.receivers import InProcessTransport, LocalEndpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from datetime import datetime
    from typing import TypeAlias

    from asyncpg import Connection

    from outbox.config import Settings
    from outbox.operations.dead_letters.queries import DeadLetterRow
    from outbox.receiver.message import Message
    from outbox.testing.receivers import ReceiverLike, RunBlocking, SentRequest

    Receivers: TypeAlias = ReceiverLike | Mapping[str, ReceiverLike] | None

PASS_TIMEOUT_S = 10.0
PASS_POLL_S = 0.02
PASS_DRAIN_S = 1.0
"""Time that requests in flight have when the time of the pass is up."""
_SILENT = "the database does not respond"

READ_ENDPOINTS = "SELECT id, name, header_prefix FROM endpoint WHERE state <> 'removed'"

READ_LAST_DEAD = "SELECT coalesce(max(id), 0) FROM dead_letter"

# Whether every committed event is sequenced, what is due is published, and every replay is fed.
IS_SEQUENCED = """
WITH newest AS MATERIALIZED (SELECT high, young FROM batch ORDER BY batch DESC LIMIT 1),
gaps AS MATERIALIZED (
    SELECT lower(r) AS lo, upper(r) - 1 AS hi FROM newest, unnest(young) AS r
    UNION ALL
    SELECT lo, hi FROM gap)
SELECT NOT EXISTS (SELECT FROM outbox o WHERE o.id > (SELECT high FROM newest))
   AND NOT EXISTS (SELECT FROM gaps g JOIN outbox o ON o.id BETWEEN g.lo AND g.hi)
   AND NOT EXISTS (SELECT FROM future_event
                    WHERE coalesce(retry_at, deliver_at) <= clock_timestamp())
   AND NOT EXISTS (SELECT FROM schedule WHERE state = 'active' AND due_at <= clock_timestamp())
   AND NOT EXISTS (SELECT FROM replay_job_endpoint WHERE ended_at IS NULL)
"""

# Lanes with pending deliveries, and what they wait for, if they do.
READ_PENDING = f"""
SELECT e.name AS endpoint, e.id AS endpoint_id, e.state, l.lane_id, l.generation, l.slot,
       l.acked_seq, l.last_seq, {lanes.FAILING} AS failing, l.attempts, l.next_attempt_at,
       l.next_attempt_at <= clock_timestamp() AS due, b.lane_id IS NOT NULL AS blocked,
       h.state IN ('failing', 'rejecting') AS broken,
       coalesce(h.held_until > clock_timestamp(), false) AS held_off
  FROM ({lanes.LANE_STATE}) l
  JOIN endpoint e ON e.id = l.endpoint_id
  LEFT JOIN endpoint_health h ON h.endpoint_id = e.id
  LEFT JOIN lane_block b ON b.lane_id = l.lane_id
 WHERE e.state <> 'removed' AND l.last_seq > l.acked_seq
 ORDER BY e.name COLLATE "C", l.generation, l.slot
"""  # noqa: S608 (constants only)


@dataclass(frozen=True, slots=True)
class PendingLane:
    """A lane whose deliveries are left for later."""

    endpoint: str
    lane: str
    sequence: int
    """The sequence number of the first pending delivery."""
    pending: int
    """Number of pending deliveries."""
    attempts: int
    """Attempts of the first one."""
    next_attempt_at: datetime | None
    """When it is retried; None: it was not attempted yet."""
    reason: str
    """`retry`, `Retry-After`, `circuit breaker`, `blocked`, `earlier lanes`, or the endpoint's
    state."""


@dataclass(frozen=True, slots=True)
class DeliveryReport:
    """What a pass did, and what it left."""

    requests: tuple[SentRequest, ...]
    """Every request with its response, in the order of the responses."""
    dead_letters: tuple[DeadLetterRow, ...]
    """The new ones."""
    pending: tuple[PendingLane, ...]

    @property
    def delivered(self) -> list[Message]:
        """The deliveries that were acknowledged, of all endpoints."""
        return [each for request in self.requests if request.delivered for each in request.messages]

    def to(self, endpoint: str) -> list[SentRequest]:
        """The requests to an endpoint."""
        return [request for request in self.requests if request.endpoint == endpoint]


def deliver_now(
    dsn: str | None = None,
    receivers: Receivers = None,
    *,
    timeout_s: float = PASS_TIMEOUT_S,
    raise_errors: bool = True,
    schema: str | None = None,
) -> DeliveryReport:
    """Deliver what is committed, without a relay process and without a network.

    Delayed events and schedules that are due are published.  Receivers that are not coroutines are
    called in this thread.

    Args:
        dsn: the database's address, as for `outbox relay`; None: OUTBOX_DSN, and the other
            settings.
        receivers: one for all endpoints, or by endpoint name: an `AsyncReceiver`, a `Receiver`, an
            ASGI or WSGI application, or a function that takes a `Request` and returns a status.
            Endpoints without one respond with 204.
        timeout_s: limit of the pass, in seconds.
        raise_errors: raise the first error of a receiver, after the pass; False: its response is
            500, and the request has it.
        schema: the schema of the outbox tables; None: that of the settings.

    Returns:
        The requests with their responses, the new dead letters, and what is left for later.

    Raises:
        Conflict: a relay is running on this database.
        TimeoutError: deliveries are left that could be sent.
        UsageError: a receiver or the address is invalid, or an event loop is running.
        CannotRun: the database cannot be used; also SchemaMissing and DatabaseUnavailable.
        Exception: what a receiver raised.
    """
    with suppress(RuntimeError):
        asyncio.get_running_loop()
        raise UsageError(
            "deliver_now: it would block the event loop; use await outbox.testing.deliver_now_async"
        )
    calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    async def run_here(function: Callable[[], Any]) -> Any:
        """Run a function in the thread of the test, with its connections and its debugger."""
        loop = asyncio.get_running_loop()
        future = loop.create_future()

        def call() -> None:
            with suppress(RuntimeError):  # The pass has ended meanwhile.
                try:
                    returned = function()
                except BaseException as error:
                    loop.call_soon_threadsafe(_settle, future, None, error)
                else:
                    loop.call_soon_threadsafe(_settle, future, returned, None)

        calls.put(call)
        return await future

    made = _deliver(dsn, receivers, run_here, timeout_s, schema, raise_errors=raise_errors)
    with ThreadPoolExecutor(1, thread_name_prefix="outbox-deliver-now") as pool:
        done = pool.submit(asyncio.run, made)
        done.add_done_callback(lambda _: calls.put(None))
        while (call := calls.get()) is not None:
            call()
        return done.result()


async def deliver_now_async(
    dsn: str | None = None,
    receivers: Receivers = None,
    *,
    timeout_s: float = PASS_TIMEOUT_S,
    raise_errors: bool = True,
    schema: str | None = None,
) -> DeliveryReport:
    """Like `deliver_now`, in a running event loop.

    Receivers that are not coroutines are called in other threads.
    """
    return await _deliver(
        dsn, receivers, asyncio.to_thread, timeout_s, schema, raise_errors=raise_errors
    )


async def _deliver(
    dsn: str | None,
    receivers: Receivers,
    run_blocking: RunBlocking,
    timeout_s: float,
    schema: str | None,
    *,
    raise_errors: bool,
) -> DeliveryReport:
    settings = load({"dsn": dsn, "schema_name": schema, "drain_s": PASS_DRAIN_S})
    address = addresses.from_settings(settings)
    connection = await connect(
        address,
        schema=settings.schema_name,
        application_name="outbox-deliver-now",
        pooled=settings.pooled,
    )
    try:
        with map_errors(settings.schema_name):
            await require_current(connection, settings.schema_name)
            if running := await read_names(connection):
                raise Conflict(
                    f'the relay "{running[0]}" is running on this database and delivers '
                    "its events; stop it, or use another database for the test (a killed relay "
                    "counts until its lease expires)"
                )
            endpoints = {
                row["id"]: LocalEndpoint(row["name"], row["header_prefix"])
                for row in await connection.fetch(READ_ENDPOINTS)
            }
            last_dead = await connection.fetchval(READ_LAST_DEAD)
            transport = InProcessTransport(endpoints, receivers, run_blocking)
            relay = Relay(
                transport,
                Connections(CurrentSettings(settings, address)),
                name="deliver_now",
                rng=_LatestRetry(),
            )
            await _run_pass(connection, relay, timeout_s)
            try:
                async with asyncio.timeout(timeout_s):
                    report = await _report(connection, settings, transport, last_dead)
            except TimeoutError:
                raise TimeoutError(f"deliver_now: {_SILENT}") from None
    finally:
        connection.terminate()
    if raise_errors:
        for request in report.requests:
            if request.error is not None:
                raise request.error
    return report


class _LatestRetry(random.Random):
    """Makes each retry as late as its jitter allows: so a fast pass attempts a delivery once."""

    def random(self) -> float:
        """The largest value below 1."""
        return 1.0 - 2**-53


async def _run_pass(connection: Connection[Any], relay: Relay, timeout_s: float) -> None:
    """Run a relay until there is nothing to send.

    Raises:
        TimeoutError: the time was up before.
    """
    before = {row["lane_id"]: _head(row) for row in await connection.fetch(READ_PENDING)}
    working = asyncio.create_task(relay.run())
    try:
        async with asyncio.timeout(timeout_s):
            while not working.done() and not await _is_done(connection, before):
                await asyncio.wait([working], timeout=PASS_POLL_S)
    except TimeoutError:
        raise TimeoutError(await _unfinished(connection, relay, before, timeout_s)) from None
    finally:
        relay.stop()
        (failure,) = await asyncio.gather(working, return_exceptions=True)
    if failure is not None:
        raise failure


async def _is_done(connection: Connection[Any], before: Mapping[int, tuple[int, int]]) -> bool:
    if not await connection.fetchval(IS_SEQUENCED):
        return False
    # Read after the events were sequenced, so it includes all of their deliveries.
    rows = await connection.fetch(READ_PENDING)
    return all(reason is not None for _, reason in _reasons(rows, before))


async def _unfinished(
    connection: Connection[Any], relay: Relay, before: Mapping[int, tuple[int, int]], limit_s: float
) -> str:
    """Describe what is left when the time is up."""
    try:
        async with asyncio.timeout(PASS_DRAIN_S):
            rows = await connection.fetch(READ_PENDING)
    except TimeoutError:
        return f"deliver_now: not done after {limit_s:g} s: {_SILENT}"
    left = {row["endpoint"] for row, reason in _reasons(rows, before) if reason is None}
    condition = relay.readiness()
    if not condition.ready:
        what = f"the relay is not ready: {condition.reason}"
    elif left:
        names = ", ".join(sorted(left))
        what = f"deliveries are pending ({names}); a receiver may be slow, or its rate limited"
    else:
        what = "events are not sequenced"
    return f"deliver_now: not done after {limit_s:g} s: {what}"


async def _report(
    connection: Connection[Any],
    settings: Settings,
    transport: InProcessTransport,
    last_dead: int,
) -> DeliveryReport:
    dead: list[DeadLetterRow] = []
    more = True
    while more:
        after = dead[-1].id if dead else last_dead
        page = await list_dead_letters(connection, settings.schema_name, after=after)
        dead += page
        more = page.more
    rows = await connection.fetch(READ_PENDING)
    pending = tuple(
        PendingLane(
            row["endpoint"],
            lane_name(row["endpoint_id"], row["generation"], row["slot"]),
            row["acked_seq"] + 1,
            row["last_seq"] - row["acked_seq"],
            row["attempts"] if row["failing"] else 0,
            row["next_attempt_at"] if row["failing"] else None,
            reason or "retry",
        )
        for row, reason in _reasons(rows, {})
    )
    return DeliveryReport(tuple(transport.sent), tuple(dead), pending)


def _head(row: Any) -> tuple[int, int]:
    """What changes in a lane when its first pending delivery is attempted."""
    return row["acked_seq"], row["attempts"]


def _reasons(
    rows: list[Any], before: Mapping[int, tuple[int, int]]
) -> list[tuple[Any, str | None]]:
    """The lanes with pending deliveries, with the reason of each for not sending.

    Args:
        before: the lanes' heads before the pass: a failed delivery is attempted once in a pass.

    Returns:
        None as the reason of a lane that can send.
    """
    oldest: dict[Any, int] = {}
    for row in rows:
        oldest.setdefault(row["endpoint_id"], row["generation"])
    found: list[tuple[Any, str | None]] = []
    for row in rows:
        reason = None
        if row["state"] in ("paused", "disabled"):
            reason = row["state"]
        elif row["blocked"]:
            reason = "blocked"
        elif row["held_off"]:
            reason = "Retry-After"
        elif row["broken"]:
            reason = "circuit breaker"
        elif row["failing"] and (not row["due"] or before.get(row["lane_id"]) != _head(row)):
            reason = "retry"
        elif row["generation"] > oldest[row["endpoint_id"]]:
            reason = "earlier lanes"
        found.append((row, reason))
    return found


def _settle(future: asyncio.Future[Any], returned: Any, error: BaseException | None) -> None:
    if future.done():  # Cancelled: the endpoint's time-out has passed.
        return
    if error is None:
        future.set_result(returned)
    else:
        future.set_exception(error)
