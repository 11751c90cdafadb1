"""Messages that take locks for which producers would wait.

A session that waits for a lock blocks every later one whose lock conflicts with the awaited one:
behind a long transaction of one producer all others would wait for as long as it lasts.  So such a
message waits for a lock for a tenth of a second at most, and is sent again after a pause, in which
the others proceed.  A message that takes several locks should take the one that producers need
last, because it waits for each.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from outbox.drivers.errors import LOCK_NOT_GRANTED, server_error
from outbox.errors import CannotRun

if TYPE_CHECKING:
    from collections.abc import Callable

MESSAGE_LOCK_TIMEOUT_S = 0.1
"""Maximum wait for each lock of a message."""
RETRY_FOR_S = 10.0
"""Time after which a message is not sent again."""
PAUSE_S = 0.2
"""Time between two attempts, for those that have waited behind the last one."""


def lock_message(statements: list[str]) -> str:
    """Statements as one message, which waits for a lock for `MESSAGE_LOCK_TIMEOUT_S` at most."""
    return ";\n".join(
        [
            # Whatever the session's default: each statement must see what was committed
            # before its locks were granted.
            "SET LOCAL transaction_isolation = 'read committed'",
            f"SET LOCAL lock_timeout = {int(MESSAGE_LOCK_TIMEOUT_S * 1000)}",
            *statements,
        ]
    )


def retry_until_granted(attempt: Callable[[], None], failure: str) -> None:
    """Repeat an attempt of a blocking driver until its locks are granted.

    Args:
        attempt: sends statements that wait for a lock for `MESSAGE_LOCK_TIMEOUT_S` at most; an
            attempt that fails changes nothing.
        failure: what was not done if the locks are not granted, for the error.

    Raises:
        CannotRun: a lock was not granted within `RETRY_FOR_S`; nothing was changed.
        Exception: any other error of the attempt.
    """
    deadline = time.monotonic() + RETRY_FOR_S
    while True:
        try:
            attempt()
        except Exception as error:
            if server_error(error).sqlstate not in LOCK_NOT_GRANTED:
                raise
            if time.monotonic() >= deadline:
                raise CannotRun(lock_failure(failure)) from error
        else:
            return
        time.sleep(PAUSE_S)


def lock_failure(failure: str, who: str = "another session", remedy: str = "run it again") -> str:
    """The error when a lock was not granted in time, with what to do."""
    return f"{failure}: after {RETRY_FOR_S:g} s {who} still holds a lock that it needs; {remedy}"
