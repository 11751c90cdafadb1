"""/v1/me, /v1/status, /v1/replicas, /v1/doctor, /v1/verify: how everything is."""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import TYPE_CHECKING, Any

from pydantic import Field

from outbox.api.problem import Kind, Problem
from outbox.api.redaction import teller
from outbox.api.route import LIMIT, LIMIT_MAX, Call, For, Model, Route, Shown
from outbox.api.schemas import joined
from outbox.destinations.http.endpoint_validation import policy_of
from outbox.operations import status
from outbox.operations.doctor import Finding, Look, examine
from outbox.operations.status import Cursor, EndpointStatus, Replica
from outbox.operations.views import status as views
from outbox.operations.views.doctor import examined
from outbox.operations.views.verify import audited

if TYPE_CHECKING:
    from outbox.api.request_parsing import NoQuery
    from outbox.operations.views.verify import Audit

VERIFY_S = 60.0
"""An audit reads everything that is kept; what takes longer is for the command."""
DOCTOR_S = 70.0
"""It bounds itself, a bit below this."""


class StatusQuery(Model):
    limit: int = Field(default=LIMIT, ge=1, le=LIMIT_MAX)
    """At most so many endpoints, those that are owed most first."""


class Me(Shown):
    """What this token may do."""

    name: str
    scopes: tuple[str, ...]
    tenant: str | None
    expires_at: datetime | None
    schema_name: str = Field(serialization_alias="schema")
    """The schema of the outbox that it is for."""


CursorShown: Any = joined("Cursor", Cursor, lag=int)


class Status(Shown):
    """One look at everything."""

    schema_name: str = Field(serialization_alias="schema")
    at: datetime
    cursor: CursorShown
    open_gaps: int
    replicas: tuple[Replica, ...]
    owed: int
    endpoints_total: int
    endpoints: tuple[EndpointStatus, ...]
    dead_letters: dict[str, int]


class Replicas(Shown):
    """The relays that are registered."""

    items: tuple[Replica, ...]


class Examined(Shown):
    """What the doctor found."""

    schema_name: str = Field(serialization_alias="schema")
    problems: int
    warnings: int
    findings: list[Finding]


class Check(Shown):
    """A promise, and the exceptions to it."""

    name: str
    promise: str
    violations: int
    examples: tuple[str, ...]
    do: str | None


class Audited(Shown):
    """What an audit found."""

    violations: int
    checks: list[Check]
    counts: dict[str, int]
    seconds: float


async def _me(call: Call[NoQuery, None]) -> dict[str, Any]:
    caller = call.caller
    return {
        "name": caller.name,
        "scopes": caller.scopes,
        "tenant": caller.tenant,
        "expires_at": caller.expires_at,
        "schema": call.schema,
    }


async def _status(call: Call[StatusQuery, None]) -> dict[str, Any]:
    seen = await status.read(call.db, call.schema, limit=call.query.limit)
    return views.overview(call.schema, (await teller(call)).overview(seen))


async def _replicas(call: Call[NoQuery, None]) -> dict[str, Any]:
    return {"items": await status.replicas(call.db, call.schema)}


async def _doctor(call: Call[NoQuery, None]) -> dict[str, Any]:
    settings = call.settings
    policy = policy_of(settings)
    look = Look(
        call.db,
        call.schema,
        listening=settings.notify and not settings.pooled,
        pooled=settings.pooled,
        refusal=policy.refusal_of_url,
        allow_networks=settings.allow_networks,
        keep=settings.keep,
    )
    return examined(call.schema, [finding async for finding in examine(look)])


async def _verify(call: Call[NoQuery, None]) -> dict[str, Any]:
    try:
        async with asyncio.timeout(VERIFY_S):
            found: Audit = await audited(call.db, call.schema)
    except TimeoutError:
        raise Problem(
            Kind.UNAVAILABLE,
            f"the audit took over {VERIFY_S:.0f} s and was given up; run: outbox verify",
        ) from None
    return found.as_json()


ROUTES = (
    Route(
        method="GET",
        path="/v1/me",
        summary="What this token may do",
        handler=_me,
        asks=False,
        scope=None,
        tenants=For.ANYBODY,
        answers={200: Me},
    ),
    Route(
        method="GET",
        path="/v1/status",
        summary="What is owed, failing and running",
        handler=_status,
        scope="read",
        query=StatusQuery,
        answers={200: Status},
    ),
    Route(
        method="GET",
        path="/v1/replicas",
        summary="The relays that are registered",
        handler=_replicas,
        scope="read",
        answers={200: Replicas},
    ),
    Route(
        method="GET",
        path="/v1/doctor",
        summary="Preconditions and live health, with what to do; without the probe, which writes",
        handler=_doctor,
        scope="read",
        timeout_s=DOCTOR_S,
        long=True,
        answers={200: Examined},
    ),
    Route(
        method="POST",
        path="/v1/verify",
        summary=f"Audit the tables, for at most {VERIFY_S:.0f} s; to repair is for the command",
        handler=_verify,
        scope="operate",
        timeout_s=VERIFY_S + 5,
        long=True,
        answers={200: Audited},
    ),
)
