"""What went wrong, as RFC 9457 (Problem Details for HTTP APIs) has it.

    {"type": "urn:outbox:problem:not-found", "title": "not found", "status": 404,
     "detail": "there is no endpoint \"shop\"; see: outbox endpoint list"}

`type` is for programs and does not change; `detail` is the one line that a command
would print, and may.  What a command says of the database, though, is for its operator:
addresses, roles and names.  Anybody may ask here, so the log has that, and the answer does
not (`is_veiled`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

import asyncpg

from outbox.core.model.text import one_line
from outbox.errors import (
    Conflict,
    NotFound,
    OutboxError,
    SchemaMissing,
    SchemaTooNew,
    UsageError,
)
from outbox.store.connection.connect import TROUBLE, in_one_line

if TYPE_CHECKING:
    from collections.abc import Mapping

MEDIA_TYPE = "application/problem+json"
RETRY_AFTER_S = 1
AWAY = "the database cannot be used just now; the log of this relay says why"
MISSING = "the tables are not there, or not of this version; run: outbox migrate"
NOT_GRANTED = (
    "the database does not let this relay do that: its role was not granted to operate, or to "
    "publish; run: outbox migrate --operator ROLE --producer ROLE"
)
TOO_NEW = "the tables are of a later version than this relay"


class Kind(Enum):
    """Each with its type, status and title."""

    BAD_REQUEST = ("bad-request", 400, "the request cannot be read")
    UNAUTHENTICATED = ("unauthenticated", 401, "a good token is needed")
    SCOPE_MISSING = ("scope-missing", 403, "the token may not do this")
    NOT_FOR_TENANTS = ("not-for-tenants", 403, "not for a tenant's token")
    NOT_FOUND = ("not-found", 404, "not found")
    METHOD_NOT_ALLOWED = ("method-not-allowed", 405, "wrong method")
    CONFLICT = ("conflict", 409, "what is there stands in the way")
    TOO_LARGE = ("too-large", 413, "the body is too large")
    WRONG_CONTENT_TYPE = ("wrong-content-type", 415, "the body is not JSON")
    WRONG_HOST = ("wrong-host", 421, "this is not the host that was asked for")
    INVALID = ("invalid", 422, "something in the request is wrong")
    TOO_MANY_REQUESTS = ("too-many-requests", 429, "too many requests")
    INTERNAL = ("internal", 500, "an error of ours")
    NOT_GRANTED = ("not-granted", 501, "this relay's role in the database may not do this")
    UNAVAILABLE = ("unavailable", 503, "the database cannot be used just now")

    def __init__(self, name: str, status: int, title: str) -> None:
        self.type = f"urn:outbox:problem:{name}"
        self.status = status
        self.title = title


@dataclass(eq=False)
class Problem(Exception):
    """A request that is answered with a problem."""

    kind: Kind
    detail: str
    headers: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.detail

    def body(self) -> dict[str, Any]:
        """What is answered."""
        kind = self.kind
        return {
            "type": kind.type,
            "title": kind.title,
            "status": kind.status,
            # Whatever was quoted in it, it stays one line that can be shown.
            "detail": one_line(self.detail),
        }


def of(error: Exception) -> Problem | None:
    """What to answer for an error; None: nobody expected it."""
    match error:
        case Problem():
            return error
        case NotFound():
            return Problem(Kind.NOT_FOUND, str(error))
        case Conflict():
            return Problem(Kind.CONFLICT, str(error))
        case UsageError():
            return Problem(Kind.INVALID, str(error))
        case SchemaMissing():
            return unavailable(MISSING)
        case SchemaTooNew():
            return unavailable(TOO_NEW)
        case _ if _not_granted(error):
            return Problem(Kind.NOT_GRANTED, NOT_GRANTED)
        case asyncpg.QueryCanceledError():
            return unavailable("the database took too long; try again when it has less to do")
        case asyncpg.SerializationError() | asyncpg.DeadlockDetectedError():
            return unavailable("somebody else changed the same at that moment; try again")
        case asyncpg.LockNotAvailableError():
            return unavailable("somebody else holds what this needs; try again")
        case asyncpg.DataError():
            # A value that passed our own checks and that no column can hold.
            return Problem(Kind.INVALID, in_one_line(error))
        case asyncpg.PostgresError() if error.sqlstate[:2] not in _TRANSIENT:
            return None
        case asyncpg.InterfaceError() if "closed" not in str(error):
            return None
        case TimeoutError():
            return unavailable("no answer in time; try again when there is less to do")
        case _ if isinstance(error, (OutboxError, *TROUBLE)):
            return unavailable(AWAY)
    return None


def is_veiled(told: Problem) -> bool:
    """Whether the error behind it says more than is answered."""
    return told.detail in (AWAY, MISSING, NOT_GRANTED, TOO_NEW)


def _not_granted(error: Exception) -> bool:
    denied = asyncpg.InsufficientPrivilegeError
    return isinstance(error, denied) or isinstance(error.__cause__, denied)


_TRANSIENT = ("08", "25", "53", "55", "57")
"""Classes of SQLSTATE that tell of the server's state, not of a mistake of ours."""


def unavailable(detail: str) -> Problem:
    """What cannot be answered now, and perhaps later."""
    return Problem(Kind.UNAVAILABLE, detail, {"Retry-After": str(RETRY_AFTER_S)})
