"""/v1/me, /v1/status, /v1/replicas, /v1/doctor, /v1/verify: status and diagnostics."""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import TYPE_CHECKING, Any

from pydantic import Field

from outbox.api.problem import Problem, ProblemKind
from outbox.api.redaction import redactor_for
from outbox.api.route import (
    LIMIT,
    LIMIT_MAX,
    Call,
    RequestModel,
    ResponseModel,
    Route,
    TenantAccess,
)
from outbox.api.schemas import merged_response_model
from outbox.destinations.http.endpoint_validation import policy_of
from outbox.operations import status
from outbox.operations.doctor import DoctorContext, DoctorFinding, examine
from outbox.operations.status import CursorStatus, EndpointStatus, ReplicaStatus
from outbox.operations.views import status as views
from outbox.operations.views.doctor import doctor_report
from outbox.operations.views.verify import run_audit

if TYPE_CHECKING:
    from outbox.api.request_parsing import NoQuery
    from outbox.operations.views.verify import Audit

VERIFY_TIMEOUT_S = 60.0
"""An audit reads all retained rows; run `outbox verify` if it takes longer."""
DOCTOR_TIMEOUT_S = 70.0
"""Backstop; the checks have their own, shorter bound."""


class StatusQuery(RequestModel):
    limit: int = Field(default=LIMIT, ge=1, le=LIMIT_MAX)
    """Maximum number of endpoints, those with the most pending deliveries first."""


class Me(ResponseModel):
    """Scopes and tenant of the calling token."""

    name: str
    scopes: tuple[str, ...]
    tenant: str | None
    expires_at: datetime | None
    schema_name: str = Field(serialization_alias="schema")
    """Database schema of the outbox."""


CursorModel: Any = merged_response_model("Cursor", CursorStatus, lag=int)


class Blocking(ResponseModel):
    """Session, or prepared transaction, that keeps events from being sequenced."""

    pid: int | None
    prepared_transaction: str | None
    role: str | None
    application: str | None
    state: str | None
    """As in pg_stat_activity; null: not visible to the relay's role."""
    since_s: float | None
    """Age of its transaction, in seconds."""
    end_command: str
    """SQL command that ends it."""


class Status(ResponseModel):
    """Status of the installation."""

    schema_name: str = Field(serialization_alias="schema")
    at: datetime
    cursor: CursorModel
    blocker: Blocking | None
    """Session for which sequencing waits, while events wait."""
    open_gaps: int
    replicas: tuple[ReplicaStatus, ...]
    pending: int
    endpoints_total: int
    endpoints: tuple[EndpointStatus, ...]
    dead_letters: dict[str, int]


class Replicas(ResponseModel):
    """Registered relays."""

    items: tuple[ReplicaStatus, ...]


class DoctorReport(ResponseModel):
    """Findings of the diagnostics."""

    schema_name: str = Field(serialization_alias="schema")
    problems: int
    warnings: int
    findings: list[DoctorFinding]


class VerifyCheck(ResponseModel):
    """An invariant and its violations."""

    name: str
    guarantee: str
    violations: int
    examples: tuple[str, ...]
    action: str | None


class VerifyReport(ResponseModel):
    """Result of an audit."""

    violations: int
    checks: list[VerifyCheck]
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
    seen = await status.read_overview(call.db, call.schema, limit=call.query.limit)
    return views.status_report(call.schema, (await redactor_for(call)).redact_overview(seen))


async def _replicas(call: Call[NoQuery, None]) -> dict[str, Any]:
    return {"items": await status.list_replicas(call.db, call.schema)}


async def _doctor(call: Call[NoQuery, None]) -> dict[str, Any]:
    settings = call.settings
    policy = policy_of(settings)
    context = DoctorContext(
        call.db,
        call.schema,
        listening=settings.notify and not settings.pooled,
        pooled=settings.pooled,
        explain_url_rejection=policy.refusal_of_url,
        allow_networks=settings.allow_networks,
        keep=settings.keep,
    )
    return doctor_report(call.schema, [finding async for finding in examine(context)])


async def _verify(call: Call[NoQuery, None]) -> dict[str, Any]:
    try:
        async with asyncio.timeout(VERIFY_TIMEOUT_S):
            found: Audit = await run_audit(call.db, call.schema)
    except TimeoutError:
        raise Problem(
            ProblemKind.UNAVAILABLE,
            f"the audit exceeded {VERIFY_TIMEOUT_S:.0f} s and was cancelled; run: outbox verify",
        ) from None
    return found.as_json()


ROUTES = (
    Route(
        method="GET",
        path="/v1/me",
        summary="Show the scopes and the tenant of this token",
        handler=_me,
        needs_connection=False,
        scope=None,
        tenants=TenantAccess.ALL_CALLERS,
        responses={200: Me},
    ),
    Route(
        method="GET",
        path="/v1/status",
        summary="Show backlog, failures, dead letters and relays",
        handler=_status,
        scope="read",
        query=StatusQuery,
        responses={200: Status},
    ),
    Route(
        method="GET",
        path="/v1/replicas",
        summary="List registered relays",
        handler=_replicas,
        scope="read",
        responses={200: Replicas},
    ),
    Route(
        method="GET",
        path="/v1/doctor",
        summary="Check preconditions and health, read-only (without the probe)",
        handler=_doctor,
        scope="read",
        timeout_s=DOCTOR_TIMEOUT_S,
        long=True,
        responses={200: DoctorReport},
    ),
    Route(
        method="POST",
        path="/v1/verify",
        summary=f"Audit the tables, read-only, for at most {VERIFY_TIMEOUT_S:.0f} s",
        handler=_verify,
        scope="operate",
        timeout_s=VERIFY_TIMEOUT_S + 5,
        long=True,
        responses={200: VerifyReport},
    ),
)
