"""Every error a user can meet, with the exit code of its kind.

    OutboxError
    ├── UsageError           2   the command, an argument or a setting is wrong
    │   ├── InvalidEvent         an event breaks a limit or a rule
    │   ├── NotFound             a name or id that does not exist
    │   └── Conflict             what is there stands in the way
    └── CannotRun            3   the surroundings are missing
        ├── DatabaseUnavailable
        ├── SchemaMissing        `outbox migrate` was not run
        ├── SchemaTooNew         the database was migrated by a later version
        └── CursorBroken         the id sequence cannot be trusted any more

The message is one line that says what is wrong and what to do next.  Exit
code 1 is not an error but an answer ("it ran, and something is missing"), so
no exception stands for it.
"""

from __future__ import annotations


class OutboxError(Exception):
    """Base of all errors raised by this package."""

    exit_code = 3


class UsageError(OutboxError, ValueError):
    """The caller asked for something that cannot be; nothing was changed."""

    exit_code = 2


class InvalidEvent(UsageError):
    """An event breaks a limit or a rule; `field` names the column."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class NotFound(UsageError):
    """No such endpoint, event or dead letter."""


class Conflict(UsageError):
    """What is there stands in the way: a name is taken, or it is in another state."""


class CannotRun(OutboxError):
    """The surroundings are missing; running again later may help."""

    exit_code = 3


class DatabaseUnavailable(CannotRun):
    """The database could not be reached, or refused the login."""


class SchemaMissing(CannotRun):
    """The schema is absent or older than this version needs."""


class SchemaTooNew(CannotRun):
    """The schema was written by a later version of this package."""


class CursorBroken(CannotRun):
    """The id sequence went back or ids were written around it.

    Sequencing on would lose or repeat events, so it stops until an operator
    has looked.
    """
