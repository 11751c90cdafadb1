"""What a route is: everything that is known of it stands in one row of the table.

The table (`outbox.api.routes`) decides who may call a route, reads the query and
the body for it, and is what the OpenAPI document is made of.  A route that says
nothing about tenants is not for their tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from pydantic import BaseModel, ConfigDict

from outbox.api.problem import Kind, Problem

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from asyncpg import Connection

    from outbox.api.live import LiveBook
    from outbox.config import Settings
    from outbox.core.model.api_token import Scope
    from outbox.destinations.http.test_deliveries import Trials

LIMIT, LIMIT_MAX = 100, 1000
ID_MAX = 2**63 - 1
TIMEOUT_S = 30.0
"""For a whole request, unless its route says otherwise."""


class Model(BaseModel):
    """A query or a body; what it does not know is a mistake."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        hide_input_in_errors=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    flags: ClassVar[Mapping[str, str]] = {}
    """What somebody may call a field who knows the commands, with what it is called here."""
    many: ClassVar[str | None] = None
    """The field that takes several of what the others are one of."""


class Shown(BaseModel):
    """The form of an answer; only the document is made of it."""

    # What it consists of are types of ours that name others only for type checkers.
    model_config = ConfigDict(defer_build=True, use_attribute_docstrings=True)


Q = TypeVar("Q")
B = TypeVar("B")


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks: a token."""

    id: int
    name: str
    scopes: tuple[Scope, ...]
    tenant: str | None
    expires_at: Any

    @property
    def actor(self) -> str:
        """As changes and the journal have it."""
        return f"token {self.name}"


@dataclass(frozen=True, slots=True)
class Call(Generic[Q, B]):
    """A request that may be answered: it was let in, and it could be read."""

    caller: Caller
    db: Connection[Any]
    settings: Settings
    path: Mapping[str, str]
    headers: Mapping[str, str]
    query: Q
    body: B
    live: LiveBook
    trials: Trials

    @property
    def schema(self) -> str:
        """The schema of the outbox."""
        return self.settings.schema_name

    @property
    def tenant(self) -> str | None:
        """Whose own the caller is kept to; None: nobody's."""
        return self.caller.tenant

    @property
    def actor(self) -> str:
        """Who does it."""
        return self.caller.actor


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer with another status than 200."""

    value: Any
    status: int = 200


@dataclass(frozen=True, slots=True)
class Later:
    """An answer that takes its time, and no connection to the database meanwhile."""

    go: Callable[[], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class Page:
    """Items, and the cursor that goes on behind them."""

    items: list[Any]
    next: str | None
    rest: Mapping[str, Any] = field(default_factory=dict)
    """What else is told of it."""


class For(Enum):
    """Whose tokens may call a route; how a tenant's are kept to its own is in `tenancy`."""

    SYSTEM = "system"
    """Not a tenant's."""
    ANYBODY = "anybody"
    """There is nothing in it that is anybody's."""
    NARROWED = "narrowed"
    """The handler is given the tenant, and asks for no more than what is its own."""
    ENDPOINT = "endpoint"
    """`name` in the path is an endpoint, which has to be its own; so with the next ones."""
    SCHEDULE = "schedule"
    DEAD_LETTER = "dead letter"
    JOB = "replay job"


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One method of one path."""

    method: str
    path: str
    summary: str
    handler: Callable[[Call[Any, Any]], Awaitable[Any]]
    scope: Scope | None
    """None: any token will do."""
    answers: Mapping[int, Any]
    """What is answered with each status of success; `PageOf` for a page."""
    tenants: For = For.SYSTEM
    query: type[Model] | None = None
    body: type[Model] | None = None
    body_required: bool = True
    headers: Mapping[str, str] = field(default_factory=dict)
    """Request headers that it heeds, and what for."""
    timeout_s: float = TIMEOUT_S
    long: bool = False
    """It may have a connection for minutes."""
    asks: bool = True
    """False: it needs no connection, and has none."""

    @property
    def tag(self) -> str:
        """What it is about: the first word of its path."""
        return self.path.split("/")[2]

    @property
    def operation(self) -> str:
        """Its name in the document."""
        words = [word.strip("{}") for word in self.path.split("/")[2:]]
        return "_".join([self.method.lower(), *(word.replace("-", "_") for word in words)])


@dataclass(frozen=True, slots=True)
class PageOf:
    """A page of such items, with what else is told of it."""

    item: Any
    rest: type[Shown] | None = None


def paged(rows: list[Any], limit: int, cursor: Callable[[Any], object]) -> Page:
    """A page of rows, of which one more than `limit` was asked for."""
    more = len(rows) > limit
    rows = rows[:limit]
    return Page(rows, str(cursor(rows[-1])) if more else None)


def id_cursor(text: str | None, default: int) -> int:
    """The number that a cursor stands for.

    Raises:
        Problem: it is none of ours.
    """
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) <= ID_MAX):
        raise Problem(Kind.BAD_REQUEST, "after: this is not a cursor that a page ended with")
    return int(text)
