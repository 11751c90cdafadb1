"""/v1/schedules: recurring events (cron)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field, StrictBool

from outbox.core.schedules.schedule import (
    GRACE_S_MAX,
    MISFIRE_GRACE_S,
    Misfire,
    Overlap,
    ScheduleSettings,
)
from outbox.operations.schedules import changes as schedule_changes
from outbox.operations.schedules import queries as schedules
from outbox.operations.schedules.changes import RemovedSchedule, ScheduleRun
from outbox.operations.schedules.queries import FutureEvents, ListedSchedule, Schedule
from outbox.operations.tenancy import owns_schedule
from outbox_api import route, tenancy
from outbox_api.endpoints import ChangeBody
from outbox_api.field_types import EventType, Name, OrderingKey, ScheduleName, Tenant
from outbox_api.limits import PAYLOAD_BODY_BYTES_MAX
from outbox_api.redaction import redactor_for
from outbox_api.request_parsing import Paging, Seconds, up_to
from outbox_api.route import (
    Call,
    Headers,
    NoQuery,
    Page,
    PageOf,
    RequestModel,
    ResponseModel,
    Route,
    TenantAccess,
    page_of_rows,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

NAME = "/v1/schedules/{name}"


class ScheduleBody(RequestModel):
    """A schedule and its event."""

    example: ClassVar = {
        "name": "nightly",
        "cron": "0 3 * * *",
        "type": "report.due",
        "timezone": "UTC",
    }

    name: ScheduleName
    """The schedule's name.  With a tenant token it must begin with the tenant's prefix:
    acme.nightly."""
    cron: Name
    """Cron expression with five fields, or a nickname such as @daily."""
    type: EventType
    timezone: Name = "UTC"
    payload: Any = Field(default_factory=dict)
    key: OrderingKey | None = None
    tenant: Tenant | None = None
    headers: Headers[str] | None = None
    misfire: Misfire = "once"
    """Policy for missed runs: skip, once or all."""
    grace: Annotated[Seconds, up_to(GRACE_S_MAX, minimum=0)] = MISFIRE_GRACE_S
    """How late a run may be published with `skip`."""
    overlap: Overlap = "allow"
    """`wait`: the next run waits until the previous one was delivered or dead-lettered."""
    replace: StrictBool = False
    """Replace an existing schedule of this name."""


class SchedulesExtra(ResponseModel):
    future_events: FutureEvents | None
    """The delayed events of all tenants; null for tenant tokens."""


@route.get(
    "/v1/schedules",
    "List schedules by name, and count future events",
    scope="read",
    tenants=TenantAccess.NARROWED,
    responses={200: PageOf(ListedSchedule, SchedulesExtra)},
)
async def _list(call: Call[Paging, None]) -> Page[Any]:
    query = call.query
    rows = await call.run(
        schedules.list_schedules, tenant=call.tenant, limit=query.limit, after=query.after
    )
    future = None
    if call.tenant is None:
        future = await call.run(schedules.count_future_events)
    redactor = await redactor_for(call)
    page = page_of_rows(rows, lambda row: row.name, redactor.redact_schedule)
    return Page(page.items, page.next, {"future_events": future})


@route.post(
    "/v1/schedules",
    "Add a schedule, or replace one",
    scope="operate",
    tenants=TenantAccess.NARROWED,
    body_bytes_max=PAYLOAD_BODY_BYTES_MAX,
    status=201,
)
async def _add(call: Call[NoQuery, ScheduleBody]) -> Schedule:
    fields = call.body.model_dump()
    replace, grace_s = fields.pop("replace"), fields.pop("grace")
    fields["tenant"] = tenancy.resolve_tenant(call.tenant, fields["tenant"])
    wanted = ScheduleSettings(**fields, grace_s=grace_s)
    if call.tenant is not None:
        # Another tenant's schedule is never replaced; it causes a conflict.
        replace = replace and await owns_schedule(call.db, call.tenant, wanted.name)
        if not replace:
            tenancy.require_name(call.tenant, wanted.name)
    added = await call.run(schedule_changes.add_schedule, wanted, actor=call.actor, replace=replace)
    return await _redacted(call, added)


async def _redacted(call: Call[Any, Any], found: Schedule) -> Schedule:
    return (await redactor_for(call)).redact_schedule(found)


@route.get(
    NAME,
    "Show a schedule with its event and next runs",
    scope="read",
    tenants=TenantAccess.SCHEDULE,
)
async def _show(call: Call[NoQuery, None]) -> Schedule:
    return await _redacted(call, await call.run(schedules.get_schedule, call.path["name"]))


def _state_route(
    verb: str, summary: str, operation: Callable[..., Awaitable[list[Schedule]]]
) -> Route:
    @route.post(
        f"{NAME}/{verb}",
        summary,
        scope="operate",
        tenants=TenantAccess.SCHEDULE,
        body_required=False,
    )
    async def change(call: Call[NoQuery, ChangeBody]) -> Schedule:
        names, comment = [call.path["name"]], call.body.comment
        (changed,) = await call.run(operation, names, actor=call.actor, comment=comment)
        return await _redacted(call, changed)

    return change


_PAUSE = _state_route("pause", "Pause a schedule", schedule_changes.pause_schedules)
_RESUME = _state_route(
    "resume", "Resume a schedule with its next run", schedule_changes.resume_schedules
)


@route.post(
    f"{NAME}/run-now",
    "Publish its event now, even if the schedule is paused",
    scope="operate",
    tenants=TenantAccess.SCHEDULE,
    status=201,
)
async def _run_now(call: Call[NoQuery, None]) -> ScheduleRun:
    name = call.path["name"]
    return await call.run(schedule_changes.run_schedule_now, name, actor=call.actor)


@route.delete(
    NAME,
    "Remove a schedule; events already published are delivered",
    scope="operate",
    tenants=TenantAccess.SCHEDULE,
)
async def _remove(call: Call[NoQuery, None]) -> RemovedSchedule:
    names = [call.path["name"]]
    (removed,) = await call.run(schedule_changes.remove_schedules, names, actor=call.actor)
    return removed
