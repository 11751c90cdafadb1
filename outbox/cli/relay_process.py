"""The relay's process: signals, telemetry export and systemd around the relay.

signals ──▶ relay ──▶ metrics and traces ──▶ OTLP
            │     └─▶ systemd
            └─ child: the API
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from outbox.cli.common import warn
from outbox.cli.systemd import Supervisor
from outbox.event_loop import STOP_SIGNALS, collect_rarely
from outbox.hosting.api_child import api_child
from outbox.hosting.hosted_relay import hosted_relay
from outbox.relay.relay import default_name
from outbox.telemetry.exporters import configure_export
from outbox.version import __version__

if TYPE_CHECKING:
    from outbox.config import Settings
    from outbox.relay.relay import Relay
    from outbox.telemetry.exporters import TelemetryExport


async def run(settings: Settings) -> None:
    """Run a relay until SIGTERM or SIGINT.

    Raises:
        OutboxError: the relay cannot run.
    """
    name = default_name()
    telemetry = configure_export(name, __version__)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(telemetry.close)
        api = None
        if settings.admin is not None or settings.receivers is not None:
            api = await stack.enter_async_context(api_child(settings))
        relay = await stack.enter_async_context(
            hosted_relay(settings, telemetry, warn, name=name, companion=api)
        )
        collect_rarely()
        await _deliver(relay, telemetry)


async def _deliver(relay: Relay, telemetry: TelemetryExport) -> None:
    """Deliver until the first stop signal drains the relay; the second cancels it."""
    supervisor = Supervisor()
    task = asyncio.current_task()
    assert task is not None
    stopping = over = False

    def stop() -> None:
        nonlocal stopping
        if stopping and not over:
            task.cancel()
        stopping = True
        supervisor.stopping()
        relay.stop()

    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, stop)
    failed: Exception | None = None
    try:
        async with asyncio.TaskGroup() as tasks:
            background = [
                tasks.create_task(telemetry.push(lambda: relay.snapshot(time.time()))),
                tasks.create_task(supervisor.follow(relay)),
            ]
            try:
                await relay.run()
            except Exception as error:
                failed = error  # Raised below, not inside an ExceptionGroup.
            finally:
                for each in background:
                    each.cancel()
    except asyncio.CancelledError:
        if not stopping:
            raise
    finally:
        # The remaining clean-up is bounded and has no requests in flight: a second signal
        # must not cancel it.
        over = True
    if failed is not None:
        raise failed
