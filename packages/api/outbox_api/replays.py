"""/v1/replays: replay jobs of dead letters and backfills of history."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StrictBool, model_validator

from outbox.operations.criteria import Criteria
from outbox.operations.replays import backfill
from outbox.operations.replays import jobs as replay_jobs
from outbox.operations.replays.backfill import BackfillPlan
from outbox.operations.replays.chosen import CHOSEN_EVENTS_MAX, find_chosen
from outbox.operations.replays.jobs import JobState, ReplayJob
from outbox.operations.rows import ID_MAX
from outbox_api import route, tenancy
from outbox_api.field_types import Name, Text
from outbox_api.redaction import redactor_for
from outbox_api.request_parsing import IdPaging, TimeOrAge
from outbox_api.route import (
    Call,
    NoQuery,
    Page,
    Reply,
    RequestModel,
    TenantAccess,
    TypePatterns,
    at_most,
    id_cursor,
    page_of_rows,
)


class ReplaysQuery(IdPaging):
    state: JobState | Literal["all"] = "all"


class BackfillBody(RequestModel):
    """Past events to send to an endpoint, in order, at the end of its lanes: those since some
    time, or chosen ones.

    Each delivery has a new X-Delivery, so receivers process it as a new one.
    """

    example: ClassVar = {"endpoint": "shop", "since": "2h", "rate": 50}

    endpoint: Name
    since: TimeOrAge | None = None
    """Published at this time or later.  Needed without `events` and `key`."""
    until: TimeOrAge | None = None
    """Published before this time."""
    type: TypePatterns = ()
    """Restrict to types that match, in addition to the endpoint's subscription."""
    tenant: Name | None = None
    """Only events of this tenant."""
    events: Annotated[tuple[Text, ...], at_most(CHOSEN_EVENTS_MAX)] = ()
    """Only these events: an event id, X-Delivery, idempotency key or outbox id each."""
    key: Text | None = None
    """Only the events with this ordering key."""
    rate: Annotated[float, Field(gt=0, strict=True)] | None = None
    """Maximum rate, in deliveries per second."""
    dry_run: StrictBool = False
    """Count only."""

    @model_validator(mode="after")
    def _is_selective(self) -> BackfillBody:
        if self.since is None and not self.events and self.key is None:
            raise ValueError("give since, events or key")
        return self


@route.get(
    "/v1/replays", "List replay jobs, newest first", scope="read", tenants=TenantAccess.NARROWED
)
async def _list(call: Call[ReplaysQuery, None]) -> Page[ReplayJob]:
    query = call.query
    states = replay_jobs.STATES if query.state == "all" else (query.state,)
    rows = await call.run(
        replay_jobs.list_jobs,
        states=states,
        tenant=call.tenant,
        limit=query.limit,
        before=id_cursor(query.after, ID_MAX),
    )
    redactor = await redactor_for(call)
    return page_of_rows(rows, lambda job: job.id, redactor.redact_job)


@route.get(
    "/v1/replays/{id}", "Show the progress of a replay job", scope="read", tenants=TenantAccess.JOB
)
async def _show(call: Call[NoQuery, None]) -> ReplayJob:
    job = await call.run(replay_jobs.get_job, tenancy.parse_id(call.path["id"]))
    return (await redactor_for(call)).redact_job(job)


@route.post(
    "/v1/replays",
    "Start a backfill: send an endpoint its history, or chosen events again",
    scope="operate",
    tenants=TenantAccess.NARROWED,
    responses={201: ReplayJob, 200: BackfillPlan},
)
async def _start_backfill(call: Call[NoQuery, BackfillBody]) -> Any:
    body = call.body
    await tenancy.require_endpoint(call.db, call.tenant, body.endpoint)
    tenant = tenancy.resolve_tenant(call.tenant, body.tenant)
    history = Criteria(body.endpoint, body.type, tenant=tenant, since=body.since, until=body.until)
    chosen = await call.run(
        find_chosen,
        history,
        events=body.events,
        key=body.key,
        once_key=partial(tenancy.stored_key, call.tenant),
    )
    if body.dry_run:
        return await call.run(backfill.plan_backfill, history, outbox_ids=chosen)
    job = await call.run(
        backfill.request_backfill,
        history,
        actor=call.actor,
        rate_per_s=body.rate,
        outbox_ids=chosen,
    )
    redactor = await redactor_for(call)
    return Reply(redactor.redact_job(await call.run(replay_jobs.get_job, job)), 201)


@route.post(
    "/v1/replays/{id}/abort",
    "Abort a replay job; deliveries already queued are still sent",
    scope="operate",
    tenants=TenantAccess.JOB,
)
async def _abort(call: Call[NoQuery, None]) -> ReplayJob:
    job_id = tenancy.parse_id(call.path["id"])
    redactor = await redactor_for(call)
    return redactor.redact_job(await call.run(replay_jobs.abort_job, job_id, actor=call.actor))
