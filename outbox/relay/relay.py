"""The relay process: runs sessions one after the other until it is stopped."""

from __future__ import annotations

import asyncio
import os
import random
import socket
from typing import TYPE_CHECKING

import asyncpg
import structlog

from outbox.errors import DatabaseUnavailable, OutboxError
from outbox.relay.cluster.lease_clock import steady, wall
from outbox.relay.delivery.telemetry import DeliveryTelemetry
from outbox.relay.session import Session
from outbox.relay.session_parts import SharedParts
from outbox.relay.session_state import Readiness
from outbox.store.connection.connect import (
    CONNECTION_ERRORS,
    READ_ONLY,
    in_one_line,
    is_temporary,
    not_granted,
)
from outbox.store.errors import Fenced
from outbox.store.sequencing.stalls import CommitUnconfirmed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from outbox.destinations.broker import BrokerFactory
    from outbox.destinations.interface import Transport
    from outbox.relay.cluster.connections import Connections
    from outbox.relay.companion import Companion
    from outbox.telemetry.snapshot import Snapshot

log = structlog.get_logger("outbox.relay")

RETRY_MIN_S, RETRY_MAX_S = 0.1, 5.0

SURVIVABLE = (*CONNECTION_ERRORS, Fenced)
"""Errors that end a session but not the relay: the database or the lease was lost."""

SESSION_UNAVAILABLE = "it has no working database session; see its log for the reason"
"""Shown in place of the reason, which may contain the database's address."""


class Relay:
    """Delivers until `stop`; reconnects after restarts of the database.

    Args:
        transport: shared by all sessions; the caller closes it.
        connections: they have the settings, whose secrets are read again for each session.
        name: the replica's name; default: host and process id.
        clock: monotonic seconds that include the time in which the machine is suspended.
        wall: this machine's clock in epoch seconds, for comparison with the database's.
        rng: the source of the jitter of retries and probes.
        telemetry: receives logs, metrics and traces of deliveries.
        brokers: makes the brokers of endpoints; None: there are only HTTP receivers.
        wait_for_database: wait for one that is not available at the first attempt to register,
            and retry every error after that attempt.
        companion: a process beside the relay, which is reported with its own state.
    """

    def __init__(
        self,
        transport: Transport,
        connections: Connections,
        *,
        name: str | None = None,
        clock: Callable[[], float] = steady,
        wall: Callable[[], float] = wall,
        rng: random.Random | None = None,
        telemetry: DeliveryTelemetry | None = None,
        brokers: BrokerFactory | None = None,
        wait_for_database: bool = False,
        companion: Companion | None = None,
    ) -> None:
        self._shared = SharedParts(
            connections,
            transport,
            brokers,
            telemetry or DeliveryTelemetry(),
            clock,
            wall,
            rng or random.Random(),  # noqa: S311 (jitter needs no secrecy)
            companion,
        )
        self._name = name or default_name()
        self.started = asyncio.Event()
        """Set at the first registration."""
        self.attempted = asyncio.Event()
        """Set after the first attempt to register, unless its error ends the relay."""
        self._wait_for_database = wait_for_database
        # Labels of this relay's earlier replicas.
        self._former: list[str] = []
        self._session: Session | None = None
        # Why there is no session; and the same for unauthenticated clients.
        self._down_reason = "it has not reached the database yet"
        self._down_public_reason = SESSION_UNAVAILABLE
        self._stop = asyncio.Event()

    def stop(self) -> None:
        """Drain, then let `run` return; takes at most `drain_s`."""
        self._stop.set()

    def readiness(self) -> Readiness:
        """Whether the relay is ready, and why not."""
        if self._stop.is_set():
            return Readiness(ready=False, reason="it is stopping")
        working = None if self._session is None else self._session.running
        if working is None:
            return Readiness(
                ready=False, reason=self._down_reason, redacted_reason=self._down_public_reason
            )
        condition, companion = working.readiness(), self._shared.companion
        if not condition.ready or companion is None or companion.problem is None:
            return condition
        return condition.with_warning(companion.problem, companion.public_problem)

    async def snapshot(self, at: float) -> Snapshot:
        """All metrics.

        Args:
            at: epoch seconds.
        """
        working = None if self._session is None else self._session.running
        meters, companion = self._shared.telemetry.meters, self._shared.companion
        gauges = {} if working is None else await working.gauges(meters)
        snapshot = meters.snapshot(at, gauges)
        return snapshot if companion is None else companion.add_to(snapshot)

    async def run(self) -> None:
        """Deliver until stopped; after an unexpected error it may be called again.

        Raises:
            OutboxError: the database cannot be used at the first attempt;
                after the first registration, errors are retried.
        """
        delay_s = RETRY_MIN_S
        while not self._stop.is_set():
            session = Session(
                self._shared.connections.reread_secrets(),
                self._shared,
                self._name,
                self._former,
                self._mark_registered,
            )
            self._session = session
            started_at = asyncio.get_running_loop().time()
            try:
                await session.run(self._stop)
            except Exception as error:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    # A task group prefers its tasks' errors to its own cancellation.
                    raise asyncio.CancelledError from error
                reason = self._survivable_reason(error)
            else:
                break
            finally:
                self._session = None
            self._down_reason = reason
            self.attempted.set()
            self._shared.telemetry.meters.session_losses += 1
            if self._stop.is_set():
                log.warning(
                    "stopping; other replicas take over when the lease expires", reason=reason
                )
                break
            if asyncio.get_running_loop().time() - started_at > RETRY_MAX_S:
                delay_s = RETRY_MIN_S
            event = "the session was lost" if self.started.is_set() else "not registered yet"
            log.warning(event, reason=reason, retry_s=round(delay_s, 1))
            try:
                async with asyncio.timeout(delay_s):
                    await self._stop.wait()
            except TimeoutError:
                pass
            delay_s = min(delay_s * 2, RETRY_MAX_S)
        log.info("stopped")

    def _mark_registered(self) -> None:
        self.started.set()
        self.attempted.set()

    def _survivable_reason(self, error: Exception) -> str:
        """Return why the session ended, if a new one may be tried; otherwise raise the error.

        Before its first registration the relay fails at once, so that a wrong DSN is
        noticed; afterwards it waits for the database to return.
        """
        errors = list(_flatten(error))
        for each in errors:
            if self._is_retried(each):
                continue
            if not isinstance(each, OutboxError | OSError | asyncpg.PostgresError):
                log.error("an unexpected error ends the relay", exc_info=error)
            raise each if len(errors) == 1 else error
        first = errors[0]
        self._down_public_reason = SESSION_UNAVAILABLE
        if isinstance(first, CommitUnconfirmed):
            self._down_public_reason = first.public_reason
        if isinstance(first, Fenced):
            return (
                "the lease ran out, another replica took over, outbox resequence ended the "
                "registration, the server's timeline changed, or the database was restored"
            )
        if isinstance(first, asyncpg.InsufficientPrivilegeError):
            return not_granted(first, "relay")
        if isinstance(first, asyncpg.ReadOnlySQLTransactionError):
            return READ_ONLY
        return in_one_line(first)

    def _is_retried(self, error: Exception) -> bool:
        if isinstance(error, SURVIVABLE):
            return True
        if self._former or (self._wait_for_database and self.attempted.is_set()):
            return isinstance(error, OutboxError)
        return (
            self._wait_for_database
            and isinstance(error, DatabaseUnavailable)
            and is_temporary(error)
        )


def default_name() -> str:
    """The default replica name: host and process id."""
    return f"{socket.gethostname()}:{os.getpid()}"


def _flatten(error: Exception) -> Iterator[Exception]:
    if isinstance(error, ExceptionGroup):
        for inner in error.exceptions:
            yield from _flatten(inner)
    else:
        yield error
