"""/v1/dead-letters: list, replay and discard dead letters; and skip a delivery, which makes one."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StrictBool

from outbox.operations.criteria import SELECTED_IDS_MAX, Criteria, DeadLetterSelection
from outbox.operations.dead_letters import discard
from outbox.operations.dead_letters import queries as dead_letters
from outbox.operations.dead_letters import replay as replays
from outbox.operations.dead_letters.discard import DiscardReport
from outbox.operations.dead_letters.queries import (
    DeadLetter,
    DeadLetterCounts,
    DeadLetterRow,
    DeadLetterState,
)
from outbox.operations.dead_letters.replay import ReplayReport
from outbox.operations.dead_letters.skip import SkippedDelivery, skip_delivery
from outbox.operations.endpoints.queries import NOT_SHOWN
from outbox.operations.rows import ID_MAX
from outbox_api import route, tenancy
from outbox_api.field_types import Name
from outbox_api.redaction import redactor_for
from outbox_api.request_parsing import IdPaging, TimeOrAge
from outbox_api.route import (
    Call,
    Comment,
    NoQuery,
    Page,
    RequestModel,
    TenantAccess,
    TypePatterns,
    at_most,
    id_cursor,
    page_of_rows,
)

SKIP_WAIT_S = 1.0
"""Maximum wait for the owner of the lane.  It is shorter than that of a command, because the
request has one of the API's few connections."""

DeadId = Annotated[int, Field(ge=1, le=ID_MAX, strict=True)]


class DeadLetterFilterFields(RequestModel):
    """Filter of dead letters."""

    endpoint: Name | None = None
    type: TypePatterns = ()
    """Type patterns such as order.*."""
    tenant: Name | None = None
    reason: Name | None = None
    """Reason of dead-lettering."""
    since: TimeOrAge | None = None
    """Dead-lettered at this time or later."""
    until: TimeOrAge | None = None
    """Dead-lettered before this time."""

    @property
    def criteria(self) -> Criteria:
        return Criteria(self.endpoint, self.type, self.tenant, self.reason, self.since, self.until)


class DeadLettersQuery(DeadLetterFilterFields, IdPaging):
    state: DeadLetterState | Literal["all"] = "dead"


class DeadLetterSelectionBody(DeadLetterFilterFields):
    """Selection of dead letters: by id, by filter, or all."""

    ids: Annotated[tuple[DeadId, ...], at_most(SELECTED_IDS_MAX)] = ()
    all: StrictBool = False
    dry_run: StrictBool = False
    """Count only.  The response has the time of the count, `until`."""
    counted: Annotated[int, Field(ge=0, strict=True)] | None = None
    """The number that a dry run counted; 409 if more are selected by now."""


class ReplayBody(DeadLetterSelectionBody):
    """Dead letters to replay."""

    example: ClassVar = {"ids": [1], "rate": 10}

    rate: Annotated[float, Field(gt=0, strict=True)] | None = None
    """Maximum rate, in deliveries per second."""


class DiscardBody(DeadLetterSelectionBody):
    """Dead letters to discard."""

    example: ClassVar = {"ids": [2], "comment": "the customer has left"}

    comment: Comment | None = None
    """Recorded in the journal."""


class SkipBody(RequestModel):
    """The delivery that a lane is stuck on."""

    example: ClassVar = {"lane": "shop-1", "sequence": 7, "comment": "the receiver cannot parse it"}

    lane: Name
    """Name of the lane, as in X-Lane."""
    sequence: DeadId
    """Sequence number that the lane waits for; 409 if it waits for another one by now."""
    comment: Comment | None = None
    """Recorded in the journal."""


@route.get(
    "/v1/dead-letters",
    "List dead letters, oldest first",
    scope="read",
    tenants=TenantAccess.NARROWED,
)
async def _list(call: Call[DeadLettersQuery, None]) -> Page[DeadLetterRow]:
    query = call.query
    states = dead_letters.STATES if query.state == "all" else (query.state,)
    rows = await call.run(
        dead_letters.list_dead_letters,
        only=tenancy.restrict_criteria(call.tenant, query.criteria),
        states=states,
        limit=query.limit,
        after=id_cursor(query.after, 0),
    )
    redactor = await redactor_for(call)
    return page_of_rows(rows, lambda row: row.id, redactor.redact_dead_letter_row)


@route.get(
    "/v1/dead-letters/counts",
    "Count dead letters by endpoint, reason and state",
    scope="read",
    tenants=TenantAccess.NARROWED,
)
async def _counts(call: Call[DeadLetterFilterFields, None]) -> DeadLetterCounts:
    only = tenancy.restrict_criteria(call.tenant, call.query.criteria)
    return await call.run(dead_letters.count_by_state, only=only)


@route.get(
    "/v1/dead-letters/{id}",
    "Show a dead letter with its event and last response",
    scope="read",
    tenants=TenantAccess.DEAD_LETTER,
)
async def _show(call: Call[NoQuery, None]) -> DeadLetter:
    dead_id = tenancy.parse_id(call.path["id"])
    found = await call.run(dead_letters.get_dead_letter, dead_id)
    return (await redactor_for(call)).redact_dead_letter(found)


@route.post(
    "/v1/dead-letters/replay",
    "Replay dead letters at the end of their lanes",
    scope="operate",
    tenants=TenantAccess.NARROWED,
)
async def _replay(call: Call[NoQuery, ReplayBody]) -> ReplayReport:
    body = call.body
    return await call.run(
        replays.start_replay,
        await _selection(call),
        actor=call.actor,
        rate_per_s=body.rate,
        counted=body.counted,
        dry_run=body.dry_run,
    )


@route.post(
    "/v1/dead-letters/discard",
    "Discard dead letters permanently",
    scope="operate",
    tenants=TenantAccess.NARROWED,
)
async def _discard(call: Call[NoQuery, DiscardBody]) -> DiscardReport:
    body = call.body
    return await call.run(
        discard.discard_dead_letters,
        await _selection(call),
        actor=call.actor,
        comment=body.comment,
        counted=body.counted,
        dry_run=body.dry_run,
    )


@route.post(
    "/v1/endpoints/{name}/skip",
    "Turn the delivery that a lane is stuck on into a dead letter",
    scope="operate",
    tenants=TenantAccess.ENDPOINT,
)
async def _skip(call: Call[NoQuery, SkipBody]) -> SkippedDelivery:
    body = call.body
    skipped = await call.run(
        skip_delivery,
        call.path["name"],
        body.lane,
        body.sequence,
        actor=call.actor,
        owner=call.tenant,
        comment=body.comment,
        wait_s=SKIP_WAIT_S,
    )
    if call.tenant is not None and skipped.relay is not None:
        return replace(skipped, relay=NOT_SHOWN)
    return skipped


async def _selection(call: Call[Any, Any]) -> DeadLetterSelection:
    body: DeadLetterSelectionBody = call.body
    selection = DeadLetterSelection(body.ids, body.criteria, body.all)
    await tenancy.require_dead_letters(call.db, call.tenant, selection.ids)
    return tenancy.restrict_selection(call.tenant, selection)
