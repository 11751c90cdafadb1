"""/v1/dead-letters: what was given up, and what becomes of it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from outbox.api import tenancy
from outbox.api.redaction import teller
from outbox.api.request_parsing import NoQuery, Paging, When, moment
from outbox.api.route import ID_MAX, Call, For, Model, Page, PageOf, Route, Shown, id_cursor, paged
from outbox.api.schemas import joined
from outbox.operations import dead_letter_filter, dead_letters, discard, replays
from outbox.operations.dead_letter_filter import IDS_MAX, Filter, Selection
from outbox.operations.dead_letters import Count, DeadLetter, DeadRow, State
from outbox.operations.replays import Outcome
from outbox.operations.views import dead_letters as views

DeadId = Annotated[int, Field(ge=1, le=ID_MAX)]


class Chosen(Model):
    """Which ones, by what they have in common."""

    endpoint: str | None = None
    type: tuple[str, ...] = ()
    """Only of these types, such as order.*."""
    tenant: str | None = None
    reason: str | None = None
    """Only those given up for this."""
    since: When | None = None
    """Given up then or later."""
    until: When | None = None
    """Given up before."""


class DeadLettersQuery(Chosen, Paging):
    state: State | Literal["all"] = "dead"


class Selected(Chosen):
    """Which dead letters: by number, by what they have in common, or all of them."""

    ids: Annotated[tuple[DeadId, ...], Field(max_length=IDS_MAX)] = ()
    all: bool = False
    dry_run: bool = False
    """Only say how many there are."""


class ReplayBody(Selected):
    """Which dead letters are to be sent again."""

    rate: Annotated[float, Field(gt=0)] | None = None
    """At most so many deliveries a second."""


class DiscardBody(Selected):
    """Which dead letters are to be set aside."""

    why: str | None = None
    """Kept in the journal, beside who did it."""


class Counts(Shown):
    """How many there are."""

    total: dict[str, int]
    """By state."""
    counts: list[Count]


class Replaying(Shown):
    """What is, or in a dry run would be, sent again."""

    replaying: int
    skipped: dict[str, int]
    """How many are left alone, by reason."""
    job: int | None = None
    """The replay job, which tells how far it is; none when there is nothing to do."""
    dry_run: bool = False
    by_endpoint: dict[str, int] | None = None


class Discarded(Shown):
    """What was, or in a dry run would be, set aside."""

    discarded: int
    skipped: dict[str, int]
    dry_run: bool = False
    by_endpoint: dict[str, int] | None = None


async def _list(call: Call[DeadLettersQuery, None]) -> Page:
    query = call.query
    states = dead_letters.STATES if query.state == "all" else (query.state,)
    rows = await dead_letters.page(
        call.db,
        call.schema,
        only=tenancy.listed(call.tenant, await _filter(call, query)),
        states=states,
        limit=query.limit + 1,
        after=id_cursor(query.after, 0),
    )
    return paged(rows, query.limit, lambda row: row.id)


async def _counts(call: Call[Chosen, None]) -> dict[str, Any]:
    only = tenancy.listed(call.tenant, await _filter(call, call.query))
    return views.counts(await dead_letters.counts(call.db, call.schema, only=only))


async def _show(call: Call[NoQuery, None]) -> dict[str, Any]:
    dead_id = tenancy.number(call.path["id"])
    found = await dead_letters.get(call.db, call.schema, dead_id)
    return views.letter((await teller(call)).letter(found))


async def _replay(call: Call[NoQuery, ReplayBody]) -> dict[str, Any]:
    which = await _selection(call)
    if call.body.dry_run:
        _, outcome = await replays.plan(call.db, call.schema, which)
        return views.planned("replaying", outcome)
    outcome = await replays.replay(
        call.db, call.schema, which, actor=call.actor, rate_per_s=call.body.rate
    )
    return views.done("replaying", outcome)


async def _discard(call: Call[NoQuery, DiscardBody]) -> dict[str, Any]:
    which = await _selection(call)
    if call.body.dry_run:
        outcome = Outcome(await discard.count(call.db, call.schema, which), {})
        return views.planned("discarded", outcome)
    outcome = await discard.discard(
        call.db, call.schema, which, actor=call.actor, reason=call.body.why
    )
    return views.done("discarded", outcome)


async def _filter(call: Call[Any, Any], chosen: Chosen) -> Filter:
    now = await dead_letter_filter.now(call.db)
    since, until = moment(chosen.since, now), moment(chosen.until, now)
    return Filter(chosen.endpoint, tuple(chosen.type), chosen.tenant, chosen.reason, since, until)


async def _selection(call: Call[Any, Any]) -> Selection:
    body: Selected = call.body
    which = Selection(tuple(body.ids), await _filter(call, body), body.all)
    await tenancy.require_dead_letters(call.db, call.tenant, which.ids)
    return tenancy.swept(call.tenant, which)


ROUTES = (
    Route(
        method="GET",
        path="/v1/dead-letters",
        summary="Dead letters, the oldest first",
        handler=_list,
        scope="read",
        tenants=For.NARROWED,
        query=DeadLettersQuery,
        answers={200: PageOf(DeadRow)},
    ),
    Route(
        method="GET",
        path="/v1/dead-letters/counts",
        summary="How many there are, by endpoint, reason and state",
        handler=_counts,
        scope="read",
        tenants=For.NARROWED,
        query=Chosen,
        answers={200: Counts},
    ),
    Route(
        method="POST",
        path="/v1/dead-letters/replay",
        summary="Send dead letters again, at the end of their lanes",
        handler=_replay,
        scope="operate",
        tenants=For.NARROWED,
        body=ReplayBody,
        answers={200: Replaying},
    ),
    Route(
        method="POST",
        path="/v1/dead-letters/discard",
        summary="Set dead letters aside for good",
        handler=_discard,
        scope="operate",
        tenants=For.NARROWED,
        body=DiscardBody,
        answers={200: Discarded},
    ),
    Route(
        method="GET",
        path="/v1/dead-letters/{id}",
        summary="A dead letter with its event and the last answer",
        handler=_show,
        scope="read",
        tenants=For.DEAD_LETTER,
        answers={200: joined("DeadLetter", DeadRow, DeadLetter, without=("row",))},
    ),
)
