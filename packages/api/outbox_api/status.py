"""/v1/me, /v1/status, /v1/doctor and others: the token, the state of the system, its checks."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import Field

from outbox.operations import status
from outbox.operations.endpoints import statuses
from outbox.operations.endpoints.statuses import EndpointStatuses
from outbox.operations.status import Overview, ReplicaStatus
from outbox_api import route
from outbox_api.limits import LIMIT, LIMIT_MAX
from outbox_api.problem import unavailable
from outbox_api.redaction import redactor_for
from outbox_api.route import (
    Call,
    NoQuery,
    RequestModel,
    TenantAccess,
)
from outbox_doctor.check import DoctorContext, DoctorReport
from outbox_doctor.examination import examine
from outbox_doctor.maintenance.resequence import Resequenced, resequence
from outbox_doctor.verify.audit import VerifyReport, run_audit

if TYPE_CHECKING:
    from datetime import datetime

VERIFY_TIMEOUT_S = 60.0
"""An audit reads all retained rows; run `outbox verify` if it takes longer."""
RESEQUENCE_TIMEOUT_S = 600.0
"""It is done in committed portions; after a time-out, repeat the request."""
DOCTOR_TIMEOUT_S = 70.0
"""Backstop; the checks have their own, shorter bound."""


class StatusQuery(RequestModel):
    limit: int = Field(default=LIMIT, ge=1, le=LIMIT_MAX)
    """Maximum number of endpoints: those that fail first, then those with the most pending
    deliveries.  There are fewer after 1 MiB of text."""


class ResequenceQuery(RequestModel):
    dry_run: bool = False
    """Return what would be sequenced, and change nothing."""


@dataclass(frozen=True, slots=True)
class Me:
    """Scopes and tenant of the calling token."""

    name: str
    scopes: tuple[str, ...]
    tenant: str | None
    expires_at: datetime | None
    schema: str
    """Database schema of the outbox."""


@dataclass(frozen=True, slots=True)
class Replicas:
    """Registered relays."""

    items: list[ReplicaStatus]


@route.get(
    "/v1/me",
    "Show the scopes and the tenant of this token",
    needs_connection=False,
    scope=None,
    tenants=TenantAccess.ALL_CALLERS,
)
async def _me(call: Call[NoQuery, None]) -> Me:
    caller = call.caller
    return Me(caller.name, caller.scopes, caller.tenant, caller.expires_at, call.schema)


@route.get("/v1/status", "Show backlog, failures, dead letters and relays", scope="read")
async def _status(call: Call[StatusQuery, None]) -> Overview:
    seen = await call.run(status.read_overview, limit=call.query.limit)
    return (await redactor_for(call)).redact_overview(seen)


@route.get(
    "/v1/endpoint-statuses",
    "Show backlog, failures and dead letters of endpoints",
    scope="read",
    tenants=TenantAccess.NARROWED,
)
async def _endpoint_statuses(call: Call[StatusQuery, None]) -> EndpointStatuses:
    found = await call.run(
        statuses.read_endpoint_statuses, tenant=call.tenant, limit=call.query.limit
    )
    return (await redactor_for(call)).redact_statuses(found)


@route.get("/v1/replicas", "List registered relays", scope="read")
async def _replicas(call: Call[NoQuery, None]) -> Replicas:
    return Replicas(await call.run(status.list_replicas))


@route.get(
    "/v1/doctor",
    "Check preconditions and health, read-only (without the probe)",
    scope="read",
    timeout_s=DOCTOR_TIMEOUT_S,
    long=True,
)
async def _doctor(call: Call[NoQuery, None]) -> DoctorReport:
    return await examine(DoctorContext.from_settings(call.db, call.settings))


@route.post(
    "/v1/verify",
    f"Audit the tables, read-only, for at most {VERIFY_TIMEOUT_S:.0f} s",
    scope="operate",
    timeout_s=VERIFY_TIMEOUT_S + 5,
    long=True,
)
async def _verify(call: Call[NoQuery, None]) -> VerifyReport:
    try:
        async with asyncio.timeout(VERIFY_TIMEOUT_S):
            return await call.run(run_audit)
    except TimeoutError:
        raise unavailable(
            f"the audit exceeded {VERIFY_TIMEOUT_S:.0f} s and was cancelled; run: outbox verify"
        ) from None


@route.post(
    "/v1/resequence",
    "Sequence committed events that were skipped; relays register again",
    scope="operate",
    timeout_s=RESEQUENCE_TIMEOUT_S,
    long=True,
)
async def _resequence(call: Call[ResequenceQuery, None]) -> Resequenced:
    return await call.run(resequence, actor=call.actor, dry_run=call.query.dry_run)
