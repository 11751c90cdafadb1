"""Limits how long a connection may leave statements without a response."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from outbox.errors import DatabaseUnavailable
from outbox.store.connection.connect import CONNECTION_ERRORS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from asyncpg import Connection


class ResponseOverdue(DatabaseUnavailable):
    """The server did not respond to a statement in time."""


@contextmanager
def response_deadline(connection: Connection[Any], within_s: float, what: str) -> Iterator[None]:
    """Terminate the connection if the block takes longer; used before the watchdog runs.

    The connection is terminated instead of cancelling the block, because a cancelled
    transaction waits for its rollback.

    Raises:
        ResponseOverdue: the connection was terminated.
    """
    cut = False

    def end() -> None:
        nonlocal cut
        cut = True
        connection.terminate()

    timer = asyncio.get_running_loop().call_later(within_s, end)
    try:
        yield
    except CONNECTION_ERRORS as error:
        if not cut:
            raise
        raise ResponseOverdue(f"no response within {within_s:g} s to {what}") from error
    finally:
        timer.cancel()
