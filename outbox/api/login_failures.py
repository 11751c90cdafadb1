"""Failed logins in the journal, bounded: nobody fills a disk by guessing.

They are counted here, and written together, in at most one row for each interval;
the first one at once.  A row names a few addresses and counts the rest.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING

import structlog

from outbox.operations.api_tokens import note_failed_logins
from outbox.store.connection.connect import in_one_line

if TYPE_CHECKING:
    from outbox.api.database import Database

log = structlog.get_logger("outbox.api")

INTERVAL_S = 60.0
ADDRESSES_MAX = 20
OTHERS = "others"
LAST_WRITE_S = 1.0
"""For what is left when the server ends."""


class FailedLogins:
    """Counts those who came without a good token; `run` writes it down."""

    def __init__(self, database: Database, *, interval_s: float = INTERVAL_S) -> None:
        self._database = database
        self._interval_s = interval_s
        self._addresses: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()
        self._some = asyncio.Event()

    def note(self, address: str, why: str) -> None:
        """One more."""
        known = address in self._addresses or len(self._addresses) < ADDRESSES_MAX
        self._addresses[address if known else OTHERS] += 1
        self._reasons[why.partition(";")[0]] += 1
        self._some.set()

    async def run(self) -> None:
        """Write them down until cancelled, and then what is left."""
        try:
            while True:
                await self._some.wait()
                await self._write()
                await asyncio.sleep(self._interval_s)
        finally:
            if self._addresses:
                with suppress(TimeoutError):
                    async with asyncio.timeout(LAST_WRITE_S):
                        await self._write()

    async def _write(self) -> None:
        addresses, reasons = self._addresses, self._reasons
        self._addresses, self._reasons = Counter(), Counter()
        self._some.clear()
        told = {
            "attempts": addresses.total(),
            "addresses": dict(addresses.most_common()),
            "reasons": dict(reasons),
        }
        try:
            async with self._database.connection() as connection:
                await note_failed_logins(connection, self._database.schema, told)
        except Exception as error:  # Whatever it is: the log has it then, and the API goes on.
            log.warning("failed logins", **told, not_journalled=in_one_line(error))
