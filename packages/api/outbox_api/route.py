"""Routes: a decorated handler, whose types are those of the request and of the response.

    @route.get("/v1/endpoints/{name}", "Show an endpoint", scope="read", tenants=ENDPOINT)
    async def _show(call: Call[NoQuery, None]) -> EndpointDetail: ...

The table of all routes (`outbox_api.routes`) drives authorization, request parsing and the
OpenAPI document.  Tenant tokens cannot call a route that does not declare tenant access.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Concatenate,
    Generic,
    ParamSpec,
    Required,
    TypeAlias,
    TypedDict,
    TypeVar,
    Unpack,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from outbox.core.model.headers import WIRE_COUNT_MAX
from outbox.core.model.setting_types import TYPES_MAX
from outbox.operations.rows import ID_MAX, parse_id
from outbox_api.field_types import TypePattern, text_schema
from outbox_api.limits import COMMENT_CHARS_MAX, REQUEST_BODY_BYTES_MAX, REQUEST_TIMEOUT_S
from outbox_api.problem import Problem, ProblemKind

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from asyncpg import Connection

    from outbox.config import Settings
    from outbox.core.model.api_token import Scope
    from outbox.operations.rows import RowPage
    from outbox_api.endpoint_tester import EndpointTester
    from outbox_api.fair_publishing import FairPublisher
    from outbox_api.live_cache import LiveStatusCache
    from outbox_api.rate_limit import Holder


class RequestModel(BaseModel):
    """Base of query and body models; unknown fields are errors."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        hide_input_in_errors=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    list_field: ClassVar[str | None] = None
    """Field that takes a list of objects.  It selects the model of a body that may have another
    one, and is a hint when the body is an array."""
    example: ClassVar[Mapping[str, Any] | None] = None
    """A body that is accepted, for the OpenAPI document."""

    @model_validator(mode="before")
    @classmethod
    def _reject_unknown_fields(cls, values: Any) -> Any:
        """Fail at the first unknown field; `extra` would collect an error for each."""
        if isinstance(values, dict):
            for name in values:
                if name not in cls.model_fields:
                    raise PydanticCustomError("unknown_field", "unknown field", {"name": name})
        return values


class NoQuery(RequestModel):
    """Query without parameters."""


def at_most(items: int, *, at_least: int = 0) -> Any:
    """Limit the items of a tuple in a request; validation stops at the first error."""
    return Field(min_length=at_least or None, max_length=items, fail_fast=True)


def _check_header_count(headers: Any) -> Any:
    """Check before validation: pydantic validates all entries first, and collects their errors."""
    if isinstance(headers, dict) and len(headers) > WIRE_COUNT_MAX:
        counts = {"actual_length": len(headers), "max_length": WIRE_COUNT_MAX}
        raise PydanticCustomError("too_long", "too many headers", counts)
    return headers


V = TypeVar("V")
Headers = Annotated[
    dict[str, V], Field(max_length=WIRE_COUNT_MAX), BeforeValidator(_check_header_count)
]
"""Headers in a request."""
Comment = Annotated[str, Field(max_length=COMMENT_CHARS_MAX)]
TypePatterns = Annotated[tuple[TypePattern, ...], at_most(TYPES_MAX)]


class ResponseModel(BaseModel):
    """Base of response models, used for the OpenAPI document only."""

    # defer_build: field types have forward references, resolved by `outbox_api.schemas`.
    model_config = ConfigDict(defer_build=True, use_attribute_docstrings=True)


P = ParamSpec("P")
Result = TypeVar("Result")
Q = TypeVar("Q")
B = TypeVar("B")
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Caller:
    """The authenticated token."""

    id: int
    name: str
    scopes: tuple[Scope, ...]
    tenant: str | None
    expires_at: Any

    @property
    def actor(self) -> str:
        """Actor name in changes and in the journal."""
        return f"token {self.name}"

    @property
    def holder(self) -> Holder:
        """Whose limits its requests count against: those of a tenant have them together."""
        return ("token", self.id) if self.tenant is None else ("tenant", self.tenant)


@dataclass(frozen=True, slots=True)
class Call(Generic[Q, B]):
    """An authorized and parsed request."""

    caller: Caller
    db: Connection[Any]
    settings: Settings
    path: Mapping[str, str]
    headers: Mapping[str, str]
    query: Q
    body: B
    live: LiveStatusCache
    endpoint_tester: EndpointTester
    publisher: FairPublisher

    @property
    def schema(self) -> str:
        return self.settings.schema_name

    @property
    def tenant(self) -> str | None:
        """Tenant that the caller is restricted to; None: no restriction."""
        return self.caller.tenant

    @property
    def actor(self) -> str:
        return self.caller.actor

    async def run(
        self,
        operation: Callable[Concatenate[Connection[Any], str, P], Awaitable[Result]],
        /,
        *args: P.args,
        **options: P.kwargs,
    ) -> Result:
        """Run an operation on the request's connection, with the schema's name."""
        return await operation(self.db, self.schema, *args, **options)


@dataclass(frozen=True, slots=True)
class Reply:
    """A result with a status other than that of its route."""

    value: Any
    status: int = 200


@dataclass(frozen=True, slots=True)
class DeferredReply:
    """A result computed after the database connection was released."""

    produce: Callable[[], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class Page(Generic[Item]):
    """One page of items and the cursor of the next page."""

    items: list[Item]
    next: str | None
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Additional fields of the response."""


Handler: TypeAlias = "Callable[[Call[Any, Any]], Awaitable[Any]]"


class TenantAccess(Enum):
    """Which tokens may call a route, and how `outbox_api.tenancy` restricts tenant tokens."""

    SYSTEM = "system"
    """System tokens only."""
    ALL_CALLERS = "anybody"
    """All tokens; the response has no tenant data."""
    NARROWED = "narrowed"
    """All tokens; the handler filters by `Call.tenant`."""
    ENDPOINT = "endpoint"
    """The tenant must own the object in the path: here the endpoint `name`."""
    SCHEDULE = "schedule"
    DEAD_LETTER = "dead letter"
    JOB = "replay job"


_PROBLEMS = (
    ProblemKind.UNAUTHENTICATED,
    ProblemKind.WRONG_HOST,
    ProblemKind.INVALID,
    ProblemKind.TOO_MANY_REQUESTS,
    ProblemKind.INTERNAL,
    ProblemKind.UNAVAILABLE,
)
"""Problems that every request may cause."""
_BODY_PROBLEMS = {
    ProblemKind.BODY_LATE,
    ProblemKind.TOO_LARGE,
    ProblemKind.WRONG_CONTENT_TYPE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One method of one path."""

    method: str
    path: str
    summary: str
    handler: Handler
    scope: Scope | None
    """The scope that a token needs; None: any token is accepted."""
    responses: Mapping[int, Any]
    """Response model by success status; `PageOf` for a page."""
    status: int = 200
    """The status of a result that is not a `Reply`."""
    tenants: TenantAccess = TenantAccess.SYSTEM
    query: type[RequestModel] | None = None
    bodies: tuple[type[RequestModel], ...] = ()
    """The models of the body, the usual one first."""
    body_required: bool = True
    body_bytes_max: int = REQUEST_BODY_BYTES_MAX
    headers: Mapping[str, str] = field(default_factory=dict)
    """Request headers with their descriptions."""
    timeout_s: float = REQUEST_TIMEOUT_S
    long: bool = False
    """Uses a connection of the pool for long requests (minutes)."""
    needs_connection: bool = True
    """Whether the handler uses `Call.db`."""
    problems: tuple[ProblemKind, ...] = ()
    """Problems that its requests may cause, besides those of `expected_problems`."""

    @property
    def parameters(self) -> list[str]:
        """Names of the parameters in the path."""
        return re.findall(r"{(\w+)}", self.path)

    @property
    def path_schema(self) -> dict[str, Any]:
        """JSON schema of the parameters in the path."""
        if self.tenants in (TenantAccess.DEAD_LETTER, TenantAccess.JOB):
            return {"type": "integer", "minimum": 1, "maximum": ID_MAX}
        schema: dict[str, Any] = text_schema()
        return schema

    @property
    def expected_problems(self) -> set[ProblemKind]:
        """Problems that a request may cause, by what it contains and does."""
        kinds = {*_PROBLEMS, *self.problems}
        if self.scope is not None:
            kinds.add(ProblemKind.SCOPE_MISSING)
        if self.tenants is TenantAccess.SYSTEM:
            kinds.add(ProblemKind.NOT_FOR_TENANTS)
        if self.parameters or self.query or self.bodies:
            # It may contain what cannot be stored, and name what does not exist.
            kinds |= {ProblemKind.BAD_REQUEST, ProblemKind.NOT_FOUND}
        if self.bodies:
            kinds |= _BODY_PROBLEMS
        if self.method != "GET":
            kinds.add(ProblemKind.CONFLICT)
        return kinds

    @property
    def tag(self) -> str:
        """OpenAPI tag: the resource in the path."""
        return self.path.split("/")[2]

    @property
    def operation_id(self) -> str:
        """OpenAPI operationId."""
        words = [word.strip("{}") for word in self.path.split("/")[2:]]
        return "_".join([self.method.lower(), *(word.replace("-", "_") for word in words)])


@dataclass(frozen=True, slots=True)
class PageOf:
    """Response model of a page."""

    item: Any
    extra: type[ResponseModel] | None = None


class RouteOptions(TypedDict, total=False):
    """What a route declares besides the types of its handler; see `Route`."""

    scope: Required[Scope | None]
    tenants: TenantAccess
    status: int
    responses: Mapping[int, Any]
    """The documented responses; they replace the handler's result."""
    bodies: tuple[type[RequestModel], ...]
    """The models of the body.  They are subclasses of the type in `Call`, which they replace."""
    body_required: bool
    body_bytes_max: int
    headers: Mapping[str, str]
    timeout_s: float
    long: bool
    needs_connection: bool
    problems: tuple[ProblemKind, ...]


def _make_route(
    method: str, path: str, summary: str, **options: Unpack[RouteOptions]
) -> Callable[[Handler], Route]:
    """Make a handler the route of requests with a method for a path."""

    def decorate(handler: Handler) -> Route:
        types = get_type_hints(handler)
        query, body = get_args(types["call"])
        declared: dict[str, Any] = {
            "query": None if query is NoQuery else query,
            "bodies": () if body is type(None) else get_args(body) or (body,),
            "responses": {options.get("status", 200): _response_model(types["return"])},
            **options,
        }
        return Route(method=method, path=path, summary=summary, handler=handler, **declared)

    return decorate


get, post, put, patch, delete = (
    partial(_make_route, method) for method in ("GET", "POST", "PUT", "PATCH", "DELETE")
)


def _response_model(result: Any) -> Any:
    return PageOf(*get_args(result)) if get_origin(result) is Page else result


def page_of_rows(
    rows: RowPage[Any],
    cursor: Callable[[Item], object],
    shown: Callable[[Any], Item] = lambda row: row,
) -> Page[Item]:
    """Build a page.

    Args:
        cursor: the cursor after an item.
        shown: the item for a row.
    """
    items = list(map(shown, rows))
    if not rows.more:
        return Page(items, None)
    return Page(items, str(cursor(items[-1]) if rows.cursor is None else rows.cursor))


def id_cursor(text: str | None, default: int) -> int:
    """Parse an id cursor.

    Raises:
        Problem: the cursor is malformed.
    """
    if text is None:
        return default
    if (cursor := parse_id(text, 0)) is None:
        raise Problem(
            ProblemKind.BAD_REQUEST,
            "after: not a valid cursor; use the `next` value of the previous page",
        )
    return cursor
