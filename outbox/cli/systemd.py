"""Service notifications to systemd by sd_notify(3), for units of Type=notify.

Does nothing if NOTIFY_SOCKET is not set.
"""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from outbox.relay.relay import Relay

STATUS_EVERY_S = 10.0
WATCHDOG_SHARE = 0.5
"""Share of the watchdog time-out, as recommended by sd_watchdog_enabled(3)."""


class Supervisor:
    """Reports to systemd that the relay is ready, alive and stopping."""

    def __init__(self, env: Mapping[str, str] | None = None) -> None:
        env = os.environ if env is None else env
        self._address = env.get("NOTIFY_SOCKET", "")
        self._watchdog_s: float | None = None
        if env.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid()):
            microseconds = env.get("WATCHDOG_USEC", "")
            if microseconds.isdigit() and int(microseconds):
                self._watchdog_s = int(microseconds) / 1_000_000

    async def follow(self, relay: Relay) -> None:
        """Report readiness, status and watchdog keep-alives until cancelled.

        The keep-alive does not depend on the database: restarting the relay would not
        repair an unavailable database.
        """
        if not self._address:
            return
        every_s = STATUS_EVERY_S
        if self._watchdog_s is not None:
            every_s = min(every_s, self._watchdog_s * WATCHDOG_SHARE)
        ready = False
        while True:
            if not ready and relay.started.is_set():
                ready = True
                self._notify("READY=1")
            condition = relay.readiness()
            status = "delivering" if condition.ready else f"not ready: {condition.reason}"
            self._notify(f"WATCHDOG=1\nSTATUS={status}")
            try:
                async with asyncio.timeout(every_s):
                    if ready:
                        await asyncio.Event().wait()
                    else:
                        await relay.started.wait()
            except TimeoutError:
                pass

    def stopping(self) -> None:
        """Report that shutdown has begun."""
        if self._address:
            self._notify("STOPPING=1")

    def _notify(self, text: str) -> None:
        address = self._address
        # A leading @ means an address in the abstract namespace.
        where = "\0" + address[1:] if address.startswith("@") else address
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as each:
            each.setblocking(False)
            each.sendto(text.encode(), where)
