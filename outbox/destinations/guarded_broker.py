"""A broker whose calls end with a result whatever its server sends, and its driver does.

A server is an outsider, and so may be the driver.  A response of a form that no driver expects, or
a result that no relay expects, would otherwise raise, end the relay's session, and with it the
deliveries of all other endpoints.
"""

from __future__ import annotations

import asyncio
import traceback
from typing import TYPE_CHECKING

import structlog

from outbox.core.brokers.port import (
    Appended,
    Capabilities,
    Fenced,
    Foreign,
    Position,
    Stop,
    StopKind,
)
from outbox.destinations.broker import BrokerFinding

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outbox.core.brokers.port import Message, Owner, Standing
    from outbox.destinations.broker import Broker

LATE_S = 5.0
"""How long after its time-out a call may return: the event loop may be busy."""

log = structlog.get_logger("outbox.destinations")


class GuardedBroker:
    """Passes calls to a driver; see `Broker`."""

    def __init__(self, driver: Broker, timeout_s: float) -> None:
        self.driver = driver
        self._timeout_s = timeout_s

    @property
    def capabilities(self) -> Capabilities:
        return self.driver.capabilities

    async def open(
        self, lane: str, owner: Owner, after: int, receipt: str | None, *, force: bool = False
    ) -> Standing:
        try:
            async with self._in_time():
                standing = await self.driver.open(lane, owner, after, receipt, force=force)
            if not isinstance(standing, Position | Foreign | Fenced | Stop):
                raise TypeError
            return standing
        except Exception as error:
            return self._unexpected(error)

    async def append(
        self, lane: str, owner: Owner, after: int, messages: Sequence[Message]
    ) -> Appended:
        try:
            async with self._in_time():
                appended = await self.driver.append(lane, owner, after, messages)
            if not isinstance(appended, Appended):
                raise TypeError
            # One that counts wrongly would acknowledge what it did not get.
            first, last = after, messages[-1].sequence
            if appended.stop is None:
                first = last
            elif not isinstance(appended.stop, Stop):
                raise TypeError
            if not first <= appended.through <= last:
                raise ValueError
            return appended
        except Exception as error:
            return Appended(after, self._unexpected(error))

    async def check(self, lanes: Sequence[str]) -> list[BrokerFinding]:
        try:
            return [BrokerFinding(*each) for each in await self.driver.check(lanes)]
        except Exception as error:
            what = self._unexpected(error).detail
            return [BrokerFinding(True, what, "check that the URL is that of such a broker")]

    async def aclose(self) -> None:
        try:
            async with self._in_time():
                await self.driver.aclose()
        except Exception as error:
            log.warning("broker not closed", reason=self._unexpected(error).detail)

    def _in_time(self) -> asyncio.Timeout:
        """One that does not end its calls would hold a lane for ever, and nobody would know."""
        return asyncio.timeout(self._timeout_s + LATE_S)

    def _unexpected(self, error: Exception) -> Stop:
        # Without the error's text, which may be anything that the server has sent.
        own = {__package__.partition(".")[0], type(self.driver).__module__.partition(".")[0]}
        *_, place = (
            f"{name}:{line}"
            for frame, line in traceback.walk_tb(error.__traceback__)
            if (name := frame.f_globals.get("__name__", "")).partition(".")[0] in own
        )
        what = f"{type(error).__name__} at {place}"
        text = f"the response has an unexpected form, or the driver has a defect ({what})"
        return Stop(StopKind.UNKNOWN, text)
