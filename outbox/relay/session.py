"""A session of a replica: from its registration to its release or the loss of the database.

All tasks run in one task group.  Any failure ends the group and closes requests
in flight; the next session starts from the tables.  No replica runs with only
some of its tasks.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import structlog

from outbox.relay.registration import Registration, SessionConnections
from outbox.relay.session_parts import build_session
from outbox.store.connection.secrets import Vault
from outbox.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from outbox.config import Settings
    from outbox.relay.registration import Registered
    from outbox.relay.session_parts import SharedParts
    from outbox.relay.session_state import RunningSession

log = structlog.get_logger("outbox.relay")

QUIET_SHARE, HAND_OVER_MIN_S = 0.8, 1.0
"""Share of `drain_s` for requests in flight; the rest is for releasing endpoints.  The
whole shutdown gets at least `HAND_OVER_MIN_S`, since the database may be slow."""
CANCEL_MAX_S = 1.0
"""Limit for cancelled background tasks to end."""


class Session:
    """A registered replica.

    Args:
        former: labels of this process's earlier replicas, see `Registration`.
        on_registered: called after the registration.
    """

    def __init__(
        self,
        settings: Settings,
        shared: SharedParts,
        name: str,
        former: list[str],
        on_registered: Callable[[], object],
    ) -> None:
        self._settings = settings
        self._shared = shared
        self._opened = SessionConnections(shared.connections)
        self._on_registered = on_registered
        self._vault = Vault.from_settings(settings)
        self._registration = Registration(
            settings, shared.connections, self._opened, self._vault,
            name, __version__, former, shared.clock, shared.rng,
        )  # fmt: skip
        self._releasing = self._released = False
        self.running: RunningSession | None = None
        """Readiness and gauges; None: the replica is not registered yet."""

    async def run(self, stop: asyncio.Event) -> None:
        """Run until `stop` is set and all endpoints are released.

        Raises:
            ExceptionGroup: of asyncpg's errors, OSError or Fenced, if the session
                ended for another reason.
            OutboxError: the database cannot be used.
        """
        try:
            registered = await self._registration.register_unless(stop)
            if registered is not None:
                try:
                    await self._work(registered, stop)
                except Exception:
                    # After the release, a terminated connection loses nothing.
                    if not self._released:
                        raise
        finally:
            self._opened.terminate()

    async def _work(self, registered: Registered, stop: asyncio.Event) -> None:
        settings, me = self._settings, registered.replica_id
        log.info("replica registered", replica=me, lease_s=settings.lease_s)
        parts = build_session(settings, registered, self._vault, self._shared)
        self._shared.telemetry.meters.begin()
        self.running = parts.running
        self._on_registered()
        async with asyncio.TaskGroup() as tasks:
            cut = tasks.create_task(self._opened.terminate_at_end())
            delivering = tasks.create_task(parts.dispatcher.run())
            background = [tasks.create_task(parts.recorder.run())]
            background += [
                tasks.create_task(self._run_until_release(each))
                for each in (self._opened.watch(), *parts.background)
            ]
            working = [
                tasks.create_task(parts.ownership.run()),
                tasks.create_task(parts.sequencer.run()),
            ]
            await stop.wait()
            log.info("draining", at_most_s=settings.drain_s)
            loop = asyncio.get_running_loop()
            quiet_by = loop.time() + settings.drain_s * QUIET_SHARE
            stopped_by = loop.time() + max(settings.drain_s, HAND_OVER_MIN_S)
            # Terminated, not cancelled: a cancelled transaction waits for its rollback.
            too_late = loop.call_at(stopped_by, self._opened.terminate)
            parts.dispatcher.stop(e.id for e in parts.dispatcher.endpoints())
            parts.ownership.stop()
            parts.sequencer.stop()
            await asyncio.wait(working)
            with suppress(TimeoutError):
                async with asyncio.timeout_at(quiet_by):
                    await parts.ownership.drain()
            # Requests in flight are closed before another replica may send them again.
            delivering.cancel()
            await asyncio.wait([delivering])
            await parts.recorder.flush()
            await parts.recorder.checkpoint()
            await parts.sequencer.release_leadership()
            self._releasing = True
            await parts.replicas.release_all(me, f"replica {me}")
            self._released = True
            await parts.replicas.wake_all()
            for task in background:
                task.cancel()
            left_s = (stopped_by - loop.time()) / 2
            await asyncio.wait(background, timeout=min(left_s, CANCEL_MAX_S))
            # A COMMIT that hangs keeps its locks after its task has ended.
            await parts.replicas.terminate_busy_sessions(registered.label)
            too_late.cancel()
            cut.cancel()

    async def _run_until_release(self, task: Coroutine[Any, Any, None]) -> None:
        """Run a background task, whose failure ends the session.

        From the release on it does not: the replica's row is gone, so a renewal is fenced off, and
        a lost connection is not opened again, while the clean stop has locks to release.
        """
        try:
            await task
        except Exception:
            if not self._releasing:
                raise
