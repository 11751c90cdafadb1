"""A broker whose calls end with a result whatever its server sends.

A server is an outsider.  A response of a form that no driver expects would otherwise raise, end the
relay's session, and with it the deliveries of all other endpoints.
"""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING

from outbox.core.brokers.port import Appended, Capabilities, Stop, StopKind
from outbox.destinations.broker import BrokerFinding

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outbox.core.brokers.port import Message, Owner, Standing
    from outbox.destinations.broker import Broker


class GuardedBroker:
    """Passes calls to a driver; see `Broker`."""

    def __init__(self, driver: Broker) -> None:
        self.driver = driver

    @property
    def capabilities(self) -> Capabilities:
        return self.driver.capabilities

    async def open(
        self, lane: str, owner: Owner, after: int, receipt: str | None, *, force: bool = False
    ) -> Standing:
        try:
            return await self.driver.open(lane, owner, after, receipt, force=force)
        except Exception as error:
            return self._unexpected(error)

    async def append(
        self, lane: str, owner: Owner, after: int, messages: Sequence[Message]
    ) -> Appended:
        try:
            return await self.driver.append(lane, owner, after, messages)
        except Exception as error:
            return Appended(after, self._unexpected(error))

    async def check(self, lanes: Sequence[str]) -> list[BrokerFinding]:
        try:
            return await self.driver.check(lanes)
        except Exception as error:
            what = self._unexpected(error).detail
            return [BrokerFinding(True, what, "check that the URL is that of such a broker")]

    async def aclose(self) -> None:
        await self.driver.aclose()

    def _unexpected(self, error: Exception) -> Stop:
        # Without the error's text, which may be anything that the server has sent.
        own = {__package__.partition(".")[0], type(self.driver).__module__.partition(".")[0]}
        *_, place = (
            f"{name}:{line}"
            for frame, line in traceback.walk_tb(error.__traceback__)
            if (name := frame.f_globals["__name__"]).partition(".")[0] in own
        )
        what = f"{type(error).__name__} at {place}"
        text = f"the response has an unexpected form, or the driver has a defect ({what})"
        return Stop(StopKind.UNKNOWN, text)
