"""API errors as problem details (RFC 9457).

    {"type": "urn:outbox:problem:not-found", "title": "not found", "status": 404,
     "detail": "there is no endpoint \"shop\"; see: GET /v1/endpoints"}

`type` is stable and for programs; `detail` is one line for people and may change.  Database
errors contain addresses, roles and names: the log has them, the response has a generic
detail (`hides_cause`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import TYPE_CHECKING, Any

import asyncpg

from outbox.core.model.text import one_line
from outbox.errors import (
    Conflict,
    CursorBroken,
    EventSuppressed,
    NotFound,
    OutboxError,
    QuotaExceeded,
    SchemaMissing,
    SchemaTooNew,
    UsageError,
)
from outbox.store.connection.connect import CONNECTION_ERRORS, in_one_line
from outbox.store.connection.secrets import AlteredSecret, UnreadableSecret
from outbox.store.privileges import LacksPrivileges

if TYPE_CHECKING:
    from collections.abc import Mapping

MEDIA_TYPE = "application/problem+json"
RETRY_AFTER_S = 1
RETRIED_STATUSES = (429, 503)
"""Statuses with the header Retry-After."""
ROWS_HIDDEN = "rows may be hidden from the API; see outbox doctor"
DATABASE_UNAVAILABLE = "the database is unavailable; see the log of the API"
SCHEMA_MISSING = "the schema is missing or has another version; run: outbox migrate"
KEY_MISSING = "the API lacks the key of an encrypted secret; run: outbox doctor"
NOT_STORABLE = "the request contains a character that PostgreSQL cannot store"
NOT_GRANTED = "the database role of the API lacks a privilege; see the log of the API"
SCHEMA_TOO_NEW = "the schema has a later version than the API; upgrade the API"


class ProblemKind(Enum):
    """Problem types with HTTP status and title."""

    BAD_REQUEST = ("bad-request", 400, "malformed request")
    UNAUTHENTICATED = ("unauthenticated", 401, "a valid token is required")
    SCOPE_MISSING = ("scope-missing", 403, "insufficient scope")
    NOT_FOR_TENANTS = ("not-for-tenants", 403, "not available to tenant tokens")
    NOT_FOUND = ("not-found", 404, "not found")
    METHOD_NOT_ALLOWED = ("method-not-allowed", 405, "method not allowed")
    BODY_LATE = ("body-late", 408, "the body was not sent in time")
    CONFLICT = ("conflict", 409, "conflict with the current state")
    SECRET_ALTERED = ("secret-altered", 409, "a stored secret was altered")
    TOO_LARGE = ("too-large", 413, "the body is too large")
    WRONG_CONTENT_TYPE = ("wrong-content-type", 415, "the body is not JSON")
    WRONG_HOST = ("wrong-host", 421, "the Host header names another host")
    INVALID = ("invalid", 422, "invalid request")
    QUOTA_EXCEEDED = ("quota-exceeded", 422, "a quota is exceeded")
    KEY_REUSED = ("idempotency-key-reused", 422, "the idempotency key was used for another body")
    TOO_MANY_REQUESTS = ("too-many-requests", 429, "too many requests")
    INTERNAL = ("internal", 500, "internal error")
    UNAVAILABLE = ("unavailable", 503, "the database is unavailable")

    def __init__(self, name: str, status: int, title: str) -> None:
        self.type = f"urn:outbox:problem:{name}"
        self.status = status
        self.title = title


class Refusal(StrEnum):
    """Why a request was refused, in metrics."""

    RATE = "rate"
    SHARE = "share"
    CONCURRENCY = "concurrency"
    LOGINS = "logins"
    BODY_SIZE = "body_size"
    BODY_TIME = "body_time"
    TOKEN = "token"  # noqa: S105 (not a secret)
    SCOPE = "scope"
    HOST = "host"
    UNAVAILABLE = "unavailable"


_REFUSALS = {
    ProblemKind.UNAUTHENTICATED: Refusal.TOKEN,
    ProblemKind.SCOPE_MISSING: Refusal.SCOPE,
    ProblemKind.NOT_FOR_TENANTS: Refusal.SCOPE,
    ProblemKind.BODY_LATE: Refusal.BODY_TIME,
    ProblemKind.TOO_LARGE: Refusal.BODY_SIZE,
    ProblemKind.WRONG_HOST: Refusal.HOST,
    ProblemKind.UNAVAILABLE: Refusal.UNAVAILABLE,
}


@dataclass(eq=False)
class Problem(Exception):
    """An error response."""

    kind: ProblemKind
    detail: str
    headers: Mapping[str, str] = field(default_factory=dict)
    limit: Refusal | None = None
    """The limit that was exceeded, unless its kind says it."""

    @property
    def refusal(self) -> Refusal | None:
        """Why the request was refused; None: it was invalid, or it failed."""
        return self.limit or _REFUSALS.get(self.kind)

    def __str__(self) -> str:
        return self.detail

    def to_json(self) -> dict[str, Any]:
        """Return the response body."""
        kind = self.kind
        return {
            "type": kind.type,
            "title": kind.title,
            "status": kind.status,
            # Quoted input must not add lines or control characters.
            "detail": one_line(self.detail),
        }


def problem_for(error: Exception) -> Problem | None:
    """Map an exception to a problem; None: the exception is unexpected."""
    match error:
        case Problem():
            return error
        case NotFound():
            return Problem(ProblemKind.NOT_FOUND, in_api_words(str(error)))
        case Conflict():
            return Problem(ProblemKind.CONFLICT, in_api_words(str(error)))
        case QuotaExceeded():
            return Problem(ProblemKind.QUOTA_EXCEEDED, in_api_words(str(error)))
        case UsageError():
            return Problem(ProblemKind.INVALID, in_api_words(str(error)))
        case AlteredSecret():
            return Problem(ProblemKind.SECRET_ALTERED, str(error))
        case UnreadableSecret():
            return unavailable(KEY_MISSING)
        case EventSuppressed():
            return unavailable(str(error))
        case CursorBroken():
            # The reason names tables and roles.
            return unavailable(ROWS_HIDDEN)
        case SchemaMissing():
            return unavailable(SCHEMA_MISSING)
        case SchemaTooNew():
            return unavailable(SCHEMA_TOO_NEW)
        case _ if is_not_granted(error):
            return unavailable(NOT_GRANTED)
        case asyncpg.QueryCanceledError():
            return unavailable(
                "the database query timed out; narrow the request, or try again later"
            )
        case asyncpg.SerializationError() | asyncpg.DeadlockDetectedError():
            return unavailable("a concurrent change conflicted with this one; try again")
        case asyncpg.LockNotAvailableError():
            return unavailable("a lock is held by another transaction; try again")
        case asyncpg.CharacterNotInRepertoireError() | asyncpg.UntranslatableCharacterError():
            return Problem(ProblemKind.BAD_REQUEST, NOT_STORABLE)
        case asyncpg.DataError():
            # The value passed validation but does not fit its column.
            return Problem(ProblemKind.INVALID, in_one_line(error))
        case asyncpg.PostgresError() if error.sqlstate[:2] not in _TRANSIENT:
            return None
        case asyncpg.InterfaceError() if "closed" not in str(error):
            return None
        case TimeoutError():
            return unavailable("the request timed out; try again later")
        case _ if isinstance(error, (OutboxError, *CONNECTION_ERRORS)):
            return unavailable(DATABASE_UNAVAILABLE)
    return None


# The operations name commands, which are the same functions as these routes.
_ROUTES = {
    "endpoint list": "GET /v1/endpoints",
    "endpoint resume": "POST /v1/endpoints/{name}/resume",
    "endpoint enable": "POST /v1/endpoints/{name}/enable",
    "dead list": "GET /v1/dead-letters",
    "dead show": "GET /v1/dead-letters/{id}",
    "dead replay": "POST /v1/dead-letters/replay",
    "dead discard": "POST /v1/dead-letters/discard",
    "replay list": "GET /v1/replays",
    "replay show": "GET /v1/replays/{id}",
    "schedule list": "GET /v1/schedules",
    "token list": "GET /v1/tokens",
    "once list": "GET /v1/once",
    "quota list": "GET /v1/quotas",
    "quota set": "PUT /v1/quotas",
    "doctor": "GET /v1/doctor",
}
# The flags of lists are singular, because each value has its own.
_FIELDS = {"allow_network": "allow_networks", "header": "headers", "type": "types"}
_COMMAND = re.compile(rf"\boutbox ({'|'.join(_ROUTES)})(?: (\d+))?")
_OPTION = re.compile(r"(?<![\w-])--([a-z]+(?:-[a-z]+)*)")


def in_api_words(text: str) -> str:
    """An error message with routes and fields in place of commands and options."""

    def route(found: re.Match[str]) -> str:
        return _ROUTES[found[1]].replace("{id}", found[2] or "{id}")

    def field_of(found: re.Match[str]) -> str:
        name = found[1].replace("-", "_")
        return _FIELDS.get(name, name)

    return _OPTION.sub(field_of, _COMMAND.sub(route, text))


def hides_cause(problem: Problem) -> bool:
    """Whether the detail is generic, so that the cause belongs in the log."""
    return problem.detail in (DATABASE_UNAVAILABLE, SCHEMA_MISSING, SCHEMA_TOO_NEW)


def is_not_granted(error: Exception) -> bool:
    """Whether the database role lacks a privilege."""
    denied = asyncpg.InsufficientPrivilegeError
    return isinstance(error, (denied, LacksPrivileges)) or isinstance(error.__cause__, denied)


_TRANSIENT = ("08", "25", "53", "55", "57")
"""SQLSTATE classes of server conditions: a retry may succeed."""


def unavailable(detail: str) -> Problem:
    """Return a 503 problem with Retry-After."""
    return Problem(ProblemKind.UNAVAILABLE, detail, {"Retry-After": str(RETRY_AFTER_S)})
