"""A migration of the outbox."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from outbox.store.connection.lock_retry import LockRetry
from tests.sim.database.engine import EXCLUSIVE, Wait
from tests.sim.database.inserts import OUTBOX_LOCK

if TYPE_CHECKING:
    from tests.sim.database.connection import Connection
    from tests.sim.database.engine import Steps, Transaction
    from tests.sim.database.tables import Database


async def alter_outbox(connection: Connection, schema: str, *, actor: str) -> None:
    """Alter the table that producers write to, with the real loop of such messages."""
    await LockRetry(_Session(connection)).execute([], "not migrated")


class _Session:
    """Executes the message of a `LockRetry`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def execute(self, message: str) -> None:
        found = re.search(r"lock_timeout = (\d+)", message)
        assert found is not None
        await self._connection.call(alter_table, int(found[1]) / 1000)


def alter_table(db: Database, tx: Transaction, lock_timeout_s: float) -> Steps[None]:
    tx.lock_timeout_s = lock_timeout_s
    yield Wait(*OUTBOX_LOCK, EXCLUSIVE)
    yield db.pause_s()
