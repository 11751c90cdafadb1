"""/v1/schedules: recurring events (cron)."""

from __future__ import annotations

from typing import Annotated, Any
from uuid import UUID

from pydantic import Field

from outbox.api import tenancy
from outbox.api.endpoints import ChangeBody
from outbox.api.redaction import redactor_for
from outbox.api.request_parsing import NoQuery, Paging, Seconds
from outbox.api.route import (
    PAYLOAD_BODY_BYTES_MAX,
    Call,
    Headers,
    Page,
    PageOf,
    Reply,
    RequestModel,
    ResponseModel,
    Route,
    TenantAccess,
    page_of_rows,
)
from outbox.core.schedules.schedule import GRACE_S, Misfire, Overlap, ScheduleSettings
from outbox.operations import schedule_changes, schedules
from outbox.operations.schedules import FutureEvents, ListedSchedule, Schedule
from outbox.operations.tenancy import owns_schedule

NAME = "/v1/schedules/{name}"


class ScheduleBody(RequestModel):
    """A schedule and its event."""

    name: str
    """With a tenant token it must begin with the tenant's prefix: acme.nightly."""
    cron: str
    """Cron expression with five fields, or a nickname such as @daily."""
    type: str
    timezone: str = "UTC"
    payload: Any = Field(default_factory=dict)
    key: str | None = None
    tenant: str | None = None
    headers: Headers[str] | None = None
    misfire: Misfire = "once"
    """Policy for missed runs: skip, once or all."""
    grace: Annotated[Seconds, Field(ge=0)] = GRACE_S
    """With `skip`: how late a run may be published."""
    overlap: Overlap = "allow"
    """`wait`: the next run waits until the previous one was delivered or dead-lettered."""
    replace: bool = False
    """Replace an existing schedule of this name."""


class SchedulesExtra(ResponseModel):
    future_events: FutureEvents | None
    """Of all tenants; null for tenant tokens."""


class ScheduleRun(ResponseModel):
    """The published event."""

    id: UUID


class RemovedSchedule(ResponseModel):
    """The removed schedule."""

    removed: str


async def _list(call: Call[Paging, None]) -> Page:
    after, tenant = call.query.after, call.tenant
    limit = await schedules.read_schedules_limit(
        call.db, call.schema, tenant=tenant, limit=call.query.limit, after=after
    )
    rows = await schedules.list_schedules(
        call.db, call.schema, tenant=tenant, limit=limit + 1, after=after
    )
    page = page_of_rows(rows, limit, lambda row: row.name)
    future = None
    if call.tenant is None:
        future = await schedules.count_future_events(call.db, call.schema)
    redactor = await redactor_for(call)
    items = [redactor.redact_schedule(row) for row in page.items]
    return Page(items, page.next, {"future_events": future})


async def _add(call: Call[NoQuery, ScheduleBody]) -> Reply:
    fields = call.body.model_dump()
    replace, grace_s = fields.pop("replace"), fields.pop("grace")
    fields["tenant"] = tenancy.resolve_tenant(call.tenant, fields["tenant"])
    wanted = ScheduleSettings(**fields, grace_s=grace_s)
    if call.tenant is not None:
        # Another tenant's schedule is never replaced; it causes a conflict.
        replace = replace and await owns_schedule(call.db, call.tenant, wanted.name)
        if not replace:
            tenancy.require_name(call.tenant, wanted.name)
    added = await schedule_changes.add_schedule(
        call.db, call.schema, wanted, actor=call.actor, replace=replace
    )
    return Reply(await _redacted(call, added), 201)


async def _redacted(call: Call[Any, Any], found: Schedule) -> Schedule:
    return (await redactor_for(call)).redact_schedule(found)


async def _show(call: Call[NoQuery, None]) -> Schedule:
    return await _redacted(
        call, await schedules.get_schedule(call.db, call.schema, call.path["name"])
    )


async def _pause(call: Call[NoQuery, ChangeBody]) -> Schedule:
    (paused,) = await schedule_changes.pause_schedules(
        call.db, call.schema, [call.path["name"]], actor=call.actor, comment=call.body.comment
    )
    return await _redacted(call, paused)


async def _resume(call: Call[NoQuery, ChangeBody]) -> Schedule:
    (resumed,) = await schedule_changes.resume_schedules(
        call.db, call.schema, [call.path["name"]], actor=call.actor, comment=call.body.comment
    )
    return await _redacted(call, resumed)


async def _run_now(call: Call[NoQuery, None]) -> Reply:
    event_id = await schedule_changes.run_schedule_now(
        call.db, call.schema, call.path["name"], actor=call.actor
    )
    return Reply({"id": event_id}, 201)


async def _remove(call: Call[NoQuery, None]) -> dict[str, Any]:
    name = call.path["name"]
    await schedule_changes.remove_schedules(call.db, call.schema, [name], actor=call.actor)
    return {"removed": name}


ROUTES = (
    Route(
        method="GET",
        path="/v1/schedules",
        summary="List schedules by name, and count future events",
        handler=_list,
        scope="read",
        tenants=TenantAccess.NARROWED,
        query=Paging,
        responses={200: PageOf(ListedSchedule, SchedulesExtra)},
    ),
    Route(
        method="POST",
        path="/v1/schedules",
        summary="Add a schedule, or replace one",
        handler=_add,
        scope="operate",
        tenants=TenantAccess.NARROWED,
        body=ScheduleBody,
        body_bytes_max=PAYLOAD_BODY_BYTES_MAX,
        responses={201: Schedule},
    ),
    Route(
        method="GET",
        path=NAME,
        summary="Show a schedule with its event and next runs",
        handler=_show,
        scope="read",
        tenants=TenantAccess.SCHEDULE,
        responses={200: Schedule},
    ),
    Route(
        method="DELETE",
        path=NAME,
        summary="Remove a schedule; events already published are delivered",
        handler=_remove,
        scope="operate",
        tenants=TenantAccess.SCHEDULE,
        responses={200: RemovedSchedule},
    ),
    Route(
        method="POST",
        path=f"{NAME}/pause",
        summary="Pause a schedule",
        handler=_pause,
        scope="operate",
        tenants=TenantAccess.SCHEDULE,
        body=ChangeBody,
        body_required=False,
        responses={200: Schedule},
    ),
    Route(
        method="POST",
        path=f"{NAME}/resume",
        summary="Resume a schedule with its next run",
        handler=_resume,
        scope="operate",
        tenants=TenantAccess.SCHEDULE,
        body=ChangeBody,
        body_required=False,
        responses={200: Schedule},
    ),
    Route(
        method="POST",
        path=f"{NAME}/run-now",
        summary="Publish its event now, even if the schedule is paused",
        handler=_run_now,
        scope="operate",
        tenants=TenantAccess.SCHEDULE,
        responses={201: ScheduleRun},
    ),
)
