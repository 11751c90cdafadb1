"""The exception hierarchy, with the exit code of each kind.

    OutboxError
    ├── UsageError           2   the command, an argument or a setting is wrong
    │   ├── InvalidEvent         an event breaks a limit or a rule
    │   ├── NoTransaction        an event would be committed on its own
    │   ├── SnapshotRefused      a snapshot has no position
    │   ├── NotFound             a name or id that does not exist
    │   ├── QuotaExceeded        a tenant would have more than its quota
    │   └── Conflict             the current state does not allow the change
    └── CannotRun            3   the environment is missing
        ├── DatabaseUnavailable
        ├── SchemaMissing        `outbox migrate` was not run
        ├── SchemaTooNew         the database was migrated by a later version
        ├── MissingExtra         a package of an extra is not installed
        └── CursorBroken         the id sequence cannot be trusted any more

The message is one line with the problem and the next step.  Exit code 1 ("the
command ran, and found a problem") is a result and not an error, so it has no
exception.
"""

from __future__ import annotations


class OutboxError(Exception):
    """Base of all errors raised by this package."""

    exit_code = 3


class UsageError(OutboxError, ValueError):
    """The request is invalid; nothing was changed."""

    exit_code = 2


class InvalidEvent(UsageError):
    """An event breaks a limit or a rule; `field` names the column."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class NoTransaction(UsageError):
    """Publishing on a connection without a transaction: a rollback could not undo the event.

    A snapshot would end with the statement that takes its position.
    """


class SnapshotRefused(UsageError):
    """The transaction's snapshot has no position, such as at READ COMMITTED."""


class NotFound(UsageError):
    """No such endpoint, event or dead letter."""


class QuotaExceeded(UsageError):
    """A tenant would have more than its quota; nothing was changed."""


class Conflict(UsageError):
    """The current state does not allow the change, for example because a name is taken."""


class CannotRun(OutboxError):
    """The environment is missing; a later retry may succeed."""

    exit_code = 3


class DatabaseUnavailable(CannotRun):
    """The database is unreachable, or refused the login."""


class EventSuppressed(CannotRun):
    """A trigger or rule of the tables suppressed an event; nothing was written."""


class SchemaMissing(CannotRun):
    """The schema is absent or older than this version needs."""


class SchemaTooNew(CannotRun):
    """The schema was migrated by a later version of this package."""


class MissingExtra(CannotRun):
    """A package is not installed, which an extra of this package installs."""


class CursorBroken(CannotRun):
    """The id sequence was set back, or rows were inserted with explicit ids.

    Sequencing would lose or repeat events, so it stops until an operator
    intervenes.
    """
