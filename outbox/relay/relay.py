"""The relay process: session after session, until it is told to stop."""

from __future__ import annotations

import asyncio
import os
import random
import socket
from typing import TYPE_CHECKING

import asyncpg
import structlog

import outbox
from outbox.errors import OutboxError
from outbox.relay.cluster.lease_clock import steady
from outbox.relay.delivery.telemetry import Observer
from outbox.relay.session import Session
from outbox.relay.session_state import Condition
from outbox.store.connection.connect import TROUBLE, in_one_line, not_granted
from outbox.store.records import Fenced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from outbox.config import Settings
    from outbox.destinations.interface import Transport
    from outbox.relay.cluster.connections import Connections
    from outbox.telemetry.snapshot import Snapshot

log = structlog.get_logger("outbox.relay")

RETRY_MIN_S, RETRY_MAX_S = 0.1, 5.0

SURVIVABLE = (*TROUBLE, Fenced)
"""What ends a session but not the relay: the database, or the lease, was lost."""

NOT_WORKING = "it is not at work with its database just now; its log says why"
"""The reason itself may have the database's address in it."""


class Relay:
    """Delivers until `stop`; survives the database's restarts.

    Args:
        transport: used over all sessions, closed by whoever made it.
        name: what it is called among the replicas; the host and the process if not said.
        clock: seconds that nobody sets and that go on while the machine sleeps.
        rng: for the jitter of retries and probes.
        observer: told of everything that happens.
    """

    def __init__(
        self,
        settings: Settings,
        transport: Transport,
        connections: Connections,
        *,
        name: str | None = None,
        clock: Callable[[], float] = steady,
        rng: random.Random | None = None,
        observer: Observer | None = None,
    ) -> None:
        self._settings = settings
        self._transport = transport
        self._connections = connections
        self._name = name or default_name()
        self._observer = observer or Observer()
        self.started = asyncio.Event()
        """Set when it was registered for the first time."""
        self._session: Session | None = None
        # Why there is no session.
        self._lost = "it has not reached the database yet"
        self._clock = clock
        self._rng = rng or random.Random()  # noqa: S311 (jitter needs no secrecy)
        self._stop = asyncio.Event()

    def stop(self) -> None:
        """Drain and return; bounded by `drain_s`."""
        self._stop.set()

    def condition(self) -> Condition:
        """Whether it does its work, and if not, why."""
        if self._stop.is_set():
            return Condition(ready=False, why="it is stopping")
        working = None if self._session is None else self._session.working
        if working is None:
            return Condition(ready=False, why=self._lost, told=NOT_WORKING)
        return working.condition()

    async def snapshot(self, at: float) -> Snapshot:
        """All metrics.

        Args:
            at: epoch seconds.
        """
        working = None if self._session is None else self._session.working
        meters = self._observer.meters
        gauges = {} if working is None else await working.gauges(meters)
        return meters.snapshot(at, gauges)

    async def run(self) -> None:
        """Deliver until stopped.

        Raises:
            OutboxError: the database cannot be used at the first attempt;
                later ones are repeated.
        """
        former: list[int] = []
        delay_s = RETRY_MIN_S
        while not self._stop.is_set():
            session = Session(
                self._settings,
                self._transport,
                self._connections,
                self._name,
                outbox.__version__,
                former=former,
                clock=self._clock,
                rng=self._rng,
                observer=self._observer,
                on_registered=self.started.set,
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
                reason = _why_survivable(error, registered=bool(former))
            else:
                break
            finally:
                self._session = None
            self._lost = reason
            self._observer.meters.session_losses += 1
            if self._stop.is_set():
                log.warning("others take over when the lease has ended", reason=reason)
                break
            if asyncio.get_running_loop().time() - started_at > RETRY_MAX_S:
                delay_s = RETRY_MIN_S
            log.warning("the session was lost", reason=reason, retry_s=round(delay_s, 1))
            try:
                async with asyncio.timeout(delay_s):
                    await self._stop.wait()
            except TimeoutError:
                pass
            delay_s = min(delay_s * 2, RETRY_MAX_S)
        log.info("stopped")


def default_name() -> str:
    """What this process is called among the replicas."""
    return f"{socket.gethostname()}:{os.getpid()}"


def _why_survivable(error: Exception, *, registered: bool) -> str:
    """The reason to try again, or the error itself if there is none.

    Before it was ever registered, the relay says what is wrong and ends, so
    that a wrong DSN is noticed; afterwards the database is expected back.
    """
    leaves = list(_leaves(error))
    for leaf in leaves:
        if isinstance(leaf, SURVIVABLE) or (registered and isinstance(leaf, OutboxError)):
            continue
        raise leaf if len(leaves) == 1 else error
    first = leaves[0]
    if isinstance(first, Fenced):
        return "the lease ran out, another replica took over, or the server's timeline changed"
    if isinstance(first, asyncpg.InsufficientPrivilegeError):
        return not_granted(first, "relay")
    return in_one_line(first)


def _leaves(error: Exception) -> Iterator[Exception]:
    if isinstance(error, ExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error
