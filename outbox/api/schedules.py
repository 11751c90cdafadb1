"""/v1/schedules: events by the clock."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

from pydantic import Field

from outbox.api import tenancy
from outbox.api.endpoints import Why
from outbox.api.redaction import teller
from outbox.api.request_parsing import NoQuery, Paging, Seconds
from outbox.api.route import Call, For, Model, Page, PageOf, Reply, Route, Shown, paged
from outbox.api.schemas import joined
from outbox.core.schedules.schedule import GRACE_S, Misfire, Overlap, ScheduleSettings
from outbox.operations import schedule_changes, schedules
from outbox.operations.schedules import Schedule
from outbox.operations.tenancy import owns_schedule
from outbox.operations.views import schedules as views

NAME = "/v1/schedules/{name}"

ScheduleShown = joined("Schedule", Schedule, without=("now",), next_runs=list[datetime])
ListedSchedule = joined(
    "ListedSchedule", Schedule, without=("now", "payload", "headers"), next_runs=list[datetime]
)


class ScheduleBody(Model):
    """A schedule, by the names of `outbox schedule add`."""

    name: str
    """Of a tenant's token it begins with the tenant's: acme.nightly."""
    cron: str
    """Five fields, or a nickname such as @daily."""
    type: str
    timezone: str = "UTC"
    payload: Any = Field(default_factory=dict)
    key: str | None = None
    tenant: str | None = None
    headers: dict[str, str] | None = None
    misfire: Misfire = "once"
    """What becomes of ticks that were missed."""
    grace: Annotated[Seconds, Field(ge=0)] = GRACE_S
    """With skip: how late a tick may be."""
    overlap: Overlap = "allow"
    """wait: the next run only after the last one was delivered or given up."""
    replace: bool = False
    """Change the one of this name, if there is one."""


class FutureEvents(Shown):
    """Events that wait for their time, of everybody; a tenant is not told."""

    events: int
    """Above 10,000: more than that."""
    first_at: datetime | None


class Rest(Shown):
    future_events: FutureEvents | None


class Run(Shown):
    """The event that was published."""

    id: UUID


class Removed(Shown):
    """The name of the schedule that is gone."""

    removed: str


async def _list(call: Call[Paging, None]) -> Page:
    limit = call.query.limit
    rows = await schedules.page(
        call.db, call.schema, tenant=call.tenant, limit=limit + 1, after=call.query.after
    )
    page = paged(rows, limit, lambda row: row.name)
    waiting = None
    if call.tenant is None:
        future = await schedules.future(call.db, call.schema)
        waiting = {"events": future.events, "first_at": future.first_at}
    to = await teller(call)
    items = [views.schedule(to.schedule(row), of_many=True) for row in page.items]
    return Page(items, page.next, {"future_events": waiting})


async def _add(call: Call[NoQuery, ScheduleBody]) -> Reply:
    said = call.body.model_dump()
    replace, grace_s = said.pop("replace"), said.pop("grace")
    said["tenant"] = tenancy.forced(call.tenant, said["tenant"])
    wanted = ScheduleSettings(**said, grace_s=grace_s)
    if call.tenant is not None:
        # What is somebody else's is not replaced: it stands in the way, if anything does.
        replace = replace and await owns_schedule(call.db, call.tenant, wanted.name)
        if not replace:
            tenancy.require_name(call.tenant, wanted.name)
    added = await schedule_changes.add(
        call.db, call.schema, wanted, actor=call.actor, replace=replace
    )
    return Reply(await _told(call, added), 201)


async def _told(call: Call[Any, Any], found: Schedule) -> dict[str, Any]:
    return views.schedule((await teller(call)).schedule(found))


async def _show(call: Call[NoQuery, None]) -> dict[str, Any]:
    return await _told(call, await schedules.get(call.db, call.schema, call.path["name"]))


async def _pause(call: Call[NoQuery, Why]) -> dict[str, Any]:
    (paused,) = await schedule_changes.pause(
        call.db, call.schema, [call.path["name"]], actor=call.actor, why=call.body.why
    )
    return await _told(call, paused)


async def _resume(call: Call[NoQuery, Why]) -> dict[str, Any]:
    (resumed,) = await schedule_changes.resume(
        call.db, call.schema, [call.path["name"]], actor=call.actor, why=call.body.why
    )
    return await _told(call, resumed)


async def _run_now(call: Call[NoQuery, None]) -> Reply:
    event_id = await schedule_changes.run_now(
        call.db, call.schema, call.path["name"], actor=call.actor
    )
    return Reply({"id": event_id}, 201)


async def _remove(call: Call[NoQuery, None]) -> dict[str, Any]:
    name = call.path["name"]
    await schedule_changes.remove(call.db, call.schema, [name], actor=call.actor)
    return {"removed": name}


ROUTES = (
    Route(
        method="GET",
        path="/v1/schedules",
        summary="Schedules by name, and how many events wait for their time",
        handler=_list,
        scope="read",
        tenants=For.NARROWED,
        query=Paging,
        answers={200: PageOf(ListedSchedule, Rest)},
    ),
    Route(
        method="POST",
        path="/v1/schedules",
        summary="Add a schedule, or replace one",
        handler=_add,
        scope="operate",
        tenants=For.NARROWED,
        body=ScheduleBody,
        answers={201: ScheduleShown},
    ),
    Route(
        method="GET",
        path=NAME,
        summary="A schedule with its event and its next runs",
        handler=_show,
        scope="read",
        tenants=For.SCHEDULE,
        answers={200: ScheduleShown},
    ),
    Route(
        method="DELETE",
        path=NAME,
        summary="Remove a schedule; events that it has published are delivered",
        handler=_remove,
        scope="operate",
        tenants=For.SCHEDULE,
        answers={200: Removed},
    ),
    Route(
        method="POST",
        path=f"{NAME}/pause",
        summary="Publish nothing until it is resumed",
        handler=_pause,
        scope="operate",
        tenants=For.SCHEDULE,
        body=Why,
        body_required=False,
        answers={200: ScheduleShown},
    ),
    Route(
        method="POST",
        path=f"{NAME}/resume",
        summary="Go on with the next tick from now",
        handler=_resume,
        scope="operate",
        tenants=For.SCHEDULE,
        body=Why,
        body_required=False,
        answers={200: ScheduleShown},
    ),
    Route(
        method="POST",
        path=f"{NAME}/run-now",
        summary="Publish its event at once, whether it is paused or not",
        handler=_run_now,
        scope="operate",
        tenants=For.SCHEDULE,
        answers={201: Run},
    ),
)
