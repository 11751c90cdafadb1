"""Failed logins in the journal, aggregated so that guessing cannot fill the disk.

Failures are counted and written as at most one journal entry per interval, the first one
immediately.  An entry names up to `REPORTED_ADDRESSES_MAX` addresses and counts the rest.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING

import structlog

from outbox.operations.tokens.api import record_failed_logins
from outbox.store.connection.connect import in_one_line

if TYPE_CHECKING:
    from outbox_api.database import Database

log = structlog.get_logger("outbox.api")

REPORT_INTERVAL_S = 60.0
REPORTED_ADDRESSES_MAX = 20
OTHERS = "others"
LAST_WRITE_S = 1.0
"""Timeout of the last write at shutdown."""


class FailedLogins:
    """Counts failed logins; `run` writes them to the journal."""

    def __init__(self, database: Database, *, interval_s: float = REPORT_INTERVAL_S) -> None:
        self._database = database
        self._interval_s = interval_s
        self._addresses: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()
        self._has_failures = asyncio.Event()

    def record_failure(self, address: str, reason: str) -> None:
        """Count one failed login."""
        known = address in self._addresses or len(self._addresses) < REPORTED_ADDRESSES_MAX
        self._addresses[address if known else OTHERS] += 1
        self._reasons[reason.partition(";")[0]] += 1
        self._has_failures.set()

    async def run(self) -> None:
        """Write entries until cancelled, then write the remainder."""
        try:
            while True:
                await self._has_failures.wait()
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
        self._has_failures.clear()
        entry = {
            "attempts": addresses.total(),
            "addresses": dict(addresses.most_common()),
            "reasons": dict(reasons),
        }
        try:
            async with self._database.connection() as connection:
                await record_failed_logins(connection, self._database.schema, entry)
        except Exception as error:  # The log keeps the entry, and the API keeps running.
            log.warning("failed logins", **entry, not_journalled=in_one_line(error))
