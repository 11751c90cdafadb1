"""/v1/replays: jobs that send again, dead letters or an endpoint's history."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import Field

from outbox.api import tenancy
from outbox.api.redaction import teller
from outbox.api.request_parsing import NoQuery, Paging, When, moment
from outbox.api.route import Call, For, Model, Page, PageOf, Reply, Route, Shown, id_cursor, paged
from outbox.operations import backfill, dead_letter_filter, replay_jobs
from outbox.operations.backfill import Backfill
from outbox.operations.replay_jobs import Job, State
from outbox.operations.views.replays import planned


class ReplaysQuery(Paging):
    state: State | Literal["all"] = "running"


class BackfillBody(Model):
    """Which history is to be sent to an endpoint, in order, at the end of its lanes."""

    endpoint: str
    since: When
    """Published then or later."""
    until: When | None = None
    """Published before."""
    type: tuple[str, ...] = ()
    """Only those of its types that match this, too."""
    rate: Annotated[float, Field(gt=0)] | None = None
    """At most so many deliveries a second."""
    dry_run: bool = False
    """Only say how many there are."""


class Planned(Shown):
    """What a backfill would make now."""

    dry_run: bool
    endpoint: str
    since: datetime
    until: datetime | None
    types: tuple[str, ...]
    deliveries: int


async def _list(call: Call[ReplaysQuery, None]) -> Page:
    query = call.query
    rows = await replay_jobs.page(
        call.db,
        call.schema,
        states=replay_jobs.STATES if query.state == "all" else (query.state,),
        tenant=call.tenant,
        limit=query.limit + 1,
        after=id_cursor(query.after, 0),
    )
    to = await teller(call)
    return paged([to.job(row) for row in rows], query.limit, lambda job: job.id)


async def _show(call: Call[NoQuery, None]) -> Job:
    job = await replay_jobs.get(call.db, call.schema, tenancy.number(call.path["id"]))
    return (await teller(call)).job(job)


async def _ask(call: Call[NoQuery, BackfillBody]) -> Any:
    body = call.body
    await tenancy.require_endpoint(call.db, call.tenant, body.endpoint)
    now = await dead_letter_filter.now(call.db)
    since = moment(body.since, now)
    assert since is not None
    asked = Backfill(body.endpoint, since, moment(body.until, now), tuple(body.type))
    if body.dry_run:
        return planned(asked, await backfill.plan(call.db, call.schema, asked))
    job = await backfill.ask(call.db, call.schema, asked, actor=call.actor, rate_per_s=body.rate)
    to = await teller(call)
    return Reply(to.job(await replay_jobs.get(call.db, call.schema, job)), 201)


async def _abort(call: Call[NoQuery, None]) -> Job:
    job_id = tenancy.number(call.path["id"])
    to = await teller(call)
    return to.job(await replay_jobs.abort(call.db, call.schema, job_id, actor=call.actor))


ROUTES = (
    Route(
        method="GET",
        path="/v1/replays",
        summary="Replay jobs, the oldest first: of dead letters, and of history",
        handler=_list,
        scope="read",
        tenants=For.NARROWED,
        query=ReplaysQuery,
        answers={200: PageOf(Job)},
    ),
    Route(
        method="POST",
        path="/v1/replays",
        summary="Send an endpoint its history again",
        handler=_ask,
        scope="operate",
        tenants=For.NARROWED,
        body=BackfillBody,
        answers={201: Job, 200: Planned},
    ),
    Route(
        method="GET",
        path="/v1/replays/{id}",
        summary="How far a replay job is",
        handler=_show,
        scope="read",
        tenants=For.JOB,
        answers={200: Job},
    ),
    Route(
        method="POST",
        path="/v1/replays/{id}/abort",
        summary="Take nothing more of a replay job",
        handler=_abort,
        scope="operate",
        tenants=For.JOB,
        answers={200: Job},
    ),
)
